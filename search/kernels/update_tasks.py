"""The task graph of the optimizer's updates, and of the gathers of updated weights."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.collective_cost import collective_ns
from search.kernels.forward_tasks import put
from search.kernels.records import (
    BACKWARD,
    SHARED_UPDATE,
    SYNCHRONIZE,
    UPDATE,
    UPDATE_GATHER,
    Array,
    Buckets,
    Holds,
    Scratch,
    Tasks,
)


@entry
def lay_out_updates(
    tasks: Tasks, scratch: Scratch, holds: Holds, buckets: Buckets, update_ns_D: Array, update_origin_D: Array
) -> bool:
    """Write one update a device that updates weights, and the gathers of shares that are then new.

    Returns False where arrays are too short.
    """
    devices = len(update_ns_D)
    waits_D, place_D = np.zeros(devices, np.int64), np.full(devices, -1, np.int64)
    return write_updates(
        tasks, scratch, holds, update_ns_D, update_origin_D, waits_D, place_D
    ) and write_update_gathers(tasks, scratch, holds, buckets, place_D)


@inner
def write_update_gathers(
    tasks: Tasks, scratch: Scratch, holds: Holds, buckets: Buckets, task_D: Array
) -> bool:
    """Write the gathers of updated shares, in the order of their buckets; `task_D` is overwritten."""
    n, e = scratch.counts[0], scratch.counts[1]
    task_D[:] = -1
    task = n - 1
    while task >= 0 and tasks.kind[task] == UPDATE:
        task_D[tasks.hold[task]] = task
        task -= 1
    for position in range(buckets.counts[0]):
        bucket = buckets.order[position]
        if buckets.sharing[bucket] != SHARED_UPDATE:
            continue
        hold, size_bytes = buckets.gather[bucket], buckets.size_bytes[bucket]
        first, last = holds.end_ptr[hold], holds.end_ptr[hold + 1]
        if n + 1 > len(tasks.kind) or e + last - first > len(tasks.pred):
            return False
        run_ns = collective_ns(holds, hold, size_bytes)
        put(tasks, n, UPDATE_GATHER, run_ns, hold, holds.origin[hold], position, 0, size_bytes)
        for place in range(first, last):
            if task_D[holds.end[place]] >= 0:
                tasks.pred[e] = task_D[holds.end[place]]
                e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def write_updates(
    tasks: Tasks,
    scratch: Scratch,
    holds: Holds,
    update_ns_D: Array,
    update_origin_D: Array,
    waits_D: Array,
    place_D: Array,
) -> bool:
    """Write the updates as `lay_out_updates`; `waits_D` is 0 and `place_D` -1 everywhere."""
    devices = len(update_ns_D)
    n, e = scratch.counts[0], scratch.counts[1]
    for task in range(n):
        if tasks.kind[task] == BACKWARD:
            waits_D[tasks.hold[task]] += 1
        elif tasks.kind[task] == SYNCHRONIZE:
            for end in range(holds.end_ptr[tasks.hold[task]], holds.end_ptr[tasks.hold[task] + 1]):
                waits_D[holds.end[end]] += 1
    last = n
    for device in range(devices):
        if scratch.elements_D[device] == 0:
            continue
        if last + 1 > len(tasks.kind) or e + waits_D[device] > len(tasks.pred):
            return False
        put(tasks, last, UPDATE, update_ns_D[device], device, update_origin_D[device], device, 0, 0)
        place_D[device] = e
        e += waits_D[device]
        last += 1
        tasks.pred_ptr[last] = e
    for task in range(n):
        if tasks.kind[task] == BACKWARD:
            device = tasks.hold[task]
            if place_D[device] >= 0:
                tasks.pred[place_D[device]] = task
                place_D[device] += 1
        elif tasks.kind[task] == SYNCHRONIZE:
            for end in range(holds.end_ptr[tasks.hold[task]], holds.end_ptr[tasks.hold[task] + 1]):
                device = holds.end[end]
                if place_D[device] >= 0:
                    tasks.pred[place_D[device]] = task
                    place_D[device] += 1
    scratch.counts[0] = last
    scratch.counts[1] = e
    return True
