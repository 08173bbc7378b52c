"""Micro-batches: in how many parts a step goes through its batch, and in which order pipeline stages work on them.

With M micro-batches a strategy's graph is that of one of them. Gradients add up over the M; a mean loss is over the
targets of all of them where these follow from inputs, else it is the mean of theirs (`runtime.lowering.loss_count`).
Weights are updated once. Their gradients are summed over replicas after the last micro-batch or in each of them
(`GradientSums`). A stage is a run of operators on devices of its own (`stages_of`): where a strategy has only one, M
micro-batches are gradient accumulation.

    gpipe        all forwards, then all backwards: every micro-batch is in flight at once
    1f1b         after as many forwards as there are stages behind, one backward and one forward in turn: a stage has no
                 more micro-batches in flight than there are stages from it on
    interleaved  1f1b of v stages a group of devices, which the micro-batches pass v times: v times less idle time at
                 the ends, at v times as many messages; M is a multiple of the number of groups
    zero-bubble  1f1b with the backward in two parts (`graph.backward_parts`): the gradients of inputs, for which the
                 stage before waits, and those of weights, for which nobody does before they are summed. The weight part
                 fills what was idle: stage s puts it off by s micro-batches, so that of K stages each has K
                 micro-batches in flight, as the first one has anyway (ZB-H1)
    actors       a stage does what is ready, a backward before a forward, as long as it has credits: the number of
                 micro-batches that it may have in flight, as many as with 1f1b unless others are given

Every device follows one static order, and the orders of all devices are parts of one common order (`common_order`),
so that no wait is ever for what comes later. Of `actors` it is the order that uses all credits, which takes the most
memory. On CPUs each stage finds its own as the step goes on (`runtime.execution.acting`), and a simulation finds the
one that follows from its times (`acted_order`); on GPUs, whose hosts do not know what has arrived, it is executed.

Sources: GPipe (arXiv:1811.06965); 1F1B: PipeDream-Flush (arXiv:2006.09503); interleaved: Megatron-LM
(arXiv:2104.04473), section 2.2; zero-bubble: ZB-H1 of Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.2;
actors: OneFlow (arXiv:2110.15032), section 4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from graph.actors import Actor, Input, act
from graph.errors import StrategyError
from graph.texts import counted, shown

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.strategy import Configuration

MOST_MICRO_BATCHES = 4096


class Schedule(StrEnum):
    """In which order stages work on micro-batches, see above."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ACTORS = "actors"


class GradientSums(StrEnum):
    """When the gradients of replicated weights are summed over the replicas.

    LAST: once, in the backward of the last micro-batch; until then every replica has all its own gradients.
    EACH: in every micro-batch, as soon as its backward has made them, M times as many bytes. Where the update of
        weights is shared, a replica so keeps the sums of its share alone from one micro-batch to the next.

    Sources: `no_sync` of PyTorch DDP for LAST (arXiv:2006.15704, section 3.2.4); ZeRO stage 2 for EACH
    (arXiv:1910.02054, section 5.2).
    """

    LAST = "last"
    EACH = "each"


GRADIENT_REGISTERS = 2
"""Micro-batches of which a stage of `actors` has room for arriving gradients: it reads one, and one is on its way."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The number of micro-batches of a step, and the schedule; of one micro-batch all schedules are the same.

    credits: of `actors`, for each stage, the micro-batches that it may have in flight; empty: those of 1f1b.
    gradients: when they are summed over replicas.
    """

    count: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    credits: tuple[int, ...] = ()
    gradients: GradientSums = GradientSums.LAST

    def __post_init__(self) -> None:
        # One form for one strategy, so that equal ones have one digest.
        if self.count == 1:
            object.__setattr__(self, "schedule", Schedule.ONE_F_ONE_B)
            object.__setattr__(self, "credits", ())
            object.__setattr__(self, "gradients", GradientSums.LAST)
        # What a stage has in flight every stage before it has, too.
        usable = accumulate(self.credits, min, initial=self.count)
        object.__setattr__(self, "credits", tuple(usable)[1:])

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are made apart from those of inputs (`graph.backward_parts`)."""
        return self.schedule is Schedule.ZERO_BUBBLE

    @property
    def sums_each(self) -> bool:
        """Whether the gradients of every micro-batch are summed over replicas."""
        return self.gradients is GradientSums.EACH

    @property
    def text(self) -> str:
        """The number and the schedule, for reports."""
        given = f", credits {' '.join(map(str, self.credits))}" if self.credits else ""
        given += ", gradients summed in each" if self.sums_each else ""
        return f"{self.count} micro-batches, schedule {self.schedule.value}{given}"

    def credits_of(self, stages: int) -> tuple[int, ...]:
        """Return, for each of the stages of `actors`, the micro-batches that it may have in flight."""
        return self.credits or tuple(min(stages - stage, self.count) for stage in range(stages))


ONE_BATCH = MicroBatches()


class Phase(StrEnum):
    """What a stage does with a micro-batch.

    WEIGHT: the weight part of its backward, where a schedule has it apart; BACKWARD is then the rest.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Unit(NamedTuple):
    """The forward, the backward or the weight part of one stage on one micro-batch."""

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
    # Of lists of devices, since many operators have the same.
    positions: dict[tuple[int, ...], tuple[int, int]] = {}
    for index in graph.order.of_loss:
        devices = configurations[index].devices
        first, _ = positions.get(devices, (index, index))
        positions[devices] = (first, index)
    of_devices: dict[int, tuple[int, int]] = {}
    for devices, (first, last) in positions.items():
        for device in devices:
            before = of_devices.get(device, (first, last))
            of_devices[device] = (min(first, before[0]), max(last, before[1]))
    spans: list[list[int]] = []
    for first, last in sorted(of_devices.values()):
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
    lists: list[set[tuple[int, ...]]] = [set() for _ in firsts]
    for index in graph.order.of_loss:
        stage = bisect_right(firsts, index) - 1
        if stage >= 0:
            lists[stage].add(configurations[index].devices)
    return tuple(
        Stage(first, last, frozenset(chain.from_iterable(lists[number])), number)
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
    if micro_batches.credits and len(micro_batches.credits) != len(stages):
        raise StrategyError(
            f"strategy: has credits for {counted(len(micro_batches.credits), 'stage')}, must have them for its "
            f"{len(stages)}; give one number a stage"
        )
    renewed = {buffer for buffer, _ in graph.buffer_updates}
    for index in graph.order.of_loss if renewed else ():
        for name in graph.operators[index].inputs:
            if name in renewed:
                raise StrategyError(
                    f"strategy: operator {graph.operators[index].name} reads buffer {name}, which the micro-batch "
                    "before renews, must read none such; train in one batch"
                )


# ---- orders


@lru_cache(maxsize=256)
def group_orders(micro_batches: MicroBatches, groups: int, chunks: int = 1) -> tuple[tuple[Unit, ...], ...]:
    """Return, for each group of devices, its forwards and backwards in their order.

    Stage s is of group s modulo `groups`; there are `chunks` stages a group, 1 but for `interleaved`.
    """
    schedule, count = micro_batches.schedule, micro_batches.count
    if schedule is Schedule.GPIPE:
        return tuple(
            tuple(
                Unit(phase, stage, number)
                for phase in (Phase.FORWARD, Phase.BACKWARD)
                for number in range(count)
            )
            for stage in range(groups)
        )
    if schedule is Schedule.ZERO_BUBBLE:
        return tuple(_zero_bubble(stage, groups, count) for stage in range(groups))
    aheads = [groups - group - 1 for group in range(groups)]
    if chunks > 1:
        # Megatron-LM: chunks of a group follow each other every `groups` micro-batches.
        aheads = [2 * ahead + (chunks - 1) * groups for ahead in aheads]
    elif schedule is Schedule.ACTORS:
        aheads = [registers - 1 for registers in micro_batches.credits_of(groups)]
    return tuple(
        _one_forward_one_backward(group, groups, chunks, count, ahead) for group, ahead in enumerate(aheads)
    )


def _one_forward_one_backward(
    group: int, groups: int, chunks: int, count: int, ahead: int
) -> tuple[Unit, ...]:
    """Return the order of 1f1b, of several chunks the interleaved one, with so many forwards before all."""
    total = count * chunks
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


def _zero_bubble(stage: int, stages: int, count: int) -> tuple[Unit, ...]:
    """Return the order of 1f1b with weight parts: that of a micro-batch `stage` backwards after its own one."""
    order: list[Unit] = []
    for unit in _one_forward_one_backward(stage, stages, 1, count, stages - stage - 1):
        order.append(unit)
        if unit.phase is Phase.BACKWARD and unit.micro_batch >= stage:
            order.append(Unit(Phase.WEIGHT, stage, unit.micro_batch - stage))
    order.extend(Unit(Phase.WEIGHT, stage, number) for number in range(max(0, count - stage), count))
    return tuple(order)


def waits_of(unit: Unit, stages: int) -> tuple[Unit, ...]:
    """Return the units whose results a unit needs: the stage before it, or behind it; its own forward, or backward."""
    phase, stage, number = unit
    if phase is Phase.WEIGHT:
        return (Unit(Phase.BACKWARD, stage, number),)
    if phase is Phase.FORWARD:
        return (Unit(Phase.FORWARD, stage - 1, number),) if stage else ()
    own = Unit(Phase.FORWARD, stage, number)
    return (own, Unit(Phase.BACKWARD, stage + 1, number)) if stage + 1 < stages else (own,)


@lru_cache(maxsize=256)
def common_order(micro_batches: MicroBatches, groups: int, chunks: int = 1) -> tuple[Unit, ...]:
    """Return all units in one order, of which the order of each group of devices is a part.

    They are in the order in which they would end if a backward took twice as long as a forward, each of its parts as
    long, and nothing else took any time, since what a unit sends is issued at its end; of equals the later stage first.
    Weight parts of the last micro-batch come after all else, in the order of backwards: what they complete is summed
    over stages, too.

    Raises:
        ValueError: the orders wait for each other.
    """
    orders = group_orders(micro_batches, groups, chunks)
    stages = groups * chunks
    ended: dict[Unit, int] = {}
    free, done = [0] * groups, [0] * groups
    whole = 1 if micro_batches.splits_backward else 2
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
        free[group] = ended[unit] = start + (whole if unit.phase is Phase.BACKWARD else 1)
        done[group] += 1
        for other in (group, *waiting.pop(unit, ())):
            look_at(other)
    if len(ended) < sum(map(len, orders)):
        raise ValueError(f"the orders of {micro_batches.schedule} over {groups} groups wait for each other")

    def place(unit: Unit) -> tuple[bool, int, int]:
        is_last = unit.phase is Phase.WEIGHT and unit.micro_batch == micro_batches.count - 1
        return is_last, 0 if is_last else ended[unit], -unit.stage

    return tuple(sorted(ended, key=place))


class StageTimes(NamedTuple):
    """What stages take for a micro-batch, in ns, and what lies between them.

    arrives: from the end of a stage's forward until the next one's can begin; returns: likewise of the backward, until
    that of the stage before it can.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    arrives: tuple[int, ...]
    returns: tuple[int, ...]


def acted_order(micro_batches: MicroBatches, times: StageTimes) -> tuple[Unit, ...]:
    """Return all units of `actors` in the order of their ends, of stages that take these times."""
    stages = len(times.forward)
    acts = act(_actors(micro_batches, times), micro_batches.count)
    return tuple(
        Unit(Phase.BACKWARD if actor < stages else Phase.FORWARD, actor % stages, number)
        for _, _, actor, number in acts
    )


def _actors(micro_batches: MicroBatches, times: StageTimes) -> list[Actor]:
    """Return the backward of each stage, then the forward of each: so a backward goes first."""
    stages = len(times.forward)
    backwards = [
        Actor(
            times.backward[stage],
            GRADIENT_REGISTERS,
            stage,
            (
                Input(stages + stage),
                *([Input(stage + 1, latency=times.returns[stage + 1])] if stage + 1 < stages else ()),
            ),
        )
        for stage in range(stages)
    ]
    forwards = [
        Actor(
            times.forward[stage],
            registers,
            stage,
            (Input(stages + stage - 1, latency=times.arrives[stage - 1]),) if stage else (),
        )
        for stage, registers in enumerate(micro_batches.credits_of(stages))
    ]
    return backwards + forwards


# ---- as a part of strategies


def micro_batches_to_json(micro_batches: MicroBatches) -> dict[str, Any]:
    """Return the number of micro-batches and the schedule as a document, which is empty for one micro-batch."""
    if micro_batches == ONE_BATCH:
        return {}
    document: dict[str, Any] = {"count": micro_batches.count, "schedule": micro_batches.schedule.value}
    if micro_batches.credits:
        document["credits"] = list(micro_batches.credits)
    if micro_batches.gradients is not GradientSums.LAST:
        document["gradients"] = micro_batches.gradients.value
    return document


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
    keys = ("count", "schedule", "credits", "gradients")
    unknown = sorted(str(name) for name in document if name not in keys)
    if unknown:
        raise StrategyError(
            f"micro_batches: key {shown(unknown[0])} is unknown, must be one of {', '.join(keys)}; correct the strategy"
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
    gradients = document.get("gradients", GradientSums.LAST.value)
    if gradients not in tuple(GradientSums):
        raise StrategyError(
            f"micro_batches: gradients is {shown(gradients)}, must be one of {', '.join(GradientSums)}; correct the "
            "strategy"
        )
    micro_batches = MicroBatches(count, Schedule(schedule), gradients=GradientSums(gradients))
    return with_credits(micro_batches, document.get("credits", []), "micro_batches")


def with_credits(micro_batches: MicroBatches, given: object, source: str) -> MicroBatches:
    """Return micro-batches with the credits that a person gives, none where these are empty.

    Raises:
        StrategyError: they are malformed, or not of schedule actors; the message begins with the `source`.
    """
    if given == []:
        return micro_batches
    if not isinstance(given, list) or any(type(one) is not int or one < 1 for one in given):
        values = ", ".join(map(shown, given)) if isinstance(given, list) else given
        raise StrategyError(
            f"{source}: credits are {shown(values)}, must be a whole number of at least 1 for each stage; correct them"
        )
    if micro_batches.schedule is not Schedule.ACTORS:
        raise StrategyError(
            f"{source}: credits are given for schedule {micro_batches.schedule.value}, must be for schedule actors; "
            "leave them out or choose it"
        )
    return replace(micro_batches, credits=tuple(given))
