"""Regions of operands under given degrees, and what two of them have in common, each computed once.

A side is one operand of one operator under given degrees. Its regions are products of cuts, one a dim; a cut
depends on few axes and recurs in most sides. So overlaps are products of small tables, and devices come in later
(`search.simulate.fragment_cache`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from graph.axes import Axis, Degrees, Dim, OperandMap, dim_indexes, part_of
from graph.intervals import IndexSet, Region, count
from search.kernels.records import Overlaps

# Codes beyond which distinct ones are found by sorting.
MOST_CODES = 1 << 12
# Pairs of regions beyond which only those are looked at that meet in one dim.
MOST_PAIRS = 1 << 14

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One dim under given degrees: its distinct index sets, and the place among them of every combination of
    parts of the axes that it follows (`axes`, ascending; row-major). Of each index set: its number among all met
    so far, and how many indexes it has.

    is_plain: every combination has an index set of its own, in order.
    is_apart: index sets are intervals that have nothing in common, ascending, none empty.
    """

    number: int
    axes: tuple[int, ...]
    index_sets: tuple[IndexSet, ...]
    place: IntArray
    set_number: IntArray
    elements: IntArray
    is_plain: bool
    is_apart: bool


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The distinct regions of an operand under given degrees of the axes that it follows. Equal ones have one number.

    axes: the followed axes, ascending.
    place: for every combination of their parts (row-major, one dim an axis), which row has its region.
    region: for each row, the number of its region (`Regions.region`).
    elements: for each row, those of its region.
    dims: for each dim, its cut, and for each row the place of its index set.
    is_apart: no two regions have anything in common, and none is empty; they ascend, the first dim counting most.
    """

    number: int
    axes: tuple[int, ...]
    place: IntArray
    region: IntArray
    elements: IntArray
    dims: tuple[tuple[Cut, IntArray], ...]
    is_apart: bool

    def sizes(self, row: int) -> tuple[int, ...]:
        """Return the sizes of a row's region."""
        return tuple([int(cut.elements[place[row]]) for cut, place in self.dims])


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One operand under given degrees. Sides that differ in replicas alone have one number.

    row: for each task, which of the rows has its region.
    region: for each task, the number of its region.
    """

    number: int
    rows: Rows
    row: IntArray
    region: IntArray


class _Numbering(dict[Any, int]):
    """Numbers of keys, in the order in which they are first asked for, and in `listed` the keys."""

    def __init__(self) -> None:
        self.listed: list[Any] = []

    def __missing__(self, key: object) -> int:
        number = self[key] = len(self)
        self.listed.append(key)
        return number


class _Port(NamedTuple):
    """An operand of an operator's axes: those that it follows (ascending), and of each dim its number and its axes."""

    axes: tuple[Axis, ...]
    operand: OperandMap
    followed: tuple[int, ...]
    dims: tuple[tuple[int, tuple[int, ...]], ...]


class Regions:
    """All cuts, sides and overlaps met so far."""

    def __init__(self) -> None:
        self._port_numbers = _Numbering()
        self._dim_numbers = _Numbering()
        self._ports: list[_Port] = []
        self._cutting: list[tuple[int, ...] | None] = []
        self.clear()

    def clear(self) -> None:
        """Forget all but the ports."""
        self._cuts: dict[tuple[int, Degrees], Cut] = {}
        self._rows: dict[tuple[int, Degrees], Rows] = {}
        self._rows_of_cuts: dict[tuple[int, ...], Rows] = {}
        self._sides: dict[tuple[int, Degrees], Side] = {}
        self._side_numbers = _Numbering()
        self._set_numbers = _Numbering()
        self._region_numbers = _Numbering()
        self._common: dict[tuple[int, int], IntArray] = {}
        self._meeting: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}
        self._overlaps: dict[tuple[int, int], Overlaps] = {}

    def port(self, axes: tuple[Axis, ...], operand: OperandMap) -> int:
        """Return the number of an operand map over given axes."""
        number = self._port_numbers[axes, operand]
        if number == len(self._ports):
            followed = [
                tuple(sorted({factor.axis for factor in dim if factor.axis is not None})) for dim in operand
            ]
            dims = tuple(
                (self._dim_numbers[dim, tuple(axes[axis] for axis in mine)], mine)
                for dim, mine in zip(operand, followed, strict=True)
            )
            self._cutting.append(cutting_axes(axes, operand))
            self._ports.append(_Port(axes, operand, tuple(sorted({*itertools.chain(*followed)})), dims))
        return number

    def cutting_axes(self, port: int) -> tuple[int, ...] | None:
        """Return what the function of this name says of an operand map."""
        return self._cutting[port]

    def region(self, number: int) -> Region:
        """Return the region of a number."""
        index_sets: list[IndexSet] = self._set_numbers.listed
        return tuple([index_sets[one] for one in self._region_numbers.listed[number]])

    def number(self, region: Region) -> int:
        """Return the number of a region."""
        return self._region_numbers[tuple([self._set_numbers[indexes] for indexes in region])]

    def side(self, port: int, degrees: Degrees) -> Side:
        """Return an operand under given degrees."""
        known = self._sides.get((port, degrees))
        if known is None:
            rows = self._rows_of(port, degrees)
            # What does not split the operand repeats it.
            shape = [1] * len(degrees)
            for axis in rows.axes:
                shape[axis] = degrees[axis]
            row = (rows.place.reshape(shape) + np.zeros(degrees, np.int64)).reshape(-1)
            number = self._side_numbers[rows.number, degrees[:-1]]
            known = self._sides[port, degrees] = Side(number, rows, row, rows.region[row])
        return known

    def _rows_of(self, port: int, degrees: Degrees) -> Rows:
        of = self._ports[port]
        key = (port, tuple([degrees[axis] for axis in of.followed]))
        known = self._rows.get(key)
        if known is None:
            cuts = [
                self._cut(number, of.axes, dim, mine, tuple([degrees[axis] for axis in mine]))
                for dim, (number, mine) in zip(of.operand, of.dims, strict=True)
            ]
            cut_numbers = tuple([cut.number for cut in cuts])
            known = self._rows_of_cuts.get(cut_numbers)
            if known is None:
                known = self._make_rows(cuts, of.followed, key[1])
                self._rows_of_cuts[cut_numbers] = known
            self._rows[key] = known
        return known

    def _make_rows(self, cuts: Sequence[Cut], axes: tuple[int, ...], degrees: Degrees) -> Rows:
        counts = [len(cut.index_sets) for cut in cuts]
        # A row as one number: the places of its index sets, the first dim's counting most.
        possible = prod(counts)
        if all(cut.is_plain for cut in cuts) and axes == tuple(axis for cut in cuts for axis in cut.axes):
            codes = place = np.arange(possible)
        else:
            code = np.zeros((1,) * len(axes), np.int64)
            for cut in cuts:
                shape = [
                    degree if axis in cut.axes else 1 for axis, degree in zip(axes, degrees, strict=True)
                ]
                code = code * len(cut.index_sets) + cut.place.reshape(shape)
            codes, place = distinct(code.reshape(-1), possible)
        nowhere = np.zeros(len(codes), np.int64)
        elements = nowhere + 1
        places: list[IntArray] = []
        keys: list[Iterable[int]] = []
        stride = possible
        for cut, sets in zip(cuts, counts, strict=True):
            stride //= sets
            if sets == 1:
                places.append(nowhere)
                keys.append([int(cut.set_number[0])] * len(codes))
                elements *= cut.elements[0]
            else:
                place_here = codes // stride % sets
                places.append(place_here)
                keys.append(cut.set_number[place_here].tolist())
                elements *= cut.elements[place_here]
        numbers = [self._region_numbers[key] for key in (zip(*keys, strict=True) if keys else [()])]
        return Rows(
            len(self._rows_of_cuts),
            axes,
            place,
            np.array(numbers, np.int64),
            elements,
            tuple(zip(cuts, places, strict=True)),
            all(cut.is_apart for cut in cuts),
        )

    def _cut(
        self, number: int, axes: tuple[Axis, ...], dim: Dim, followed: tuple[int, ...], degrees: Degrees
    ) -> Cut:
        """Return a dim (of that number among all over their axes) under degrees of the axes that it follows."""
        known = self._cuts.get((number, degrees))
        if known is None:
            points = [(0, 1)] * len(axes)
            found = _Numbering()
            place = []
            for parts in itertools.product(*map(range, degrees)):
                for axis, degree, part in zip(followed, degrees, parts, strict=True):
                    points[axis] = part_of(axes[axis], degree, part)
                place.append(found[dim_indexes(dim, points)])
            known = Cut(
                len(self._cuts),
                followed,
                tuple(found.listed),
                np.array(place, np.int64),
                np.array([self._set_numbers[indexes] for indexes in found], np.int64),
                np.array([count(indexes) for indexes in found], np.int64),
                len(found) == len(place),
                all(len(indexes) == 1 for indexes in found)
                and all(one[0][1] <= other[0][0] for one, other in itertools.pairwise(found)),
            )
            self._cuts[number, degrees] = known
        return known

    def overlaps(self, reader: Side, source: Side, replicas: int) -> Overlaps:
        """Return the elements that a reader's distinct regions (rows) and groups of replicas have in common."""
        key = (reader.rows.number, source.number)
        known = self._overlaps.get(key)
        if known is None:
            theirs = source.row[::replicas]
            if len(reader.rows.region) * len(theirs) <= MOST_PAIRS:
                known = self._all_overlaps(reader.rows, source.rows, theirs)
            else:
                known = self._some_overlaps(reader.rows, source.rows, theirs)
            self._overlaps[key] = known
        return known

    def _all_overlaps(self, mine: Rows, theirs: Rows, group_row: IntArray) -> Overlaps:
        """Return overlaps, looking at all pairs of a row and a group (of which `group_row` is the row)."""
        # Few dims are split on both sides: the others count row by row, group by group, or for all alike.
        by_row: int | IntArray = 1
        by_group: int | IntArray = 1
        both: int | IntArray = 1
        for (my_cut, my_place), (their_cut, their_place) in zip(mine.dims, theirs.dims, strict=True):
            table = self._common_elements(my_cut, their_cut)
            if len(table) == 1:
                one = table[0, 0] if table.shape[1] == 1 else table[0].take(their_place.take(group_row))
                by_group = by_group * one
            elif table.shape[1] == 1:
                by_row = by_row * table[:, 0].take(my_place)
            else:
                both = both * table.take(their_place.take(group_row), 1).take(my_place, 0)
        rows, groups = len(mine.region), len(group_row)
        common = np.empty((rows, groups), np.int64)
        np.multiply(both, by_group, out=common)
        if isinstance(by_row, np.ndarray):
            common *= by_row[:, None]
        there = common.reshape(-1)
        pairs = there.nonzero()[0]
        pointers = pairs.searchsorted(np.arange(0, rows * groups + 1, groups))
        return Overlaps(pointers, pairs % groups, there[pairs])

    def _some_overlaps(self, mine: Rows, theirs: Rows, group_row: IntArray) -> Overlaps:
        """Return what `_all_overlaps` does, looking at pairs alone that meet in one dim."""
        my_places = [place for _, place in mine.dims]
        their_places = [place[group_row] for _, place in theirs.dims]
        rows = len(mine.region)
        if mine.dims:
            row, group = self._candidates(mine, theirs, my_places, their_places)
        else:
            row, group = np.divmod(np.arange(rows * len(group_row)), len(group_row))
        elements = np.ones(len(row), np.int64)
        cuts = [
            (my_cut, their_cut) for (my_cut, _), (their_cut, _) in zip(mine.dims, theirs.dims, strict=True)
        ]
        for (my_cut, their_cut), my_place, their_place in zip(cuts, my_places, their_places, strict=True):
            elements *= self._common_elements(my_cut, their_cut)[my_place[row], their_place[group]]
        there = elements > 0
        pointers = np.zeros(rows + 1, np.int64)
        np.cumsum(np.bincount(row[there], minlength=rows), out=pointers[1:])
        return Overlaps(pointers, group[there], elements[there])

    def _candidates(
        self, mine: Rows, theirs: Rows, my_places: Sequence[IntArray], their_places: Sequence[IntArray]
    ) -> tuple[IntArray, IntArray]:
        """Return all pairs of a row and a group that meet in one dim, that which the source cuts most; ascending."""
        cuts = [len(cut.index_sets) for cut, _ in theirs.dims]
        dim = cuts.index(max(cuts))
        first, met = self._meeting_sets(mine.dims[dim][0], theirs.dims[dim][0])
        my_place, their_place = my_places[dim], their_places[dim]
        # From rows to the index sets that they meet, then to the groups of each.
        row = np.repeat(np.arange(len(my_place)), first[my_place + 1] - first[my_place])
        index_set = met[ranges(first[my_place], first[my_place + 1])]
        groups = np.argsort(their_place, kind="stable")
        begin = np.searchsorted(their_place[groups], np.arange(cuts[dim] + 1))
        pair_row = np.repeat(row, begin[index_set + 1] - begin[index_set])
        pair_group = groups[ranges(begin[index_set], begin[index_set + 1])]
        order = np.argsort(pair_row * len(their_place) + pair_group)
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


def distinct(codes: IntArray, possible: int) -> tuple[IntArray, IntArray]:
    """Return distinct codes ascending, and for every code the place of its like.

    codes: whole numbers below `possible`.
    """
    if possible > MOST_CODES:
        found, place = np.unique(codes, return_inverse=True)
        return found, place
    is_there = np.zeros(possible, np.bool_)
    is_there[codes] = True
    if is_there.all():
        return np.arange(possible), codes
    return np.flatnonzero(is_there), (np.cumsum(is_there) - 1)[codes]


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
