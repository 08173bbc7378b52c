"""The evaluation of a proposal in program order, from its changes to its makespan (`search.evaluate.incremental`)."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner, quick_entry, section
from search.kernels.collective_formulas import collective_ns
from search.kernels.fragments import operator_header, value_header
from search.kernels.held import HeldTuple, hold
from search.kernels.hosts import issue
from search.kernels.incremental_backward import bucket_ns, simulate_backward
from search.kernels.incremental_forward import simulate_collectives, simulate_forward, simulate_transfers
from search.kernels.machine import carry, compute, find_even, settle, settle_held, settle_links
from search.kernels.memory_accounting import account_tensors, find_peak_memory
from search.kernels.records import (
    HELD,
    HELD_LEFT,
    SHARED_UPDATE,
    Array,
    Derivation,
    Fragments,
    GraphArrays,
    Machine,
    Machines,
    ProposalArrays,
    Step,
    StepTimes,
    Workload,
)
from search.kernels.workload import add_load, derive_changes


@entry
def hold_proposal(arrays: ProposalArrays) -> HeldTuple[ProposalArrays]:
    """Return the arrays held."""
    return hold(arrays)


@entry
def evaluate_program_order(held: HeldTuple[ProposalArrays], folds: int, bound_ns: int) -> tuple[int, int]:
    """Make `new` that of the strategy that has the step's fragments from `old`, and simulate it in program order.

    folds: what all devices do alike is served together, which takes that hosts issue tasks in no time.

    Returns the makespan, -1 beyond the bound, -2 where the pool is too short, -3 where the buckets are, -4 where the
    gathers are; and the bytes beyond the devices' memories.
    """
    old_fragments, step, old, new, machines, times = held.value
    shortage = derive_changes(old_fragments, step, old, new, machines)
    if shortage < 0:
        return shortage, 0
    makespan_ns = simulate_program_order(step, new, machines, times, folds, bound_ns)
    if makespan_ns < 0:
        return -1, 0
    derivation, excess_bytes = new.derivation, 0
    # Of what takes too long nobody asks for the memory.
    account_tensors(
        step.graph, old_fragments, step.fragments, step.arena, step.groups, old.derivation, derivation
    )
    find_peak_memory(derivation)
    for device in range(len(derivation.peak_D)):
        excess_bytes += max(derivation.peak_D[device] - machines.capacity_bytes_D[device], 0)
    return makespan_ns, excess_bytes


@section
def simulate_program_order(
    step: Step, work: Workload, machines: Machines, times: StepTimes, folds: int, bound_ns: int
) -> int:
    """Simulate in program order without a task graph; return the makespan of the task graph, or -1 beyond the bound.

    `derive_changes` has run. A resource is never done before it is free and has done what it still has to do: where
    that exceeds the bound, so does the makespan.
    """
    graph, derivation, gathers = step.graph, work.derivation, step.gathers
    operators, devices = len(step.fragments.operator_at), len(derivation.memory_D)
    left_ns_R, update_ns_D = work.load_ns_R.copy(), np.zeros(devices, np.int64)
    is_shared = add_synchronization(step, left_ns_R)
    contended = False
    for device in range(devices):
        contended = contended or machines.contention_ppm_D[device] > 0
        if derivation.elements_D[device]:
            # The same expression as `search.cost.cost_table.nanoseconds`.
            update_ns_D[device] = int(derivation.elements_D[device] * machines.update_s_D[device] * 1e9 + 0.5)
            left_ns_R[device] += update_ns_D[device]
    for resource in range(len(left_ns_R)):
        if left_ns_R[resource] > bound_ns:
            return -1
    gathers.blocked_D[:] = 0
    gathers.reduced_D[:] = 0
    machine = Machine(
        np.zeros(len(left_ns_R), np.int64),
        np.zeros(devices, np.int64),
        np.zeros(devices, np.int64),
        left_ns_R,
        machines.contention_ppm_D,
        contended,
        folds == 0,
        # Where devices wait for gathers or for sums of others before them, every task is served by itself.
        folds != 0 and not is_shared,
        bound_ns,
        np.zeros(HELD_LEFT + 1, np.int64),
    )
    machine.deferred[HELD] = -1
    find_even(machine)
    for latest in (times.sync_end_D, times.gradients_ns_O, times.gradient_ns_V, times.is_awaited_O):
        latest[:] = 0
    times.member_D[:] = -1
    times.end_ns_O[:] = -1
    if (
        simulate_forward(step, machine, work, times, 0, graph.loss_operators)
        and simulate_backward(step, machine, work, times)
        and simulate_forward(step, machine, work, times, graph.loss_operators, operators)
        and simulate_end(step, machine, work, machines, times, update_ns_D)
    ):
        makespan_ns = machine.free_ns_R.max()
        return makespan_ns if makespan_ns <= bound_ns else -1
    return -1


@inner
def add_synchronization(step: Step, load_ns_R: Array) -> bool:
    """Add the time of sums of gradients and of gathers; return whether anything of a weight is shared."""
    sets, buckets, gathers = step.resource_sets, step.buckets, step.gathers
    is_shared = gathers.counts[1] > 0
    for position in range(buckets.counts[0]):
        bucket = buckets.order[position]
        add_load(sets, buckets.resource_set[bucket], bucket_ns(sets, buckets, bucket), load_ns_R)
        is_shared = is_shared or buckets.sharing[bucket] != 0
        if buckets.sharing[bucket] == SHARED_UPDATE:
            resource_set = buckets.gather[bucket]
            run_ns = collective_ns(sets, resource_set, buckets.size_bytes[bucket])
            add_load(sets, resource_set, run_ns, load_ns_R)
    for gather in range(gathers.counts[1]):
        resource_set = gathers.resource_set[gather]
        add_load(sets, resource_set, collective_ns(sets, resource_set, gathers.size_bytes[gather]), load_ns_R)
    return bool(is_shared)


@inner
def simulate_end(
    step: Step, machine: Machine, work: Workload, machines: Machines, times: StepTimes, update_ns_D: Array
) -> bool:
    """Serve what renews buffers, the updates, and the gathers of updated shares; return False beyond the bound."""
    graph, sets, buckets, derivation = step.graph, step.resource_sets, step.buckets, work.derivation
    settle(machine)
    first, last = graph.value_count, graph.value_count + graph.buffer_count
    for value in range(first, last):
        fragment, active_at = step.fragments.value_at[value], derivation.active_at[graph.producer[value]]
        # Nobody waits for a renewed buffer.
        if not simulate_collectives(step, machine, times, fragment, active_at, -1, 0):
            return False
    for value in range(first, last):
        fragment, active_at = step.fragments.value_at[value], derivation.active_at[graph.producer[value]]
        if not simulate_transfers(step, machine, times, fragment, active_at, -1):
            return False
    for device in range(len(update_ns_D)):
        if derivation.elements_D[device] == 0:
            continue
        launch_ns = machines.update_launch_ns_D[device]
        if compute(machine, device, times.sync_end_D[device], update_ns_D[device], launch_ns) < 0:
            return False
    for position in range(buckets.counts[0]):
        bucket = buckets.order[position]
        if buckets.sharing[bucket] != SHARED_UPDATE:
            continue
        resource_set = buckets.gather[bucket]
        ready_ns = issue(sets, machine, resource_set)
        for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
            device = sets.end[index]
            if derivation.elements_D[device]:
                # The update is the last that the device computes.
                ready_ns = max(ready_ns, machine.free_ns_R[device])
        settle_links(sets, machine)
        run_ns = collective_ns(sets, resource_set, buckets.size_bytes[bucket])
        if carry(sets, machine, resource_set, ready_ns, run_ns) < 0:
            return False
    if machine.deferred[HELD] >= 0:
        settle_held(sets, machine)
    return True


@quick_entry
def compact(
    graph: GraphArrays, fragments: Fragments, arena: Array, derivation: Derivation, target: Array
) -> None:
    """Copy the words of a derivation to another pool of the same length."""
    derivation.counts[1] = 0
    for operator in range(len(fragments.operator_at)):
        tasks = operator_header(arena, fragments.operator_at[operator]).tasks
        move_words(derivation.active_at, operator, tasks, derivation, target)
    for value in range(graph.value_count):
        header = value_header(arena, fragments.value_at[value])
        move_words(derivation.last_at, value, header.assemblies, derivation, target)
        move_words(derivation.collective_at, value, header.collectives, derivation, target)


@inner
def move_words(at: Array, index: int, count: int, derivation: Derivation, target: Array) -> None:
    """Copy what is at `at[index]` in the pool to the end of another one."""
    end = derivation.counts[1]
    for word in range(count):
        target[end + word] = derivation.pool[at[index] + word]
    at[index] = end
    derivation.counts[1] = end + count
