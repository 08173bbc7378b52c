"""Gathers of weights that are kept in shares (FSDP's unshard): which, before which operator, and their prefetch."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.fragments import cells_of, static_header
from search.kernels.records import (
    SHARED_WEIGHT,
    Array,
    Fragments,
    GatherArrays,
    GraphArrays,
    Groups,
    ResourceSets,
)


@inner
def find_gathered_weights(
    graph: GraphArrays,
    fragments: Fragments,
    arena: Array,
    operator_active: Array,
    groups: Groups,
    gathers: GatherArrays,
) -> int:
    """Find before which operator each weight is needed first, forward and backward; return how many are gathered."""
    gathers.weight_2W[:] = -1
    count = 0
    for weight in range(graph.weight_count):
        first, last = graph.reader_ptr[weight], graph.reader_ptr[weight + 1]
        static = static_header(arena, fragments.static_at[weight])
        if first == last or static.sharing != SHARED_WEIGHT or static.cells == 0:
            continue
        count += 1
        gathers.weight_2W[0, weight] = graph.reader[first]
        for index in range(first, last):
            if operator_active[graph.reader[index]]:
                gathers.weight_2W[1, weight] = groups.last_O[graph.reader[index]]
    return count


@entry
def find_gathers(
    graph: GraphArrays,
    fragments: Fragments,
    arena: Array,
    operator_active: Array,
    groups: Groups,
    gathers: GatherArrays,
    least_bytes: int,
) -> bool:
    """Find which weights are gathered before which operator, as `graph.plan` does; False where arrays are too short."""
    gathers.first_2O[:] = 0
    gathers.last_2O[:] = 0
    gathers.latest_D[:] = -1
    gathers.blocked_D[:] = -1
    gathers.reduced_D[:] = -1
    gathers.counts[:] = 0
    if find_gathered_weights(graph, fragments, arena, operator_active, groups, gathers) == 0:
        return True
    operators = len(fragments.operator_at)
    count = 0
    for side in range(2):
        # The weights of each operator as linked lists, in their order.
        head = np.full(operators, -1, np.int64)
        following = np.empty(graph.weight_count, np.int64)
        for weight in range(graph.weight_count - 1, -1, -1):
            operator = gathers.weight_2W[side, weight]
            if operator >= 0:
                following[weight] = head[operator]
                head[operator] = weight
        gathering, first, size_bytes = -1, count, 0
        for step in range(operators):
            operator = step if side == 0 else operators - 1 - step
            weight = head[operator]
            if weight < 0:
                continue
            if gathering >= 0 and gathers.stage_O[operator] != gathers.stage_O[gathering]:
                gathering = -1
            if gathering < 0:
                gathering, first, size_bytes = operator, count, 0
            while weight >= 0:
                gathers.weight_2W[side, weight] = gathering
                for cell in cells_of(arena, fragments.static_at[weight]):
                    number = first
                    while number < count and gathers.resource_set[number] != cell.gather_resource_set:
                        number += 1
                    if number == count:
                        if count + 1 > len(gathers.resource_set):
                            return False
                        gathers.resource_set[count] = cell.gather_resource_set
                        gathers.size_bytes[count] = 0
                        gathers.operator[count] = gathering
                        count += 1
                    gathers.size_bytes[number] += cell.size_bytes
                    size_bytes += cell.size_bytes
                weight = following[weight]
            gathers.first_2O[side, gathering] = first
            gathers.last_2O[side, gathering] = count
            if size_bytes >= least_bytes:
                gathering = -1
        if side == 0:
            gathers.counts[0] = count
    gathers.counts[1] = count
    return True


@inner
def next_gathers(gathers: GatherArrays, side: int, operator: int) -> tuple[int, int]:
    """Return which gathers begin before an operator: those that the next one needs; before the first, its own too.

    The next and the first one are of the operator's stage.
    """
    first, last = gathers.first_2O[side, operator], gathers.last_2O[side, operator]
    if first == last:
        return 0, 0
    begin, end = (0, gathers.counts[0]) if side == 0 else (gathers.counts[0], gathers.counts[1])
    stage = gathers.stage_O[operator]
    is_first = first == begin or gathers.stage_O[gathers.operator[first - 1]] != stage
    is_last = last == end or gathers.stage_O[gathers.operator[last]] != stage
    upto = last if is_last else gathers.last_2O[side, gathers.operator[last]]
    return first if is_first else last, upto


@inner
def takes_part(sets: ResourceSets, resource_set: int, device: int) -> bool:
    """Return whether a device is one of those of a device set."""
    is_end = False
    for end in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
        is_end = is_end or sets.end[end] == device
    return is_end
