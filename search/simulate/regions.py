"""The regions of operands under given degrees, in words that kernels read (`search.kernels.regions`).

Index sets, cuts of dims and sides recur, in one strategy and from proposal to proposal, and are written once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graph.axes import Axis, Degrees, Dim, OperandMap, dim_indexes, part_of
from graph.intervals import IndexSet, Region, count
from search.kernels.regions import find_regions
from search.simulate.arrays import GrowingArray

# Degrees for which there is room at first in tables of operands under degrees.
FEWEST_DEGREES = 64
# Pairs of index sets of which it is kept what they have in common.
COMMON_PAIRS = 1 << 14

# In place of an axis: some that an operand does not follow.
UNFOLLOWED = -1

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FollowedDegrees = tuple[tuple[int, int], ...]
"""Axes with their degrees, in order (`Regions.followed_degrees`)."""


class _Port(NamedTuple):
    """An operand of an operator's axes: of each dim its number among all over their axes, and those that it follows.

    followed: by any dim.
    """

    axes: tuple[Axis, ...]
    operand: OperandMap
    dims: tuple[tuple[int, tuple[int, ...]], ...]
    followed: frozenset[int]


class Regions:
    """All regions met so far."""

    def __init__(self) -> None:
        self._port_numbers: dict[tuple[tuple[Axis, ...], OperandMap], int] = {}
        self._dim_numbers: dict[tuple[Dim, tuple[Axis, ...]], int] = {}
        self._ports: list[_Port] = []
        self._cutting: list[tuple[int, ...] | None] = []
        self.common_K3 = np.empty((COMMON_PAIRS, 3), np.int64)
        self.clear()

    def clear(self) -> None:
        """Forget all but the ports."""
        self._words = GrowingArray(np.int64)
        # Words that wait to be appended together.
        self._waiting: list[int] = []
        self._end = 0
        self.common_K3[:] = -1
        self._set_at: dict[IndexSet, int] = {}
        self._index_sets: dict[int, IndexSet] = {}
        self._counts: dict[int, int] = {}
        self._cuts: dict[tuple[int, Degrees], int] = {}
        self._sides: dict[tuple[int, Degrees], int] = {}
        self._regions: dict[tuple[int, FollowedDegrees], IntArray] = {}
        # The index sets of a region, by its number, and the other way.
        self._sets_of: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._volumes = GrowingArray(np.int64)

    @property
    def words(self) -> GrowingArray:
        """All words so far, as kernels read them."""
        if self._waiting:
            self._words.extend(self._waiting)
            self._waiting = []
        return self._words

    def write(self, words: Sequence[int]) -> int:
        """Append words that are valid until all is forgotten; return where they start."""
        at = self._end
        self._waiting += words
        self._end = at + len(words)
        return at

    def port(self, axes: tuple[Axis, ...], operand: OperandMap) -> int:
        """Return the number of an operand map over given axes."""
        number = self._port_numbers.setdefault((axes, operand), len(self._ports))
        if number == len(self._ports):
            followed = [
                tuple(sorted({factor.axis for factor in dim if factor.axis is not None})) for dim in operand
            ]
            dims = [
                (
                    self._dim_numbers.setdefault(
                        (dim, tuple(axes[axis] for axis in mine)), len(self._dim_numbers)
                    ),
                    mine,
                )
                for dim, mine in zip(operand, followed, strict=True)
            ]
            self._cutting.append(cutting_axes(axes, operand))
            self._ports.append(_Port(axes, operand, tuple(dims), frozenset(itertools.chain(*followed))))
        return number

    def cutting_axes(self, port: int) -> tuple[int, ...] | None:
        """Return what the function of this name says of an operand map."""
        return self._cutting[port]

    def region(self, number: int) -> Region:
        """Return the region of a number."""
        return tuple([self._index_sets[at] for at in self._sets_of[number]])

    def number(self, region: Region) -> int:
        """Return the number of a region."""
        return self._number(tuple(self._write_index_sets(region)))

    def followed_degrees(self, port: int, degrees: Degrees) -> FollowedDegrees:
        """Return all that the regions of tasks depend on: of equal ones every task has the same region of an operand.

        These are the axes that the operand follows, with their degrees; degrees of others beside each other are one.
        """
        followed = self._ports[port].followed
        split: list[tuple[int, int]] = []
        for axis, degree in enumerate(degrees):
            if degree == 1:
                continue
            if axis in followed:
                split.append((axis, degree))
            elif split and split[-1][0] == UNFOLLOWED:
                split[-1] = UNFOLLOWED, split[-1][1] * degree
            else:
                split.append((UNFOLLOWED, degree))
        return tuple(split)

    def numbers(self, port: int, degrees: Degrees) -> IntArray:
        """Return the number of the region that each task has of an operand under given degrees."""
        key = port, self.followed_degrees(port, degrees)
        region_numbers = self._regions.get(key)
        if region_numbers is None:
            side = self.side(port, degrees)
            region_of, sets = find_regions(self.words.items, side)
            numbers = [self._number(dims) for dims in map(tuple, sets.tolist())]
            region_numbers = self._regions[key] = np.array(numbers, np.int64)[region_of]
        return region_numbers

    def side(self, port: int, degrees: Degrees) -> int:
        """Return where an operand under given degrees is among the words."""
        side_at = self._sides.get((port, degrees))
        if side_at is None:
            of = self._ports[port]
            strides, tasks = [0] * len(degrees), 1
            for axis in range(len(degrees) - 1, -1, -1):
                strides[axis] = tasks
                tasks *= degrees[axis]
            words = [tasks, degrees[-1], len(of.dims)]
            cuts = self._cuts
            for dim, (number, followed) in zip(of.operand, of.dims, strict=True):
                under = tuple([degrees[axis] for axis in followed])
                cut = cuts.get((number, under))
                if cut is None:
                    cut = cuts[number, under] = self._cut(of.axes, dim, followed, under)
                words.append(cut)
                words.append(len(under) - under.count(1))
                for axis, degree in zip(followed, under, strict=True):
                    if degree > 1:
                        words.append(strides[axis])
                        words.append(degree)
            side_at = self._sides[port, degrees] = self.write(words)
        return side_at

    def _cut(
        self, axes: tuple[Axis, ...], dim: Dim, followed: tuple[int, ...], degrees: tuple[int, ...]
    ) -> int:
        """Write a dim under given degrees of the axes that it follows; return where it is among the words."""
        points = [(0, 1)] * len(axes)
        index_sets = []
        for parts in itertools.product(*map(range, degrees)):
            for axis, degree, part in zip(followed, degrees, parts, strict=True):
                points[axis] = part_of(axes[axis], degree, part)
            index_sets.append(dim_indexes(dim, points))
        return self.write(self._write_index_sets(index_sets))

    def _write_index_sets(self, index_sets: Sequence[IndexSet]) -> list[int]:
        """Return where index sets are among the words; those that are new are appended together."""
        end = self._end
        words: list[int] = []
        starts = []
        for indexes in index_sets:
            at = self._set_at.get(indexes)
            if at is None:
                at = self._set_at[indexes] = end + len(words)
                self._index_sets[at] = indexes
                size = self._counts[at] = count(indexes)
                words += size, len(indexes), *itertools.chain(*indexes)
            starts.append(at)
        self.write(words)
        return starts

    def _number(self, sets: tuple[int, ...]) -> int:
        number = self._numbers.get(sets)
        if number is None:
            number = self._numbers[sets] = len(self._sets_of)
            self._sets_of.append(sets)
        return number

    def volumes(self, numbers: IntArray) -> IntArray:
        """Return the elements of regions by their numbers."""
        written, counts = len(self._volumes), self._counts
        if written < len(self._sets_of):
            self._volumes.extend([prod([counts[at] for at in sets]) for sets in self._sets_of[written:]])
        elements: IntArray = self._volumes.items[numbers]
        return elements


def cutting_axes(axes: Sequence[Axis], operand: OperandMap) -> tuple[int, ...] | None:
    """Return the axes whose parts cut an operand into disjoint regions, one for every combination of them.

    None where its regions may overlap, or leave something out.
    """
    cutting: list[int] = []
    for factor in itertools.chain.from_iterable(operand):
        if factor.axis is None:
            continue
        if not factor.is_identity or factor.size != axes[factor.axis].size or factor.axis in cutting:
            return None
        cutting.append(factor.axis)
    return tuple(cutting)
