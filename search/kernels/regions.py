"""The regions of a value that tasks make and read, what they have in common, and its fragment from them.

A region is a product of index sets, one a dim. What they are derived from are words, addressed by where they start:

    index set   the number of its indexes, that of its intervals, and of each of these where it starts and stops
    cut         for every combination of parts of the axes that a dim follows (row-major), its index set
    side        an operand under given degrees: its tasks, the replicas of each part, its dims; of every dim its cut,
                the number of axes that split it, and of each of these its stride among tasks and its degree
"""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, hot, inner, inner_with_arrays
from search.kernels.exchange import write_exchange
from search.kernels.records import Array, ExchangeLinks, Overlaps, Readers, Sources

SIDE_WORDS = 3


@inner_with_arrays
def write_value(
    arena: Array,
    at: int,
    words: Array,
    common_K3: Array,
    ports: Array,
    links: ExchangeLinks,
    item_bytes: int,
    summable: int,
) -> int:
    """Write a value fragment at `at`; return its words, or minus the words needed where the arena is too short.

    common_K3: room for pairs of index sets, and how many indexes both have; -1 where there is none.
    ports: of the value's producer, then of every reading, where its side and the devices of its tasks are.
    """
    source, source_device_at = ports[0], ports[1]
    tasks, replicas = words[source], words[source + 1]
    readings, groups = len(ports) // 2 - 1, tasks // replicas
    pointers = np.zeros(readings + 1, np.int64)
    for reading in range(readings):
        pointers[reading + 1] = pointers[reading] + words[ports[2 * reading + 2]]
    count = pointers[readings]
    set_TD = np.empty((count + groups, words[source + 2]), np.int64)
    reader_device = np.empty(count, np.int64)
    for reading in range(readings):
        device_at, first = ports[2 * reading + 3], pointers[reading]
        write_index_sets(words, ports[2 * reading + 2], 1, set_TD[first:])
        for task in range(pointers[reading + 1] - first):
            reader_device[first + task] = words[device_at + task]
    write_index_sets(words, source, replicas, set_TD[count:])
    region_T, first_R = number_regions(set_TD)
    source_region, source_device = np.empty(tasks, np.int64), np.empty(tasks, np.int64)
    for task in range(tasks):
        source_region[task] = region_T[count + task // replicas]
        source_device[task] = words[source_device_at + task]
    read = 0
    while read < len(first_R) and first_R[read] < count:
        read += 1
    region_elements = np.ones(read, np.int64)
    for region in range(read):
        for dim in range(set_TD.shape[1]):
            region_elements[region] *= words[set_TD[first_R[region], dim]]
    return write_exchange(
        arena,
        at,
        Sources(source_device, source_region, replicas),
        Readers(pointers, reader_device, region_T[:count], region_elements),
        find_overlaps(words, common_K3, set_TD, first_R[:read], region_elements, region_T[count:], source),
        links,
        item_bytes,
        summable,
    )


@entry
def find_regions(words: Array, side: int) -> tuple[Array, Array]:
    """Return the number of each task's region, counted from 0 as they are met, and the index sets of these."""
    set_TD = np.empty((words[side], words[side + 2]), np.int64)
    write_index_sets(words, side, 1, set_TD)
    region_T, first_R = number_regions(set_TD)
    return region_T, set_TD[first_R]


@inner
def write_index_sets(words: Array, side: int, step: int, set_TD: Array) -> None:
    """Write the index sets of every task of a side whose number is a multiple of `step`."""
    at = side + SIDE_WORDS
    for dim in range(words[side + 2]):
        cut, axes = words[at], words[at + 1]
        at += 2
        for row in range(words[side] // step):
            code = 0
            for axis in range(axes):
                degree = words[at + 2 * axis + 1]
                code = code * degree + row * step // words[at + 2 * axis] % degree
            set_TD[row, dim] = words[cut + code]
        at += 2 * axes


@inner_with_arrays
def number_regions(set_TD: Array) -> tuple[Array, Array]:
    """Return the number of each row's region, counted from 0 as they are met, and the first row of each."""
    rows, dims = set_TD.shape
    slots = 1
    while slots < 2 * rows:
        slots *= 2
    region_of = np.full(slots, -1, np.int64)
    region_T, first_R = np.empty(rows, np.int64), np.empty(rows, np.int64)
    regions = 0
    for row in range(rows):
        slot = 0
        for dim in range(dims):
            # Below 2^62, so that it overflows without a compiler neither.
            slot = (slot * 1_000_003 + set_TD[row, dim] * 7_919) & 0xFFFFFFFF
        slot = (slot ^ slot >> 16) & (slots - 1)
        while region_of[slot] >= 0 and are_different(set_TD, first_R[region_of[slot]], row):
            slot = (slot + 1) & (slots - 1)
        if region_of[slot] < 0:
            region_of[slot] = regions
            first_R[regions] = row
            regions += 1
        region_T[row] = region_of[slot]
    return region_T, first_R[:regions].copy()


@inner
def are_different(set_TD: Array, row: int, other: int) -> bool:
    """Return whether the regions of two rows are different ones."""
    different = False
    for dim in range(set_TD.shape[1]):
        different = different or set_TD[row, dim] != set_TD[other, dim]
    return different


@inner
def are_apart(words: Array, side: int) -> bool:
    """Return whether any two regions of a side are surely apart or equal: parts of its dims follow one another."""
    at = side + SIDE_WORDS
    for _ in range(words[side + 2]):
        cut, axes = words[at], words[at + 1]
        parts = 1
        for axis in range(axes):
            parts *= words[at + 2 * axis + 3]
        for part in range(parts):
            index_set = words[cut + part]
            if words[index_set + 1] != 1:
                return False
            if part > 0 and words[index_set + 2] < words[words[cut + part - 1] + 3]:
                return False
        at += 2 + 2 * axes
    return True


@inner_with_arrays
def find_overlaps(
    words: Array,
    common_K3: Array,
    set_TD: Array,
    row_R: Array,
    elements_R: Array,
    region_G: Array,
    side: int,
) -> Overlaps:
    """Return what regions have in common with those of groups of replicas.

    row_R: of each region a row of set_TD, whose last rows are those of the groups. region_G: the region of each group,
    beyond those of row_R where it is none of them. side: of the groups.
    """
    dims, groups = set_TD.shape[1], len(region_G)
    first_group = len(set_TD) - groups
    pointers = np.zeros(len(row_R) + 1, np.int64)
    group_of, elements = np.empty(len(row_R) * groups, np.int64), np.empty(len(row_R) * groups, np.int64)
    # Of regions that groups have: the first such group; of these groups the next one.
    first_R, next_G = np.full(len(row_R), -1, np.int64), np.empty(groups, np.int64)
    if are_apart(words, side):
        for group in range(groups - 1, -1, -1):
            region = region_G[group]
            if region < len(row_R) and elements_R[region] > 0:
                next_G[group], first_R[region] = first_R[region], group
    # Of the latest region of no group: the groups that it meets in the first dims, and what it has in common with them
    # there.
    met_DG, product_DG = np.empty((dims + 1, groups), np.int64), np.empty((dims + 1, groups), np.int64)
    count_D = np.full(dims + 1, groups, np.int64)
    for group in range(groups):
        met_DG[0, group], product_DG[0, group] = group, 1
    end = 0
    latest = -1
    for region in range(len(row_R)):
        group = first_R[region]
        while group >= 0:
            group_of[end], elements[end] = group, elements_R[region]
            end += 1
            group = next_G[group]
        if first_R[region] >= 0:
            pointers[region + 1] = end
            continue
        is_other = latest < 0
        for dim in range(dims):
            mine = set_TD[row_R[region], dim]
            is_other = is_other or mine != set_TD[row_R[latest], dim]
            if is_other:
                count = 0
                for index in range(count_D[dim]):
                    group = met_DG[dim, index]
                    common = common_indexes(words, common_K3, mine, set_TD[first_group + group, dim])
                    if common:
                        met_DG[dim + 1, count], product_DG[dim + 1, count] = (
                            group,
                            common * product_DG[dim, index],
                        )
                        count += 1
                count_D[dim + 1] = count
        for index in range(count_D[dims]):
            group_of[end], elements[end] = met_DG[dims, index], product_DG[dims, index]
            end += 1
        pointers[region + 1] = end
        latest = region
    return Overlaps(pointers, group_of, elements)


@hot
def common_indexes(words: Array, common_K3: Array, mine: int, theirs: int) -> int:
    """Return the number of indexes in both of two index sets."""
    if mine == theirs:
        return int(words[mine])
    mine_end, theirs_end = mine + 2 + 2 * words[mine + 1], theirs + 2 + 2 * words[theirs + 1]
    if mine_end == mine + 4 and theirs_end == theirs + 4:
        both = min(words[mine + 3], words[theirs + 3]) - max(words[mine + 2], words[theirs + 2])
        return int(max(both, 0))
    row = (mine * 1_000_003 + theirs) % len(common_K3)
    if common_K3[row, 0] == mine and common_K3[row, 1] == theirs:
        return int(common_K3[row, 2])
    count, left, right = 0, mine + 2, theirs + 2
    while left < mine_end and right < theirs_end:
        stop = min(words[left + 1], words[right + 1])
        count += max(stop - max(words[left], words[right]), 0)
        if words[left + 1] == stop:
            left += 2
        else:
            right += 2
    common_K3[row, 0], common_K3[row, 1], common_K3[row, 2] = mine, theirs, count
    return count
