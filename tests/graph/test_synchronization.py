"""How a strategy sums gradients: its document, its digest, its names on the command line, and its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.errors import StrategyError, UsageError
from graph.plan import Plan, build_plan
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
from tests.search.builders import branches, random_mesh, two_layers

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
        for of in (
            p3(4096),
            p3(),
            *(Synchronization(of, 4096) for of in (Policy.FIFO, Policy.TIC, Policy.TAC)),
        )
    }
    assert len({plain.digest, *digests}) == 6
    assert strategy_from_json(sliced.to_json(graph), graph, 4) == sliced
    # What a person leaves out is as usual.
    document = {**plain.to_json(graph), "synchronization": {"policy": "p3"}}
    assert strategy_from_json(document, graph, 4).synchronization == p3(200_000)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("p3", "policy is p3, must be one of fifo, p3, tic, tac"),
        ({"policy": "p4"}, "policy is p4, must be one of fifo, p3, tic, tac"),
        ({"slice_bytes": 4096}, "policy is nothing, must be one of fifo, p3, tic, tac"),
        (
            {"policy": "tic", "slice_bytes": 4096},
            "key slice_bytes is unknown, must be policy or, of tic, bucket_bytes",
        ),
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
        UsageError, match=r"^--policy: is .*, must be fifo, p3, tic, tac, or one of them with 1,024 bytes"
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
    replace(sharded, synchronization=Synchronization(Policy.TIC)).validate(graph, 2)
    with pytest.raises(
        StrategyError, match=r"^synchronization: policy p3 is for weights that every holder keeps"
    ):
        replace(sharded, synchronization=p3()).validate(graph, 2)


def plan_in_order(seed: int, gather_order: Sequence[int] = ()) -> Plan:
    graph = branches()
    strategy = random_mesh(graph, 4, np.random.default_rng(seed))
    strategy = replace(
        shared(graph, strategy, Sharding.OPTIMIZER), synchronization=Synchronization(Policy.TIC)
    )
    return build_plan(graph, strategy, [0] * 4, 64, gather_order=gather_order)


@pytest.mark.parametrize("seed", range(6))
def test_late_gathers_are_awaited_by_the_first_reader_and_in_their_order(seed: int) -> None:
    buckets = list(plan_in_order(seed).gather_order)
    np.random.default_rng(seed).shuffle(buckets)
    plan = plan_in_order(seed, buckets)
    awaited = [number for numbers in plan.gathers_awaited.values() for number in numbers]
    assert awaited == buckets
    order = plan.graph.order.of_loss
    places = {number: order.index(index) for index, of in plan.gathers_awaited.items() for number in of}
    assert [places[number] for number in buckets] == sorted(places.values())
    for number in buckets:
        weights = {entry.weight for entry in plan.buckets[number].entries}
        first = min(order.index(index) for name in weights for index, _ in plan.graph.consumers[name])
        # Or by an operator before, which needs a gather behind it in the order.
        assert places[number] <= first
    started = [*plan.first_gathers, *filter(lambda one: one is not None, map(plan.gather_after, awaited))]
    assert started == buckets


def test_an_order_of_other_gathers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^gather_order: is \[0\], must be of the buckets \["):
        plan_in_order(0, (0,))


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
