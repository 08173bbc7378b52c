"""The task graph of one training step: `graph.plan`'s order, with durations, in flat arrays.

Tasks stand in program order, and a dependency always points backwards:

    forward of every operator that the loss depends on: its tasks, then the collectives of its outputs, then a
        transfer for every remote piece of every assembly that no collective serves;
    backward in reverse: the tasks that have a backward, then the collectives and the transfers of the gradients that
        are now complete, then the all-reduces of the buckets that are now full; before the last operator of a group
        that is made again, the forward tasks of the group that have a backward, once more;
    forward of the operators that only renew buffers, likewise; the collectives and the transfers that renew buffers;
    one update for each device that updates weights; an all-gather for each bucket of which the update was shared.

Before an operator that is the first to read weights kept in shares, one of several whose weights are gathered together,
stand the all-gathers of the next such group (before the first of them also its own); in the backward those before the
last readers, likewise.

A forward task waits for all pieces of what it reads; a collective for all tasks that put something into it; a
backward task for its own forward and for the gradients of all assemblies that it feeds; the gradient of an assembly
for the backward of all its readers; an all-reduce of a bucket for the backward of all readers of its weights on its
devices; an update for the all-reduces of buckets and for the backwards of its device. A forward or backward task waits
for the gathers of what it reads, a gather for what its devices have computed so far. A forward task that is made again
waits for what its device computes before it: what it reads is there. Its backward waits for it. The sum of a bucket
whose gradients are shared waits for the one before on its devices, and so does all that these devices compute in the
backward after it: no device has more than two of them in its hands. The gather of updated shares waits for the
updates.

So it is of a step in one batch, and of each micro-batch (`search.simulate.micro_batches`).

Source: FlexFlow (arXiv:1807.05358) section 5.1, with forward, backward, gradient transfers, collectives and
updates apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graph.collectives import CollectiveKind
from graph.operators import OperatorGraph, ValueKind
from graph.plan import Plan, build_plan
from graph.strategy import Sharding, Strategy
from graph.synchronization import BUCKET_BYTES, BY_DEFAULT
from graph.topology import Topology
from graph.training import OPTIMIZER_STATE, Training
from search.cost.calls_to_profile import LocalCalls, rule_calls
from search.cost.cost_table import ORIGIN_CODE, CostTable, nanoseconds
from search.cost.link_costs import COLLECTIVE_KINDS, LinkCosts
from search.simulate.accumulation import GradientAccumulation
from search.simulate.weight_parts import WeightParts

if TYPE_CHECKING:
    from search.kernels.records import Machines, ResourceSets, Tasks, UpdateTimes
    from search.simulate.strategy_state import Layout

IntArray = np.ndarray[Any, np.dtype[Any]]


class TaskKind(IntEnum):
    """What a task does; the values are those of `TaskGraph.kind_T`."""

    FORWARD = 0
    BACKWARD = 1
    TRANSFER = 2
    GRADIENT_TRANSFER = 3
    BUFFER_TRANSFER = 4
    SYNCHRONIZE = 5
    UPDATE = 6
    COLLECTIVE = 7
    GRADIENT_COLLECTIVE = 8
    BUFFER_COLLECTIVE = 9
    FORWARD_GATHER = 10
    BACKWARD_GATHER = 11
    UPDATE_GATHER = 12
    RECOMPUTE = 13
    WEIGHT = 14


COMPUTE_KINDS = (
    TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.UPDATE, TaskKind.RECOMPUTE, TaskKind.WEIGHT,
)  # fmt: skip


# The arrays of `TaskGraph` that are those of kernels, in their order.
_COLUMNS = (
    "kind_T", "run_ns_T", "resource_set_T", "origin_T", "subject_T", "part_T", "size_bytes_T", "launch_ns_T",
    "pred_ptr_T1", "pred_E",
)  # fmt: skip

_ABOUT_BUCKETS = {TaskKind.SYNCHRONIZE: "bucket", TaskKind.UPDATE_GATHER: "weights of bucket"}
_ABOUT_WEIGHTS = {
    **_ABOUT_BUCKETS,
    TaskKind.FORWARD_GATHER: "weights for forward of",
    TaskKind.BACKWARD_GATHER: "weights for backward of",
}


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks in program order, as flat arrays (T tasks, E dependencies, D devices).

    kind_T: `TaskKind`. run_ns_T: duration. origin_T: position in `search.cost.cost_table.ORIGINS`.
    resource_set_T: what the task holds, see `resources`.
    subject_T: the operator of a forward (also one made again) or backward (also its weight part) or before which
        weights are gathered, the value of a transfer or collective (renewed buffers after the values that operators
        make), the bucket of its sum or of the gather after its update, the device of an update.
    part_T: the task of a forward or backward, the piece of a transfer (counted over all assemblies), the number of
        a collective or gather, else 0.
    size_bytes_T: bytes of a transfer, a bucket or a collective, else 0: of an all-gather or reduce-scatter all its
        chunks, of an all-to-all what crosses devices, of others the region.
    launch_ns_T: nanoseconds in which the host of each device that takes part issues the task, see `launched_ns_T`.
    pred_ptr_T1, pred_E: tasks that a task waits for; one may be named twice.
    contention_ppm_D: by how much communication slows compute, in parts per million.
    peak_memory_D: bytes, see `search.simulate.simulator.Simulation`.
    micro_batch_T: the micro-batch of each task, -1 of what is of all (`search.simulate.micro_batches`); None where a
        step goes through one.
    """

    graph: OperatorGraph
    topology: Topology
    kind_T: IntArray
    run_ns_T: IntArray
    resource_set_T: IntArray
    origin_T: IntArray
    subject_T: IntArray
    part_T: IntArray
    size_bytes_T: IntArray
    launch_ns_T: IntArray
    pred_ptr_T1: IntArray
    pred_E: IntArray
    contention_ppm_D: IntArray
    peak_memory_D: IntArray
    resource_sets: ResourceSets
    micro_batch_T: IntArray | None = None

    @property
    def task_count(self) -> int:
        """Number of tasks."""
        return len(self.kind_T)

    @cached_property
    def launched_ns_T(self) -> IntArray:  # noqa: N802 - the shape suffix
        """When hosts, which issue tasks in program order, have issued each at the earliest: the last of its hosts."""
        from search.kernels.hosts import issued_tasks

        return issued_tasks(self.flat, self.resource_sets, len(self.topology.devices))

    @property
    def resource_count(self) -> int:
        """Number of devices and links."""
        return len(self.topology.devices) + len(self.topology.links)

    @property
    def flat(self) -> Tasks:
        """The tasks as kernels take them."""
        from search.kernels.records import Tasks

        return Tasks(
            self.kind_T,
            self.run_ns_T,
            self.resource_set_T,
            self.origin_T,
            self.subject_T,
            self.part_T,
            self.size_bytes_T,
            self.launch_ns_T,
            self.pred_ptr_T1,
            self.pred_E,
        )

    def resources(self, task: int) -> tuple[int, ...]:
        """Return the resources that a task holds while it runs: a device, or links (numbered after the devices)."""
        resource_set = self.resource_set_T[task]
        resources = self.resource_sets.resource[
            self.resource_sets.resource_ptr[resource_set] : self.resource_sets.resource_ptr[resource_set + 1]
        ]
        return tuple(resources.tolist())

    def ends(self, task: int) -> tuple[int, ...]:
        """Return the devices of a task: its own, (source, destination), or those of a collective."""
        resource_set = self.resource_set_T[task]
        if resource_set < len(self.topology.devices):
            return (int(resource_set),)
        ends = self.resource_sets.end[
            self.resource_sets.end_ptr[resource_set] : self.resource_sets.end_ptr[resource_set + 1]
        ]
        return tuple(ends.tolist())

    def operation(self, task: int) -> CollectiveKind | None:
        """Return which collective a task is, the all-reduce of a bucket among them; None for other tasks."""
        code = int(self.resource_sets.operation[self.resource_set_T[task]])
        return COLLECTIVE_KINDS[code] if code >= 0 else None

    def resource_names(self) -> list[str]:
        """Return the names of all resources."""
        devices = [f"device {device.index}" for device in self.topology.devices]
        return [*devices, *(link.name for link in self.topology.links)]

    def names(self, tasks: Sequence[int] | None = None) -> list[str]:
        """Return names for reports, such as "backward conv1[3] of micro-batch 2", of some tasks or of all."""
        from search.simulate.arrays import operator_values

        operators = [operator.name for operator in self.graph.operators]
        values = [value.name for value in operator_values(self.graph)]
        values += [buffer for buffer, _ in self.graph.buffer_updates]
        chosen = range(self.task_count) if tasks is None else tasks
        names = [self._name(task, operators, values) for task in chosen]
        if self.micro_batch_T is None:
            return names
        micro_batches = self.micro_batch_T[list(chosen)].tolist()
        return [
            name if number < 0 else f"{name} of micro-batch {number}"
            for name, number in zip(names, micro_batches, strict=True)
        ]

    def _name(self, task: int, operators: Sequence[str], values: Sequence[str]) -> str:
        kind = TaskKind(int(self.kind_T[task]))
        subject = int(self.subject_T[task])
        ends = self.ends(task)
        if kind is TaskKind.WEIGHT:
            return f"weight part of backward {operators[subject]}[{int(self.part_T[task])}]"
        if kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.RECOMPUTE):
            return f"{kind.name.lower()} {operators[subject]}[{int(self.part_T[task])}]"
        if kind is TaskKind.UPDATE:
            return f"update device {subject}"
        operation = self.operation(task)
        if kind in _ABOUT_WEIGHTS and operation is not None:
            over = ", ".join(str(device) for device in ends)
            named = str(subject) if kind in _ABOUT_BUCKETS else operators[subject]
            return f"{operation.value} {_ABOUT_WEIGHTS[kind]} {named} over {over}"
        if operation is not None:
            of = {"COLLECTIVE": "", "GRADIENT_COLLECTIVE": "gradient of ", "BUFFER_COLLECTIVE": "new "}[
                kind.name
            ]
            over = ", ".join(str(device) for device in ends)
            return f"{operation.value} {of}{values[subject]} over {over}"
        what = {"TRANSFER": "send", "GRADIENT_TRANSFER": "send gradient of", "BUFFER_TRANSFER": "renew"}[
            kind.name
        ]
        return f"{what} {values[subject]} {ends[0]}->{ends[1]}"


class TaskGraphBuilder:
    """Builds task graphs of one graph on one topology; fragments are shared by all its layouts.

    Raises:
        CostError: later, where a local call has no cost.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostTable,
        training: Training,
        *,
        links: LinkCosts | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        local_calls: LocalCalls | None = None,
        beside: TaskGraphBuilder | None = None,
    ) -> None:
        """Begin a builder.

        beside: that of another graph on the same topology with the same links, with which resource sets are shared.
        """
        from search.simulate.arrays import contention_ppm
        from search.simulate.fragment_cache import UnitStore

        self.graph = graph
        self.topology = topology
        self.training = training
        self.bucket_bytes = bucket_bytes
        self.links = links if links is not None else LinkCosts()
        self.local_calls = local_calls if local_calls is not None else rule_calls()
        self.store: UnitStore = UnitStore(
            graph,
            topology,
            costs,
            self.links,
            self.local_calls,
            None if beside is None else beside.store.resource_sets,
        )
        self.state_tensors = OPTIMIZER_STATE[training.optimizer]
        self.contention_ppm_D = contention_ppm(topology)
        self.capacity_bytes_D = np.array(
            [topology.kind_of(device.index).memory_bytes for device in topology.devices], np.int64
        )
        self.costs = costs
        # Of the last strategy that was planned; most of a plan is the same whatever the policy of synchronization.
        self._planned: Plan | None = None

    def plan(self, strategy: Strategy) -> Plan:
        """Return the plan of a validated strategy, in default orders."""
        plain = replace(strategy, synchronization=BY_DEFAULT)
        if self._planned is None or self._planned.strategy != plain:
            self._planned = build_plan(self.graph, plain, [device.node for device in self.topology.devices])
        return self._planned.with_synchronization(strategy.synchronization)

    def _changed(self, links: LinkCosts, bucket_bytes: int) -> TaskGraphBuilder:
        """Return a builder with other costs of links and other buckets."""
        return TaskGraphBuilder(
            self.graph,
            self.topology,
            self.costs,
            self.training,
            links=links,
            bucket_bytes=bucket_bytes,
            local_calls=self.local_calls,
        )

    def updates(self, elements_D: IntArray) -> UpdateTimes:
        """Return the times of updates of so many elements on each device; 0 where there are none."""
        from search.kernels.records import UpdateTimes

        seconds_D, origin_D, launch_ns_D = self._update_costs
        # The same expression as `search.cost.cost_table.nanoseconds`.
        run_ns_D = (elements_D * seconds_D * 1e9 + 0.5).astype(np.int64)
        is_updated_D = elements_D > 0
        return UpdateTimes(
            run_ns_D, np.where(is_updated_D, origin_D, 0), np.where(is_updated_D, launch_ns_D, 0)
        )

    @property
    def update_s_D(self) -> IntArray:  # noqa: N802 - the shape suffix
        """Seconds in which each device updates one element."""
        return self._update_costs[0]

    @property
    def has_hosts(self) -> bool:
        """Whether hosts take time to issue tasks, as far as costs are known."""
        return self._launches_others or self.store.task_costs.has_launches

    @cached_property
    def _launches_others(self) -> bool:
        """Whether hosts take time to issue communications or updates."""
        return self.links.issue_s > 0 or bool(self._update_costs[2].any())

    @cached_property
    def sum_costs(self) -> tuple[IntArray, IntArray]:
        """Seconds in which each device adds two elements of gradients, nanoseconds in which its host issues the sum."""
        seconds_D, _, launch_ns_D = self._costs_of_updates("sgd")
        return seconds_D, launch_ns_D

    @cached_property
    def is_input_S(self) -> IntArray:  # noqa: N802 - the shape suffix
        """Whether each static tensor is an input, of which every micro-batch has its own."""
        from search.simulate.arrays import static_values

        return np.array([value.kind is ValueKind.INPUT for value in static_values(self.graph)], np.bool_)

    @cached_property
    def accumulation(self) -> GradientAccumulation:
        """What tasks add to the gradients of the micro-batches before."""
        return GradientAccumulation(self.graph, self.local_calls)

    @cached_property
    def weight_parts(self) -> WeightParts:
        """The parts of backwards, for schedules that have the gradients of weights apart."""
        return WeightParts(self.graph, self.store.classes.operators, self.costs, self.local_calls)

    def kind_of(self, device: int) -> str:
        """Return the name of a device's kind."""
        return self.topology.devices[device].kind_name

    @cached_property
    def _update_costs(self) -> tuple[IntArray, IntArray, IntArray]:
        return self._costs_of_updates(self.training.optimizer)

    def _costs_of_updates(self, optimizer: str) -> tuple[IntArray, IntArray, IntArray]:
        """Return by device the seconds of an element, origins, and the nanoseconds in which an update is issued."""
        of_kind = {
            name: self.costs.update_cost(optimizer, self.graph.weight_dtype, name)
            for name in dict.fromkeys(device.kind_name for device in self.topology.devices)
        }
        costs = [of_kind[device.kind_name] for device in self.topology.devices]
        return (
            np.array([cost.seconds for cost in costs], np.float64),
            np.array([ORIGIN_CODE[cost.origin] for cost in costs], np.int64),
            np.array([nanoseconds(cost.launch_s) for cost in costs], np.int64),
        )

    @cached_property
    def machines(self) -> Machines:
        """What simulations without a task graph know of the devices."""
        from search.kernels.records import Machines

        return Machines(
            self.contention_ppm_D,
            self.capacity_bytes_D,
            self.update_s_D,
            self._update_costs[2],
            self.bucket_bytes,
            self.state_tensors,
        )

    def layout(self, strategy: Strategy) -> Layout:
        """Return a layout of a validated strategy."""
        from search.simulate.strategy_state import Layout

        return Layout(
            self,
            strategy.configurations,
            self.sharding(strategy),
            strategy.recomputation,
            strategy.micro_batches,
        )

    def sharding(self, strategy: Strategy) -> tuple[Sharding, ...]:
        """Return what is shared of each weight."""
        return tuple(strategy.sharding_of(number) for number in range(len(self.graph.weights)))

    def build(self, strategy: Strategy) -> TaskGraph:
        """Return the task graph of a validated strategy, of its own step, in all its micro-batches.

        A step that leaves work to the next one is made of it by `search.simulate.steady_state`.
        """
        plain = replace(strategy, collective_algorithms=(), synchronization=BY_DEFAULT)
        if plain != strategy:
            by_default = strategy.synchronization == BY_DEFAULT
            size_bytes = self.bucket_bytes if by_default else strategy.synchronization.size_bytes
            return self._changed(self.links.choosing(strategy), size_bytes).build(plain)
        layout = self.layout(strategy)
        tasks, micro_batch_T = layout.step()
        resource_sets = self.store.resource_sets.arrays()
        return TaskGraph(
            graph=self.graph,
            topology=self.topology,
            **{column: array.copy() for column, array in zip(_COLUMNS, tasks, strict=True)},
            contention_ppm_D=self.contention_ppm_D,
            peak_memory_D=layout.peak_memory_D.copy(),
            resource_sets=type(resource_sets)(*(array.copy() for array in resource_sets)),
            micro_batch_T=micro_batch_T,
        )
