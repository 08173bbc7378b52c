"""The tasks of a step in micro-batches, from those of one micro-batch.

Each task of one micro-batch belongs to the forward or the backward of a stage, a unit (`graph.schedule`), by where it
stands in program order: a transfer or collective to the operator that it follows, what is made again to the last
operator of its group, a gather of weights to the operator that it stands before. Units stand in the common order of the
schedule, each with the tasks of its micro-batch:

    forwards and backwards of all stages on all micro-batches, and weight parts where the schedule has them apart; sums
        of gradients only in the backwards, or weight parts, of the last micro-batch, when all others have added theirs,
        but for those that are summed in every micro-batch
    for each micro-batch the forward of the operators that only renew buffers, and renewals
    updates; gathers of updated shares

A task waits for what it waits for in one micro-batch, of its own micro-batch. A computation also waits for the one
before it on its device: the schedule is static, whatever the order in which tasks are served. That holds back a sum of
gradients until all micro-batches have been through the backwards of its readers, as these run on their devices one
after the other. A sum that a backward of another micro-batch would wait for is awaited where it stands before it. What
renews buffers for one micro-batch waits for what the one before renewed.

Where gradients are summed in every micro-batch (`graph.plan.Plan.summed_each`), a bucket is filled again when its last
sum is done, and of gradients that are shared a device has one sum under way beside the one that it prepares: for these
wait the next sum, and what its devices compute after that.

A gather of weights that are kept in shares waits for the computation before it on each of its devices, as in one batch,
also where that is of another micro-batch. Those that a unit begins with stand right behind the unit before it on these
devices: links serve in program order, and what other units send until this one begins would else be ahead of them.

Of schedule actors the order of units is the one that stages find when each takes as long as in a step of one
micro-batch alone, messages between them included (`with_acted_units`).

Shape letters here: T tasks of one micro-batch, N tasks and E dependencies of the step, U units, S stages, O operators.

Sources: GPipe (arXiv:1811.06965); PipeDream-Flush (arXiv:2006.09503); Megatron-LM (arXiv:2104.04473), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from graph.operators import OperatorGraph
from graph.schedule import (
    MicroBatches,
    Phase,
    StageTimes,
    Unit,
    acted_order,
    common_order,
    stages_of,
)
from graph.strategy import Configuration
from search.kernels.micro_batches import await_tasks, copy_tasks
from search.kernels.records import (
    BACKWARD,
    BACKWARD_GATHER,
    BUFFER_COLLECTIVE,
    BUFFER_TRANSFER,
    FORWARD,
    FORWARD_GATHER,
    RECOMPUTE,
    SYNCHRONIZE,
    UPDATE,
    UPDATE_GATHER,
    Array,
    LatestTasks,
    ResourceSets,
    StepCopies,
    StepWaits,
    Tasks,
)
from search.simulate.weight_parts import PartCosts, with_weight_parts

_PHASES = tuple(Phase)
OF_ALL = -1
"""Stands for the micro-batch of a task that is of all of them: a sum of gradients, an update, a gather."""


class Units(NamedTuple):
    """The units of a step in their common order, as arrays: place of the phase in `Phase`, stage, micro-batch."""

    phase_U: Array
    stage_U: Array
    micro_batch_U: Array


class StepTasks(NamedTuple):
    """The tasks of a step, and the micro-batch of each, from 0; `OF_ALL` of what is done once.

    There is none where a step goes through one.
    """

    tasks: Tasks
    micro_batch_T: Array | None


class MicroBatchTasks(NamedTuple):
    """The tasks of one micro-batch, and what makes those of a step of them.

    pipeline: none where a step goes through its batch at once. parts: of backwards that are divided, if the schedule
    has the gradients of weights apart.
    """

    tasks: Tasks
    sets: ResourceSets
    pipeline: Pipeline | None = None
    parts: PartCosts | None = None

    def busiest_ns(self) -> int:
        """Return the nanoseconds of a step in which its busiest device or link is held: no order takes less."""
        tasks, sets, pipeline, parts = self
        run_ns_T = tasks.run_ns
        if parts is not None:
            run_ns_T = np.where(parts.is_divided_T, parts.input_ns_T + parts.weight_ns_T, run_ns_T)
        if pipeline is not None:
            is_once_T = _is_last_sum(tasks, sets, pipeline) | (
                _segments(tasks, pipeline) == pipeline.updating
            )
            run_ns_T = np.where(is_once_T, 1, pipeline.micro_batches) * run_ns_T
        if not len(run_ns_T):
            return 0
        # Sums of whole numbers below 2**53, about a hundred days of nanoseconds, are exact.
        held_ns = np.bincount(tasks.resource_set, weights=run_ns_T)
        ends = sets.resource_ptr[: len(held_ns) + 1]
        held_ns = np.repeat(held_ns, np.diff(ends))
        return int(np.bincount(sets.resource[ends[0] : ends[-1]], weights=held_ns).max())


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The stages of a strategy's operators, and the units of its step.

    stage_O: the stage of each operator. last_O: the last operator of the group that each is made again with, itself
    where it is in none. is_late_O: whether each only renews buffers. devices_of, group_S: of each stage the devices and
    their group. is_shared_B: whether gradients are shared, of buckets in the order of their sums; None where
    all are summed in the last micro-batch.
    """

    stage_O: Array
    last_O: Array
    is_late_O: Array
    stages: int
    micro_batches: int
    units: Units
    devices_of: tuple[frozenset[int], ...]
    group_S: Array
    is_shared_B: Array | None = None

    @property
    def renewing(self) -> int:
        """The segment of what renews buffers; those before are the forwards of all stages, and so on by phase."""
        return len(Phase) * self.stages

    @property
    def updating(self) -> int:
        """The segment of updates, and of gathers of updated shares."""
        return self.renewing + 1

    @property
    def leading(self) -> int:
        """The segment of the gathers that the first stage's forward begins with; then those of others, and by phase."""
        return self.updating + 1


def pipeline_of(
    graph: OperatorGraph,
    configurations: Sequence[Configuration],
    micro_batches: MicroBatches,
    last_O: Array,
) -> Pipeline:
    """Return the pipeline that configurations make with a number of micro-batches.

    Raises:
        StrategyError: the schedule is interleaved, and groups of devices do not take turns.
    """
    stages = stages_of(graph, configurations, micro_batches.schedule)
    groups = 1 + max(stage.group for stage in stages)
    firsts = [stage.first for stage in stages]
    return Pipeline(
        stage_O=stage_numbers(len(graph.operators), firsts),
        last_O=last_O,
        is_late_O=np.isin(np.arange(len(graph.operators)), graph.order.of_buffers),
        stages=len(stages),
        micro_batches=micro_batches.count,
        units=_units(micro_batches, groups, len(stages) // groups),
        devices_of=tuple(stage.devices for stage in stages),
        group_S=np.array([stage.group for stage in stages], np.int64),
    )


def stage_numbers(operators: int, firsts: Sequence[int]) -> Array:
    """Return the stage of each of so many operators; `firsts`: the first operators of stages, ascending."""
    # What stands before the first stage, if anything, only renews buffers.
    return np.maximum(np.searchsorted(firsts, np.arange(operators), side="right") - 1, 0)


@lru_cache(maxsize=64)
def _units(micro_batches: MicroBatches, groups: int, chunks: int) -> Units:
    return _as_arrays(common_order(micro_batches, groups, chunks))


def _as_arrays(units: Sequence[Unit]) -> Units:
    return Units(
        np.array([_PHASES.index(unit.phase) for unit in units], np.int64),
        np.array([unit.stage for unit in units], np.int64),
        np.array([unit.micro_batch for unit in units], np.int64),
    )


def with_acted_units(
    pipeline: Pipeline,
    micro_batches: MicroBatches,
    tasks: Tasks,
    device_count: int,
    serve: Callable[[Tasks], tuple[Array, Array]],
) -> Pipeline:
    """Return the pipeline of schedule actors with its units in the order that follows from what stages take.

    tasks: of one micro-batch. serve: returns when each task of a step in one batch starts and ends.
    """
    segment_T = _segments(tasks, pipeline)
    of_all = (pipeline.renewing, pipeline.updating)
    once_T = (tasks.kind == SYNCHRONIZE) | np.isin(segment_T, of_all)
    start_T, end_T = serve(tasks._replace(run_ns=np.where(once_T, 0, tasks.run_ns)))
    computes_T = (tasks.resource_set < device_count) & ~once_T
    begins_G = np.full(2 * pipeline.stages, np.iinfo(np.int64).max)
    ends_G = np.zeros(2 * pipeline.stages, np.int64)
    np.minimum.at(begins_G, segment_T[computes_T], start_T[computes_T])
    np.maximum.at(ends_G, segment_T[computes_T], end_T[computes_T])
    # A stage may have no backward.
    begins_G = np.minimum(begins_G, ends_G)
    forward_S, backward_S = np.split(ends_G - begins_G, 2)
    arrives_S = np.zeros(pipeline.stages, np.int64)
    returns_S = np.zeros(pipeline.stages, np.int64)
    begins_S, ends_S = begins_G[: pipeline.stages], ends_G[: pipeline.stages]
    arrives_S[:-1] = np.maximum(begins_S[1:] - ends_S[:-1], 0)
    begins_S, ends_S = begins_G[pipeline.stages :], ends_G[pipeline.stages :]
    returns_S[1:] = np.maximum(begins_S[:-1] - ends_S[1:], 0)
    times = StageTimes(*(tuple(item.tolist()) for item in (forward_S, backward_S, arrives_S, returns_S)))
    return replace(pipeline, units=_as_arrays(acted_order(micro_batches, times)))


def unrolled(
    tasks: Tasks,
    sets: ResourceSets,
    device_count: int,
    pipeline: Pipeline,
    parts: PartCosts | None = None,
) -> StepTasks:
    """Return the tasks of a step from those of one micro-batch; all arrays are as long as there are tasks.

    parts: of backwards that are divided, where the schedule has the gradients of weights apart.
    """
    segment_T = _segments(tasks, pipeline)
    if parts is not None:
        # Sums, too, stand a phase later.
        tasks, segment_T = with_weight_parts(tasks, segment_T, parts, _places(pipeline), pipeline.stages)
    is_last_sum_T = _is_last_sum(tasks, sets, pipeline)
    is_of_all_T = is_last_sum_T | (segment_T == pipeline.updating)
    copies = _copies(segment_T, is_last_sum_T, pipeline)
    source_N = copies.source_N
    copies.number_MT[:, is_of_all_T] = copies.number_MT[-1, is_of_all_T]
    renewals_2E = _awaited_renewals(
        tasks, sets, segment_T == pipeline.renewing, device_count, copies.number_MT
    )
    waits = _waits(tasks, sets, copies, pipeline.is_shared_B, renewals_2E, device_count)
    return StepTasks(
        Tasks(
            kind=tasks.kind.take(source_N),
            run_ns=tasks.run_ns.take(source_N),
            resource_set=tasks.resource_set.take(source_N),
            origin=tasks.origin.take(source_N),
            subject=tasks.subject.take(source_N),
            part=tasks.part.take(source_N),
            size_bytes=tasks.size_bytes.take(source_N),
            launch_ns=tasks.launch_ns.take(source_N),
            pred_ptr=waits.pred_ptr,
            pred=waits.pred,
        ),
        np.where(is_of_all_T.take(source_N), OF_ALL, copies.micro_batch_N),
    )


def _segments(tasks: Tasks, pipeline: Pipeline) -> Array:
    """Return the segment of the program that each task stands in (`renewing`, `updating`, `leading` of `Pipeline`)."""
    kind, segment_T = tasks.kind, np.full(len(tasks.kind), -1, np.int64)
    forward = np.flatnonzero(kind == FORWARD)
    operator = tasks.subject[forward]
    segment_T[forward] = np.where(pipeline.is_late_O[operator], pipeline.renewing, pipeline.stage_O[operator])
    for of_kind in (BACKWARD, RECOMPUTE):
        backward = np.flatnonzero(kind == of_kind)
        operator = tasks.subject[backward]
        if of_kind == RECOMPUTE:
            operator = pipeline.last_O[operator]
        segment_T[backward] = pipeline.stages + pipeline.stage_O[operator]
    computes_T = segment_T >= 0
    for side, of_kind in enumerate((FORWARD_GATHER, BACKWARD_GATHER)):
        gathers = np.flatnonzero(kind == of_kind)
        segment_T[gathers] = side * pipeline.stages + pipeline.stage_O[tasks.subject[gathers]]
    segment_T[(kind == UPDATE) | (kind == UPDATE_GATHER)] = pipeline.updating
    # Other communication follows the tasks of the operator that it belongs to, or of those that renew buffers.
    places = np.where(segment_T >= 0, np.arange(len(kind)), 0)
    segment_T = segment_T[np.maximum.accumulate(places)]
    gathers = np.flatnonzero((kind == FORWARD_GATHER) | (kind == BACKWARD_GATHER))
    if len(gathers):
        # Of each segment the first computation: of several the first is written last.
        computations = np.flatnonzero(computes_T)[::-1]
        first_G = np.full(pipeline.leading, len(kind))
        first_G[segment_T[computations]] = computations
        segment_T[gathers[gathers < first_G[segment_T[gathers]]]] += pipeline.leading
    return segment_T


def _is_last_sum(tasks: Tasks, sets: ResourceSets, pipeline: Pipeline) -> Array:
    """Return which tasks are sums of gradients in the last micro-batch alone."""
    is_sum_T: Array = tasks.kind == SYNCHRONIZE
    if pipeline.is_shared_B is None:
        return is_sum_T
    result: Array = np.zeros(len(is_sum_T), np.bool_)
    for resource_set in np.unique(tasks.resource_set[is_sum_T]).tolist():
        devices = frozenset(sets.end[sets.end_ptr[resource_set] : sets.end_ptr[resource_set + 1]].tolist())
        if not any(devices <= of_stage for of_stage in pipeline.devices_of):
            result |= is_sum_T & (tasks.resource_set == resource_set)
    return result


def _places(pipeline: Pipeline) -> Array:
    """Return the place of each segment in the order of one micro-batch."""
    stages = np.arange(pipeline.stages)
    order = [stages, *(stages[::-1] + phase * pipeline.stages for phase in range(1, len(Phase)))]
    places = np.empty(pipeline.leading + 2 * pipeline.stages, np.int64)
    leading = [pipeline.leading + segments for segments in (order[0], order[1])]
    in_order = [
        *np.stack([leading[0], order[0]]).T.ravel(),
        *np.stack([leading[1], order[1]]).T.ravel(),
        *np.concatenate([*order[2:], [pipeline.renewing, pipeline.updating]]),
    ]
    places[in_order] = np.arange(len(places))
    return places


def _copies(segment_T: Array, is_last_sum_T: Array, pipeline: Pipeline) -> StepCopies:
    """Return the copies of tasks that make a step; a task that runs once belongs to the last micro-batch."""
    stages, count, units = pipeline.stages, pipeline.micro_batches, pipeline.units
    sizes_G = np.bincount(segment_T, minlength=pipeline.leading + 2 * stages)
    order = np.argsort(_places(pipeline))
    first_G = np.empty_like(sizes_G)
    first_G[order] = np.cumsum(sizes_G[order]) - sizes_G[order]
    of_units, micro_batches = units.phase_U * stages + units.stage_U, units.micro_batch_U
    if sizes_G[pipeline.leading :].any():
        # Gathers begin where the unit before theirs ends, and stand there: behind it no unit waits for their links.
        led = np.flatnonzero(of_units < 2 * stages)
        places = np.concatenate([_units_before(pipeline)[led] + 0.5, np.arange(len(of_units))])
        in_order = np.argsort(places, kind="stable")
        of_units = np.concatenate([pipeline.leading + of_units[led], of_units])[in_order]
        micro_batches = np.concatenate([micro_batches[led], micro_batches])[in_order]
    segments = np.concatenate([of_units, np.full(count, pipeline.renewing), [pipeline.updating]])
    micro_batches = np.concatenate([micro_batches, np.arange(count), [count - 1]])
    most = int(sizes_G[segments].sum())
    copies = StepCopies(
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty((count, len(segment_T)), np.int64)
    )
    length = copy_tasks(first_G[segments], sizes_G[segments], micro_batches, is_last_sum_T, copies)
    return copies._replace(source_N=copies.source_N[:length], micro_batch_N=copies.micro_batch_N[:length])


def _units_before(pipeline: Pipeline) -> Array:
    """Return, for each unit, the place of the one before it on its group of devices; of the first -1."""
    group_U = pipeline.group_S[pipeline.units.stage_U]
    by_group = np.argsort(group_U, kind="stable")
    before = np.full(len(group_U), -1)
    follows = group_U[by_group[1:]] == group_U[by_group[:-1]]
    before[by_group[1:][follows]] = by_group[:-1][follows]
    return before


def _ranges(first: Array, counts: Array) -> Array:
    """Return ranges of whole numbers, given by their first and their counts, one behind the other."""
    ends = np.cumsum(counts)
    return np.repeat(first - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _by_device(resource_set_N: Array, device_count: int) -> Array:
    """Return the computations of the first device in their order, then those of the next, and so on."""
    computations = np.flatnonzero(resource_set_N < device_count)
    device = resource_set_N[computations]
    # So few bits are sorted in linear time.
    return computations[
        np.argsort(device.astype(np.int16) if device_count < 2**15 else device, kind="stable")
    ]


def _waits(
    tasks: Tasks,
    sets: ResourceSets,
    copies: StepCopies,
    is_shared_B: Array | None,
    renewals_2E: Array,
    device_count: int,
) -> StepWaits:
    """Return the dependencies of a step's tasks; arguments as of `await_tasks`."""
    source_N, is_shared_B = copies.source_N, np.zeros(0, np.bool_) if is_shared_B is None else is_shared_B
    members_T = np.diff(sets.end_ptr).take(tasks.resource_set)
    sums = int(members_T.take(source_N)[tasks.kind.take(source_N) == SYNCHRONIZE].sum())
    # A computation waits for one more on its device; gathers and sums for one on each of theirs.
    most_T = np.diff(tasks.pred_ptr) + np.where(tasks.resource_set < device_count, 1, members_T)
    most = int(most_T.take(source_N).sum()) + renewals_2E.shape[1] + sums
    latest = LatestTasks(
        computation_D=np.full(device_count, -1, np.int64),
        sum_DB=np.full((device_count, 1 + len(is_shared_B)), -1, np.int64),
        awaited_D=np.full(device_count, -1, np.int64),
        awaited_2P=np.empty((2, sums), np.int64),
    )
    waits = StepWaits(np.empty(len(source_N) + 1, np.int64), np.empty(most, np.int64))
    count = await_tasks(tasks, sets, copies, is_shared_B, renewals_2E, latest, waits)
    return waits._replace(pred=waits.pred[:count])


def _awaited_renewals(
    tasks: Tasks, sets: ResourceSets, is_renewing_T: Array, device_count: int, number_MT: Array
) -> Array:
    """Return the first forward that renews buffers on a device, and a renewal there for the batch before: (2, pairs).

    Forwards are ascending.
    """
    renewals = np.flatnonzero((tasks.kind == BUFFER_COLLECTIVE) | (tasks.kind == BUFFER_TRANSFER))
    forwards = np.flatnonzero(is_renewing_T & (tasks.kind == FORWARD))
    first_D = np.full(device_count, -1, np.int64)
    # Of several the first is written last.
    first_D[tasks.resource_set[forwards[::-1]]] = forwards[::-1]
    ends_at = sets.end_ptr[tasks.resource_set[renewals]]
    counts = sets.end_ptr[tasks.resource_set[renewals] + 1] - ends_at
    forward = first_D[sets.end[_ranges(ends_at, counts)]]
    renewal = np.repeat(renewals, counts)[forward >= 0]
    forward = forward[forward >= 0]
    pairs_2E = np.stack([number_MT[1:, forward].reshape(-1), number_MT[:-1, renewal].reshape(-1)])
    return np.ascontiguousarray(pairs_2E[:, np.argsort(pairs_2E[0], kind="stable")])
