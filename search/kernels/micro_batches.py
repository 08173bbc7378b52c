"""The tasks of a step in micro-batches, as copies of those of one, and their dependencies.

The rules of these dependencies are in `search.simulate.micro_batches`. Shape letters here: T tasks of one micro-batch,
M micro-batches, N tasks of the step, K runs of tasks, E dependencies, B buckets, D devices, P pairs of a sum and one of
its devices.
"""

from __future__ import annotations

from search.kernels.cache import inner, quick_entry
from search.kernels.records import (
    BACKWARD_GATHER,
    FORWARD_GATHER,
    SYNCHRONIZE,
    Array,
    LatestTasks,
    ResourceSets,
    StepCopies,
    StepWaits,
    Tasks,
)


@quick_entry
def copy_tasks(
    first_K: Array, count_K: Array, micro_batch_K: Array, is_last_sum_T: Array, copies: StepCopies
) -> int:
    """Write which tasks a step has; return how many.

    first_K, count_K, micro_batch_K: of the runs of tasks that follow each other in the step. is_last_sum_T: what the
    last micro-batch alone has.
    """
    count = 0
    for run in range(len(first_K)):
        micro_batch = micro_batch_K[run]
        is_last = micro_batch == len(copies.number_MT) - 1
        for task in range(first_K[run], first_K[run] + count_K[run]):
            if is_last or not is_last_sum_T[task]:
                copies.source_N[count] = task
                copies.micro_batch_N[count] = micro_batch
                copies.number_MT[micro_batch, task] = count
                count += 1
    return count


@quick_entry
def await_tasks(
    tasks: Tasks,
    sets: ResourceSets,
    copies: StepCopies,
    is_shared_B: Array,
    renewals_2E: Array,
    latest: LatestTasks,
    waits: StepWaits,
) -> int:
    """Write the dependencies of a step's tasks; return their number.

    A task waits for what it waits for in one micro-batch, of its own micro-batch or of all of them. In other
    micro-batches than the last some backwards stand before sums that they would wait for.

    tasks: of one micro-batch. is_shared_B: whether gradients are shared, of buckets that are summed in every
    micro-batch; empty where there are none. renewals_2E: tasks, ascending, and renewals of buffers that each waits for.
    latest: as before the first task, written over. waits: has room for all.
    """
    count = renewal = awaited_sums = 0
    waits.pred_ptr[0] = 0
    for task in range(len(copies.source_N)):
        source = copies.source_N[task]
        for place in range(tasks.pred_ptr[source], tasks.pred_ptr[source + 1]):
            awaited = copies.number_MT[copies.micro_batch_N[task], tasks.pred[place]]
            if awaited < task:
                waits.pred[count] = awaited
                count += 1
        while renewal < renewals_2E.shape[1] and renewals_2E[0, renewal] == task:
            waits.pred[count] = renewals_2E[1, renewal]
            count += 1
            renewal += 1
        kind, resource_set = tasks.kind[source], tasks.resource_set[source]
        if resource_set < len(latest.computation_D):
            count = await_on_device(resource_set, task, latest, waits, count)
        elif kind in (FORWARD_GATHER, BACKWARD_GATHER):
            for end in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
                computation = latest.computation_D[sets.end[end]]
                if computation >= 0:
                    waits.pred[count] = computation
                    count += 1
        elif kind == SYNCHRONIZE and len(is_shared_B):
            bucket = tasks.subject[source]
            column = 0 if is_shared_B[bucket] else 1 + bucket
            for end in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
                device = sets.end[end]
                before = latest.sum_DB[device, column]
                latest.sum_DB[device, column] = task
                if before >= 0:
                    waits.pred[count] = before
                    count += 1
                    latest.awaited_2P[0, awaited_sums] = before
                    latest.awaited_2P[1, awaited_sums] = latest.awaited_D[device]
                    latest.awaited_D[device] = awaited_sums
                    awaited_sums += 1
        waits.pred_ptr[task + 1] = count
    return count


@inner
def await_on_device(device: int, task: int, latest: LatestTasks, waits: StepWaits, count: int) -> int:
    """Let a computation wait for sums, and for the one before it on its device; return the new count."""
    place = latest.awaited_D[device]
    while place >= 0:
        waits.pred[count] = latest.awaited_2P[0, place]
        count += 1
        place = latest.awaited_2P[1, place]
    latest.awaited_D[device] = -1
    if latest.computation_D[device] >= 0:
        waits.pred[count] = latest.computation_D[device]
        count += 1
    latest.computation_D[device] = task
    return count
