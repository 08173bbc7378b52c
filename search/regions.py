"""Regions of operands under given degrees, and what two of them have in common, each computed once.

A side is one operand of one operator under given degrees. Its regions are products of cuts, one a dim; a cut
depends on few axes and recurs in most sides. So overlaps are products of small tables, and devices come in later
(`search.units`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graph.axes import Axis, Degrees, Dim, OperandMap, dim_indexes, part_of
from graph.intervals import IndexSet, Region, count

# Codes beyond which distinct ones are found by sorting.
MOST_CODES = 1 << 12
# Pairs of regions beyond which only those are looked at that meet in one dim.
MOST_PAIRS = 1 << 14

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One dim under given degrees: its distinct index sets, and the place among them of every combination of
    parts of the axes that it follows (`axes`, ascending; row-major). Of each index set: its number among all met
    so far, and how many indexes it has."""

    number: int
    axes: tuple[int, ...]
    index_sets: tuple[IndexSet, ...]
    place: IntArray
    set_number: IntArray
    elements: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One operand under given degrees. Sides that differ in replicas alone have one number.

    region: for each task, the number of its region (`Regions.region`).
    row: for each task, the place of its region among the side's distinct ones.
    row_task: for each distinct region, the first task that has it.
    row_elements: for each distinct region, its elements.
    dims: for each dim, its cut, and for each distinct region the place of its index set.
    """

    number: int
    region: IntArray
    row: IntArray
    row_task: IntArray
    row_elements: IntArray
    dims: tuple[tuple[Cut, IntArray], ...]


class Overlaps(NamedTuple):
    """What rows have in common with groups: for each row (pointers) the groups, ascending, and elements."""

    pointers: IntArray
    group: IntArray
    elements: IntArray


class Regions:
    """All cuts, sides and overlaps met so far."""

    def __init__(self) -> None:
        self._ports: dict[tuple[tuple[Axis, ...], OperandMap], int] = {}
        self._port_keys: list[tuple[tuple[Axis, ...], OperandMap]] = []
        self._cutting: list[tuple[int, ...] | None] = []
        self.clear()

    def clear(self) -> None:
        """Forget all but the ports."""
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self._sides: dict[tuple[int, Degrees], Side] = {}
        self._index_sets: list[IndexSet] = []
        self._set_numbers: dict[IndexSet, int] = {}
        self._region_keys: list[tuple[int, ...]] = []
        self._region_numbers: dict[tuple[int, ...], int] = {}
        self._common: dict[tuple[int, int], IntArray] = {}
        self._meeting: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}
        self._overlaps: dict[tuple[int, int], Overlaps] = {}
        self._side_count = 0

    def port(self, axes: tuple[Axis, ...], operand: OperandMap) -> int:
        """Return the number of an operand map over given axes."""
        key = (axes, operand)
        known = self._ports.get(key)
        if known is None:
            known = self._ports[key] = len(self._port_keys)
            self._port_keys.append(key)
            self._cutting.append(cutting_axes(axes, operand))
        return known

    def cutting_axes(self, port: int) -> tuple[int, ...] | None:
        """Return what the function of this name says of an operand map."""
        return self._cutting[port]

    def region(self, number: int) -> Region:
        """Return the region of a number."""
        return tuple(self._index_sets[one] for one in self._region_keys[number])

    def side(self, port: int, degrees: Degrees) -> Side:
        """Return an operand under given degrees."""
        known = self._sides.get((port, degrees))
        if known is None:
            if degrees[-1] > 1:
                known = replicated(self.side(port, (*degrees[:-1], 1)), degrees[-1])
            else:
                known = self._make_side(port, degrees)
            self._sides[port, degrees] = known
        return known

    def _make_side(self, port: int, degrees: Degrees) -> Side:
        axes, operand = self._port_keys[port]
        cuts = [self._cut(axes, dim, degrees) for dim in operand]
        # A task's region as one number: the places of its index sets, the first dim's counting most.
        code = np.zeros((1,) * len(degrees), np.int64)
        for cut in cuts:
            shape = [degrees[axis] if axis in cut.axes else 1 for axis in range(len(degrees))]
            code = code * len(cut.index_sets) + cut.place.reshape(shape)
        codes, row_task, row = distinct(
            np.broadcast_to(code, degrees).reshape(-1), prod(len(cut.index_sets) for cut in cuts)
        )
        row_elements = np.ones(len(codes), np.int64)
        keys = np.empty((len(codes), len(cuts)), np.int64)
        dims = []
        for position in reversed(range(len(cuts))):
            cut = cuts[position]
            codes, place = np.divmod(codes, len(cut.index_sets))
            row_elements *= cut.elements[place]
            keys[:, position] = cut.set_number[place]
            dims.append((cut, place))
        numbers = [self._number(tuple(key)) for key in keys.tolist()]
        self._side_count += 1
        region = np.array(numbers, np.int64)[row]
        return Side(self._side_count, region, row, row_task, row_elements, tuple(reversed(dims)))

    def _number(self, key: tuple[int, ...]) -> int:
        """Return the number of the region that is a product of index sets of these numbers."""
        known = self._region_numbers.get(key)
        if known is None:
            known = self._region_numbers[key] = len(self._region_keys)
            self._region_keys.append(key)
        return known

    def _cut(self, axes: tuple[Axis, ...], dim: Dim, degrees: Degrees) -> Cut:
        followed = tuple(sorted({factor.axis for factor in dim if factor.axis is not None}))
        key = (dim, followed, tuple((axes[axis], degrees[axis]) for axis in followed))
        known = self._cuts.get(key)
        if known is None:
            points = [(0, 1)] * len(axes)
            found: dict[IndexSet, int] = {}
            place = []
            for parts in itertools.product(*(range(degrees[axis]) for axis in followed)):
                for axis, part in zip(followed, parts, strict=True):
                    points[axis] = part_of(axes[axis], degrees[axis], part)
                place.append(found.setdefault(dim_indexes(dim, points), len(found)))
            known = Cut(
                len(self._cuts),
                followed,
                tuple(found),
                np.array(place, np.int64),
                np.array([self._set_number(indexes) for indexes in found], np.int64),
                np.array([count(indexes) for indexes in found], np.int64),
            )
            self._cuts[key] = known
        return known

    def _set_number(self, indexes: IndexSet) -> int:
        known = self._set_numbers.get(indexes)
        if known is None:
            known = self._set_numbers[indexes] = len(self._index_sets)
            self._index_sets.append(indexes)
        return known

    def overlaps(self, reader: Side, source: Side, replicas: int) -> Overlaps:
        """Return the elements that a reader's distinct regions (rows) and groups of replicas have in common."""
        key = (reader.number, source.number)
        known = self._overlaps.get(key)
        if known is None:
            group_row = source.row[::replicas]
            tables = [
                self._common_elements(mine, theirs)
                for (mine, _), (theirs, _) in zip(reader.dims, source.dims, strict=True)
            ]
            my_places = [place for _, place in reader.dims]
            their_places = [place[group_row] for _, place in source.dims]
            rows = len(reader.row_task)
            if rows * len(group_row) <= MOST_PAIRS or not tables:
                row, group = np.divmod(np.arange(rows * len(group_row)), len(group_row))
            else:
                row, group = self._candidates(reader, source, my_places, their_places)
            elements = np.ones(len(row), np.int64)
            for table, mine, theirs in zip(tables, my_places, their_places, strict=True):
                elements *= table[mine[row], theirs[group]]
            there = elements > 0
            pointers = np.zeros(rows + 1, np.int64)
            np.cumsum(np.bincount(row[there], minlength=rows), out=pointers[1:])
            known = self._overlaps[key] = Overlaps(pointers, group[there], elements[there])
        return known

    def _candidates(
        self, reader: Side, source: Side, my_places: Sequence[IntArray], their_places: Sequence[IntArray]
    ) -> tuple[IntArray, IntArray]:
        """Return all pairs of a row and a group that meet in one dim, that which the source cuts most; ascending."""
        cuts = [len(cut.index_sets) for cut, _ in source.dims]
        dim = cuts.index(max(cuts))
        first, met = self._meeting_sets(reader.dims[dim][0], source.dims[dim][0])
        mine, theirs = my_places[dim], their_places[dim]
        # From rows to the index sets that they meet, then to the groups of each.
        row = np.repeat(np.arange(len(mine)), first[mine + 1] - first[mine])
        index_set = met[ranges(first[mine], first[mine + 1])]
        groups = np.argsort(theirs, kind="stable")
        begin = np.searchsorted(theirs[groups], np.arange(cuts[dim] + 1))
        pair_row = np.repeat(row, begin[index_set + 1] - begin[index_set])
        pair_group = groups[ranges(begin[index_set], begin[index_set + 1])]
        order = np.argsort(pair_row * len(theirs) + pair_group)
        return pair_row[order], pair_group[order]

    def _meeting_sets(self, mine: Cut, theirs: Cut) -> tuple[IntArray, IntArray]:
        """Return, for each index set of a cut, those of another that it meets: pointers and places."""
        key = (mine.number, theirs.number)
        known = self._meeting.get(key)
        if known is None:
            left, right = np.nonzero(self._common_elements(mine, theirs))
            pointers = np.zeros(len(mine.index_sets) + 1, np.int64)
            np.cumsum(np.bincount(left, minlength=len(mine.index_sets)), out=pointers[1:])
            known = self._meeting[key] = pointers, right
        return known

    def _common_elements(self, mine: Cut, theirs: Cut) -> IntArray:
        key = (mine.number, theirs.number)
        known = self._common.get(key)
        if known is None:
            known = self._common[key] = common_elements(mine.index_sets, theirs.index_sets)
        return known


def cutting_axes(axes: Sequence[Axis], operand: OperandMap) -> tuple[int, ...] | None:
    """Return the axes whose parts cut an operand into disjoint regions, one for every combination of them.

    None where its regions may overlap, or leave something out.
    """
    found: list[int] = []
    for factor in itertools.chain.from_iterable(operand):
        if factor.axis is None:
            continue
        if not factor.is_identity or factor.size != axes[factor.axis].size or factor.axis in found:
            return None
        found.append(factor.axis)
    return tuple(found)


def stacked(overlaps: Sequence[Overlaps]) -> Overlaps:
    """Return the rows of several, one after the other."""
    if len(overlaps) == 1:
        return overlaps[0]
    if not overlaps:
        return Overlaps(np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
    ends = np.cumsum([0, *(len(one.group) for one in overlaps)])
    return Overlaps(
        np.concatenate([[0], *(one.pointers[1:] + end for one, end in zip(overlaps, ends, strict=False))]),
        np.concatenate([one.group for one in overlaps]),
        np.concatenate([one.elements for one in overlaps]),
    )


def ranges(starts: IntArray, stops: IntArray) -> IntArray:
    """Return the numbers from each start up to its stop, one range after the other."""
    sizes = stops - starts
    before = np.cumsum(sizes) - sizes
    found: IntArray = np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
    return found


def replicated(side: Side, replicas: int) -> Side:
    """Return a side without replicas as it is with so many: the replicas of a task follow each other."""
    return Side(
        side.number,
        np.repeat(side.region, replicas),
        np.repeat(side.row, replicas),
        side.row_task * replicas,
        side.row_elements,
        side.dims,
    )


def distinct(codes: IntArray, possible: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return distinct codes ascending, where each stands first, and for every code the place of its like.

    codes: whole numbers below `possible`.
    """
    if possible > MOST_CODES:
        found, first, place = np.unique(codes, return_index=True, return_inverse=True)
        return found, first, place
    first = np.full(possible, -1, np.int64)
    # Of several the last one is kept: the first, backwards.
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    is_there = first >= 0
    if is_there.all():
        return np.arange(possible), first, codes
    return np.flatnonzero(is_there), first[is_there], (np.cumsum(is_there) - 1)[codes]


def common_elements(left: Sequence[IndexSet], right: Sequence[IndexSet]) -> IntArray:
    """Return, for every pair of index sets, the number of indexes in both."""
    if all(len(indexes) == 1 for indexes in (*left, *right)):
        mine = np.array([indexes[0] for indexes in left], np.int64)
        theirs = np.array([indexes[0] for indexes in right], np.int64)
        start = np.maximum(mine[:, None, 0], theirs[None, :, 0])
        stop = np.minimum(mine[:, None, 1], theirs[None, :, 1])
        common: IntArray = np.maximum(stop - start, 0)
        return common
    lows, highs, ptr = _flat(right)
    table = np.zeros((len(left), len(right)), np.int64)
    for row, indexes in enumerate(left):
        between = _ranks(indexes, highs) - _ranks(indexes, lows)
        sums = np.concatenate([[0], np.cumsum(between)])
        table[row] = sums[ptr[1:]] - sums[ptr[:-1]]
    return table


def _flat(index_sets: Sequence[IndexSet]) -> tuple[IntArray, IntArray, IntArray]:
    """Return starts and stops of all intervals, set after set, and where each set begins among them."""
    bounds = np.array([interval for indexes in index_sets for interval in indexes], np.int64).reshape(-1, 2)
    ptr = np.zeros(len(index_sets) + 1, np.int64)
    np.cumsum([len(indexes) for indexes in index_sets], out=ptr[1:])
    return bounds[:, 0], bounds[:, 1], ptr


def _ranks(indexes: IndexSet, bounds: IntArray) -> IntArray:
    """Return, for each bound, how many indexes are below it."""
    if not indexes:
        return np.zeros(len(bounds), np.int64)
    own = np.array(indexes, np.int64)
    sizes = np.concatenate([[0], np.cumsum(own[:, 1] - own[:, 0])])
    begun = np.searchsorted(own[:, 0], bounds)
    last = np.maximum(own[begun - 1, 1] - bounds, 0)
    ranks: IntArray = np.where(begun > 0, sizes[begun] - last, 0)
    return ranks
