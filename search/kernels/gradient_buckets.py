"""Buckets of gradients that are summed together, and gathers of weights that are kept in shares."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.records import (
    CELL_STRIDE,
    HOLDER_STRIDE,
    SHARED_WEIGHT,
    STATIC_HEADER,
    Array,
    Buckets,
    Gathers,
    GraphArrays,
    Groups,
    Holds,
    Units,
)


@entry
def fill_buckets(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    operator_active: Array,
    buckets: Buckets,
    bucket_bytes: int,
) -> bool:
    """Fill the gradient buckets as `graph.plan` does; return False where the arrays are too short.

    A bucket's number is the order in which it was opened; `buckets.order` is that of the all-reduces.
    """
    operators = len(units.operator_at)
    complete_at = np.full(graph.weight_count, -1, np.int64)
    ptr = np.zeros(operators + 1, np.int64)
    for weight in range(graph.weight_count):
        for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
            operator = graph.weight_user[user]
            if operator_active[operator] and (complete_at[weight] < 0 or operator < complete_at[weight]):
                complete_at[weight] = operator
        if complete_at[weight] >= 0:
            ptr[complete_at[weight] + 1] += 1
    for operator in range(operators):
        ptr[operator + 1] += ptr[operator]
    weights = np.empty(ptr[operators], np.int64)
    place = ptr.copy()
    for weight in range(graph.weight_count):
        if complete_at[weight] >= 0:
            weights[place[complete_at[weight]]] = weight
            place[complete_at[weight]] += 1
    opened = closed = entries = 0
    buckets.filling[:] = -1
    for operator in range(operators - 1, -1, -1):
        for position in range(ptr[operator], ptr[operator + 1]):
            weight = weights[position]
            at = units.static_at[weight]
            sharing = arena[at + 2]
            cell_at = at + STATIC_HEADER + HOLDER_STRIDE * arena[at]
            for cell in range(arena[at + 1]):
                if opened + 1 > len(buckets.hold) or entries + 1 > len(buckets.entry_weight):
                    return False
                word = cell_at + CELL_STRIDE * cell
                hold = arena[word]
                # One series a kind of sharing: the holds of the sums are the same for both.
                series = arena[word + 2] if sharing == SHARED_WEIGHT else hold
                bucket = buckets.filling[series]
                if bucket < 0:
                    bucket = opened
                    opened += 1
                    buckets.filling[series] = bucket
                    buckets.hold[bucket] = hold
                    buckets.sharing[bucket] = sharing
                    buckets.gather[bucket] = arena[word + 2]
                    buckets.size_bytes[bucket] = 0
                    buckets.after[bucket] = -1
                    buckets.first_entry[bucket] = entries
                elif buckets.entry_weight[buckets.last_entry[bucket]] != weight:
                    buckets.entry_next[buckets.last_entry[bucket]] = entries
                # Another cell of a weight that the bucket has already waits for the same tasks.
                if (
                    buckets.size_bytes[bucket] == 0
                    or buckets.entry_weight[buckets.last_entry[bucket]] != weight
                ):
                    buckets.entry_weight[entries] = weight
                    buckets.entry_next[entries] = -1
                    buckets.last_entry[bucket] = entries
                    entries += 1
                buckets.size_bytes[bucket] += arena[word + 1]
                if buckets.size_bytes[bucket] >= bucket_bytes:
                    buckets.after[bucket] = operator
                    buckets.order[closed] = bucket
                    closed += 1
                    buckets.filling[series] = -1
    for bucket in range(opened):
        if buckets.after[bucket] < 0:
            buckets.after[bucket] = 0
            buckets.order[closed] = bucket
            closed += 1
    buckets.counts[0] = opened
    buckets.counts[1] = entries
    return True


@entry
def find_gathers(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    operator_active: Array,
    groups: Groups,
    gathers: Gathers,
    least_bytes: int,
) -> bool:
    """Find what is gathered before which operator, as `graph.plan` does; return False where arrays are too short."""
    gathers.first_2O[:] = 0
    gathers.last_2O[:] = 0
    gathers.weight_2W[:] = -1
    gathers.latest_D[:] = -1
    gathers.blocked_D[:] = -1
    gathers.reduced_D[:] = -1
    gathers.counts[:] = 0
    found = 0
    for weight in range(graph.weight_count):
        first, last = graph.reader_ptr[weight], graph.reader_ptr[weight + 1]
        at = units.static_at[weight]
        if first == last or arena[at + 2] != SHARED_WEIGHT or arena[at + 1] == 0:
            continue
        found += 1
        gathers.weight_2W[0, weight] = graph.reader[first]
        for place in range(first, last):
            if operator_active[graph.reader[place]]:
                gathers.weight_2W[1, weight] = groups.last_O[graph.reader[place]]
    if found == 0:
        return True
    operators = len(units.operator_at)
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
        unit, first, size_bytes = -1, count, 0
        for place in range(operators):
            operator = place if side == 0 else operators - 1 - place
            weight = head[operator]
            if weight < 0:
                continue
            if unit < 0:
                unit, first, size_bytes = operator, count, 0
            while weight >= 0:
                gathers.weight_2W[side, weight] = unit
                at = units.static_at[weight]
                cell_at = at + STATIC_HEADER + HOLDER_STRIDE * arena[at]
                for cell in range(arena[at + 1]):
                    word = cell_at + CELL_STRIDE * cell
                    number = first
                    while number < count and gathers.hold[number] != arena[word + 2]:
                        number += 1
                    if number == count:
                        if count + 1 > len(gathers.hold):
                            return False
                        gathers.hold[count] = arena[word + 2]
                        gathers.size_bytes[count] = 0
                        gathers.operator[count] = unit
                        count += 1
                    gathers.size_bytes[number] += arena[word + 1]
                    size_bytes += arena[word + 1]
                weight = following[weight]
            gathers.first_2O[side, unit] = first
            gathers.last_2O[side, unit] = count
            if size_bytes >= least_bytes:
                unit = -1
        if side == 0:
            gathers.counts[0] = count
    gathers.counts[1] = count
    return True


@inner
def next_gathers(gathers: Gathers, side: int, operator: int) -> tuple[int, int]:
    """Return which gathers begin before an operator: those that the next one needs; before the first, its own too."""
    first, last = gathers.first_2O[side, operator], gathers.last_2O[side, operator]
    if first == last:
        return 0, 0
    begin, end = (0, gathers.counts[0]) if side == 0 else (gathers.counts[0], gathers.counts[1])
    upto = last if last == end else gathers.last_2O[side, gathers.operator[last]]
    return first if first == begin else last, upto


@inner
def takes_part(holds: Holds, hold: int, device: int) -> bool:
    """Return whether a device is one of those of a device set."""
    found = False
    for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        found = found or holds.end[place] == device
    return found
