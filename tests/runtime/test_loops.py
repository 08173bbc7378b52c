"""The loops that users of DistributedDataParallel and FSDP write equal the plain module's, by `runtime.parallelize`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.runtime import loops
from tests.runtime.spawned import run_ranks

Results = dict[tuple[str, str], list[dict[str, Any]]]


def cases_of(loop: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("strategy", loops.LOOPS[loop][1])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each rank's result of every loop, from one start of two processes."""
    of_ranks = run_ranks(loops.every_loop, loops.SIZE, tmp_path_factory.mktemp("ranks"))
    return {case: [of_rank[case] for of_rank in of_ranks] for case in of_ranks[0]}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for key, value in expected.items():
        if key == "state":
            assert list(found[key]) == list(value)
            for name, tensor in value.items():
                np.testing.assert_allclose(found[key][name], tensor, rtol=tolerance, atol=tolerance)
        else:
            assert found[key] == pytest.approx(value, rel=tolerance, nan_ok=True), key


@cases_of("accumulate")
def test_batches_of_a_divided_loss_make_the_step_of_their_mean(strategy: str, results: Results) -> None:
    expected = loops.accumulate_plainly()
    for of_rank in results["accumulate", strategy]:
        assert_equal(of_rank, expected, 1e-9)


@cases_of("scale losses")
def test_an_overflow_on_one_rank_is_skipped_on_all(strategy: str, results: Results) -> None:
    expected = loops.scale_losses_plainly()
    assert expected["scales"] == [1024, 1024, 512, 512, 512, 1024]
    assert not math.isfinite(expected["norms"][1])
    of_ranks = results["scale losses", strategy]
    for of_rank in of_ranks:
        assert_equal(of_rank, expected, 1e-4)
        assert of_rank["without the scaler"].startswith("apply: the gradients were scaled by a GradScaler")
    if strategy in ("fsdp", "split weights"):
        assert [of_rank["finite"] for of_rank in of_ranks] == [[True, True, True], [True, False, True]]


@cases_of("sample")
def test_a_distributed_sampler_deals_out_the_whole_batch(strategy: str, results: Results) -> None:
    expected = loops.sample_plainly()
    first, second = results["sample", strategy]
    assert_equal(first, expected, 1e-9)
    assert_equal(second, expected, 1e-9)
    assert first["messages"] == second["messages"]
    starts = {
        ("no shards", 0): "inputs: all have the whole example's shapes",
        ("whole on rank 1", 0): "inputs: input.1 of rank 1 is another shard than that of rank 0",
        ("another mask on rank 1", 0): "inputs: input.2 of rank 1 differs from that of rank 0",
        ("fewer on rank 1", 0): "rank 1: inputs: input.0 has shape (6, 3), must have (6, 8) or a 1/2 of it",
        ("no shards", 1): "inputs: all have the whole example's shapes",
        ("whole on rank 1", 1): "rank 1: inputs: input.1 is whole, must be a shard along dim 0",
        ("another mask on rank 1", 1): "inputs: input.2 of rank 1 differs from that of rank 0",
        ("fewer on rank 1", 1): "rank 1: inputs: input.0 has shape (6, 3), must have (6, 8) or a 1/2 of it",
    }
    assert first["messages"].keys() == starts.keys()
    for key, start in starts.items():
        assert first["messages"][key].startswith(start)
        assert "\n" not in first["messages"][key]
