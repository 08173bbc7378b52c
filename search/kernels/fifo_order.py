"""The simulation of a task graph in fifo order (FlexFlow, Algorithm 1), and the queue that priority order uses too."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner, inner_with_arrays
from search.kernels.hosts import issued
from search.kernels.program_order import new_resources, serve
from search.kernels.records import Array, Events, Resources, ResourceSets, Tasks, Timeline


@inner
def push(heap_ns: Array, heap_task: Array, size: int, ready_ns: int, task: int) -> int:
    """Add (ready time, task) to a binary heap; return its new size."""
    slot = size
    while slot > 0:
        parent = (slot - 1) // 2
        if heap_ns[parent] < ready_ns or (heap_ns[parent] == ready_ns and heap_task[parent] < task):
            break
        heap_ns[slot] = heap_ns[parent]
        heap_task[slot] = heap_task[parent]
        slot = parent
    heap_ns[slot] = ready_ns
    heap_task[slot] = task
    return size + 1


@inner
def pop(heap_ns: Array, heap_task: Array, size: int) -> int:
    """Remove the first of a binary heap (the caller has read it); return its new size."""
    size -= 1
    ready_ns, task = heap_ns[size], heap_task[size]
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            heap_ns[right] < heap_ns[child]
            or (heap_ns[right] == heap_ns[child] and heap_task[right] < heap_task[child])
        ):
            child = right
        if ready_ns < heap_ns[child] or (ready_ns == heap_ns[child] and task < heap_task[child]):
            break
        heap_ns[slot] = heap_ns[child]
        heap_task[slot] = heap_task[child]
        slot = child
    heap_ns[slot] = ready_ns
    heap_task[slot] = task
    return size


@inner_with_arrays
def new_events(
    task_count: int, tasks: Tasks, sets: ResourceSets, resource_count: int, device_count: int
) -> Events:
    """Return the events before the first task: what waits for each, and what every resource has to do."""
    pred_ptr, pred_E = tasks.pred_ptr, tasks.pred
    waiting = np.empty(task_count, np.int64)
    # Counted two places on: filling them moves each pointer to where the next task's begins.
    ptr, successor = np.zeros(task_count + 2, np.int64), np.empty(pred_ptr[task_count], np.int64)
    for task in range(task_count):
        waiting[task] = pred_ptr[task + 1] - pred_ptr[task]
        for index in range(pred_ptr[task], pred_ptr[task + 1]):
            ptr[pred_E[index] + 2] += 1
    for task in range(task_count):
        ptr[task + 2] += ptr[task + 1]
    for task in range(task_count):
        for index in range(pred_ptr[task], pred_ptr[task + 1]):
            pred = pred_E[index]
            successor[ptr[pred + 1]] = task
            ptr[pred + 1] += 1
    left_ns_R = np.zeros(resource_count, np.int64)
    for task in range(task_count):
        resource_set = tasks.resource_set[task]
        for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
            left_ns_R[sets.resource[index]] += tasks.run_ns[task]
    return Events(
        waiting,
        issued(task_count, tasks, sets, device_count),
        np.full(task_count, -1, np.int64),
        ptr,
        successor,
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
        left_ns_R,
    )


@entry
def run_fifo_order(
    task_count: int,
    tasks: Tasks,
    sets: ResourceSets,
    contention_ppm_D: Array,
    resource_count: int,
    timeline: Timeline,
    bound_ns: int,
) -> int:
    """Serve the tasks by (ready time, task); return the makespan, or -1 once it is sure to exceed the bound.

    Source: FlexFlow, Algorithm 1.
    """
    events = new_events(task_count, tasks, sets, resource_count, len(contention_ppm_D))
    resources = new_resources(resource_count, contention_ppm_D)
    return serve_by_readiness(task_count, tasks, sets, resources, timeline, events, bound_ns)


@inner
def begin(task_count: int, events: Events, bound_ns: int) -> int:
    """Put the tasks that wait for nothing into the heap; return its size, -1 where some resource exceeds the bound."""
    for left_ns in events.left_ns_R:
        if left_ns > bound_ns:
            return -1
    size = 0
    for task in range(task_count):
        if events.waiting[task] == 0:
            size = push(events.heap_ns, events.heap_task, size, events.ready_ns[task], task)
    return size


@inner
def finish(
    task: int,
    tasks: Tasks,
    sets: ResourceSets,
    resources: Resources,
    timeline: Timeline,
    events: Events,
    bound_ns: int,
    size: int,
) -> tuple[int, int]:
    """Serve a task, and put what is then ready into the heap of `size`; return its new size and the task's end.

    The end is -1 where the makespan is sure to exceed the bound.
    """
    resource_set, run_ns = tasks.resource_set[task], tasks.run_ns[task]
    end_ns = serve(task, events.ready_ns[task], events.cause[task], tasks, sets, resources, timeline)
    for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
        resource = sets.resource[index]
        events.left_ns_R[resource] -= run_ns
        if end_ns > bound_ns - events.left_ns_R[resource]:
            return size, -1
    for index in range(events.ptr[task], events.ptr[task + 1]):
        following = events.successor[index]
        if end_ns > events.ready_ns[following]:
            events.ready_ns[following] = end_ns
            events.cause[following] = task
        events.waiting[following] -= 1
        if events.waiting[following] == 0:
            ready_ns = events.ready_ns[following]
            size = push(events.heap_ns, events.heap_task, size, ready_ns, following)
    return size, end_ns


@inner
def serve_by_readiness(
    task_count: int,
    tasks: Tasks,
    sets: ResourceSets,
    resources: Resources,
    timeline: Timeline,
    events: Events,
    bound_ns: int,
) -> int:
    """Serve the tasks by (ready time, task), as `run_fifo_order`."""
    makespan_ns, size = 0, begin(task_count, events, bound_ns)
    while size > 0:
        task = events.heap_task[0]
        size = pop(events.heap_ns, events.heap_task, size)
        size, end_ns = finish(task, tasks, sets, resources, timeline, events, bound_ns, size)
        if end_ns < 0:
            return -1
        makespan_ns = max(makespan_ns, end_ns)
    return -1 if size < 0 else makespan_ns
