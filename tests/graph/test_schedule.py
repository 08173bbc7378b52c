"""Schedules of micro-batches: orders against published makespans and peaks; stages; what does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from graph.errors import StrategyError
from graph.schedule import (
    GradientSums,
    MicroBatches,
    Phase,
    Schedule,
    StageTimes,
    Unit,
    acted_order,
    common_order,
    group_orders,
    micro_batches_from_json,
    micro_batches_to_json,
    waits_of,
)
from search.space.baselines import data_parallel, fsdp
from tests.search.builders import two_layers


def in_flight(order: Sequence[Unit]) -> int:
    """Return how many micro-batches, of all its stages, a group has begun and not ended at most."""
    last = Phase.WEIGHT if any(unit.phase is Phase.WEIGHT for unit in order) else Phase.BACKWARD
    most = now = 0
    for unit in order:
        now += (unit.phase is Phase.FORWARD) - (unit.phase is last)
        most = max(most, now)
    return most


def makespan(
    schedule: Schedule,
    groups: int,
    count: int,
    forward: float,
    backward: float,
    transfer: float = 0,
    chunks: int = 1,
    weight: float = 0,
) -> float:
    """Return when the last unit ends, where a unit waits for its group and for results that take `transfer`."""
    ended: dict[object, float] = {}
    free = [0.0] * groups
    for unit in common_order(MicroBatches(count, schedule), groups, chunks):
        group = unit.stage % groups
        ready = [
            ended[wait] + (transfer if wait.stage % groups != group else 0)
            for wait in waits_of(unit, groups * chunks)
        ]
        taken = {Phase.FORWARD: forward, Phase.BACKWARD: backward, Phase.WEIGHT: weight}[unit.phase]
        free[group] = ended[unit] = max([free[group], *ready]) + taken
    return max(free)


@pytest.mark.parametrize(
    ("groups", "count", "gpipe", "in_turn"), [(2, 4, 15, 15), (4, 8, 33, 33), (4, 2, 15, 15)]
)
def test_makespan_is_that_of_the_papers(groups: int, count: int, gpipe: int, in_turn: int) -> None:
    assert makespan(Schedule.GPIPE, groups, count, 1, 2) == gpipe == (count + groups - 1) * 3
    assert makespan(Schedule.ONE_F_ONE_B, groups, count, 1, 2) == in_turn


def test_transfers_cost_one_forward_one_backward_more_than_gpipe() -> None:
    assert makespan(Schedule.GPIPE, 4, 8, 1, 2, transfer=1) == 39
    assert makespan(Schedule.ONE_F_ONE_B, 4, 8, 1, 2, transfer=1) == 49


@pytest.mark.parametrize(
    ("groups", "count", "in_turn"), [(2, 4, (2, 1)), (4, 8, (4, 3, 2, 1)), (4, 2, (2, 2, 2, 1))]
)
def test_micro_batches_in_flight_are_those_of_the_papers(
    groups: int, count: int, in_turn: tuple[int, ...]
) -> None:
    flights = {
        schedule: tuple(in_flight(order) for order in group_orders(MicroBatches(count, schedule), groups, 1))
        for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
    }
    assert flights == {Schedule.GPIPE: (count,) * groups, Schedule.ONE_F_ONE_B: in_turn}


@pytest.mark.parametrize(
    ("groups", "count", "forward", "backward", "weight", "published"),
    [
        (4, 8, 1, 1, 1, 27),
        (4, 16, 1, 1, 1, 51),
        (2, 4, 1, 1, 1, 13),
        (4, 8, 2, 2, 1, 49),
        (4, 8, 3, 3, 2, 76),
    ],
)
def test_makespan_of_zero_bubble_is_that_of_its_paper(
    groups: int, count: int, forward: int, backward: int, weight: int, published: int
) -> None:
    idle = (groups - 1) * (forward + backward - weight)
    assert published == count * (forward + backward + weight) + idle
    assert makespan(Schedule.ZERO_BUBBLE, groups, count, forward, backward, weight=weight) == published
    whole = makespan(Schedule.ONE_F_ONE_B, groups, count, forward, backward + weight)
    assert whole == published + (groups - 1) * 2 * weight


@pytest.mark.parametrize(
    ("groups", "count", "most"), [(4, 8, 4), (4, 16, 4), (2, 4, 2), (4, 2, 2), (1, 3, 1)]
)
def test_zero_bubble_has_as_many_micro_batches_in_flight_in_every_stage_as_1f1b_in_the_first(
    groups: int, count: int, most: int
) -> None:
    orders = group_orders(MicroBatches(count, Schedule.ZERO_BUBBLE), groups)
    assert [in_flight(order) for order in orders] == [most] * groups
    assert in_flight(group_orders(MicroBatches(count), groups)[0]) == most


def test_last_weight_parts_come_last_in_the_order_of_backwards() -> None:
    """What they complete is summed over stages: a tied weight by the first one's unit."""
    for groups, count in ((1, 2), (3, 2), (4, 9)):
        order = common_order(MicroBatches(count, Schedule.ZERO_BUBBLE), groups)
        assert list(order[-groups:]) == [
            Unit(Phase.WEIGHT, stage, count - 1) for stage in reversed(range(groups))
        ]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(
    chunks: int, groups: int, rounds: int
) -> None:
    count = rounds * groups
    # In units of a chunk: M v of work, and the idle time of K - 1 chunks in place of K - 1 stages.
    assert makespan(Schedule.INTERLEAVED, groups, count, 1, 2, chunks=chunks) == 3 * (
        count * chunks + groups - 1
    )


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 3])
def test_common_order_has_each_unit_once_behind_all_that_it_waits_for(
    schedule: Schedule, groups: int, rounds: int
) -> None:
    chunks = 3 if schedule is Schedule.INTERLEAVED else 1
    count = rounds * groups
    order = common_order(MicroBatches(count, schedule), groups, chunks)
    places = {unit: place for place, unit in enumerate(order)}
    phases = 3 if MicroBatches(count, schedule).splits_backward else 2
    assert len(places) == len(order) == phases * groups * chunks * count
    for unit in order:
        assert all(places[wait] < places[unit] for wait in waits_of(unit, groups * chunks))
    for group, own in enumerate(group_orders(MicroBatches(count, schedule), groups, chunks)):
        assert own == tuple(unit for unit in order if unit.stage % groups == group)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("groups", [1, 2, 4, 5])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_common_order_is_by_the_ends_of_units_a_backward_twice_a_forward(
    schedule: Schedule, groups: int, rounds: int
) -> None:
    chunks, count = (2, rounds * groups) if schedule is Schedule.INTERLEAVED else (1, rounds + 1)
    orders = group_orders(MicroBatches(count, schedule), groups, chunks)
    left = [list(order) for order in orders]
    ended: dict[Unit, int] = {}
    while any(left):
        for group, order in enumerate(left):
            while order and all(wait in ended for wait in waits_of(order[0], groups * chunks)):
                unit = order.pop(0)
                before = orders[group][: orders[group].index(unit)]
                waits = [*before[-1:], *waits_of(unit, groups * chunks)]
                start = max((ended[wait] for wait in waits), default=0)
                whole = 1 if schedule is Schedule.ZERO_BUBBLE else 2
                ended[unit] = start + (whole if unit.phase is Phase.BACKWARD else 1)
    found = common_order(MicroBatches(count, schedule), groups, chunks)
    last = [unit for unit in ended if unit.phase is Phase.WEIGHT and unit.micro_batch == count - 1]
    by_end = sorted(ended.keys() - set(last), key=lambda unit: (ended[unit], -unit.stage))
    assert list(found) == [*by_end, *sorted(last, key=lambda unit: -unit.stage)]


def test_gradients_of_the_last_micro_batch_come_last_in_every_stage() -> None:
    for schedule in Schedule:
        for order in group_orders(MicroBatches(6, schedule), 3, 2 if schedule is Schedule.INTERLEAVED else 1):
            for stage in {unit.stage for unit in order}:
                numbers = [
                    unit.micro_batch for unit in order if unit.stage == stage and unit.phase is Phase.BACKWARD
                ]
                assert numbers == list(range(6))


def test_document_comes_back_and_one_micro_batch_is_left_out() -> None:
    micro_batches = MicroBatches(8, Schedule.GPIPE)
    assert micro_batches_from_json(micro_batches_to_json(micro_batches)) == micro_batches
    assert "gradients" not in micro_batches_to_json(micro_batches)
    each = MicroBatches(8, Schedule.GPIPE, gradients=GradientSums.EACH)
    assert each.text == "8 micro-batches, schedule gpipe, gradients summed in each"
    assert micro_batches_to_json(each) == {"count": 8, "schedule": "gpipe", "gradients": "each"}
    assert micro_batches_from_json(micro_batches_to_json(each)) == each
    assert MicroBatches(1, gradients=GradientSums.EACH) == MicroBatches()
    assert micro_batches_to_json(MicroBatches(1, Schedule.GPIPE)) == {}
    assert MicroBatches(1, Schedule.GPIPE) == micro_batches_from_json({})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must map count and schedule"),
        ({"count": 0}, "count is 0, must be a whole number from 1"),
        ({"count": 2.0}, "count is 2.0, must be a whole number"),
        (
            {"count": 2, "schedule": "dualpipe"},
            "schedule is dualpipe, must be one of gpipe, 1f1b, interleaved, zero-bubble",
        ),
        ({"count": 2, "order": "gpipe"}, "key order is unknown"),
        ({"count": 2, "gradients": "first"}, "gradients is first, must be one of last, each"),
    ],
)
def test_malformed_document_is_refused(document: object, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        micro_batches_from_json(document)


def test_credits_are_of_one_form_and_make_their_way_through_json() -> None:
    given = MicroBatches(4, Schedule.ACTORS, (3, 9, 2, 5))
    assert given.credits == (3, 3, 2, 2)
    assert given.text == "4 micro-batches, schedule actors, credits 3 3 2 2"
    assert micro_batches_from_json(micro_batches_to_json(given)) == given
    assert MicroBatches(2, Schedule.ACTORS).credits_of(3) == (2, 2, 1)
    assert MicroBatches(1, Schedule.ACTORS, (1,)) == MicroBatches()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"count": 4, "schedule": "1f1b", "credits": [2, 1]},
            "for schedule 1f1b, must be for schedule actors",
        ),
        ({"count": 4, "schedule": "actors", "credits": [2, 0]}, "must be a whole number of at least 1"),
        ({"count": 4, "schedule": "actors", "credits": 2}, "must be a whole number of at least 1"),
    ],
)
def test_credits_that_no_stage_can_have_are_refused(document: object, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        micro_batches_from_json(document)


def test_actors_with_the_credits_of_1f1b_work_in_its_order_where_stages_take_alike() -> None:
    for stages, count in ((2, 4), (4, 8), (4, 2), (3, 7)):
        even = StageTimes((1,) * stages, (2,) * stages, (0,) * stages, (0,) * stages)
        acted = acted_order(MicroBatches(count, Schedule.ACTORS), even)
        for stage, own in enumerate(group_orders(MicroBatches(count), stages)):
            assert [unit for unit in acted if unit.stage == stage] == list(own)


def test_a_strategy_takes_micro_batches_and_keeps_its_schedule() -> None:
    graph = two_layers()
    strategy = data_parallel(graph, 2)
    divided = strategy.in_micro_batches(4, Schedule.GPIPE)
    assert divided.micro_batches == MicroBatches(4, Schedule.GPIPE)
    assert divided.in_micro_batches(2).micro_batches == MicroBatches(2, Schedule.GPIPE)
    assert divided.in_micro_batches(1) == strategy
    assert strategy.in_micro_batches(1, Schedule.GPIPE) is strategy
    shared = fsdp(graph, 2).in_micro_batches(2)
    shared.validate(graph, 2)
    with pytest.raises(StrategyError, match="is kept in shares with schedule zero-bubble"):
        shared.in_micro_batches(2, Schedule.ZERO_BUBBLE).validate(graph, 2)
