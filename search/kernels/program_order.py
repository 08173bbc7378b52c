"""The simulation of a task graph in program order."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, hot, inner
from search.kernels.records import PARTS_PER_MILLION, Array, Holds, Tasks, Timeline


@hot
def slowed_ns(contention_ppm: int, run_ns: int) -> int:
    """Return by how much a communication slows the compute of a device where it ends, halves up.

    Whole millions of nanoseconds and the rest apart: the product of a step of months fits into no word.
    """
    millions, rest = run_ns // PARTS_PER_MILLION, run_ns % PARTS_PER_MILLION
    return contention_ppm * millions + (contention_ppm * rest + PARTS_PER_MILLION // 2) // PARTS_PER_MILLION


@inner
def serve(
    task: int,
    ready_ns: int,
    cause: int,
    hold: int,
    run_ns: int,
    resource_ptr: Array,
    resource_of: Array,
    end_ptr: Array,
    end_of: Array,
    flows: int,
    contention_ppm_D: Array,
    free_ns_R: Array,
    last_R: Array,
    debt_ns_D: Array,
    start_ns_T: Array,
    end_ns_T: Array,
    cause_T: Array,
) -> int:
    """Run one task as early as what it holds allows; return its end."""
    begin_ns = ready_ns
    for place in range(resource_ptr[hold], resource_ptr[hold + 1]):
        resource = resource_of[place]
        if free_ns_R[resource] > begin_ns:
            begin_ns = free_ns_R[resource]
            cause = last_R[resource]
    if hold < len(debt_ns_D):
        extra_ns = debt_ns_D[hold] - (begin_ns - free_ns_R[hold])
        if extra_ns > 0:
            run_ns += extra_ns
        debt_ns_D[hold] = 0
    else:
        for place in range(end_ptr[hold], end_ptr[hold + 1]):
            device = end_of[place]
            debt_ns_D[device] += slowed_ns(contention_ppm_D[device] * flows, run_ns)
    end_ns = begin_ns + run_ns
    for place in range(resource_ptr[hold], resource_ptr[hold + 1]):
        resource = resource_of[place]
        free_ns_R[resource] = end_ns
        last_R[resource] = task
    start_ns_T[task] = begin_ns
    end_ns_T[task] = end_ns
    cause_T[task] = cause
    return end_ns


@entry
def run_program_order(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    resource_count: int,
    timeline: Timeline,
) -> int:
    """Serve the tasks in program order; return the makespan in nanoseconds."""
    free_ns_R = np.zeros(resource_count, np.int64)
    last_R = np.full(resource_count, -1, np.int64)
    debt_ns_D = np.zeros(len(contention_ppm_D), np.int64)
    return serve_in_program_order(
        task_count, tasks, holds, contention_ppm_D, timeline, free_ns_R, last_R, debt_ns_D
    )


@inner
def serve_in_program_order(
    task_count: int,
    tasks: Tasks,
    holds: Holds,
    contention_ppm_D: Array,
    timeline: Timeline,
    free_ns_R: Array,
    last_R: Array,
    debt_ns_D: Array,
) -> int:
    """Serve the tasks in program order; return the makespan. Resources are free from the start, and nothing owed."""
    hold_T, run_ns_T, pred_ptr, pred_E = tasks.hold, tasks.run_ns, tasks.pred_ptr, tasks.pred
    resource_ptr, resource_of, end_ptr, end_of = holds.resource_ptr, holds.resource, holds.end_ptr, holds.end
    start_ns_T, end_ns_T, cause_T = timeline.start_ns, timeline.end_ns, timeline.cause
    makespan_ns = 0
    for task in range(task_count):
        ready_ns = 0
        cause = -1
        for place in range(pred_ptr[task], pred_ptr[task + 1]):
            pred = pred_E[place]
            if end_ns_T[pred] > ready_ns:
                ready_ns = end_ns_T[pred]
                cause = pred
        end_ns = serve(
            task,
            ready_ns,
            cause,
            hold_T[task],
            run_ns_T[task],
            resource_ptr,
            resource_of,
            end_ptr,
            end_of,
            holds.flows[hold_T[task]],
            contention_ppm_D,
            free_ns_R,
            last_R,
            debt_ns_D,
            start_ns_T,
            end_ns_T,
            cause_T,
        )
        makespan_ns = max(makespan_ns, end_ns)
    return makespan_ns
