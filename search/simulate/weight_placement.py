"""Which devices hold what of a weight, buffer or input, and which of its cells several hold.

As `graph.weight_placement` says, for whole arrays of devices. What is held depends on which regions are needed by
somebody, and these recur: devices come in last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from graph.intervals import Region, shape, volume
from graph.weight_placement import cells, cover
from search.simulate.regions import IntArray, Regions

# More regions than there ever are.
REGIONS = 1 << 32


@dataclass(frozen=True, slots=True)
class HeldCell:
    """Elements of a weight that the same holders have: the places of what these hold, and its region."""

    places: tuple[int, ...]
    region: Region
    elements: int

    def sizes(self) -> tuple[int, ...]:
        """Return its sizes."""
        return shape(self.region)


@dataclass(frozen=True, slots=True, eq=False)
class HeldCells:
    """The cells of what is held, and whether none is in several places."""

    cells: tuple[HeldCell, ...]
    is_apart: bool


@dataclass(frozen=True, slots=True)
class SharedCell:
    """A cell that several devices (ascending) hold; `sizes` gives its sizes, which few ask for."""

    devices: IntArray
    elements: int
    sizes: Callable[[], tuple[int, ...]]


class Holders:
    """All that was held so far, over regions by their numbers."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self.clear()

    def clear(self) -> None:
        """Forget everything: the regions have other numbers now."""
        self._held: dict[bytes, HeldCells] = {}
        self._covers: dict[tuple[int, ...], int] = {}

    def covered(self, codes: IntArray) -> IntArray:
        """Return what devices hold that need so much: distinct codes, device * `REGIONS` + region, ascending."""
        device = codes // REGIONS
        is_next = device[1:] != device[:-1]
        if is_next.all():
            return codes
        starts = np.flatnonzero(np.concatenate(([True], is_next)))
        held = codes[starts]
        stops = np.append(starts[1:], len(codes))
        regions = codes % REGIONS
        for index in np.flatnonzero(stops - starts > 1).tolist():
            needed = tuple(regions[starts[index] : stops[index]].tolist())
            cover_number = self._covers.get(needed)
            if cover_number is None:
                region = cover([self._regions.region(number) for number in needed])
                cover_number = self._covers[needed] = self._regions.number(region)
            held[index] = device[starts[index]] * REGIONS + cover_number
        return held

    def elements(self, codes: IntArray) -> tuple[IntArray, IntArray]:
        """Return devices, and how many elements each holds; codes as `covered` returns them, one for each device."""
        devices, regions = np.divmod(codes, REGIONS)
        return devices, self._regions.volumes(regions)

    def shared_cells(self, codes: IntArray, *, is_cut: bool = False) -> list[SharedCell]:
        """Return the cells that several devices hold; codes as of `elements`.

        is_cut: regions are those of one operand that are apart or equal, see `search.simulate.regions.cutting_axes`.
        """
        if len(codes) < 2:
            return []
        devices, regions = np.divmod(codes, REGIONS)
        if (regions == regions[0]).all():
            return [SharedCell(devices, cell.elements, cell.sizes) for cell in self._hold(regions[:1]).cells]
        # Of equal ones the devices stay in order.
        order = np.argsort(regions, kind="stable")
        by_place, ordered = devices[order], regions[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        bounds = [*starts.tolist(), len(codes)]
        if is_cut:
            holders = [by_place[start:stop] for start, stop in itertools.pairwise(bounds)]
            return self._shared_parts(holders, ordered[starts])
        held = self._hold(ordered[starts])
        if held.is_apart and len(starts) == len(codes):
            return []
        shared = []
        for cell in held.cells:
            if len(cell.places) == 1:
                device_index = cell.places[0]
                members = by_place[bounds[device_index] : bounds[device_index + 1]]
            else:
                members = np.sort(
                    np.concatenate(
                        [
                            by_place[bounds[device_index] : bounds[device_index + 1]]
                            for device_index in cell.places
                        ]
                    )
                )
            if len(members) > 1:
                shared.append(SharedCell(members, cell.elements, cell.sizes))
        return shared

    def _shared_parts(self, holders: list[IntArray], numbers: IntArray) -> list[SharedCell]:
        """Return the regions, which are apart, that several devices hold, in the order of cells: dim by dim."""
        elements = self._regions.volumes(numbers).tolist()
        shared = [
            (self._regions.region(number), members, count)
            for number, members, count in zip(numbers.tolist(), holders, elements, strict=True)
            if len(members) > 1
        ]
        shared.sort(key=lambda part: part[0])
        return [SharedCell(members, count, partial(shape, region)) for region, members, count in shared]

    def _hold(self, numbers: IntArray) -> HeldCells:
        """Return what is held where these distinct regions are, each at a place of its own."""
        key = numbers.tobytes()
        held = self._held.get(key)
        if held is None:
            region_at = {index: self._regions.region(number) for index, number in enumerate(numbers.tolist())}
            held_cells = []
            for cell in cells(region_at):
                held_cells.append(HeldCell(cell.devices, cell.region, volume(cell.region)))
            held = self._held[key] = HeldCells(
                tuple(held_cells), all(len(cell.places) == 1 for cell in held_cells)
            )
        return held
