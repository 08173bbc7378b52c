"""Micro-batches: in how many parts a step goes through its batch, and in which order pipeline stages work on them.

With M micro-batches a strategy's graph is that of one of them. Gradients add up over the M; a mean loss is over the
targets of all of them where these follow from inputs, else it is the mean of theirs (`runtime.lowering.loss_count`).
Weights are synchronized after the last one and updated once. A stage is a run of operators on devices of its own
(`stages_of`): where a strategy has only one, M micro-batches are gradient accumulation.

    gpipe        all forwards, then all backwards: every micro-batch is in flight at once
    1f1b         after as many forwards as there are stages behind, one backward and one forward in turn: a stage has no
                 more micro-batches in flight than there are stages from it on
    interleaved  1f1b of v stages a group of devices, which the micro-batches pass v times: v times less idle time at
                 the ends, at v times as many messages; M is a multiple of the number of groups

Every device follows one static order, and the orders of all devices are parts of one common order (`common_order`),
so that no wait is ever for what comes later.

Sources: GPipe (arXiv:1811.06965); 1F1B: PipeDream-Flush (arXiv:2006.09503); interleaved: Megatron-LM
(arXiv:2104.04473), section 2.2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from graph.errors import StrategyError, UsageError
from graph.texts import shown

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.strategy import Configuration

MOST_MICRO_BATCHES = 4096


class Schedule(StrEnum):
    """In which order stages work on micro-batches, see above."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The number of micro-batches of a step, and the schedule; of one micro-batch all schedules are the same."""

    count: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B

    def __post_init__(self) -> None:
        if self.count == 1:
            # One form for one strategy, so that equal ones have one digest.
            object.__setattr__(self, "schedule", Schedule.ONE_F_ONE_B)

    @property
    def text(self) -> str:
        """The number and the schedule, for reports."""
        return f"{self.count} micro-batches, schedule {self.schedule.value}"


ONE_BATCH = MicroBatches()


class Phase(StrEnum):
    """What a stage does with a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Unit(NamedTuple):
    """The forward or the backward of one stage on one micro-batch."""

    phase: Phase
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of operators: from `first` to before `last`, as indexes of the graph; its devices, and their group.

    Stages of one group have the same devices.
    """

    first: int
    last: int
    devices: frozenset[int]
    group: int


# ---- stages


def stages_of(
    graph: OperatorGraph, configurations: Sequence[Configuration], schedule: Schedule
) -> tuple[Stage, ...]:
    """Return the pipeline stages that the configurations of a strategy make, in the order of the forward.

    Of `interleaved` a stage ends where the next operator has no device in common with it, and stages are on the same
    groups of devices in turn. Of other schedules stages are as many as there can be without a device in two of them.

    Raises:
        StrategyError: the schedule is interleaved, and groups of devices do not take turns.
    """
    if schedule is Schedule.INTERLEAVED:
        return _in_turns(_runs(graph, configurations))
    positions: dict[int, tuple[int, int]] = {}
    for index in graph.order.of_loss:
        for device in configurations[index].devices:
            first, _ = positions.get(device, (index, index))
            positions[device] = (first, index)
    spans: list[list[int]] = []
    for first, last in sorted(positions.values()):
        if spans and first <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], last)
        else:
            spans.append([first, last])
    return _with_devices(graph, configurations, [first for first, _ in spans])


def _runs(graph: OperatorGraph, configurations: Sequence[Configuration]) -> tuple[Stage, ...]:
    """Return the runs of operators of which each has a device in common with those before it."""
    firsts: list[int] = []
    devices: set[int] = set()
    for index in graph.order.of_loss:
        own = set(configurations[index].devices)
        if not firsts or devices.isdisjoint(own):
            firsts.append(index)
            devices = set()
        devices |= own
    return _with_devices(graph, configurations, firsts)


def _with_devices(
    graph: OperatorGraph, configurations: Sequence[Configuration], firsts: Sequence[int]
) -> tuple[Stage, ...]:
    bounds = [*firsts, len(graph.operators)]
    devices: list[set[int]] = [set() for _ in firsts]
    for index in graph.order.of_loss:
        stage = bisect_right(firsts, index) - 1
        if stage >= 0:
            devices[stage].update(configurations[index].devices)
    return tuple(
        Stage(first, last, frozenset(devices[number]), number)
        for number, (first, last) in enumerate(pairwise(bounds))
    )


def _in_turns(runs: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return stages with the groups of devices that they take turns on."""
    groups = next(
        (number for number, run in enumerate(runs) if number and run.devices == runs[0].devices), len(runs)
    )
    used = [device for run in runs[:groups] for device in run.devices]
    if (len(used) != len(set(used)) or len(runs) % groups) or any(
        run.devices != runs[number % groups].devices for number, run in enumerate(runs)
    ):
        raise StrategyError(
            f"strategy: schedule interleaved has {len(runs)} stages that do not take turns on groups of devices, must "
            "have the same ones in turn; choose gpipe or 1f1b, or place the operators so"
        )
    return tuple(Stage(run.first, run.last, run.devices, number % groups) for number, run in enumerate(runs))


def check_micro_batches(
    micro_batches: MicroBatches, graph: OperatorGraph, configurations: Sequence[Configuration]
) -> None:
    """Check that a strategy's step can go through so many micro-batches.

    Raises:
        StrategyError: stages do not fit the schedule, or a micro-batch needs what the one before it renews.
    """
    if micro_batches.count == 1:
        return
    stages = stages_of(graph, configurations, micro_batches.schedule)
    groups = 1 + max(stage.group for stage in stages)
    if micro_batches.schedule is Schedule.INTERLEAVED and micro_batches.count % groups:
        raise StrategyError(
            f"strategy: has {micro_batches.count} micro-batches, must have a multiple of its {groups} groups of "
            "devices for schedule interleaved; choose another number"
        )
    renewed = {buffer for buffer, _ in graph.buffer_updates}
    for index in graph.order.of_loss:
        for name in graph.operators[index].inputs:
            if name in renewed:
                raise StrategyError(
                    f"strategy: operator {graph.operators[index].name} reads buffer {name}, which the micro-batch "
                    "before renews, must read none such; train in one batch"
                )


# ---- orders


@lru_cache(maxsize=256)
def group_orders(schedule: Schedule, groups: int, chunks: int, count: int) -> tuple[tuple[Unit, ...], ...]:
    """Return, for each group of devices, its forwards and backwards in their order.

    Stage s is of group s modulo `groups`; there are `chunks` stages a group, 1 but for `interleaved`.
    """
    if schedule is Schedule.GPIPE:
        return tuple(
            tuple(Unit(phase, stage, number) for phase in Phase for number in range(count))
            for stage in range(groups)
        )
    return tuple(_one_forward_one_backward(group, groups, chunks, count) for group in range(groups))


def _one_forward_one_backward(group: int, groups: int, chunks: int, count: int) -> tuple[Unit, ...]:
    """Return the order of 1f1b, of several chunks the interleaved one."""
    total = count * chunks
    ahead = groups - group - 1
    if chunks > 1:
        # Megatron-LM: chunks of a group follow each other every `groups` micro-batches.
        ahead = 2 * ahead + (chunks - 1) * groups
    ahead = min(ahead, total)

    def unit(phase: Phase, number: int) -> Unit:
        if chunks == 1:
            return Unit(phase, group, number)
        rounds, within = divmod(number, groups * chunks)
        chunk, place = divmod(within, groups)
        if phase is Phase.BACKWARD:
            chunk = chunks - 1 - chunk
        return Unit(phase, chunk * groups + group, rounds * groups + place)

    order = [unit(Phase.FORWARD, number) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            order.append(unit(Phase.FORWARD, ahead + number))
        order.append(unit(Phase.BACKWARD, number))
    return tuple(order)


def waits_of(unit: Unit, stages: int) -> tuple[Unit, ...]:
    """Return the units whose results a unit needs: the stage before it, or behind it; its own forward."""
    phase, stage, number = unit
    if phase is Phase.FORWARD:
        return (Unit(Phase.FORWARD, stage - 1, number),) if stage else ()
    own = Unit(Phase.FORWARD, stage, number)
    return (own, Unit(Phase.BACKWARD, stage + 1, number)) if stage + 1 < stages else (own,)


@lru_cache(maxsize=256)
def common_order(schedule: Schedule, groups: int, chunks: int, count: int) -> tuple[Unit, ...]:
    """Return all units in one order, of which the order of each group of devices is a part.

    They are in the order in which they would end if a backward took twice as long as a forward and nothing else took
    any time, since what a unit sends is issued at its end; of equals the later stage first.

    Raises:
        ValueError: the orders wait for each other.
    """
    orders = group_orders(schedule, groups, chunks, count)
    stages = groups * chunks
    ended: dict[Unit, int] = {}
    free, done = [0] * groups, [0] * groups
    # Of groups whose next unit is ready: when it would start. Of the others, by a unit that theirs waits for.
    ready: list[tuple[int, int, int, Unit]] = []
    waiting: dict[Unit, list[int]] = {}

    def look_at(group: int) -> None:
        if done[group] == len(orders[group]):
            return
        unit = orders[group][done[group]]
        waits = waits_of(unit, stages)
        missing = next((wait for wait in waits if wait not in ended), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(group)
            return
        start = max([free[group], *(ended[wait] for wait in waits)])
        heappush(ready, (start, -unit.stage, group, unit))

    for group in range(groups):
        look_at(group)
    while ready:
        start, _, group, unit = heappop(ready)
        free[group] = ended[unit] = start + (1 if unit.phase is Phase.FORWARD else 2)
        done[group] += 1
        for other in (group, *waiting.pop(unit, ())):
            look_at(other)
    if len(ended) < sum(map(len, orders)):
        raise ValueError(f"the orders of {schedule} over {groups} groups wait for each other")
    return tuple(sorted(ended, key=lambda unit: (ended[unit], -unit.stage)))


# ---- as a part of strategies


def micro_batches_to_json(micro_batches: MicroBatches) -> dict[str, Any]:
    """Return the number of micro-batches and the schedule as a document, which is empty for one micro-batch."""
    if micro_batches == ONE_BATCH:
        return {}
    return {"count": micro_batches.count, "schedule": micro_batches.schedule.value}


def micro_batches_from_json(document: object) -> MicroBatches:
    """Return the micro-batches of a document that `micro_batches_to_json` (or a person) wrote.

    Raises:
        StrategyError: it is malformed, or the schedule is unknown.
    """
    if document == {}:
        return ONE_BATCH
    if not isinstance(document, Mapping):
        raise StrategyError(
            f"micro_batches: is {shown(document)}, must map count and schedule; correct the strategy"
        )
    unknown = sorted(str(name) for name in document if name not in ("count", "schedule"))
    if unknown:
        raise StrategyError(
            f"micro_batches: key {shown(unknown[0])} is unknown, must be count or schedule; correct the strategy"
        )
    count, schedule = document.get("count", 1), document.get("schedule", Schedule.ONE_F_ONE_B.value)
    if type(count) is not int or not 1 <= count <= MOST_MICRO_BATCHES:
        raise StrategyError(
            f"micro_batches: count is {shown(count)}, must be a whole number from 1 to {MOST_MICRO_BATCHES}; correct "
            "the strategy"
        )
    if schedule not in tuple(Schedule):
        raise StrategyError(
            f"micro_batches: schedule is {shown(schedule)}, must be one of {', '.join(Schedule)}; correct the strategy"
        )
    return MicroBatches(count, Schedule(schedule))


def read_schedule(text: str, option: str) -> Schedule:
    """Return the schedule that a user names.

    Raises:
        UsageError: it is none; the message begins with the `option`.
    """
    if text not in tuple(Schedule):
        raise UsageError(f"{option}: is {shown(text)}, must be one of {', '.join(Schedule)}; choose one")
    return Schedule(text)
