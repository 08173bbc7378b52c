"""The tasks of the optimizer's updates, and of the gathers of updated weights."""

from __future__ import annotations

from search.kernels.cache import inner
from search.kernels.collective_formulas import collective_ns
from search.kernels.forward_tasks import put, put_communication
from search.kernels.records import (
    BACKWARD,
    SHARED_UPDATE,
    SYNCHRONIZE,
    UPDATE,
    UPDATE_GATHER,
    Array,
    Emission,
    UpdateTimes,
)


@inner
def emit_updates(emission: Emission, updates: UpdateTimes, following_D: Array) -> None:
    """Emit one update a device that updates weights.

    following_D: 0 everywhere; the number of what each waits for is counted there, and then where the next one goes.
    """
    derivation = emission.derivation
    tasks, scratch, sets = emission.tasks, emission.scratch, emission.resource_sets
    n, e = scratch.counts[0], scratch.counts[1]
    for task in range(n):
        if tasks.kind[task] == BACKWARD:
            following_D[tasks.resource_set[task]] += 1
        elif tasks.kind[task] == SYNCHRONIZE:
            for end in range(
                sets.end_ptr[tasks.resource_set[task]], sets.end_ptr[tasks.resource_set[task] + 1]
            ):
                following_D[sets.end[end]] += 1
    last = n
    for device in range(len(following_D)):
        waits = following_D[device]
        following_D[device] = -1
        if derivation.elements_D[device] == 0:
            continue
        put(tasks, last, UPDATE, device, 0, device, updates.run_ns_D[device], updates.origin_D[device])
        tasks.launch_ns[last] = updates.launch_ns_D[device]
        following_D[device] = e
        e += waits
        last += 1
        tasks.pred_ptr[last] = e
    for task in range(n):
        if tasks.kind[task] == BACKWARD:
            await_task(emission, task, tasks.resource_set[task], following_D)
        elif tasks.kind[task] == SYNCHRONIZE:
            for end in range(
                sets.end_ptr[tasks.resource_set[task]], sets.end_ptr[tasks.resource_set[task] + 1]
            ):
                await_task(emission, task, sets.end[end], following_D)
    scratch.counts[0] = last
    scratch.counts[1] = e


@inner
def await_task(emission: Emission, task: int, device: int, following_D: Array) -> None:
    """Let the update of a device, if there is one, wait for a task."""
    if following_D[device] >= 0:
        emission.tasks.pred[following_D[device]] = task
        following_D[device] += 1


@inner
def emit_update_gathers(emission: Emission, task_D: Array) -> None:
    """Emit the gathers of updated shares, in the order of their buckets; `task_D` is overwritten."""
    tasks, scratch, sets, buckets = emission.tasks, emission.scratch, emission.resource_sets, emission.buckets
    n, e = scratch.counts[0], scratch.counts[1]
    task_D[:] = -1
    task = n - 1
    while task >= 0 and tasks.kind[task] == UPDATE:
        task_D[tasks.resource_set[task]] = task
        task -= 1
    for position in range(buckets.counts[0]):
        bucket = buckets.order[position]
        if buckets.sharing[bucket] != SHARED_UPDATE:
            continue
        resource_set, size_bytes = buckets.gather[bucket], buckets.size_bytes[bucket]
        run_ns = collective_ns(sets, resource_set, size_bytes)
        put_communication(emission, n, UPDATE_GATHER, position, 0, resource_set, run_ns, size_bytes)
        for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
            if task_D[sets.end[index]] >= 0:
                tasks.pred[e] = task_D[sets.end[index]]
                e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
