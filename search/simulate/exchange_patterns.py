"""Exchanges of values but for devices: which regions are made and read, and what they have in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph.axes import Degrees
from search.kernels.records import Overlaps
from search.simulate.fragment_classes import ValueClass
from search.simulate.regions import IntArray, Regions, stacked


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """An exchange but for devices: arguments of `write_exchange`, for the readings one after the other."""

    source_region: IntArray
    reader_ptr: IntArray
    reader_region: IntArray
    reader_row: IntArray
    row_elements: IntArray
    common: Overlaps


class Patterns:
    """All patterns met so far."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._patterns: dict[tuple[int, Degrees, tuple[Degrees, ...]], Pattern] = {}

    def clear(self) -> None:
        """Forget everything: the regions have other numbers now."""
        self._patterns.clear()

    def pattern(self, of: ValueClass, made: Degrees, read: tuple[Degrees, ...]) -> Pattern:
        """Return the pattern of a value under the degrees of its producer and of its readers."""
        key = (of.number, made, read)
        known = self._patterns.get(key)
        if known is None:
            source = self._regions.side(of.producer.number, made)
            sides = [
                self._regions.side(port.number, degrees)
                for port, degrees in zip(of.readers, read, strict=True)
            ]
            common = [self._regions.overlaps(side, source, made[-1]) for side in sides]
            known = self._patterns[key] = Pattern(
                source.region,
                np.array([*itertools.accumulate((len(side.row) for side in sides), initial=0)], np.int64),
                joined([side.region for side in sides]),
                _counted_on([side.row for side in sides], [len(side.rows.region) for side in sides]),
                joined([side.rows.elements for side in sides]),
                stacked(common),
            )
        return known


def joined(pieces: Sequence[IntArray]) -> IntArray:
    """Return the items of all pieces, one piece after the other."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _counted_on(pieces: Sequence[IntArray], sizes: Sequence[int]) -> IntArray:
    """Return numbers below these sizes, piece after piece, each counted on from where the one before ends."""
    ends = itertools.accumulate(sizes, initial=0)
    return joined([piece + end if end else piece for piece, end in zip(pieces, ends, strict=False)])
