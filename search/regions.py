"""Regions of operands under given degrees, and what two of them have in common, each computed once.

A side is one operand of one operator under given degrees. Its regions are products of cuts, one a dim; a cut
depends on few axes and recurs in most sides. So overlaps are products of small tables, and devices come in later
(`search.units`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph.axes import Axis, Degrees, Dim, OperandMap, dim_indexes, part_of
from graph.intervals import IndexSet, Region, count, intersect

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One dim under given degrees: its distinct index sets, and the place among them of every combination of
    parts of the axes that it follows (`axes`, ascending; row-major)."""

    number: int
    axes: tuple[int, ...]
    index_sets: tuple[IndexSet, ...]
    place: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One operand under given degrees.

    region: for each task, the number of its region (`Regions.region`).
    row: for each task, the place of its region among the side's distinct ones.
    row_task: for each distinct region, the first task that has it.
    row_elements: for each distinct region, its elements.
    dims: for each dim, its cut, and for each task the place of its index set.
    """

    number: int
    region: IntArray
    row: IntArray
    row_task: IntArray
    row_elements: IntArray
    dims: tuple[tuple[Cut, IntArray], ...]


class Regions:
    """All cuts, sides and overlaps met so far."""

    def __init__(self) -> None:
        self._ports: dict[tuple[tuple[Axis, ...], OperandMap], int] = {}
        self._port_keys: list[tuple[tuple[Axis, ...], OperandMap]] = []
        self.clear()

    def clear(self) -> None:
        """Forget all but the ports."""
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self._sides: dict[tuple[int, Degrees], Side] = {}
        self._index_sets: dict[IndexSet, int] = {}
        self._region_numbers: dict[tuple[int, ...], int] = {}
        self._regions: list[Region] = []
        self._common: dict[tuple[int, int], IntArray] = {}
        self._volumes: dict[tuple[int, int, int], IntArray] = {}

    def port(self, axes: tuple[Axis, ...], operand: OperandMap) -> int:
        """Return the number of an operand map over given axes."""
        key = (axes, operand)
        known = self._ports.get(key)
        if known is None:
            known = self._ports[key] = len(self._port_keys)
            self._port_keys.append(key)
        return known

    def region(self, number: int) -> Region:
        """Return the region of a number."""
        return self._regions[number]

    def side(self, port: int, degrees: Degrees) -> Side:
        """Return an operand under given degrees."""
        known = self._sides.get((port, degrees))
        if known is None:
            known = self._sides[port, degrees] = self._make_side(port, degrees)
        return known

    def _make_side(self, port: int, degrees: Degrees) -> Side:
        axes, operand = self._port_keys[port]
        tasks = int(np.prod(degrees))
        dims = []
        for dim in operand:
            cut = self._cut(axes, dim, degrees)
            shape = [degrees[axis] if axis in cut.axes else 1 for axis in range(len(degrees))]
            dims.append((cut, np.broadcast_to(cut.place.reshape(shape), degrees).reshape(tasks)))
        numbers: dict[tuple[int, ...], int] = {}
        region = np.empty(tasks, np.int64)
        row = np.empty(tasks, np.int64)
        row_task: list[int] = []
        row_elements: list[int] = []
        for task, places in enumerate(_rows([place for _, place in dims], tasks)):
            if places not in numbers:
                numbers[places] = len(numbers)
                row_task.append(task)
                sets = tuple(cut.index_sets[place] for (cut, _), place in zip(dims, places, strict=True))
                row_elements.append(int(np.prod([count(indexes) for indexes in sets], dtype=np.int64)))
                region[task] = self._number(sets)
            else:
                region[task] = region[row_task[numbers[places]]]
            row[task] = numbers[places]
        return Side(
            len(self._sides),
            region,
            row,
            np.array(row_task, np.int64),
            np.array(row_elements, np.int64),
            tuple(dims),
        )

    def _number(self, sets: Sequence[IndexSet]) -> int:
        key = tuple(self._index_sets.setdefault(indexes, len(self._index_sets)) for indexes in sets)
        known = self._region_numbers.get(key)
        if known is None:
            known = self._region_numbers[key] = len(self._regions)
            self._regions.append(tuple(sets))
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
            known = Cut(len(self._cuts), followed, tuple(found), np.array(place, np.int64))
            self._cuts[key] = known
        return known

    def volumes(self, reader: Side, source: Side, replicas: int) -> IntArray:
        """Return the elements that a reader's distinct regions (rows) and groups of replicas have in common."""
        key = (reader.number, source.number, replicas)
        known = self._volumes.get(key)
        if known is None:
            groups = len(source.region) // replicas
            known = np.ones((len(reader.row_task), groups), np.int64)
            for (mine, my_place), (theirs, their_place) in zip(reader.dims, source.dims, strict=True):
                table = self._common_elements(mine, theirs)
                known *= table[my_place[reader.row_task]][:, their_place[::replicas]]
            self._volumes[key] = known
        return known

    def _common_elements(self, mine: Cut, theirs: Cut) -> IntArray:
        key = (mine.number, theirs.number)
        known = self._common.get(key)
        if known is None:
            known = self._common[key] = common_elements(mine.index_sets, theirs.index_sets)
        return known


def common_elements(left: Sequence[IndexSet], right: Sequence[IndexSet]) -> IntArray:
    """Return, for every pair of index sets, the number of indexes in both."""
    if all(len(indexes) == 1 for indexes in (*left, *right)):
        mine = np.array([indexes[0] for indexes in left], np.int64)
        theirs = np.array([indexes[0] for indexes in right], np.int64)
        start = np.maximum(mine[:, None, 0], theirs[None, :, 0])
        stop = np.minimum(mine[:, None, 1], theirs[None, :, 1])
        common: IntArray = np.maximum(stop - start, 0)
        return common
    return np.array([[count(intersect(mine, theirs)) for theirs in right] for mine in left], np.int64)


def _rows(columns: Sequence[IntArray], tasks: int) -> list[tuple[int, ...]]:
    if not columns:
        return [()] * tasks
    return list(zip(*(column.tolist() for column in columns), strict=True))
