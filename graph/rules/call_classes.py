"""Classes of tasks that execute the same call: it is made once a class, whatever the degrees.

Tasks of one class have parts of the same sizes, whose windows reach equally far over the ends. Where a part lies counts
beside that only for an axis that some output is a partial sum over: whether it is the first (`BaseRule.by_size`).
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graph.axes import Axis, AxisKind, Degrees, DimFactor, IterationSpace, part_of, partial_axes
from graph.intervals import Interval

IntArray = np.ndarray[Any, np.dtype[np.int64]]
CallClass = tuple[object, ...]


class TaskClasses(NamedTuple):
    """The call classes of a configuration's tasks; they are equal to those of the operator's other configurations.

    first: the first task of each class. classes: each class. class_of: the number of each task's class.
    """

    first: list[int]
    classes: list[CallClass]
    class_of: list[int]


class _Split(NamedTuple):
    """The classes of the parts of one axis: each part's class by its number, each class, and its first part."""

    class_of: IntArray
    classes: list[object]
    first: IntArray


class CallClasses:
    """The call classes of one operator's tasks, under any degrees."""

    def __init__(self, space: IterationSpace) -> None:
        summed = {axis for output in range(len(space.outputs)) for axis in partial_axes(space, output)}
        self._axes = [
            _axis_classes(axis, factors_of(space, index), index in summed)
            for index, axis in enumerate(space.axes)
        ]

    def of_tasks(self, degrees: Degrees) -> TaskClasses:
        """Return the classes of the tasks under some degrees."""
        splits = [axis.split(degree) for axis, degree in zip(self._axes, degrees, strict=True)]
        # All combinations of the classes of parts; the last axis counts least, as among tasks.
        classes = list(itertools.product(*(split.classes for split in splits)))
        if len(classes) == 1:
            return TaskClasses([0], classes, [0] * prod(degrees))
        first = class_of = np.zeros(1, np.int64)
        for split, degree in zip(splits, degrees, strict=True):
            if degree == 1:  # one part, of one class
                continue
            first = (first[:, None] * degree + split.first).reshape(-1)
            class_of = (class_of[:, None] * len(split.classes) + split.class_of).reshape(-1)
        return TaskClasses(first.tolist(), classes, class_of.tolist())


class _AxisClasses:
    def __init__(self, axis: Axis, factors: tuple[DimFactor, ...], *, is_summed: bool) -> None:
        self._axis, self._factors, self._is_summed = axis, factors, is_summed
        self._splits: dict[int, _Split] = {}

    def split(self, degree: int) -> _Split:
        """Return the classes of the axis's parts under a degree."""
        if degree not in self._splits:
            of_parts = [self._class_of(degree, index) for index in range(degree)]
            classes = list(dict.fromkeys(of_parts))
            self._splits[degree] = _Split(
                np.array([classes.index(part_class) for part_class in of_parts], np.int64),
                classes,
                np.array([of_parts.index(part_class) for part_class in classes], np.int64),
            )
        return self._splits[degree]

    def _class_of(self, degree: int, index: int) -> object:
        """Return a part's size, its reach beyond the ends, and whether it is the first part of a sum."""
        if self._axis.kind is AxisKind.REPLICA:
            return None
        part = part_of(self._axis, degree, index)
        return part[1] - part[0], _beyond(part, self._factors), self._is_summed and index == 0


@lru_cache(maxsize=4096)
def _axis_classes(axis: Axis, factors: tuple[DimFactor, ...], is_summed: bool) -> _AxisClasses:  # noqa: FBT001
    """Return the classes of an axis's parts, one object for equal axes of all operators."""
    return _AxisClasses(axis, factors, is_summed=is_summed)


def factors_of(space: IterationSpace, axis: int) -> tuple[DimFactor, ...]:
    """Return the distinct factors that follow an axis, but for plain ones, whose index k is point k."""
    size = space.axes[axis].size
    factors = {
        factor: None
        for operand in (*space.inputs, *space.outputs)
        for dim in operand
        for factor in dim
        if factor.axis == axis and not (factor.is_identity and factor.size == size)
    }
    return tuple(factors)


def _beyond(part: Interval, factors: tuple[DimFactor, ...]) -> tuple[tuple[int, int], ...]:
    """Return, for each factor, how many indexes a part's windows reach beyond either end."""
    beyond = []
    for factor in factors:
        start, stop = factor.unclipped(part)
        beyond.append((max(-start, 0), max(stop - factor.size, 0)))
    return tuple(beyond)
