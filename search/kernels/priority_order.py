"""The simulation of a task graph by priority, and numbers of communications by layer."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner, inner_with_arrays, quick_entry
from search.kernels.fifo_order import begin, finish, new_events, pop, push
from search.kernels.program_order import new_resources
from search.kernels.records import (
    BUFFER_COLLECTIVE,
    BUFFER_TRANSFER,
    FORWARD,
    SYNCHRONIZE,
    UPDATE,
    UPDATE_GATHER,
    Array,
    Events,
    Positions,
    Queues,
    Resources,
    ResourceSets,
    Tasks,
    Timeline,
)


@quick_entry
def number_by_position(
    task_count: int, tasks: Tasks, devices: int, positions: Positions, priority_T: Array, bucket_T: Array
) -> None:
    """Write the number of every communication as `search.simulate.priorities.layer` defines it; computations get 0.

    bucket_T: room for a number of each bucket, of which there are fewer than tasks.
    """
    for task in range(task_count):
        kind, subject = tasks.kind[task], tasks.subject[task]
        first, last = tasks.pred_ptr[task], tasks.pred_ptr[task + 1]
        if tasks.resource_set[task] < devices:
            priority_T[task] = 0
            if kind == UPDATE:
                continue
            number = positions.forward_O[subject] if kind == FORWARD else positions.backward_O[subject]
            for index in range(first, last):
                pred = tasks.pred[index]
                if tasks.resource_set[pred] >= devices and number < priority_T[pred]:
                    priority_T[pred] = number
            continue
        number = positions.last
        if kind == SYNCHRONIZE:
            for index in range(first, last):
                pred = tasks.pred[index]
                if tasks.resource_set[pred] < devices:
                    number = min(number, positions.next_O[tasks.subject[pred]])
            bucket_T[subject] = number
        elif kind == UPDATE_GATHER:
            number = bucket_T[subject]
        elif kind in (BUFFER_TRANSFER, BUFFER_COLLECTIVE):
            number = positions.next_V[subject]
        priority_T[task] = number


@entry
def run_priority_order(
    task_count: int,
    tasks: Tasks,
    sets: ResourceSets,
    contention_ppm_D: Array,
    resource_count: int,
    timeline: Timeline,
    priority_T: Array,
    bound_ns: int,
) -> int:
    """Serve computations as in fifo order, communications by priority (not negative, below 2^31), then task.

    Returns the makespan, or -1 once it is sure to exceed the bound.

    Source: TicTac (SysML 2019) and P3 (SysML 2019) for one channel; for several links see `search.simulate.simulator`.
    """
    events = new_events(task_count, tasks, sets, resource_count, len(contention_ppm_D))
    resources = new_resources(resource_count, contention_ppm_D)
    queues = new_queues(task_count, tasks, sets, resource_count, len(contention_ppm_D), priority_T)
    return serve_by_priority(task_count, tasks, sets, resources, timeline, events, queues, bound_ns)


@inner_with_arrays
def new_queues(
    task_count: int, tasks: Tasks, sets: ResourceSets, resource_count: int, devices: int, priority_T: Array
) -> Queues:
    """Return queues of links, all empty."""
    ptr = np.zeros(resource_count + 1, np.int64)
    for task in range(task_count):
        resource_set = tasks.resource_set[task]
        if resource_set >= devices:
            for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
                ptr[sets.resource[index] + 1] += 1
    for resource in range(resource_count):
        ptr[resource + 1] += ptr[resource]
    return Queues(
        priority_T,
        ptr,
        np.empty(ptr[resource_count], np.int64),
        np.empty(ptr[resource_count], np.int64),
        np.zeros(resource_count, np.int64),
        np.zeros(resource_count, np.int64),
        np.zeros(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
        np.empty(task_count, np.int64),
    )


@inner
def may_start(
    task: int, resource_set: int, sets: ResourceSets, queues: Queues, free_ns_R: Array, now_ns: int, turn: int
) -> bool:
    """Return whether all links of a waiting communication are free, and it is the first at each of them."""
    for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
        link = sets.resource[index]
        if free_ns_R[link] > now_ns or queues.used_R[link] == turn or queues.task[queues.ptr[link]] != task:
            return False
    return True


@inner
def join(task: int, resource_set: int, sets: ResourceSets, queues: Queues) -> None:
    """Let a communication wait at all links that it holds."""
    for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
        link = sets.resource[index]
        first, size = queues.ptr[link], queues.size_R[link]
        priority = queues.priority_T[task]
        queues.size_R[link] = push(queues.priority[first:], queues.task[first:], size, priority, task)


@inner
def leave(resource_set: int, sets: ResourceSets, queues: Queues, turn: int) -> None:
    """Take a communication that starts, the first everywhere, from where it waits."""
    for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
        link = sets.resource[index]
        first, size = queues.ptr[link], queues.size_R[link]
        queues.size_R[link] = pop(queues.priority[first:], queues.task[first:], size)
        queues.used_R[link] = turn


@inner
def add_freed(tried: int, ended: int, tasks: Tasks, sets: ResourceSets, queues: Queues, turn: int) -> int:
    """Add who waits first at links that have just become free to those to be tried; return how many these are."""
    for position in range(ended):
        resource_set = tasks.resource_set[queues.ended[position]]
        for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
            link = sets.resource[index]
            if queues.size_R[link] > 0:
                first = queues.task[queues.ptr[link]]
                if queues.tried_T[first] != turn:
                    queues.tried_T[first] = turn
                    queues.tried[tried] = first
                    tried += 1
    return tried


@inner
def serve_by_priority(
    task_count: int,
    tasks: Tasks,
    sets: ResourceSets,
    resources: Resources,
    timeline: Timeline,
    events: Events,
    queues: Queues,
    bound_ns: int,
) -> int:
    """Serve the tasks as `run_priority_order`, one round after the other.

    In a round ends what ends by now; what is ready by now is served (computations) or waits (communications); then
    those that may start do. Only who has just become ready, or is first at a link that has just become free, can.
    """
    resource_set_T, devices = tasks.resource_set, len(resources.debt_ns_D)
    heap_ns, heap_task = events.heap_ns, events.heap_task
    running = turn = makespan_ns = 0
    size = begin(task_count, events, bound_ns)
    if size < 0:
        return -1
    while size > 0 or running > 0:
        now_ns = heap_ns[0] if size > 0 else queues.end_ns[0]
        if running > 0:
            now_ns = min(now_ns, queues.end_ns[0])
        turn += 1
        tried = ended = 0
        while running > 0 and queues.end_ns[0] <= now_ns:
            queues.ended[ended] = queues.end_task[0]
            ended += 1
            running = pop(queues.end_ns, queues.end_task, running)
        while size > 0 and heap_ns[0] <= now_ns:
            task = heap_task[0]
            size = pop(heap_ns, heap_task, size)
            if resource_set_T[task] >= devices:
                join(task, resource_set_T[task], sets, queues)
                queues.tried_T[task] = turn
                queues.tried[tried] = task
                tried += 1
                continue
            size, end_ns = finish(task, tasks, sets, resources, timeline, events, bound_ns, size)
            if end_ns < 0:
                return -1
            makespan_ns = max(makespan_ns, end_ns)
        tried = add_freed(tried, ended, tasks, sets, queues, turn)
        for position in range(tried):
            task = queues.tried[position]
            if not may_start(task, resource_set_T[task], sets, queues, resources.free_ns_R, now_ns, turn):
                continue
            leave(resource_set_T[task], sets, queues, turn)
            size, end_ns = finish(task, tasks, sets, resources, timeline, events, bound_ns, size)
            if end_ns < 0:
                return -1
            makespan_ns = max(makespan_ns, end_ns)
            running = push(queues.end_ns, queues.end_task, running, end_ns, task)
    return makespan_ns
