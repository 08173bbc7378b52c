"""Index sets of tensor dims, and regions of tensors as products of them.

An index set is a sorted tuple of disjoint, non-adjacent half-open intervals. A region is one index set a dim.
Splitting an axis that is an inner factor of a dim (heads inside a fused QKV) yields several intervals a dim,
so plain boxes over dims would not do. Everything here is exact integer arithmetic; nothing is rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Interval = tuple[int, int]
IndexSet = tuple[Interval, ...]
Region = tuple[IndexSet, ...]


def full(size: int) -> IndexSet:
    """Return all indexes of a dim of `size` elements."""
    return ((0, size),) if size > 0 else ()


def part(size: int, degree: int, index: int) -> Interval:
    """Return part `index` of `size` elements cut into `degree` parts that differ by at most one.

    The first `size % degree` parts are the larger ones, as in `torch.tensor_split`.
    """
    quotient, remainder = divmod(size, degree)
    start = index * quotient + min(index, remainder)
    return start, start + quotient + (1 if index < remainder else 0)


def count(indexes: IndexSet) -> int:
    """Return the number of indexes."""
    if len(indexes) == 1:  # nearly always
        return indexes[0][1] - indexes[0][0]
    return sum(stop - start for start, stop in indexes)


def normalize(intervals: Sequence[Interval]) -> IndexSet:
    """Return the union of arbitrary intervals as an index set."""
    merged: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersect(left: IndexSet, right: IndexSet) -> IndexSet:
    """Return the indexes in both sets."""
    if left == right:
        return left
    result: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        stop = min(left[i][1], right[j][1])
        if start < stop:
            result.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)


def product(outer: IndexSet, inner: IndexSet, inner_size: int) -> IndexSet:
    """Return {o * inner_size + i} for o in `outer` and i in `inner`, a mixed-radix product."""
    if inner == full(inner_size):
        return tuple((start * inner_size, stop * inner_size) for start, stop in outer)
    intervals = [
        (index * inner_size + start, index * inner_size + stop)
        for outer_start, outer_stop in outer
        for index in range(outer_start, outer_stop)
        for start, stop in inner
    ]
    return normalize(intervals)


def positions(indexes: IndexSet, within: IndexSet) -> IndexSet:
    """Return where `indexes` stand in the dense enumeration of `within`, of which they must be a subset.

    A task holds a region densely: index k of its local dim is the k-th index of the region's set.
    """
    result: list[Interval] = []
    offset = 0
    i = 0
    for start, stop in within:
        while i < len(indexes) and indexes[i][0] < stop:
            low, high = indexes[i]
            result.append((offset + max(low, start) - start, offset + min(high, stop) - start))
            if high > stop:
                break
            i += 1
        offset += stop - start
    return normalize(result)


def slice_of(indexes: IndexSet, start: int, stop: int) -> IndexSet:
    """Return the indexes that stand at `start` up to `stop` in the dense enumeration of a set."""
    result: list[Interval] = []
    offset = 0
    for low, high in indexes:
        first, last = max(low, low + start - offset), min(high, low + stop - offset)
        if first < last:
            result.append((first, last))
        offset += high - low
    return tuple(result)


def volume(region: Region) -> int:
    """Return the number of elements of a region; a region of no dims (a scalar) has one."""
    return prod(map(count, region))


def shape(region: Region) -> tuple[int, ...]:
    """Return the shape of the dense tensor that holds a region."""
    return tuple(
        [
            indexes[0][1] - indexes[0][0] if len(indexes) == 1 else count(indexes)  # nearly always
            for indexes in region
        ]
    )


def intersect_regions(left: Region, right: Region) -> Region | None:
    """Return the common region, or None where two regions of one tensor do not overlap."""
    result: list[IndexSet] = []
    for mine, theirs in zip(left, right, strict=True):
        common = intersect(mine, theirs)
        if not common:
            return None
        result.append(common)
    return tuple(result)


def full_region(sizes: Sequence[int]) -> Region:
    """Return the region of a whole tensor of shape `sizes`."""
    return tuple(full(size) for size in sizes)


def relative_region(region: Region, within: Region) -> Region:
    """Return `region` in the local indexes of a dense tensor that holds `within`."""
    return tuple(positions(mine, theirs) for mine, theirs in zip(region, within, strict=True))
