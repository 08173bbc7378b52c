"""The state of all devices and links in an incremental simulation, and how tasks are served on it."""

from __future__ import annotations

from search.kernels.cache import hot, inner
from search.kernels.fragments import tasks_of
from search.kernels.program_order import slowed_ns
from search.kernels.records import (
    COMPUTED,
    EVEN,
    FREE_DEFERRED,
    HELD,
    HELD_DEFERRED,
    HELD_END,
    HELD_LEFT,
    LEFT_DEFERRED,
    MOST_LEFT,
    Array,
    Derivation,
    Machine,
    ResourceSets,
)


@inner
def settle_held(sets: ResourceSets, machine: Machine) -> None:
    """Write to its resources what the resource set that was served alone of late has done."""
    deferred, resource_set = machine.deferred, machine.deferred[HELD]
    for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
        machine.free_ns_R[sets.resource[index]] = deferred[HELD_END]
        machine.left_ns_R[sets.resource[index]] -= deferred[HELD_DEFERRED]
    deferred[HELD] = -1


@inner
def settle(machine: Machine) -> None:
    """Write to the devices what they have computed together.

    When a device is free and what it has left are the same sum as before, so that nothing new exceeds the bound, but
    for debts: these are checked with the device's next task, or at the end.
    """
    deferred = machine.deferred
    if deferred[COMPUTED]:
        for device in range(len(machine.debt_ns_D)):
            machine.free_ns_R[device] += deferred[FREE_DEFERRED]
            machine.left_ns_R[device] -= deferred[LEFT_DEFERRED]
            if machine.contended:
                # The first task after a communication has paid it, without waiting for anything.
                machine.free_ns_R[device] += machine.debt_ns_D[device]
                machine.debt_ns_D[device] = 0
        deferred[MOST_LEFT] -= deferred[LEFT_DEFERRED]
        deferred[FREE_DEFERRED] = deferred[LEFT_DEFERRED] = deferred[COMPUTED] = 0


@inner
def settle_links(sets: ResourceSets, machine: Machine) -> None:
    """Write to links and devices all that a communication by itself must find there."""
    if machine.deferred[HELD] >= 0:
        settle_held(sets, machine)
    if machine.contended:
        settle(machine)


@inner
def carry_collective(
    sets: ResourceSets, machine: Machine, resource_set: int, ready_ns: int, run_ns: int
) -> int:
    """Serve a collective; return its end, or -1 where the makespan is sure to exceed the bound.

    Of several over the same devices, one after the other, the links are written once.
    """
    deferred = machine.deferred
    if deferred[HELD] != resource_set:
        if deferred[HELD] >= 0:
            settle_held(sets, machine)
        deferred[HELD] = resource_set
        deferred[HELD_END] = deferred[HELD_DEFERRED] = deferred[HELD_LEFT] = 0
        for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
            resource = sets.resource[index]
            deferred[HELD_END] = max(deferred[HELD_END], machine.free_ns_R[resource])
            deferred[HELD_LEFT] = max(deferred[HELD_LEFT], machine.left_ns_R[resource])
    if machine.contended:
        settle(machine)
        for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
            device = sets.end[index]
            machine.debt_ns_D[device] += slowed_ns(
                machine.contention_ppm_D[device] * sets.flows[resource_set], run_ns
            )
    end_ns = max(ready_ns, deferred[HELD_END]) + run_ns
    deferred[HELD_END] = end_ns
    deferred[HELD_DEFERRED] += run_ns
    return int(end_ns) if end_ns <= machine.bound_ns - (deferred[HELD_LEFT] - deferred[HELD_DEFERRED]) else -1


@inner
def find_even(machine: Machine) -> None:
    """Find whether all devices are free at the same time; `settle` has run."""
    deferred = machine.deferred
    deferred[EVEN] = 0
    if machine.contended:
        return
    most_left = 0
    for device in range(len(machine.debt_ns_D)):
        if machine.free_ns_R[device] != machine.free_ns_R[0]:
            return
        most_left = max(most_left, machine.left_ns_R[device])
    deferred[EVEN], deferred[MOST_LEFT] = 1, most_left


@inner
def compute_everywhere(machine: Machine, ready_ns: int, run_ns: int) -> int:
    """Serve a task on every device, all being free at the same time; return their end, or -1 as `compute` does."""
    deferred = machine.deferred
    free_ns = machine.free_ns_R[0] + deferred[FREE_DEFERRED]
    end_ns = max(ready_ns, free_ns) + run_ns
    deferred[FREE_DEFERRED] += end_ns - free_ns
    deferred[LEFT_DEFERRED] += run_ns
    deferred[COMPUTED] = 1
    return int(end_ns) if end_ns <= machine.bound_ns - (deferred[MOST_LEFT] - deferred[LEFT_DEFERRED]) else -1


@hot
def defer(machine: Machine, run_ns: int) -> None:
    """Serve a task on every device that waits for nothing and that nobody waits for: no end is asked for."""
    deferred = machine.deferred
    deferred[FREE_DEFERRED] += run_ns
    deferred[LEFT_DEFERRED] += run_ns
    deferred[COMPUTED] = 1


@inner
def compute_unawaited(
    machine: Machine, arena: Array, at: int, derivation: Derivation, active_at: int
) -> None:
    """Serve the tasks of an operator that wait for nothing and that nobody waits for, before what is deferred.

    Such a task makes a device free later by as much as it has less left: nothing new exceeds the bound.
    active_at: where the pool has which of them have a backward, to serve these; -1: all of the forward.
    """
    machine.deferred[EVEN] = 0
    tasks = tasks_of(arena, at)
    for part in range(len(tasks)):
        task = tasks[part]
        if active_at >= 0 and not derivation.pool[active_at + part]:
            continue
        run_ns = task.forward_ns if active_at < 0 else task.backward_ns
        machine.left_ns_R[task.device] -= run_ns
        if machine.contended:
            run_ns += machine.debt_ns_D[task.device]
            machine.debt_ns_D[task.device] = 0
        machine.free_ns_R[task.device] += run_ns


@hot
def carry(sets: ResourceSets, machine: Machine, resource_set: int, ready_ns: int, run_ns: int) -> int:
    """Serve a transfer, or a collective by itself, after `settle_links`.

    Returns its end, or -1 where the makespan is sure to exceed the bound.
    """
    first, last = sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]
    begin_ns = ready_ns
    for index in range(first, last):
        begin_ns = max(begin_ns, machine.free_ns_R[sets.resource[index]])
    if machine.contended:
        for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
            device = sets.end[index]
            machine.debt_ns_D[device] += slowed_ns(
                machine.contention_ppm_D[device] * sets.flows[resource_set], run_ns
            )
    end_ns = begin_ns + run_ns
    longest_ns = 0
    for index in range(first, last):
        resource = sets.resource[index]
        machine.free_ns_R[resource] = end_ns
        left_ns = machine.left_ns_R[resource] - run_ns
        machine.left_ns_R[resource] = left_ns
        longest_ns = max(longest_ns, left_ns)
    return end_ns if end_ns <= machine.bound_ns - longest_ns else -1


@hot
def compute(machine: Machine, device: int, ready_ns: int, run_ns: int, launch_ns: int) -> int:
    """Serve a task of a device; return its end, or -1 where the makespan is sure to exceed the bound."""
    launched_ns = machine.host_ns_D[device] + launch_ns
    machine.host_ns_D[device] = launched_ns
    begin_ns = max(ready_ns, launched_ns, machine.free_ns_R[device])
    left_ns = machine.left_ns_R[device] - run_ns
    machine.left_ns_R[device] = left_ns
    if machine.contended:
        extra_ns = machine.debt_ns_D[device] - (begin_ns - machine.free_ns_R[device])
        if extra_ns > 0:
            run_ns += extra_ns
        machine.debt_ns_D[device] = 0
    end_ns = begin_ns + run_ns
    machine.free_ns_R[device] = end_ns
    return end_ns if end_ns <= machine.bound_ns - left_ns else -1
