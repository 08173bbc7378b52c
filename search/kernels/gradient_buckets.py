"""Buckets of gradients that are summed together: what each holds, and after which operator's backward it starts."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner_with_arrays
from search.kernels.fragments import cells_of, static_header
from search.kernels.records import SHARED_WEIGHT, Array, Buckets, Fragments, GraphArrays


@inner_with_arrays
def weights_by_operator(graph: GraphArrays, operator_active: Array) -> tuple[Array, Array]:
    """Return the weights whose gradients the backward of each operator completes: pointers, and weights."""
    operators = len(operator_active)
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
    following = ptr.copy()
    for weight in range(graph.weight_count):
        if complete_at[weight] >= 0:
            weights[following[complete_at[weight]]] = weight
            following[complete_at[weight]] += 1
    return ptr, weights


@entry
def fill_buckets(
    graph: GraphArrays,
    fragments: Fragments,
    arena: Array,
    operator_active: Array,
    buckets: Buckets,
    bucket_bytes: int,
    ends: Array,
) -> bool:
    """Fill the gradient buckets as `graph.plan` does; return False where the arrays are too short.

    A bucket's number is the order in which it was opened; `buckets.order` is that of the all-reduces. Each starts after
    the backward of the operator `buckets.after`: this is its overlap with the backward. `ends`: operators after which
    no bucket stays open, descending, the first one last.
    """
    ptr, weights = weights_by_operator(graph, operator_active)
    opened = closed = entries = ended = first_open = 0
    buckets.filling[:] = -1
    for operator in range(len(operator_active) - 1, -1, -1):
        for position in range(ptr[operator], ptr[operator + 1]):
            weight = weights[position]
            at = fragments.static_at[weight]
            sharing = static_header(arena, at).sharing
            for cell in cells_of(arena, at):
                if opened + 1 > len(buckets.resource_set) or entries + 1 > len(buckets.entry_weight):
                    return False
                # One series a kind of sharing: the resource sets of the sums are the same for both.
                series = cell.gather_resource_set if sharing == SHARED_WEIGHT else cell.resource_set
                bucket = buckets.filling[series]
                if bucket < 0:
                    bucket = opened
                    opened += 1
                    buckets.filling[series] = bucket
                    buckets.resource_set[bucket] = cell.resource_set
                    buckets.sharing[bucket] = sharing
                    buckets.gather[bucket] = cell.gather_resource_set
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
                buckets.size_bytes[bucket] += cell.size_bytes
                if buckets.size_bytes[bucket] >= bucket_bytes:
                    buckets.after[bucket] = operator
                    buckets.order[closed] = bucket
                    closed += 1
                    buckets.filling[series] = -1
        if operator == ends[ended]:
            for bucket in range(first_open, opened):
                if buckets.after[bucket] < 0:
                    buckets.after[bucket] = operator
                    buckets.order[closed] = bucket
                    closed += 1
            first_open = opened
            ended += 1
            if ended < len(ends):
                buckets.filling[:] = -1
    buckets.counts[0] = opened
    buckets.counts[1] = entries
    return True
