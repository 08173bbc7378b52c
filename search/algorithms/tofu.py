"""Tofu: every operator on all devices, found by splitting the devices again and again and each operator with them.

The devices are k = k1 * ... * km, prime factors in ascending order, the first between the largest groups of devices.
Recursion i splits every group of devices into ki parts and every operator along one axis, a reduction too (partition-n-
reduce). Its cost is in bytes that all groups together move between parts: values between operators that are not laid
out alike, forward and back, sums of partial results, and sums of gradients of weights that all parts hold. A dynamic
program finds the least of each recursion; operators that follow a head (`search.space.groups`) are coarsened into it,
and an operator and its backward are one. Links count as uniform: the first recursions, whose costs are the least, get
the links between hosts.

A recursion sees, of a value, the region that its reader needs in one group, as if its producer in the group made just
that. So the same axes cost no less in a later recursion than in an earlier one, and costs do not fall from one
recursion to the next as long as no operator runs out of axes. One that has none left to split is replicated; one that
shares no axis with its head runs whole, and counts as if it did so in every group.

So the sum over recursions is above the bytes of the whole partition, and the least sum need not have the fewest. Of a
graph of few groups each recursion keeps several of the least sums so far (a beam), and of the partitions that they end
in the one is taken of which the simulator counts the fewest bytes.

Source: Tofu (Wang et al., EuroSys 2019, arXiv:1807.08887), sections 4 and 5. Tofu stores weights in parts, which are
fetched and whose gradients are summed; that moves as many bytes as our all-reduces. Its dynamic program goes along a
chain of coarsened operators, ours (`search.bounds.elimination`) through any graph. The beam is ours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from math import prod

import numpy as np

from graph.axes import AxisKind, Degrees, DimFactor, OperandMap, prime_factors
from graph.errors import UsageError
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Configuration, Strategy
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import builder_of
from search.bounds.elimination import LARGEST_TABLE, CostFunction, TooWide, smallest
from search.orders import Order
from search.problem import Problem
from search.simulate.simulator import Simulation, simulate_tasks
from search.simulate.task_graph import TaskGraphBuilder
from search.space.groups import NO_AXIS, Group, carried, find_groups, following
from search.tables import Array


class Unsplit(Enum):
    """How the parts of a group hold a tensor that none of its dims is split for."""

    PARTIAL = auto()
    EVERYWHERE = auto()
    ONCE = auto()


# The dim that is split and, of a dim that is a product, the elements of the factors before; else one of `Unsplit`.
TensorSplit = tuple[int, int] | Unsplit


# Sums that a recursion keeps, of a graph of at most so many groups: each sum takes an elimination a group.
BEAM = 16
BEAM_GROUPS = 16


@dataclass(frozen=True, slots=True)
class Recursion:
    """One recursion: into how many parts, the axis that each group's head splits, bytes moved between parts."""

    parts: int
    axes: tuple[int, ...]
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Partition:
    """A strategy and the recursions that made it, those between the largest groups of devices first."""

    strategy: Strategy
    recursions: tuple[Recursion, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes of all recursions."""
        return _moved_bytes(self.recursions)


def tofu(graph: OperatorGraph, device_count: int, *, limit: int = LARGEST_TABLE) -> Partition:
    """Return the partition over all devices whose recursions each move the fewest bytes.

    Raises:
        UsageError: the core that the eliminations leave is too large to be enumerated.
    """
    return partitions(graph, device_count, beam=1, limit=limit)[0]


def partitions(
    graph: OperatorGraph, device_count: int, *, beam: int, limit: int = LARGEST_TABLE
) -> list[Partition]:
    """Return partitions over all devices, each strategy once: Tofu's, then those of the least sums over recursions.

    Args:
        graph: whose operators are split.
        device_count: of which the prime factors are the recursions.
        beam: how many sums each recursion keeps, and so at most how many partitions there are. With 1 each recursion
            moves the fewest bytes, as in Tofu.
        limit: entries of the largest table.

    Raises:
        UsageError: the core that the eliminations leave is too large to be enumerated.
    """
    groups = find_groups(graph)
    ones = [(1,) * len(graph.operators[group.head].space.axes) for group in groups]
    kept: list[tuple[list[Degrees], tuple[Recursion, ...]]] = [(ones, ())]
    for parts in prime_factors(device_count):
        further = []
        for degrees, recursions in kept:
            bisection = Bisection(graph, groups, degrees, parts)
            for recursion in bisection.several(beam, limit):
                split = list(map(bisection.split, degrees, recursion.axes))
                further.append((split, (*recursions, recursion)))
        # The first one follows those that are each the least.
        others = sorted(further[1:], key=lambda state: _moved_bytes(state[1]))
        kept = [further[0], *others[: beam - 1]]
    found: dict[Strategy, Partition] = {}
    for degrees, recursions in kept:
        heads = [
            Configuration(degrees[number], _devices(degrees[number], number, recursions))
            for number in range(len(groups))
        ]
        strategy = following(graph, zip(groups, heads, strict=True))
        found.setdefault(strategy, Partition(strategy, recursions))
    return list(found.values())


def _moved_bytes(recursions: Sequence[Recursion]) -> int:
    return sum(recursion.moved_bytes for recursion in recursions)


def _devices(degrees: Degrees, group: int, recursions: Sequence[Recursion]) -> tuple[int, ...]:
    """Return the device of each task of a group's head: in each recursion the part of its axis is that of devices."""
    coordinates = np.indices(degrees).reshape(len(degrees), -1)
    left = list(degrees)
    device: Array = np.zeros(coordinates.shape[1], np.int64)
    for recursion in recursions:
        axis = recursion.axes[group]
        left[axis] //= recursion.parts
        device = device * recursion.parts + coordinates[axis] // left[axis] % recursion.parts
    return tuple(device.tolist())


class Bisection:
    """One recursion: what it may split, and what that moves.

    degrees: of every group's head, how it is split so far.
    """

    def __init__(
        self, graph: OperatorGraph, groups: Sequence[Group], degrees: Sequence[Degrees], parts: int
    ) -> None:
        self.graph, self.groups, self.parts = graph, groups, parts
        self.group_of = {index: number for number, group in enumerate(groups) for index in group.operators}
        # Of a head itself, each axis is its own.
        self._followed = {
            group.head: tuple(range(len(graph.operators[group.head].space.axes) - 1)) for group in groups
        } | {member.operator: member.axes for group in groups for member in group.members}
        self._degrees = {
            index: carried(self._followed[index], degrees[number])[0]
            for index, number in self.group_of.items()
        }
        self._device_groups = max(prod(of_head) for of_head in degrees)
        self.choices = [self._axes(group.head) for group in groups]

    def _axes(self, head: int) -> tuple[int, ...]:
        """Return the axes that a head can split once more, else its replica axis."""
        axes = self.graph.operators[head].space.axes
        degrees = self._degrees[head]
        several = tuple(
            number
            for number, (axis, degree) in enumerate(zip(axes, degrees, strict=True))
            if axis.kind is not AxisKind.REPLICA and degree * self.parts <= axis.size
        )
        return several or (len(axes) - 1,)

    def split(self, degrees: Degrees, axis: int) -> Degrees:
        """Return degrees after a split of an axis."""
        return (*degrees[:axis], degrees[axis] * self.parts, *degrees[axis + 1 :])

    def least(self, limit: int) -> Recursion:
        """Return the recursion that moves the fewest bytes.

        Raises:
            UsageError: the core that the eliminations leave is too large to be enumerated.
        """
        return self.several(1, limit)[0]

    def several(self, count: int, limit: int) -> list[Recursion]:
        """Return the recursions that move the fewest bytes, ascending.

        Raises:
            UsageError: the core that the eliminations leave is too large to be enumerated.
        """
        sizes = [len(axes) for axes in self.choices]
        try:
            minima = smallest(sizes, self.factors(), count, limit)
        except TooWide as error:
            raise UsageError(
                f"tofu: eliminations leave {error.left} of {len(self.groups)} groups, whose tables need "
                f"{error.entries} entries, must be at most {limit}; take algorithm mcmc"
            ) from None
        return [
            Recursion(
                self.parts,
                tuple(axes[number] for axes, number in zip(self.choices, minimum.chosen, strict=True)),
                minimum.value,
            )
            for minimum in minima
        ]

    def factors(self) -> list[CostFunction]:
        """Return the bytes that all groups of devices move, as functions of one and of two groups of operators."""
        own: list[Array] = [np.zeros(len(axes), np.int64) for axes in self.choices]
        between: dict[tuple[int, int], Array] = {}
        for index, operator in enumerate(self.graph.operators):
            reader = self.group_of[index]
            for slot, name in enumerate(operator.inputs):
                if name not in self.graph.producer:
                    own[reader] += [self.summed_bytes(index, slot, axis) for axis in self.choices[reader]]
                    continue
                producer = self.group_of[self.graph.producer[name][0]]
                if producer == reader:
                    own[reader] += [
                        self.exchanged_bytes(index, slot, axis, axis) for axis in self.choices[reader]
                    ]
                    continue
                table = np.array(
                    [
                        [self.exchanged_bytes(index, slot, made_by, axis) for axis in self.choices[reader]]
                        for made_by in self.choices[producer]
                    ],
                    np.int64,
                )
                key = (min(producer, reader), max(producer, reader))
                table = table if key[0] == producer else table.T
                between[key] = between[key] + table if key in between else table
        return [
            *(CostFunction((group,), table) for group, table in enumerate(own)),
            *(CostFunction(scope, table) for scope, table in between.items()),
        ]

    def summed_bytes(self, index: int, slot: int, head_axis: int) -> int:
        """Return the bytes of the sum of a weight's gradients, where parts of a group have the same elements."""
        operator = self.graph.operators[index]
        value = self.graph.value_by_name[operator.inputs[slot]]
        trained = value.kind is ValueKind.WEIGHT and self.graph.has_backward(operator)
        layout = _layout(operator.space.inputs[slot], self._own_axis(index, head_axis))
        if not trained or layout is not Unsplit.PARTIAL:
            return 0
        elements = _elements(operator.space.inputs[slot], self._lengths(index))
        return self._device_groups * 2 * (self.parts - 1) * elements * value.spec.item_bytes

    def exchanged_bytes(self, index: int, slot: int, producer_axis: int, reader_axis: int) -> int:
        """Return the bytes of a value, and of its gradient where there is one, from its producer to one reader.

        Args:
            index: of the operator that reads it.
            slot: in which it reads it.
            producer_axis: that the head of the producer's group splits.
            reader_axis: that the head of the reader's group splits.
        """
        reader = self.graph.operators[index]
        producer, output = self.graph.producer[reader.inputs[slot]]
        operand, axis = reader.space.inputs[slot], self._own_axis(index, reader_axis)
        made = _layout(
            self.graph.operators[producer].space.outputs[output], self._own_axis(producer, producer_axis)
        )
        if made is Unsplit.PARTIAL and self._is_replica(producer, producer_axis):
            made = Unsplit.EVERYWHERE
        needed = _layout(operand, axis)
        if needed is Unsplit.PARTIAL:
            needed = Unsplit.EVERYWHERE
        lengths = self._lengths(index)
        elements = self._device_groups * _elements(operand, lengths)
        moved: int | Fraction = _moved(made, needed, elements, self.parts)
        if made == needed and axis is not None:
            moved = elements * (self.parts - 1) * _overlap(operand, axis, lengths[axis])
        value = self.graph.value_by_name[reader.inputs[slot]]
        gradient = value.requires_gradient and self.graph.has_backward(reader)
        return int(moved) * value.spec.item_bytes * (2 if gradient else 1)

    def _own_axis(self, index: int, head_axis: int) -> int | None:
        """Return the axis that an operator splits where its head splits one; None where it runs whole."""
        followed = self._followed[index]
        if all(axis == NO_AXIS for axis in followed) and not self._is_head(index):
            return None
        return followed.index(head_axis) if head_axis in followed else len(followed)

    def _is_head(self, index: int) -> bool:
        return self.groups[self.group_of[index]].head == index

    def _is_replica(self, index: int, head_axis: int) -> bool:
        axis = self._own_axis(index, head_axis)
        return axis is not None and axis == len(self._followed[index])

    def _lengths(self, index: int) -> list[int]:
        """Return how many points of each axis the largest part of an operator has."""
        axes = self.graph.operators[index].space.axes
        return [
            1 if axis.kind is AxisKind.REPLICA else -(-axis.size // degree)
            for axis, degree in zip(axes, self._degrees[index], strict=True)
        ]


def _layout(operand: OperandMap, axis: int | None) -> TensorSplit:
    """Return how parts hold an operand after a split of an axis; `PARTIAL` where no dim follows it."""
    if axis is None:
        return Unsplit.ONCE
    for number, dim in enumerate(operand):
        before = 1
        for factor in dim:
            if factor.axis == axis:
                return number, before
            before *= factor.size
    return Unsplit.PARTIAL


def _overlap(operand: OperandMap, axis: int, length: int) -> Fraction:
    """Return the share of an operand that both sides of a cut through an axis touch: windows reach into each other."""
    for dim in operand:
        for factor in dim:
            if factor.axis == axis:
                return Fraction(max(0, factor.extent - factor.stride), _touched(factor, length))
    return Fraction(0)


def _elements(operand: OperandMap, lengths: Sequence[int]) -> int:
    """Return the elements of an operand that a part touches which has so many points of each axis."""
    return prod(
        _touched(factor, 1 if factor.axis is None else lengths[factor.axis])
        for dim in operand
        for factor in dim
    )


def _touched(factor: DimFactor, length: int) -> int:
    """Return the indexes of a factor that so many points of its axis touch, where they are far from its ends."""
    return min(factor.size, (length - 1) * factor.stride + factor.extent)


def _moved(made: TensorSplit, needed: TensorSplit, elements: int, parts: int) -> int:
    """Return the elements of a tensor that go from part to part, each by itself or in a collective's rings."""
    others = (parts - 1) * elements
    if made is Unsplit.EVERYWHERE or made == needed:
        return 0
    if made is Unsplit.PARTIAL:
        return 2 * others if needed is Unsplit.EVERYWHERE else others
    return others if needed is Unsplit.EVERYWHERE else others // parts


def fewest_bytes(
    builder: TaskGraphBuilder, found: Sequence[Partition], order: Order
) -> tuple[Partition, Simulation]:
    """Return the partition of which the simulator counts the fewest bytes, the first of equals; its simulation."""
    simulations = [simulate_tasks(builder.build(partition.strategy), order) for partition in found]
    best = min(range(len(found)), key=lambda number: simulations[number].bytes_moved)
    return found[best], simulations[best]


def _algorithm(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    began = time.monotonic()
    small = len(find_groups(problem.graph)) <= BEAM_GROUPS
    found = partitions(problem.graph, problem.device_count, beam=BEAM if small else 1)
    partition, simulation = fewest_bytes(builder_of(problem), found, context.options.order)
    moved = " + ".join(f"{recursion.moved_bytes / 1e6:.3f}" for recursion in partition.recursions)
    proven = f"in each recursion the fewest bytes ({moved or 0} MB) of one axis an operator"
    if partition is not found[0]:
        proven = (
            f"the fewest simulated bytes ({simulation.bytes_moved / 1e6:.3f} MB) of {len(found)} partitions of the "
            f"least sums over recursions ({moved} MB)"
        )
    return AlgorithmResult(
        "tofu",
        partition.strategy,
        simulation.step_time_s,
        proposals=len(found),
        accepted=1,
        seconds=time.monotonic() - began,
        proven=proven,
    )


ALGORITHMS: Mapping[str, Algorithm] = {"tofu": _algorithm}
