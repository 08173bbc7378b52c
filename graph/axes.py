"""Axes of an operator, and the maps from them to the dims of its operands.

An operator iterates over a box of axes. A dim of an operand is an ordered product of factors, outermost first; a
factor follows one axis (perhaps through a window) or is fixed. So a flatten is (batch, sequence), a fused QKV
weight is (3, heads, head size), an LSTM weight is (4, hidden), and a convolution's input row is a window on its
output rows. Splitting axes into parts gives every operand's region by interval arithmetic alone.

Source: FlexFlow (arXiv:1807.05358) section 4, extended by reduction axes (Unity, OSDI 2022) and products of axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod

from graph import intervals
from graph.intervals import IndexSet, Interval, Region


class AxisKind(StrEnum):
    """The meaning of a split of an axis, in FlexFlow's words plus Unity's reduction and our replica."""

    SAMPLE = "sample"
    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"
    REDUCTION = "reduction"
    REPLICA = "replica"


# A replica axis has no extent of its own: any number of tasks may compute the same region.
UNBOUNDED = 1 << 30
REPLICA_NAME = "replica"


@dataclass(frozen=True, slots=True)
class Axis:
    """One iteration axis: `size` points that may be split into parts."""

    name: str
    size: int
    kind: AxisKind


REPLICA_AXIS = Axis(REPLICA_NAME, UNBOUNDED, AxisKind.REPLICA)


@dataclass(frozen=True, slots=True)
class DimFactor:
    """One factor of a dim: the indexes, out of `size`, that a part of an axis touches.

    With `axis` an index into the operator's axes, a part [low, high) touches
    [low * stride + start, (high - 1) * stride + start + extent), clipped to [0, size).
    With `axis` None, every part touches [start, start + extent): a constant slice, or the whole dim.
    """

    size: int
    axis: int | None = None
    start: int = 0
    stride: int = 1
    extent: int = 1

    @property
    def is_identity(self) -> bool:
        """True where index k of the factor is point k of its axis."""
        return self.axis is not None and self.start == 0 and self.stride == 1 and self.extent == 1

    def unclipped(self, interval: Interval) -> Interval:
        """Return the touched indexes before clipping; they reach outside [0, size) where there is padding."""
        if self.axis is None:
            return self.start, self.start + self.extent
        low, high = interval
        return low * self.stride + self.start, (high - 1) * self.stride + self.start + self.extent

    def touched(self, interval: Interval) -> IndexSet:
        """Return the touched indexes inside [0, size)."""
        # A search asks for hundreds of thousands: comparing takes half the time of min and max.
        low, high = self.unclipped(interval)
        if low < 0:
            low = 0
        if high > self.size:
            high = self.size
        return ((low, high),) if low < high else ()


Dim = tuple[DimFactor, ...]
OperandMap = tuple[Dim, ...]


def along(axis: int, size: int) -> Dim:
    """Return a dim that is one axis."""
    return (DimFactor(size, axis),)


def whole(size: int) -> Dim:
    """Return a dim that every task needs whole."""
    return (DimFactor(size, None, 0, 1, size),)


@dataclass(frozen=True, slots=True)
class IterationSpace:
    """The axes of one operator and the maps of its tensor operands.

    The last axis is always REPLICA_AXIS. An output that lacks an axis (replica apart) is a partial sum over it:
    the whole tensor is the sum over that axis's parts.
    """

    axes: tuple[Axis, ...]
    inputs: tuple[OperandMap, ...]
    outputs: tuple[OperandMap, ...]


Degrees = tuple[int, ...]


def tasks(degrees: Degrees) -> int:
    """Return the number of tasks of a configuration."""
    return prod(degrees)


def coordinates(degrees: Degrees) -> list[tuple[int, ...]]:
    """Return the coordinates of all tasks, in task order (row-major, last axis fastest)."""
    return list(itertools.product(*(range(degree) for degree in degrees)))


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number, ascending, with repetition."""
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors


def part_of(axis: Axis, degree: int, index: int) -> Interval:
    """Return the points of `axis` that part `index` of `degree` iterates over; replicas do not split."""
    if axis.kind is AxisKind.REPLICA:
        return 0, 1
    return intervals.part(axis.size, degree, index) if degree > 1 else (0, axis.size)


def task_points(space: IterationSpace, degrees: Degrees, coordinate: Sequence[int]) -> tuple[Interval, ...]:
    """Return, for each axis, the points that the task at `coordinate` iterates over."""
    return tuple(
        [
            part_of(axis, degree, index)
            for axis, degree, index in zip(space.axes, degrees, coordinate, strict=True)
        ]
    )


def dim_indexes(dim: Dim, points: Sequence[Interval]) -> IndexSet:
    """Return the indexes of a dim that a task iterating over `points` touches."""
    if len(dim) == 1 and dim[0].size > 0:  # nearly always; to look it up would take longer
        axis = dim[0].axis
        return dim[0].touched((0, 1) if axis is None else points[axis])
    return _indexes(dim, tuple([points[factor.axis] for factor in dim if factor.axis is not None]))


@lru_cache(maxsize=65536)
def _indexes(dim: Dim, followed: tuple[Interval, ...]) -> IndexSet:
    """Return the indexes of a dim, given the points of the axes that its factors follow, in their order."""
    result: IndexSet = ((0, 1),)
    remaining = iter(followed)
    for factor in dim:
        touched = factor.touched(next(remaining) if factor.axis is not None else (0, 1))
        result = intervals.product(result, touched, factor.size)
    return result


def operand_region(operand: OperandMap, points: Sequence[Interval]) -> Region:
    """Return the region of an operand that a task iterating over `points` touches."""
    return tuple([dim_indexes(dim, points) for dim in operand])


@lru_cache(maxsize=65536)
def operand_regions(axes: tuple[Axis, ...], operand: OperandMap, degrees: Degrees) -> tuple[Region, ...]:
    """Return the operand's region for every task of a configuration, in task order."""
    cuts = [
        [part_of(axis, degree, index) for index in range(degree)]
        for axis, degree in zip(axes, degrees, strict=True)
    ]
    if not operand:
        return ((),) * tasks(degrees)
    return tuple(zip(*(_indexes_of_tasks(dim, cuts) for dim in operand), strict=True))


def _indexes_of_tasks(dim: Dim, cuts: Sequence[Sequence[Interval]]) -> list[IndexSet]:
    """Return the indexes of a dim that every task touches, in task order, made once for equal parts of its axes."""
    followed = {factor.axis for factor in dim}
    points = [(cut if axis in followed else cut[:1]) for axis, cut in enumerate(cuts)]
    indexes = [dim_indexes(dim, part) for part in itertools.product(*points)]
    # From the last axis on: what it does not follow is the same in every part.
    inner = 1
    for cut, part in zip(reversed(cuts), reversed(points), strict=True):
        if len(part) < len(cut):
            blocks = [indexes[at : at + inner] for at in range(0, len(indexes), inner)]
            indexes = [index for block in blocks for index in block * len(cut)]
        inner *= len(cut)
    return indexes


def is_gapless(operand: OperandMap) -> bool:
    """Return whether the parts of any split together touch all that the whole touches."""
    return all(factor.axis is None or factor.stride <= factor.extent for dim in operand for factor in dim)


def read_elements(space: IterationSpace, slot: int) -> int:
    """Return the least number of elements of an input that all tasks read together; 0 where a stride leaves gaps."""
    operand = space.inputs[slot]
    if not is_gapless(operand):
        return 0
    return intervals.volume(operand_region(operand, [part_of(axis, 1, 0) for axis in space.axes]))


def followed_axes(operand: OperandMap) -> frozenset[int]:
    """Return the axes that an operand's dims follow."""
    return frozenset(factor.axis for dim in operand for factor in dim if factor.axis is not None)


def partial_axes(space: IterationSpace, output: int) -> tuple[int, ...]:
    """Return the axes over which parts of output `output` are partial sums."""
    present = followed_axes(space.outputs[output])
    return tuple(
        index
        for index, axis in enumerate(space.axes)
        if index not in present and axis.kind is not AxisKind.REPLICA
    )


def refine(space: IterationSpace, factors: Mapping[int, Sequence[int]]) -> IterationSpace:
    """Return the space with some axes replaced by products of axes.

    `factors` maps an axis to the sizes, outermost first, whose product it is. Only axes that are followed by
    identity factors alone can be refined (`refinable`). The outermost factor of a SAMPLE axis stays SAMPLE; the
    inner ones are ATTRIBUTE (batch x sequence). New axes are called name.0, name.1, ...
    """
    if all(len(sizes) < 2 for sizes in factors.values()):
        return space
    axes: list[Axis] = []
    replacement: dict[int, list[int]] = {}
    for index, axis in enumerate(space.axes):
        sizes = list(factors.get(index, ()))
        if len(sizes) < 2:
            replacement[index] = [len(axes)]
            axes.append(axis)
            continue
        replacement[index] = list(range(len(axes), len(axes) + len(sizes)))
        for position, size in enumerate(sizes):
            kind = axis.kind
            if kind is AxisKind.SAMPLE and position > 0:
                kind = AxisKind.ATTRIBUTE
            axes.append(Axis(f"{axis.name}.{position}", size, kind))

    def rewrite(operand: OperandMap) -> OperandMap:
        dims: list[Dim] = []
        for dim in operand:
            result: list[DimFactor] = []
            for factor in dim:
                if factor.axis is None:
                    result.append(factor)
                    continue
                new = replacement[factor.axis]
                if len(new) == 1:
                    result.append(DimFactor(factor.size, new[0], factor.start, factor.stride, factor.extent))
                else:
                    result.extend(DimFactor(axes[axis].size, axis) for axis in new)
            dims.append(tuple(result))
        return tuple(dims)

    return IterationSpace(
        tuple(axes), tuple(rewrite(m) for m in space.inputs), tuple(rewrite(m) for m in space.outputs)
    )


def refinable(space: IterationSpace) -> frozenset[int]:
    """Return the axes followed by identity factors of their own size alone, so that products may replace them.

    A shorter factor is clipped; a longer one is a slice from 0 on. Neither is a product of the axis's factors.
    """
    touched = {
        factor.axis: True
        for operand in (*space.inputs, *space.outputs)
        for dim in operand
        for factor in dim
        if factor.axis is not None
    }
    for operand in (*space.inputs, *space.outputs):
        for dim in operand:
            for factor in dim:
                if factor.axis is None:
                    continue
                if not factor.is_identity or factor.size != space.axes[factor.axis].size:
                    touched[factor.axis] = False
    return frozenset(axis for axis, pure in touched.items() if pure)
