"""The simulation of a task graph in program order."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, hot, inner, inner_with_arrays
from search.kernels.hosts import issued
from search.kernels.records import PARTS_PER_MILLION, Array, Resources, ResourceSets, Tasks, Timeline


@hot
def slowed_ns(contention_ppm: int, run_ns: int) -> int:
    """Return by how much a communication slows the compute of a device where it ends, halves up.

    Whole millions of nanoseconds and the rest apart: the product of a step of months fits into no word.
    """
    millions, rest = run_ns // PARTS_PER_MILLION, run_ns % PARTS_PER_MILLION
    return contention_ppm * millions + (contention_ppm * rest + PARTS_PER_MILLION // 2) // PARTS_PER_MILLION


@inner_with_arrays
def new_resources(resource_count: int, contention_ppm_D: Array) -> Resources:
    """Return devices and links that are free from the start, without debt."""
    return Resources(
        np.zeros(resource_count, np.int64),
        np.full(resource_count, -1, np.int64),
        np.zeros(len(contention_ppm_D), np.int64),
        contention_ppm_D,
    )


@inner
def serve(
    task: int,
    ready_ns: int,
    cause: int,
    tasks: Tasks,
    sets: ResourceSets,
    resources: Resources,
    timeline: Timeline,
) -> int:
    """Run one task as early as what it holds allows; return its end."""
    resource_set, run_ns, begin_ns = tasks.resource_set[task], tasks.run_ns[task], ready_ns
    first, last = sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]
    for index in range(first, last):
        resource = sets.resource[index]
        if resources.free_ns_R[resource] > begin_ns:
            begin_ns = resources.free_ns_R[resource]
            cause = resources.last_R[resource]
    debt_ns_D = resources.debt_ns_D
    if resource_set < len(debt_ns_D):
        extra_ns = debt_ns_D[resource_set] - (begin_ns - resources.free_ns_R[resource_set])
        if extra_ns > 0:
            run_ns += extra_ns
        debt_ns_D[resource_set] = 0
    else:
        flows = sets.flows[resource_set]
        for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
            device = sets.end[index]
            debt_ns_D[device] += slowed_ns(resources.contention_ppm_D[device] * flows, run_ns)
    end_ns = begin_ns + run_ns
    for index in range(first, last):
        resource = sets.resource[index]
        resources.free_ns_R[resource] = end_ns
        resources.last_R[resource] = task
    timeline.start_ns[task] = begin_ns
    timeline.end_ns[task] = end_ns
    timeline.cause[task] = cause
    return int(end_ns)


@entry
def run_program_order(
    task_count: int,
    tasks: Tasks,
    sets: ResourceSets,
    contention_ppm_D: Array,
    resource_count: int,
    timeline: Timeline,
) -> int:
    """Serve the tasks in program order; return the makespan in nanoseconds."""
    resources = new_resources(resource_count, contention_ppm_D)
    issued_ns_T = issued(task_count, tasks, sets, len(contention_ppm_D))
    return serve_in_program_order(issued_ns_T, tasks, sets, resources, timeline)


@inner
def serve_in_program_order(
    issued_ns_T: Array, tasks: Tasks, sets: ResourceSets, resources: Resources, timeline: Timeline
) -> int:
    """Serve the tasks that hosts have issued then in program order; return the makespan."""
    makespan_ns = 0
    for task in range(len(issued_ns_T)):
        ready_ns = issued_ns_T[task]
        cause = -1
        for index in range(tasks.pred_ptr[task], tasks.pred_ptr[task + 1]):
            pred = tasks.pred[index]
            if timeline.end_ns[pred] > ready_ns:
                ready_ns = timeline.end_ns[pred]
                cause = pred
        end_ns = serve(task, ready_ns, cause, tasks, sets, resources, timeline)
        makespan_ns = max(makespan_ns, end_ns)
    return makespan_ns
