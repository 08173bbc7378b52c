"""`app profile --topology`: this machine measures what searches over other devices of its kind need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.db.store import Store
from profiler.devices import available_devices
from tests.app.conftest import Command

MLP = ("--model", "mlp", "--preset", "small", "--batch-size", "8")
ONE_CPU = ("--device", "cpu", "--devices", "1")
KIND = """
  {name}: {{processor: {processor}, peak_flops: {{float32: 100 GFLOP/s}}, memory: 4 GiB, memory_bandwidth: 10 GB/s,
    launch_latency: 10 us}}"""


def write_topology(file: Path, devices: list[str]) -> str:
    """Write a topology of one node with these kinds of devices, the first of this machine's; return its path."""
    kinds = "".join(
        KIND.format(name=json.dumps(name), processor="cuda" if name == "P100" else "cpu")
        for name in dict.fromkeys(devices)
    )
    file.write_text(
        f"kinds:{kinds}\nnodes:\n  count: 1\n  devices: {json.dumps(devices)}\n"
        "  interconnect: {type: switch, bandwidth: 1 GB/s, latency: 100 us}\n"
    )
    return str(file)


def test_what_is_profiled_for_a_topology_is_all_that_its_searches_need(
    command: Command, database: Path, tmp_path: Path
) -> None:
    core = available_devices("cpu")[0].kind.name
    four = write_topology(tmp_path / "four.yaml", [core] * 4)
    search = (
        "search", *MLP, "--topology", four, "--on-miss", "fail", "--proposals", "200", "--compare-baselines", "--json"
    )  # fmt: skip
    before = command(*search)
    assert before.code == 2, before
    assert "run app profile with the same --topology" in before.errors

    profiled = command("profile", *MLP, *ONE_CPU, "--topology", four, "--json")
    assert profiled.code == 0, profiled
    (kind,) = profiled.document["kinds"]
    assert (kind["device_kind"], kind["devices"], kind["failures"]) == (core, ["cpu:0"], [])
    assert kind["measured"] == kind["needed"] > 0

    # Whatever the walk proposes: of three axes or more no more than two can be split over four devices.
    searched = command(*search)
    assert searched.code == 0, searched
    assert (searched.document["proposals"], searched.document["estimated_costs"]) == (200, 0)
    shares = {one["name"]: one["shares"] for one in searched.document["predictions"]}
    assert {"data-parallel", "expert", "single-device"} < shares.keys()
    assert {share["estimated"] for share in shares.values()} == {0.0}
    # The rest is links, whose times are those of the file.
    assert shares["single-device"] == {"measured": pytest.approx(1.0), "estimated": 0.0, "datasheet": 0.0}
    with Store.open(database) as store:
        (held,) = store.cost_summaries()
    # Links of this machine are none of the topology's.
    assert (held.device_kind.name, held.link_fits) == (core, 0)

    # Devices of another kind are left to a machine that has them.
    mixed = write_topology(tmp_path / "mixed.yaml", [core, core, "P100", "P100"])
    again = command("profile", *MLP, *ONE_CPU, "--topology", mixed)
    assert again.code == 0, again
    assert "mixed has P100 too: profile on a machine that has them" in again.errors
    assert f"{kind['needed']} operator costs on 1 x {core}: all known already" in again.output


@pytest.mark.parametrize("options", [(), ("--device", "cpu")])
def test_a_topology_without_this_machines_devices_is_refused_before_anything_is_written(
    command: Command, database: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    other = write_topology(tmp_path / "other.yaml", ["Some processor (1 core)"] * 2)
    refused = command("profile", *MLP, *options, "--topology", other)
    assert refused.code == 2, refused
    (line,) = refused.errors.splitlines()
    core = available_devices("cpu")[0].kind.name
    assert line.startswith("error: --topology other: its devices are Some processor (1 core), must include ")
    assert core in line
    assert "profile on a machine that has such devices" in line
    assert not database.exists()
