"""A lower bound of a step whose first operators alone are decided."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry
from search.kernels.records import Array, Prefix


@entry
def prefix_bound(prefix: Prefix, operators: Array, after_OD: Array) -> int:
    """Return the longest path through the chosen operators (ascending), as `search.bounds.critical_path` defines it.

    What comes from operators that are not chosen counts as nothing. after_OD: what follows the backward of an
    operator's task on a device.
    """
    never = -(1 << 52)
    parts = prefix.forward_OP.shape[1]
    longest = 0
    between = np.empty((parts, parts), np.int64)
    for operator in operators:
        head, outer = prefix.head_OP[operator], prefix.outer_OPP[operator]
        for part in range(parts):
            head[part] = never if prefix.forward_OP[operator, part] < 0 else 0
        for index in range(prefix.edge_ptr[operator], prefix.edge_ptr[operator + 1]):
            edge = prefix.edge[index]
            if not prefix.known_E[edge]:
                continue
            producer = prefix.producer_E[edge]
            for source in range(parts):
                before = prefix.head_OP[producer, source] + prefix.forward_OP[producer, source]
                if before < 0:
                    continue
                for part in range(parts):
                    if head[part] >= 0:
                        head[part] = max(head[part], before + prefix.there_EPP[edge, source, part])
        replicas = prefix.replicas_O[operator]
        for back in range(parts):
            tail = never
            if prefix.backward_OP[operator, back] >= 0:
                for task in range(back * replicas, (back + 1) * replicas):
                    after = after_OD[operator, prefix.device_OT[operator, task]]
                    tail = after if tail < 0 else min(tail, after)
            for part in range(parts):
                outer[part, back] = max(head[part] + tail, never)
        for index in range(prefix.edge_ptr[operator], prefix.edge_ptr[operator + 1]):
            edge = prefix.edge[index]
            if not (prefix.known_E[edge] and prefix.goes_back_E[edge]):
                continue
            producer = prefix.producer_E[edge]
            between[:] = never
            for part in range(parts):
                for source in range(parts):
                    there = prefix.there_EPP[edge, source, part] + prefix.forward_OP[producer, source]
                    if there < 0:
                        continue
                    for home in range(parts):
                        around = there + prefix.outer_OPP[producer, source, home]
                        between[part, home] = max(between[part, home], around)
            for part in range(parts):
                for home in range(parts):
                    if between[part, home] < 0:
                        continue
                    for back in range(parts):
                        around = (
                            between[part, home]
                            + prefix.backward_OP[producer, home]
                            + prefix.back_EPP[edge, back, home]
                        )
                        outer[part, back] = max(outer[part, back], around)
        for part in range(parts):
            for back in range(parts):
                longest = max(longest, prefix.inner_OPP[operator, part, back] + outer[part, back])
    return longest
