"""Tasks of a configuration that execute the same call: it is made once for all of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from graph.axes import Axis, AxisKind, Degrees, Factor, IterationSpace, part_of, partial_axes
from graph.intervals import Interval


def alike(space: IterationSpace, degrees: Degrees) -> tuple[list[int], list[int]]:
    """Return the first task of each kind, and for every task the place of its kind among them.

    Tasks of one kind have parts of the same sizes, whose windows reach equally far over the ends. Where a part lies
    counts beside that only for an axis that some output is a partial sum over: whether it is the first
    (`BaseRule.by_size`).
    """
    mixed = np.zeros(1, np.int64)
    summed = summed_axes(space)
    for index, (axis, degree) in enumerate(zip(space.axes, degrees, strict=True)):
        if degree == 1:
            continue
        kinds = _kinds(axis, degree, factors_of(space, index), is_summed=index in summed)
        mixed = (mixed[:, None] * degree + np.array(kinds, np.int64)).reshape(-1)
    _, first, place = np.unique(mixed, return_index=True, return_inverse=True)
    return first.tolist(), place.tolist()


@lru_cache(maxsize=4096)
def factors_of(space: IterationSpace, axis: int) -> tuple[Factor, ...]:
    """Return the distinct factors that follow an axis, but for plain ones: index k is point k."""
    size = space.axes[axis].size
    found = {
        factor: None
        for operand in (*space.inputs, *space.outputs)
        for dim in operand
        for factor in dim
        if factor.axis == axis and not (factor.is_identity and factor.size == size)
    }
    return tuple(found)


@lru_cache(maxsize=4096)
def summed_axes(space: IterationSpace) -> frozenset[int]:
    """Return the axes over which the parts of some output are partial sums."""
    return frozenset(axis for output in range(len(space.outputs)) for axis in partial_axes(space, output))


@lru_cache(maxsize=65536)
def _kinds(axis: Axis, degree: int, factors: tuple[Factor, ...], *, is_summed: bool) -> tuple[int, ...]:
    """Return a number for each part of an axis: equal ones are alike."""
    if axis.kind is AxisKind.REPLICA:
        return (0,) * degree
    numbers: dict[object, int] = {}
    return tuple(
        numbers.setdefault(
            (*_shape(part_of(axis, degree, index), factors), is_summed and index == 0), len(numbers)
        )
        for index in range(degree)
    )


def _shape(part: Interval, factors: tuple[Factor, ...]) -> tuple[object, ...]:
    """Return all of a part but where it lies."""
    beyond = []
    for factor in factors:
        start, stop = factor.unclipped(part)
        beyond.append((max(-start, 0), max(stop - factor.size, 0)))
    return part[1] - part[0], tuple(beyond)
