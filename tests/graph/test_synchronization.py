"""How a strategy sums gradients: its document, its digest, its names on the command line, and its slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.errors import StrategyError, UsageError
from graph.strategy import Sharding, strategy_from_json
from graph.synchronization import (
    BY_DEFAULT,
    Policy,
    Synchronization,
    p3,
    read_synchronization,
    slice_bounds,
    started_after,
    synchronization_from_json,
    synchronization_to_json,
)
from search.space.baselines import data_parallel, shared
from tests.search.builders import random_mesh, two_layers

SIZES = st.integers(1024, 2**40)


@given(st.sampled_from(Policy), SIZES)
def test_documents_and_names_give_back_what_they_are_of(policy: Policy, size_bytes: int) -> None:
    synchronization = Synchronization(policy, size_bytes)
    assert synchronization_from_json(synchronization_to_json(synchronization)) == synchronization
    assert read_synchronization(f"{policy}:{size_bytes}", "--policy") == synchronization


def test_strategies_keep_their_policy_and_the_default_is_no_part_of_the_digest() -> None:
    graph = two_layers()
    plain = random_mesh(graph, 4, np.random.default_rng(1))
    assert "synchronization" not in plain.to_json(graph)
    assert replace(plain, synchronization=Synchronization()).digest == plain.digest
    sliced = replace(plain, synchronization=p3(4096))
    assert sliced.to_json(graph)["synchronization"] == {"policy": "p3", "slice_bytes": 4096}
    digests = {
        replace(plain, synchronization=of).digest
        for of in (p3(4096), p3(), Synchronization(Policy.FIFO, 4096))
    }
    assert len({plain.digest, *digests}) == 4
    assert strategy_from_json(sliced.to_json(graph), graph, 4) == sliced
    # What a person leaves out is as usual.
    document = {**plain.to_json(graph), "synchronization": {"policy": "p3"}}
    assert strategy_from_json(document, graph, 4).synchronization == p3(200_000)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("p3", "policy is p3, must be one of fifo, p3"),
        ({"policy": "tac"}, "policy is tac, must be one of fifo, p3"),
        ({"slice_bytes": 4096}, "policy is nothing, must be one of fifo, p3"),
        (
            {"policy": "p3", "bucket_bytes": 4096},
            "key bucket_bytes is unknown, must be policy or, of p3, slice_bytes",
        ),
        ({"policy": "p3", "slice_bytes": 1023}, "slice_bytes is 1023, must be a whole number from 1,024 to"),
        ({"policy": "fifo", "bucket_bytes": True}, "bucket_bytes is True, must be a whole number"),
    ],
)
def test_malformed_policies_are_refused_in_one_line(document: object, message: str) -> None:
    graph = two_layers()
    whole = random_mesh(graph, 4, np.random.default_rng(1)).to_json(graph)
    with pytest.raises(StrategyError, match=f"^synchronization: {message}") as refused:
        strategy_from_json({**whole, "synchronization": document}, graph, 4)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "p4", "p3:", "p3:1", "p3:x", "p3:-5", "fifo:1e6", "p3:99999999999999"])
def test_names_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"^--policy: is .*, must be fifo or p3, or one of them with 1,024 bytes"
    ):
        read_synchronization(text, "--policy")


def test_the_default_has_the_buckets_of_distributed_data_parallel() -> None:
    assert read_synchronization("fifo", "--policy") == BY_DEFAULT
    assert BY_DEFAULT.size_bytes == 25 * 2**20
    assert BY_DEFAULT.slice_count(2**30) == 1


def test_weights_that_are_shared_are_not_summed_in_slices() -> None:
    graph = two_layers()
    sharded = shared(graph, data_parallel(graph, 2), Sharding.OPTIMIZER)
    sharded.validate(graph, 2)
    with pytest.raises(
        StrategyError, match=r"^synchronization: policy p3 is for weights that every holder keeps"
    ):
        replace(sharded, synchronization=p3()).validate(graph, 2)


@given(st.integers(0, 10**7), st.integers(1, 300))
def test_slices_are_the_whole_one_after_the_other_and_nearly_equal(length: int, count: int) -> None:
    bounds = slice_bounds(length, count)
    assert [first for first, _ in bounds] == [0, *(last for _, last in bounds[:-1])]
    assert bounds[-1][1] == length
    sizes = [last - first for first, last in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_sums_start_in_their_order_each_as_soon_as_it_can(counts: list[int], random: object) -> None:
    order = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
    random.shuffle(order)  # type: ignore[attr-defined]
    started = started_after(order, len(counts))
    assert [bucket for of in started for bucket, _ in of] == order
    for full, of in enumerate(started):
        assert all(bucket <= full for bucket, _ in of)
        # The first of them needed this bucket.
        assert not of or of[0][0] == full
    assert sorted(entry for of in started for entry in of) == [
        (bucket, part) for bucket, count in enumerate(counts) for part in range(count)
    ]
