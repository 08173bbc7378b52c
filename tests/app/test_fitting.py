"""A search whose usual start does not fit the devices' memories has one that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.conftest import Command

TOPOLOGY = """
kinds:
  Small:
    processor: cuda
    peak_flops: {{float32: 10 TFLOP/s}}
    memory: {memory} MiB
    memory_bandwidth: 500 GB/s
    launch_latency: 4 us
nodes:
  count: 1
  devices: {{Small: 2}}
  interconnect: {{type: switch, bandwidth: 50 GB/s, latency: 5 us}}
"""


# Of the network's 160 MiB of weights data parallelism takes 321 MiB, and Megatron half of that.
@pytest.mark.parametrize(("memory", "starts"), [(250, ["baseline megatron-2"]), (400, [])])
def test_a_start_that_fits_is_added_where_data_parallelism_does_not_fit(
    command: Command, tmp_path: Path, memory: int, starts: list[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TOPOLOGY.format(memory=memory))
    found = command(
        "search", "--model", "mlp", "--topology", str(path), "--proposals", "4", "--chains", "1", "--json"
    ).document
    assert [one["found_for"] for one in found["known"]] == starts
    data_parallel = next(one for one in found["predictions"] if one["name"] == "data-parallel")
    assert data_parallel["feasible"] is not bool(starts)
    if starts:
        assert found["predictions"][0]["feasible"]
