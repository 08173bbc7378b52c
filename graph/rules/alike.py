"""Tasks that execute the same call: it is made once for all of them, whatever the degrees.

Tasks of one kind have parts of the same sizes, whose windows reach equally far over the ends. Where a part lies counts
beside that only for an axis that some output is a partial sum over: whether it is the first (`BaseRule.by_size`).
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graph.axes import Axis, AxisKind, Degrees, Factor, IterationSpace, part_of, partial_axes
from graph.intervals import Interval

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Kind = tuple[object, ...]


class Alike(NamedTuple):
    """The kinds of a configuration's tasks: of each its first task, what it is, and for every task its kind's place.

    Tasks are of one kind where `kinds` are equal, those of other degrees of the operator too.
    """

    first: list[int]
    kinds: list[Kind]
    place: list[int]


class _Split(NamedTuple):
    """The parts of one axis: for each the number of its kind; of each kind what it is, and its first part."""

    numbers: IntArray
    kinds: list[object]
    first: IntArray


class Kinds:
    """The kinds of the tasks of one operator, under any degrees."""

    def __init__(self, space: IterationSpace) -> None:
        summed = {axis for output in range(len(space.outputs)) for axis in partial_axes(space, output)}
        self._axes = [
            _AxisKinds(axis, factors_of(space, index), is_summed=index in summed)
            for index, axis in enumerate(space.axes)
        ]

    def alike(self, degrees: Degrees) -> Alike:
        """Return which tasks are alike."""
        splits = [axis.split(degree) for axis, degree in zip(self._axes, degrees, strict=True)]
        # Kinds of tasks are all combinations of those of parts; the last axis counts least, as among tasks.
        kinds = list(itertools.product(*(split.kinds for split in splits)))
        if len(kinds) == 1:
            return Alike([0], kinds, [0] * prod(degrees))
        first = place = np.zeros(1, np.int64)
        for split, degree in zip(splits, degrees, strict=True):
            first = (first[:, None] * degree + split.first).reshape(-1)
            place = (place[:, None] * len(split.kinds) + split.numbers).reshape(-1)
        return Alike(first.tolist(), kinds, place.tolist())


class _AxisKinds:
    def __init__(self, axis: Axis, factors: tuple[Factor, ...], *, is_summed: bool) -> None:
        self._axis, self._factors, self._is_summed = axis, factors, is_summed
        self._splits: dict[int, _Split] = {}

    def split(self, degree: int) -> _Split:
        """Return the parts of the axis under a degree."""
        known = self._splits.get(degree)
        if known is None:
            of_parts = [self._kind(degree, index) for index in range(degree)]
            kinds = list(dict.fromkeys(of_parts))
            known = self._splits[degree] = _Split(
                np.array([kinds.index(kind) for kind in of_parts], np.int64),
                kinds,
                np.array([of_parts.index(kind) for kind in kinds], np.int64),
            )
        return known

    def _kind(self, degree: int, index: int) -> object:
        """Return all of a part but where it lies."""
        if self._axis.kind is AxisKind.REPLICA:
            return None
        part = part_of(self._axis, degree, index)
        return part[1] - part[0], _beyond(part, self._factors), self._is_summed and index == 0


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


def _beyond(part: Interval, factors: tuple[Factor, ...]) -> tuple[tuple[int, int], ...]:
    """Return how far a part's windows reach over both ends, of each factor."""
    beyond = []
    for factor in factors:
        start, stop = factor.unclipped(part)
        beyond.append((max(-start, 0), max(stop - factor.size, 0)))
    return tuple(beyond)
