"""The placement of weights: the region of a weight that each device holds, and the regions to synchronize.

A device holds the smallest product of index sets that covers what its tasks read. Elements held by the same set of
devices form a cell; a cell's gradient is the sum over its holders, found by one all-reduce. Shared weights (forty
unrolled steps) are one weight here: each cell is synchronized once, after its last gradient.

Where its holders share a cell (`graph.strategy.Sharding`), each has a slice of it along one dim: the first that is long
enough for all of them, else the longest. Some then have nothing of a small cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from graph.intervals import IndexSet, Region, full_region, normalize, part, shape, slice_of, volume


@dataclass(frozen=True, slots=True)
class WeightCell:
    """A region of a weight and the devices (ascending) that hold it."""

    region: Region
    devices: tuple[int, ...]


def held_regions(needed: Iterable[tuple[int, Region]]) -> dict[int, Region]:
    """Return, for each device, the product of index sets that covers all its needed regions."""
    regions: dict[int, list[Region]] = {}
    for device, region in needed:
        of_device = regions.setdefault(device, [])
        if region not in of_device:
            of_device.append(region)
    return {device: cover(regions[device]) for device in sorted(regions)}


def cover(regions: Sequence[Region]) -> Region:
    """Return the smallest product of index sets that contains all `regions`."""
    if len(regions) == 1:
        return regions[0]
    return tuple(
        normalize([interval for indexes in dim for interval in indexes]) for dim in zip(*regions, strict=True)
    )


def _classes(index_sets: Sequence[IndexSet]) -> list[tuple[int, IndexSet]]:
    """Return the indexes of one dim by the sets of `index_sets` that contain them: the positions of these as bits."""
    placed: dict[IndexSet, int] = {}
    for number, indexes in enumerate(index_sets):
        placed[indexes] = placed.get(indexes, 0) | 1 << number
    # One sweep over all bounds: at each, some of the distinct sets begin or end, and with them their places.
    turns: dict[int, int] = {}
    for indexes, places in placed.items():
        for interval in indexes:
            for bound in interval:
                turns[bound] = turns.get(bound, 0) ^ places
    grouped: dict[int, list[tuple[int, int]]] = {}
    inside = 0
    for start, stop in itertools.pairwise(sorted(turns)):
        inside ^= turns[start]
        if inside:
            grouped.setdefault(inside, []).append((start, stop))
    return [
        (inside, tuple(intervals) if len(intervals) == 1 else normalize(intervals))
        for inside, intervals in grouped.items()
    ]


def _bits(number: int) -> Iterator[int]:
    """Yield the places of the bits that are set, ascending; of a thousand there may be one."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def cells(held: Mapping[int, Region]) -> tuple[WeightCell, ...]:
    """Return the cells of a weight: disjoint, covering every held element, each with its exact holders."""
    devices = sorted(held)
    first = held[devices[0]]
    if all(held[device] == first for device in devices):
        return (WeightCell(first, tuple(devices)),)
    # Dim by dim, the remaining holders (bits) of each combination of index sets so far.
    products: list[tuple[int, Region]] = [((1 << len(devices)) - 1, ())]
    for dim in range(len(first)):
        classes = _classes([held[device][dim] for device in devices])
        products = [
            (both, (*region, indexes))
            for members, region in products
            for inside, indexes in classes
            if (both := members & inside)
        ]
    return tuple(
        [WeightCell(region, tuple([devices[bit] for bit in _bits(members)])) for members, region in products]
    )


def with_every_element(held: Mapping[int, Region], sizes: Sequence[int]) -> dict[int, Region]:
    """Return a placement in which every element is held: the first holder takes all, where one is missing."""
    result = dict(held)
    if held and sum(volume(cell.region) for cell in cells(held)) < prod(sizes):
        result[min(held)] = full_region(sizes)
    return result


def share_dim(sizes: Sequence[int], holders: int) -> int:
    """Return the dim along which so many holders share a cell of these sizes; -1 for a scalar."""
    for dim, size in enumerate(sizes):
        if size >= holders:
            return dim
    return max(range(len(sizes)), key=lambda dim: sizes[dim], default=-1)


def share_elements(sizes: Sequence[int], holders: int) -> tuple[int, ...]:
    """Return how many elements each holder's share of a cell of these sizes has; the first has the most."""
    dim = share_dim(sizes, holders)
    if dim < 0:
        return (1, *(0,) * (holders - 1))
    others = prod(size for other, size in enumerate(sizes) if other != dim)
    bounds = (part(sizes[dim], holders, number) for number in range(holders))
    return tuple((stop - start) * others for start, stop in bounds)


def shares(cell: WeightCell) -> tuple[Region | None, ...]:
    """Return the share of each of a cell's holders; None where the share is empty."""
    holders = len(cell.devices)
    sizes = shape(cell.region)
    dim = share_dim(sizes, holders)
    if dim < 0:
        return (cell.region, *(None,) * (holders - 1))
    result: list[Region | None] = []
    for number in range(holders):
        indexes = slice_of(cell.region[dim], *part(sizes[dim], holders, number))
        region = (*cell.region[:dim], indexes, *cell.region[dim + 1 :])
        result.append(region if indexes else None)
    return tuple(result)


def gathered_elements(cell: WeightCell) -> int:
    """Return the elements of a cell's shares as equal slices: as many as the largest share, for each holder."""
    holders = len(cell.devices)
    return holders * share_elements(shape(cell.region), holders)[0]
