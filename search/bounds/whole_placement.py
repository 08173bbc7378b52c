"""The makespan of a step whose operators are placed whole, each on one device: the model that a solver minimizes.

Operators that follow one head, and heads that read one weight, are a unit, which is on one device. A device executes
its operators one at a time in the program's order, as the runtime does: forwards, then backwards from the last to the
first. An operator begins when its device is free and its inputs are there; a value that is read on another device
arrives after the time of its message, its gradient likewise, and messages do not wait for each other. At the end each
device updates its weights. A device keeps weights, gradients and optimizer state of its units, what they read of the
batch and of buffers (once for each unit), and all that they put out; what is freed on the way counts as if it were not.

Source: the model is that of DLPlacer (Pal et al., "Optimizing multi-GPU parallelization strategies for deep learning
training", IEEE Micro 2019, arXiv:1907.13257), which also chooses the order on each device; ours is the one that is
executed.

Letters of shapes: T tasks, U units, D devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graph.axes import operand_region, part_of
from graph.intervals import volume
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Configuration, Strategy
from graph.topology import Topology
from graph.training import OPTIMIZER_STATE
from search.cost.cost_table import nanoseconds
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from search.space.enumerated_space import Space
from search.space.groups import find_groups, is_view
from search.tables import Array, Tables


@dataclass(frozen=True, slots=True, eq=False)
class TaskEdge:
    """A value or a gradient that one task makes and a task of another unit reads.

    between_ns_DD: nanoseconds of its message, by their devices.
    """

    source: int
    reader: int
    between_ns_DD: Array


@dataclass(frozen=True, eq=False)
class PlacementModel:
    """Tasks in the program's order.

    unit_T: of each task. task_ns_TD: by the device that it is on. update_ns_UD, kept_bytes_U: of each unit.
    capacity_bytes_D: of each device. edges: between units. space: whose choices are the devices, by group.
    unit_of: of each group.
    """

    unit_T: tuple[int, ...]
    task_ns_TD: Array
    update_ns_UD: Array
    kept_bytes_U: Array
    capacity_bytes_D: Array
    edges: tuple[TaskEdge, ...]
    space: Space
    unit_of: tuple[int, ...]

    @cached_property
    def units(self) -> int:
        """Number of units."""
        return len(self.kept_bytes_U)

    @cached_property
    def arriving(self) -> dict[int, list[TaskEdge]]:
        """For each task, the edges from what it waits for."""
        arriving: dict[int, list[TaskEdge]] = {task: [] for task in range(len(self.unit_T))}
        for edge in self.edges:
            arriving[edge.reader].append(edge)
        return arriving

    def makespan_ns(self, devices_U: Sequence[int]) -> int:
        """Return the makespan of a placement."""
        free: Array = np.zeros(len(self.capacity_bytes_D), np.int64)
        end_ns: list[int] = []
        for task, unit in enumerate(self.unit_T):
            device = devices_U[unit]
            ready = [
                end_ns[edge.source] + int(edge.between_ns_DD[devices_U[self.unit_T[edge.source]], device])
                for edge in self.arriving[task]
            ]
            end_ns.append(max(int(free[device]), *ready, 0) + int(self.task_ns_TD[task, device]))
            free[device] = end_ns[-1]
        for unit, device in enumerate(devices_U):
            free[device] += self.update_ns_UD[unit, device]
        return int(free.max())

    def strategy(self, devices_U: Sequence[int]) -> Strategy:
        """Return the strategy of a placement."""
        return self.space.strategy([devices_U[unit] for unit in self.unit_of])


def placement_model(problem: Problem) -> PlacementModel:
    """Return the model of a problem.

    Raises:
        CostError: a local call has no cost.
    """
    graph, topology = problem.graph, problem.topology
    groups = find_groups(graph)
    count = problem.device_count
    choices = tuple(
        tuple(
            Configuration((1,) * len(graph.operators[group.head].space.axes), (device,))
            for device in range(count)
        )
        for group in groups
    )
    space = Space(graph, count, groups, choices, "every operator whole on one device", whole=False)
    tables = Tables(problem, space)
    unit_of = _units(space, graph)
    units = max(unit_of) + 1
    unit = {index: unit_of[group] for index, group in space.group_of.items()}
    order = (*graph.order.of_loss, *graph.order.of_buffers)
    back = [index for index in reversed(order) if graph.has_backward(graph.operators[index])]
    forward_task = {index: task for task, index in enumerate(order)}
    backward_task = {index: len(order) + task for task, index in enumerate(back)}
    task_ns = [
        *(tables.operator(index).forward_ns_CP[:, 0] for index in order),
        *(tables.operator(index).backward_ns_CP[:, 0] for index in back),
    ]
    edges = []
    for index, reader in enumerate(graph.operators):
        for slot, name in enumerate(reader.inputs):
            producer = graph.producer[name][0] if name in graph.producer else index
            if unit[producer] == unit[index]:
                continue
            between = _message_ns_DD(topology, problem.links, _read_bytes(graph, index, slot))
            edges.append(TaskEdge(forward_task[producer], forward_task[index], between))
            if graph.gradient_inputs(reader)[slot] and graph.has_backward(reader):
                edges.append(TaskEdge(backward_task[index], backward_task[producer], between))
    update, kept = _weights(problem, units, unit)
    for index, operator in enumerate(graph.operators):
        if not is_view(operator):
            kept[unit[index]] += sum(spec.size_bytes for spec in graph.output_specs(operator))
    return PlacementModel(
        tuple(unit[index] for index in (*order, *back)),
        np.array(task_ns, np.int64),
        update,
        kept,
        np.array([topology.kind_of(device.index).memory_bytes for device in topology.devices], np.int64),
        tuple(edges),
        space,
        unit_of,
    )


def _units(space: Space, graph: OperatorGraph) -> tuple[int, ...]:
    """Return the unit of each group: groups that read one weight are in one, so that no gradients are summed."""
    merged = list(range(len(space.groups)))
    for weight in graph.weights:
        readers = {merged[space.group_of[index]] for index, _ in graph.readers[weight.name]}
        merged = [min(readers) if unit in readers else unit for unit in merged]
    numbers = {unit: number for number, unit in enumerate(sorted(set(merged)))}
    return tuple(numbers[unit] for unit in merged)


def _weights(problem: Problem, units: int, unit: dict[int, int]) -> tuple[Array, Array]:
    """Return the nanoseconds of each unit's update on each device, and the bytes of what is kept for its weights."""
    graph, training = problem.graph, problem.training
    elements, kept = [0] * units, np.zeros(units, np.int64)
    for value in graph.values:
        readers = graph.readers.get(value.name, ())
        if value.kind is ValueKind.OPERATOR or not readers:
            continue
        # Inputs and buffers are read by several units, weights by one.
        for reading in {unit[index] for index, _ in readers}:
            copies = 1
            if value.kind is ValueKind.WEIGHT and any(
                graph.has_backward(graph.operators[index]) for index, _ in readers
            ):
                copies = 2 + OPTIMIZER_STATE[training.optimizer]
                elements[reading] += value.spec.elements
            kept[reading] += copies * value.spec.size_bytes
    update = [
        [
            problem.costs.update_ns(held, training.optimizer, graph.weight_dtype, device.kind_name)[0]
            if held
            else 0
            for device in problem.topology.devices
        ]
        for held in elements
    ]
    return np.array(update, np.int64), kept


def _read_bytes(graph: OperatorGraph, reader: int, slot: int) -> int:
    """Return the bytes that an operator reads of an input."""
    operator = graph.operators[reader]
    points = [part_of(axis, 1, 0) for axis in operator.space.axes]
    elements = volume(operand_region(operator.space.inputs[slot], points))
    return elements * graph.value_by_name[operator.inputs[slot]].spec.item_bytes


def _message_ns_DD(topology: Topology, links: LinkCosts, size_bytes: int) -> Array:  # noqa: N802 - the shape suffix
    """Return the nanoseconds of a message from each device to each other one: measured, else over its route."""
    count = len(topology.devices)
    between: Array = np.zeros((count, count), np.int64)
    for source in range(count):
        for target in range(count):
            if source != target and size_bytes:
                curve = links.messages.get((source, target))
                seconds = (
                    topology.transfer_time_s(source, target, size_bytes)
                    if curve is None
                    else curve.seconds(size_bytes)
                )
                between[source, target] = nanoseconds(seconds)
    return between
