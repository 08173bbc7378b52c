"""One strategy as it changes: the fragments that it uses, and its task graph in arrays that are used again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graph.operator_ranges import OperatorRanges, group_numbers
from graph.schedule import ONE_BATCH, MicroBatches, Schedule, stages_of
from graph.strategy import Configuration, Sharding
from search.kernels.derivation import derive
from search.kernels.fifo_order import run_fifo_order
from search.kernels.fragment_table import LEFT_OUT, WHOLE, FragmentKeys
from search.kernels.gradient_buckets import fill_buckets
from search.kernels.priority_order import number_by_position, run_priority_order
from search.kernels.program_order import run_program_order
from search.kernels.records import (
    Array,
    Buckets,
    Derivation,
    Emission,
    Fragments,
    GatherArrays,
    Groups,
    Positions,
    ResourceSets,
    Scratch,
    StageMemory,
    Tasks,
    Timeline,
)
from search.kernels.stage_memory import account_stages, find_step_peak
from search.kernels.task_graph import emit_task_graph, most_tasks
from search.kernels.weight_gathers import find_gathers
from search.outcome import NEVER_NS
from search.simulate.fragment_cache import SHARING_CODE, Chosen
from search.simulate.micro_batches import (
    MicroBatchTasks,
    Pipeline,
    StepTasks,
    pipeline_of,
    stage_numbers,
    unrolled,
    with_acted_units,
)
from search.simulate.priorities import positions, tac_of, tic_of

if TYPE_CHECKING:
    from search.simulate.task_graph import TaskGraphBuilder


class Undo(NamedTuple):
    """What a change replaced: configurations and their numbers by operators, starts of fragments by subjects."""

    operators: Array
    configurations: list[Configuration]
    numbers: Array
    subjects: Array
    at: Array


class Layout:
    """The task graph of one strategy. `change` replaces configurations, `undo` takes a change back.

    What is shared of the weights stays, unless `share` changes it; what is made again stays, unless `recompute` does;
    and the micro-batches that a step goes through, unless `divide` does.
    """

    def __init__(
        self,
        builder: TaskGraphBuilder,
        configurations: Sequence[Configuration],
        sharding: Sequence[Sharding] = (),
        recomputation: OperatorRanges = (),
        micro_batches: MicroBatches = ONE_BATCH,
    ) -> None:
        self.builder = builder
        self.micro_batches = micro_batches
        self._recomputation = recomputation
        store = builder.store
        self.groups = _new_groups(builder, recomputation)
        self.configurations = list(configurations)
        wiring, subjects = store.wiring, store.subjects
        operators, count = len(self.configurations), len(subjects.class_S)
        lasting = store.task_costs.lasting(recomputation)
        levels = [*sharding, *[Sharding.NONE] * (wiring.static_count - len(sharding))]
        # Whether the holders of any weight share something of it.
        self.is_shared = any(level is not Sharding.NONE for level in sharding)
        self._keys = FragmentKeys(
            np.zeros(operators, np.int64),
            np.zeros(count, np.int64),
            np.full(operators, WHOLE, np.int64),
            *(np.zeros(count, np.int64) for _ in range(3)),
        )
        self._keys.variant_S[:operators] = store.task_costs.variants(lasting)
        self._keys.variant_S[subjects.statics_at :] = [SHARING_CODE[level] for level in levels]
        self._chosen = Chosen(self.configurations, lasting, levels, self._keys)
        at_S = self._keys.at_S
        self.fragments = Fragments(
            at_S[:operators], at_S[operators : subjects.statics_at], at_S[subjects.statics_at :]
        )
        self._generation = -1
        # Of the change that was asked about last: its operators' configurations, and their numbers.
        self._numbered: tuple[Mapping[int, Configuration], int, list[int]] = ({}, -1, [])
        self._tasks = _new_tasks(1024, 4096)
        self._buckets = new_buckets(64, 256, 0)
        # Of each operator, the stage that it gathers weights with.
        self.stage_O = np.zeros(operators, np.int64)
        self.gathers = new_gathers(self, 64)
        self._reserve(4096)
        self._timeline = Timeline(*(np.zeros(0, np.int64) for _ in range(3)))
        self._priority_T, self._bucket_T = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._positions: Positions | None = None

    @property
    def task_count(self) -> int:
        """Number of tasks of one micro-batch that `assemble` found."""
        return int(self._scratch.counts[0])

    @property
    def peak_memory_D(self) -> Array:  # noqa: N802 - the shape suffix
        """Peak bytes of each device that `assemble` found, of several micro-batches that `step` found."""
        return self._derivation.peak_D

    @property
    def excess_bytes(self) -> int:
        """Bytes beyond the memories of all devices together; 0 where the strategy fits."""
        over = self.peak_memory_D - self.builder.capacity_bytes_D
        return int(np.maximum(over, 0).sum())

    def change(self, changed: Mapping[int, Configuration]) -> Undo:
        """Replace the configurations of some operators; return what `undo` needs.

        Raises:
            CostError: a local call has no cost.
        """
        # Only here: between a change and its undo the fragments must stay where they are.
        self.builder.store.make_room()
        return self.replace(changed)

    def replace(
        self,
        changed: Mapping[int, Configuration],
        codes: Mapping[int, int] | None = None,
        left_out: Collection[int] = (),
    ) -> Undo:
        """Change as `change`, all fragments staying where they are; the store may grow beyond its limit.

        codes: of each changed operator, which of its tasks have a backward: `ACTIVE`, `PARTLY_ACTIVE`, 0 for none. The
            change is then made in part: changed operators take no time, what they make goes nowhere, and buffers stay
            as they are. A simulation takes no longer than of all of it, and says nothing of memory.
        left_out: weights that nobody holds in a change that is made in part.

        Raises:
            CostError: a local call has no cost.
        """
        self.refresh()
        store, keys = self.builder.store, self._keys
        statics_at = store.subjects.statics_at
        operators = np.fromiter(changed, np.int64, len(changed))
        limit = len(keys.at_S) if codes is None else statics_at + store.wiring.weight_count
        subjects = store.touched(self._chosen, operators, limit)
        undo = Undo(
            operators,
            [self.configurations[index] for index in changed],
            keys.configuration_O[operators],
            subjects,
            keys.at_S[subjects],
        )
        for index, configuration in changed.items():
            self.configurations[index] = configuration
        keys.configuration_O[operators] = self.numbers_of(changed)
        if codes is None:
            store.find(self._chosen, subjects)
            return undo
        weights = statics_at + np.fromiter(left_out, np.int64, len(left_out))
        variants = keys.variant_S[weights]
        keys.code_O[operators] = [codes[index] for index in changed]
        keys.variant_S[weights] = LEFT_OUT
        try:
            store.find(self._chosen, subjects)
        finally:
            keys.code_O[operators] = WHOLE
            keys.variant_S[weights] = variants
        return undo

    def numbers_of(self, changed: Mapping[int, Configuration]) -> list[int]:
        """Return the numbers of a change's configurations; a proposal asks for them several times."""
        store = self.builder.store
        latest, generation, numbers = self._numbered
        if latest is not changed or generation != store.generation:
            numbers = store.configuration_numbers(changed.values())
            self._numbered = changed, store.generation, numbers
        return numbers

    def share(self, changed: Mapping[int, Sharding]) -> None:
        """Share other things of some weights, by their numbers; the caller takes it back by sharing the former ones."""
        self.refresh()
        levels, statics_at = self._chosen.sharding, self.builder.store.subjects.statics_at
        others = sorted(weight for weight, sharing in changed.items() if levels[weight] is not sharing)
        for weight in others:
            levels[weight] = changed[weight]
            self._keys.variant_S[statics_at + weight] = SHARING_CODE[changed[weight]]
        self.builder.store.find(self._chosen, statics_at + np.array(others, np.int64))
        self.is_shared = any(level is not Sharding.NONE for level in levels)

    def recompute(self, recomputation: OperatorRanges) -> None:
        """Make other groups again; all fragments are found anew, so that `undo` does not take this step back."""
        if recomputation == self._recomputation:
            return
        self._recomputation = recomputation
        task_costs = self.builder.store.task_costs
        self._chosen.lasting = task_costs.lasting(recomputation)
        self._keys.variant_S[: len(self.configurations)] = task_costs.variants(self._chosen.lasting)
        self.groups = _new_groups(self.builder, recomputation)
        self._reserve(len(self._derivation.pool))
        self._generation = -1

    def divide(self, micro_batches: MicroBatches) -> None:
        """Let a step go through other micro-batches; the graph stays that of one, and `undo` leaves this as it is."""
        self.micro_batches = micro_batches
        if micro_batches == ONE_BATCH:
            self.stage_O[:] = 0

    def undo(self, undo: Undo) -> None:
        """Take back the latest change."""
        for index, configuration in zip(undo.operators.tolist(), undo.configurations, strict=True):
            self.configurations[index] = configuration
        self._keys.configuration_O[undo.operators] = undo.numbers
        self._keys.at_S[undo.subjects] = undo.at

    def refresh(self) -> None:
        """Find all fragments anew where the store was emptied since."""
        store = self.builder.store
        if self._generation == store.generation:
            return
        self._keys.configuration_O[:] = store.configuration_numbers(self.configurations)
        store.find(self._chosen, np.arange(len(self._keys.at_S)))
        self._generation = store.generation

    def assemble(self) -> tuple[Tasks, ResourceSets]:
        """Write the task graph of one micro-batch; valid until the next change, the first `task_count` tasks of it."""
        self.refresh()
        store = self.builder.store
        resource_sets = store.resource_sets.arrays()
        arena, fragments, wiring = store.arena, self.fragments, store.wiring
        words = self._derive()
        if words > len(self._derivation.pool):
            self._reserve(2 * words)
            self._derive()
        derivation = self._derivation
        self._buckets = buckets_for(resource_sets, self._buckets)
        active, least_bytes = derivation.operator_active, self.builder.bucket_bytes
        firsts = self._stage_firsts()
        self.stage_O[:] = stage_numbers(len(self.configurations), firsts) if firsts else 0
        ends = np.array(
            sorted({0, *(firsts if self.micro_batches.sums_each else ())}, reverse=True), np.int64
        )
        while not fill_buckets(wiring, fragments, arena, active, self._buckets, least_bytes, ends):
            self._buckets = more_buckets(self._buckets)
        while not find_gathers(wiring, fragments, arena, active, self.groups, self.gathers, least_bytes):
            self.gathers = new_gathers(self, 2 * len(self.gathers.resource_set))
        emission = self.emission()
        tasks, dependencies = most_tasks(emission)
        if tasks > len(self._tasks.kind) or dependencies > len(self._tasks.pred):
            self._tasks = _new_tasks(2 * tasks, 2 * dependencies)
            emission = emission._replace(tasks=self._tasks)
        emit_task_graph(emission, self.builder.updates(derivation.elements_D))
        return self._tasks, resource_sets

    def _stage_firsts(self) -> list[int]:
        """Return the first operators of stages, where buckets or gathers of weights end with them.

        Raises:
            StrategyError: the schedule is interleaved, and groups of devices do not take turns.
        """
        ends = self.micro_batches.sums_each or Sharding.PARAMETERS in self._chosen.sharding
        if self.micro_batches == ONE_BATCH or not ends:
            return []
        stages = stages_of(self.builder.graph, self.configurations, self.micro_batches.schedule)
        return [stage.first for stage in stages]

    def micro_batch(self) -> MicroBatchTasks:
        """Return the tasks of one micro-batch, valid until the next change, and find the peak memory of a step.

        Raises:
            StrategyError: the schedule is interleaved, and groups of devices do not take turns.
        """
        assembled, resource_sets = self.assemble()
        count = self.task_count
        columns = {name: array[:count] for name, array in assembled._asdict().items()}
        columns["pred_ptr"] = assembled.pred_ptr[: count + 1]
        columns["pred"] = assembled.pred[: assembled.pred_ptr[count]]
        tasks = Tasks(**columns)
        if self.micro_batches == ONE_BATCH:
            return MicroBatchTasks(tasks, resource_sets)
        pipeline = pipeline_of(
            self.builder.graph, self.configurations, self.micro_batches, self.groups.last_O
        )
        if self.micro_batches.sums_each:
            pipeline = replace(pipeline, is_shared_B=self._is_shared_B())
        self._account(pipeline, tasks)
        builder = self.builder
        added_ns, launch_ns = builder.accumulation.added(tasks, self.configurations, *builder.sum_costs)
        parts = None
        if self.micro_batches.splits_backward:
            parts = builder.weight_parts.costs(tasks, self.configurations, builder.kind_of)
            parts = parts._replace(
                weight_ns_T=parts.weight_ns_T + added_ns,
                weight_launch_ns_T=parts.weight_launch_ns_T + launch_ns,
            )
            added_ns, launch_ns = (np.where(parts.is_divided_T, 0, of_T) for of_T in (added_ns, launch_ns))
        tasks = tasks._replace(run_ns=tasks.run_ns + added_ns, launch_ns=tasks.launch_ns + launch_ns)
        return MicroBatchTasks(tasks, resource_sets, pipeline, parts)

    def step(self, of_one: MicroBatchTasks | None = None) -> StepTasks:
        """Return the tasks of a step, valid until the next change, and find its peak memory.

        of_one: what `micro_batch` gives, if it was called.

        Raises:
            StrategyError: the schedule is interleaved, and groups of devices do not take turns.
        """
        tasks, resource_sets, pipeline, parts = self.micro_batch() if of_one is None else of_one
        if pipeline is None:
            return StepTasks(tasks, None)
        builder = self.builder
        device_count = len(builder.topology.devices)
        if self.micro_batches.schedule is Schedule.ACTORS and builder.topology.acts:
            pipeline = with_acted_units(pipeline, self.micro_batches, tasks, device_count, self._served)
        return unrolled(tasks, resource_sets, device_count, pipeline, parts)

    def _is_shared_B(self) -> Array:  # noqa: N802 - the shape suffix
        """Return whether the gradients of each bucket are shared, in the order of their sums."""
        count = self._buckets.counts[0]
        is_shared_B: Array = self._buckets.sharing[self._buckets.order[:count]] != SHARING_CODE[Sharding.NONE]
        return is_shared_B

    def _served(self, tasks: Tasks) -> tuple[Array, Array]:
        """Return when each task of a step in one batch starts and ends, in program order."""
        timeline = Timeline(*(np.zeros(len(tasks.kind), np.int64) for _ in range(3)))
        run_program_order(*self._served_by(tasks), timeline)
        return timeline.start_ns, timeline.end_ns

    def _served_by(self, tasks: Tasks) -> tuple[int, Tasks, ResourceSets, Array, int]:
        """Return what all orders take: the number of tasks, the tasks, and what serves them."""
        topology, resource_sets = self.builder.topology, self.builder.store.resource_sets.arrays()
        resource_count = len(topology.devices) + len(topology.links)
        return len(tasks.kind), tasks, resource_sets, self.builder.contention_ppm_D, resource_count

    def _account(self, pipeline: Pipeline, tasks: Tasks) -> None:
        """Find the peak memory of a step in micro-batches."""
        devices, stages, units = len(self.builder.topology.devices), pipeline.stages, pipeline.units
        memory = StageMemory(
            *(np.zeros(devices, np.int64) for _ in range(2)),
            *(np.zeros((stages, devices), np.int64) for _ in range(3)),
        )
        if self.micro_batches.splits_backward:
            memory.weight_SD[:] = self.builder.weight_parts.kept_SD(
                tasks, self.configurations, pipeline.stage_O.tolist(), (stages, devices)
            )
        on_stage_SD = np.zeros((0 if pipeline.is_shared_B is None else stages, devices), np.bool_)
        for stage in range(len(on_stage_SD)):
            on_stage_SD[stage, list(pipeline.devices_of[stage])] = True
        account_stages(
            self.emission(),
            pipeline.stage_O,
            on_stage_SD,
            self.builder.is_input_S,
            self.builder.state_tensors,
            memory,
        )
        find_step_peak(units.phase_U, units.stage_U, memory, pipeline.micro_batches, self._derivation.peak_D)

    def emission(self) -> Emission:
        """Return what `assemble` emits the task graph from; valid until the next change."""
        store = self.builder.store
        return Emission(
            store.wiring,
            self.fragments,
            store.arena,
            store.exchange_links,
            self.groups,
            self._derivation,
            self._scratch,
            store.resource_sets.arrays(),
            self._buckets,
            self.gathers,
            self._tasks,
        )

    def _reserve(self, words: int) -> None:
        """Make room for a strategy whose derivation takes that many words."""
        self._derivation = new_derivation(self, np.zeros(words, np.int64))
        self._scratch = _new_scratch(self, words)

    def _derive(self) -> int:
        """Derive the strategy, if the pool is long enough; return the words that this takes."""
        store = self.builder.store
        return derive(
            store.wiring,
            self.fragments,
            store.arena,
            self.groups,
            self.builder.state_tensors,
            self._derivation,
        )

    def run(
        self, order: str, bound_ns: int = NEVER_NS, of_one: MicroBatchTasks | None = None
    ) -> tuple[int, Timeline]:
        """Assemble and simulate; return the makespan in nanoseconds and the timeline (valid until the next run).

        In fifo order and by priority it is -1 where it exceeds the bound. of_one: as of `step`.
        """
        tasks, _ = self.step(of_one)
        count = len(tasks.kind)
        if len(self._timeline.start_ns) < count:
            self._timeline = Timeline(*(np.zeros(2 * count, np.int64) for _ in range(3)))
        arguments = (*self._served_by(tasks), self._timeline)
        if order == "program":
            return int(run_program_order(*arguments)), self._timeline
        if order == "fifo":
            return int(run_fifo_order(*arguments, bound_ns)), self._timeline
        return int(run_priority_order(*arguments, self._numbers(tasks, order), bound_ns)), self._timeline

    def _numbers(self, tasks: Tasks, order: str) -> Array:
        """Return the numbers that the order's policy gives to communications; valid until the next run."""
        count, devices = len(tasks.kind), len(self.builder.topology.devices)
        if order != "priority":
            policy = {"priority-tic": tic_of, "priority-tac": tac_of}[order]
            return policy(tasks, count, devices)
        if len(self._bucket_T) < count:
            self._priority_T, self._bucket_T = (np.zeros(2 * count, np.int64) for _ in range(2))
        if self._positions is None:
            self._positions = positions(self.builder.store.wiring)
        number_by_position(count, tasks, devices, self._positions, self._priority_T, self._bucket_T)
        return self._priority_T


def _new_groups(builder: TaskGraphBuilder, recomputation: OperatorRanges) -> Groups:
    operators = len(builder.graph.operators)
    first, last = np.full(operators, -1, np.int64), np.arange(operators)
    ended = np.zeros(operators, np.int64)
    for group in recomputation:
        first[group.last] = group.first
        last[group.first : group.last + 1] = group.last
        ended[group.last + 1 :] += 1
    return Groups(np.array(group_numbers(builder.graph, recomputation), np.int64), first, last, ended)


def _new_tasks(tasks: int, dependencies: int) -> Tasks:
    return Tasks(
        kind=np.zeros(tasks, np.int64),
        run_ns=np.zeros(tasks, np.int64),
        resource_set=np.zeros(tasks, np.int64),
        origin=np.zeros(tasks, np.int64),
        subject=np.zeros(tasks, np.int64),
        part=np.zeros(tasks, np.int64),
        size_bytes=np.zeros(tasks, np.int64),
        launch_ns=np.zeros(tasks, np.int64),
        pred_ptr=np.zeros(tasks + 1, np.int64),
        pred=np.zeros(dependencies, np.int64),
    )


def new_buckets(buckets: int, entries: int, resource_sets: int) -> Buckets:
    """Return room for that many buckets, entries of weights in them, and resource sets that they are of."""
    return Buckets(
        resource_set=np.zeros(buckets, np.int64),
        size_bytes=np.zeros(buckets, np.int64),
        after=np.zeros(buckets, np.int64),
        first_entry=np.zeros(buckets, np.int64),
        last_entry=np.zeros(buckets, np.int64),
        entry_weight=np.zeros(entries, np.int64),
        entry_next=np.zeros(entries, np.int64),
        filling=np.zeros(resource_sets, np.int64),
        order=np.zeros(buckets, np.int64),
        sharing=np.zeros(buckets, np.int64),
        gather=np.zeros(buckets, np.int64),
        counts=np.zeros(2, np.int64),
    )


def buckets_for(resource_sets: ResourceSets, buckets: Buckets) -> Buckets:
    """Return room for buckets of all resource sets: `buckets` themselves, where they have it."""
    if len(buckets.filling) >= len(resource_sets.origin):
        return buckets
    return new_buckets(len(buckets.resource_set), len(buckets.entry_weight), 2 * len(resource_sets.origin))


def more_buckets(buckets: Buckets) -> Buckets:
    """Return room for twice as many buckets and entries."""
    return new_buckets(2 * len(buckets.resource_set), 2 * len(buckets.entry_weight), len(buckets.filling))


def new_gathers(layout: Layout, gathers: int) -> GatherArrays:
    """Return room for that many gathers of weights."""
    wiring = layout.builder.store.wiring
    operators, devices = len(layout.configurations), len(layout.builder.topology.devices)
    return GatherArrays(
        resource_set=np.zeros(gathers, np.int64),
        size_bytes=np.zeros(gathers, np.int64),
        operator=np.zeros(gathers, np.int64),
        task=np.zeros(gathers, np.int64),
        first_2O=np.zeros((2, operators), np.int64),
        last_2O=np.zeros((2, operators), np.int64),
        weight_2W=np.full((2, wiring.weight_count), -1, np.int64),
        stage_O=layout.stage_O,
        latest_D=np.full(devices, -1, np.int64),
        blocked_D=np.full(devices, -1, np.int64),
        reduced_D=np.full(devices, -1, np.int64),
        counts=np.zeros(2, np.int64),
    )


def new_derivation(layout: Layout, pool: Array) -> Derivation:
    """Return room for the derivation of a strategy; it is that of nothing."""
    operators, values = len(layout.configurations), len(layout.builder.store.classes.values)
    devices = len(layout.builder.topology.devices)
    groups = int(layout.groups.of_O.max(initial=-1)) + 1
    return Derivation(
        pool=pool,
        active_at=np.zeros(operators, np.int64),
        last_at=np.full(values, -1, np.int64),
        collective_at=np.full(values, -1, np.int64),
        operator_active=np.zeros(operators, np.int64),
        elements_D=np.zeros(devices, np.int64),
        memory_D=np.zeros(devices, np.int64),
        again_2GD=np.zeros((2, groups, devices), np.int64),
        peak_D=np.zeros(devices, np.int64),
        counts=np.zeros(2, np.int64),
    )


def _new_scratch(layout: Layout, words: int) -> Scratch:
    """Return room for tasks of a strategy whose derivation takes that many words."""
    operators, values = len(layout.configurations), len(layout.builder.store.classes.values)
    return Scratch(
        forward_base=np.zeros(operators, np.int64),
        transfer_base=np.zeros(values, np.int64),
        collective_base=np.zeros(values, np.int64),
        backward_task=np.zeros(words, np.int64),
        gradient_base=np.zeros(words, np.int64),
        gradient_collective=np.zeros(words, np.int64),
        counts=np.zeros(2, np.int64),
    )
