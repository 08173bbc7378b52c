"""The fragments of weights, buffers and inputs that one operator reads, each device a single region of them."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import inner, inner_with_arrays
from search.kernels.collective_list import CollectiveList, append_collective, append_members, has_room
from search.kernels.fragments import (
    CELL,
    CELL_WORDS,
    HOLDER_WORDS,
    STATIC_WORDS,
    cells_of,
    holders_of,
    static_header,
    word_of,
)
from search.kernels.records import ALL_REDUCE, Array
from search.kernels.regions import number_regions, write_index_sets

CELL_RESOURCE_SET_WORD = word_of(CELL, "resource_set")


@inner_with_arrays
def write_static(
    arena: Array,
    at: int,
    words: Array,
    side: int,
    devices_at: int,
    item_bytes: int,
    is_summed: int,
    listed: CollectiveList,
) -> int:
    """Write a static fragment at `at`, of which nothing is shared; return its words, or minus the words needed.

    Returns 0 where it is to be written elsewhere: two tasks are on one device, or the list of collectives is full.
    is_summed: whether the gradients of what several devices hold are summed. Regions must be apart or equal then.
    """
    tasks, devices = words[side], len(listed.is_member_D)
    set_TD = np.empty((tasks, words[side + 2]), np.int64)
    write_index_sets(words, side, 1, set_TD)
    region_T, first_R = number_regions(set_TD)
    task_D = np.full(devices, -1, np.int64)
    holders_R, elements_R = np.zeros(len(first_R), np.int64), np.ones(len(first_R), np.int64)
    for task in range(tasks):
        if task_D[words[devices_at + task]] >= 0:
            return 0
        task_D[words[devices_at + task]] = task
        holders_R[region_T[task]] += 1
    # Of regions that several devices hold: each, in the order of their indexes.
    cell_C = np.empty(len(first_R), np.int64)
    cells = 0
    for region in range(len(first_R)):
        for dim in range(set_TD.shape[1]):
            elements_R[region] *= words[set_TD[first_R[region], dim]]
        if is_summed != 0 and holders_R[region] > 1:
            place = cells
            while place > 0 and is_before(words, set_TD, first_R[region], first_R[cell_C[place - 1]]):
                cell_C[place] = cell_C[place - 1]
                place -= 1
            cell_C[place] = region
            cells += 1
    size = STATIC_WORDS + HOLDER_WORDS * tasks + CELL_WORDS * cells
    if at + size > len(arena):
        return -int(size)
    if not has_room(listed, cells, tasks):
        return 0
    header = static_header(arena, at)
    header.holders, header.cells, header.sharing = tasks, cells, 0
    targets, holder = holders_of(arena, at), 0
    for device in range(devices):
        if task_D[device] >= 0:
            target, elements = targets[holder], elements_R[region_T[task_D[device]]]
            target.device, target.kept, target.updated, target.held = device, elements, elements, elements
            holder += 1
    for number in range(cells):
        region = cell_C[number]
        cell = cells_of(arena, at)[number]
        cell.resource_set = cell.gather_resource_set = -1
        cell.size_bytes = elements_R[region] * item_bytes
        for task in range(tasks):
            if region_T[task] == region:
                listed.is_member_D[words[devices_at + task]] = 1
        number_at = at + STATIC_WORDS + HOLDER_WORDS * tasks + CELL_WORDS * number + CELL_RESOURCE_SET_WORD
        append_collective(listed, number_at, -1, ALL_REDUCE, -1, append_members(listed), 0)
    return int(size)


@inner
def is_before(words: Array, set_TD: Array, row: int, other: int) -> bool:
    """Return whether a row's region comes before another one, from which it is apart: by its first indexes."""
    for dim in range(set_TD.shape[1]):
        mine, theirs = set_TD[row, dim], set_TD[other, dim]
        if mine != theirs:
            # Behind the numbers of its indexes and intervals stands where an index set starts.
            return bool(words[mine + 2] < words[theirs + 2])
    return False
