"""How a strategy sums gradients: its document, its digest, its names on the command line, and its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graph.errors import StrategyError, UsageError
from graph.importer import import_module
from graph.plan import Plan, build_plan
from graph.pulls import Pull, slice_starts
from graph.schedule import Phase
from graph.strategy import Sharding, strategy_from_json
from graph.synchronization import (
    BY_DEFAULT,
    Policy,
    Synchronization,
    p3,
    read_synchronization,
    slice_bounds,
    synchronization_from_json,
    synchronization_to_json,
)
from search.space.baselines import data_parallel, shared
from tests.runtime.strategies import random_pulls
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


def test_weights_that_are_kept_in_shares_are_not_summed_in_slices() -> None:
    graph = two_layers()
    for synchronization in (Synchronization(Policy.TIC), p3()):
        sharing = shared(graph, data_parallel(graph, 2), Sharding.OPTIMIZER)
        replace(sharing, synchronization=synchronization).validate(graph, 2)
    kept = shared(graph, data_parallel(graph, 2), Sharding.PARAMETERS)
    with pytest.raises(
        StrategyError,
        match=r"^synchronization: policy p3 is for weights that every holder keeps whole between steps, must be fifo",
    ):
        replace(kept, synchronization=p3()).validate(graph, 2)


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


def plan_of_pulls(slice_order: Sequence[int] = (), pulls: Sequence[Pull] = ()) -> Plan:
    """Return a plan of two linear layers whose updates are shared, with slices of 64 bytes."""
    graph = two_layers()
    strategy = replace(shared(graph, data_parallel(graph, 2), Sharding.OPTIMIZER), synchronization=p3(64))
    return build_plan(graph, strategy, [0, 0], slice_order=slice_order, pulls=pulls)


@pytest.mark.parametrize("seed", range(8))
def test_pulls_start_behind_their_sums_and_before_their_readers(seed: int) -> None:
    order = list(plan_of_pulls().slice_order)
    np.random.default_rng(seed).shuffle(order)
    pulls = random_pulls(plan_of_pulls(), order, seed)
    plan = plan_of_pulls(order, pulls)
    started = [(place, start) for place, of in enumerate(plan.starts) for start in of]
    assert [start.bucket for _, start in started if start.is_pull] == [pull.bucket for pull in pulls]
    assert [start.bucket for _, start in started if not start.is_pull] == order
    assert len({start for _, start in started}) == len(started)
    slices = [(start.bucket, start.part, start.is_pull) for _, start in started]
    for bucket, part, is_pull in slices:
        if is_pull:
            assert slices.index((bucket, part, False)) < slices.index((bucket, part, True))
    for place, start in started:
        assert plan.pull_bounds.soonest[start.bucket] <= place <= plan.pull_bounds.latest[start.bucket]
    awaited = [number for numbers in plan.pulls_awaited.values() for number in numbers]
    assert sorted(awaited) == sorted({pull.bucket for pull in pulls})


def test_pulls_that_cannot_be_are_refused() -> None:
    plan = plan_of_pulls()
    pulls, last = plan.pulls, plan.graph.order.of_loss[-1]
    for wrong, message in (
        (pulls[1:], "are of"),
        ((replace(pulls[0], sums=0), *pulls[1:]), "comes before the sum of its slice"),
        (
            (pulls[0], replace(pulls[1], sums=1), *pulls[2:]),
            "has fewer sums before it than the one ahead of it",
        ),
        ((replace(pulls[0], operator=last), *pulls[1:]), "comes after its reader"),
    ):
        with pytest.raises(ValueError, match=rf"^pulls: .*{message}"):
            plan_of_pulls((), wrong)
    # The last bucket is not full yet where the first one is.
    soon = Pull(pulls[0].bucket, Phase.BACKWARD, plan.buckets[0].after, len(plan.slice_order))
    starts = plan_of_pulls((), (soon, *pulls[1:])).starts
    assert min(place for place, of in enumerate(starts) for start in of if start.is_pull) >= soon.bucket


class Detached(nn.Module):
    """A layer's weight is read again, without a gradient, by an operator whose backward comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(self.first(x).tanh(), self.weight.detach())
        hidden = self.middle(hidden.tanh()).tanh()
        return nn.functional.linear(hidden, self.weight).square().mean()


def test_no_weight_is_updated_before_the_last_backward_that_reads_it() -> None:
    graph = import_module(Detached(), (torch.randn(8, 8),), {}, name="detached")
    strategy = replace(shared(graph, data_parallel(graph, 2), Sharding.OPTIMIZER), synchronization=p3(64))
    plan = build_plan(graph, strategy, [0, 0], bucket_bytes=1)
    last_read = {
        name: min(index for index in readers if any(plan.active[index]))
        for name, readers in graph.weight_readers.items()
    }
    assert any(last_read[bucket.entries[0].weight] < bucket.after for bucket in plan.buckets)
    for number, bucket in enumerate(plan.buckets):
        soonest = plan.pull_bounds.soonest[number]
        assert soonest >= number
        for entry in bucket.entries:
            # What stands behind the last bucket is in the next forward, when all backwards are done.
            assert soonest == len(plan.buckets) or plan.buckets[soonest].after <= last_read[entry.weight]


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
    started = [
        [(start.bucket, start.part) for start in of] for of in slice_starts(order, (), (), len(counts))
    ]
    assert [bucket for of in started for bucket, _ in of] == order
    for full, of in enumerate(started):
        assert all(bucket <= full for bucket, _ in of)
        # The first of them needed this bucket.
        assert not of or of[0][0] == full
    assert sorted(entry for of in started for entry in of) == [
        (bucket, part) for bucket, count in enumerate(counts) for part in range(count)
    ]
