"""The state of all devices and links in an incremental simulation, and how tasks are served on it."""

from __future__ import annotations

from search.kernels.cache import hot, inner
from search.kernels.program_order import slowed_ns
from search.kernels.records import (
    ASSEMBLY_STRIDE,
    COMPUTED,
    EVEN,
    FREE_OWED,
    HELD,
    HELD_END,
    HELD_LEFT,
    HELD_OWED,
    LEFT_OWED,
    MOST_LEFT,
    OPERATOR_HEADER,
    OPERATOR_STRIDE,
    PIECE_STRIDE,
    VALUE_HEADER,
    Array,
    Holds,
    Machine,
)


@inner
def settle_held(holds: Holds, machine: Machine) -> None:
    """Write to its resources what the hold that was served alone of late has done."""
    owed, hold = machine.owed, machine.owed[HELD]
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        machine.free_ns_R[holds.resource[place]] = owed[HELD_END]
        machine.left_ns_R[holds.resource[place]] -= owed[HELD_OWED]
    owed[HELD] = -1


@inner
def settle(machine: Machine) -> None:
    """Write to the devices what they have computed together.

    When a device is free and what it has left are the same sum as before, so that nothing new exceeds the bound, but
    for debts: these are checked with the device's next task, or at the end.
    """
    owed = machine.owed
    if owed[COMPUTED]:
        for device in range(len(machine.debt_ns_D)):
            machine.free_ns_R[device] += owed[FREE_OWED]
            machine.left_ns_R[device] -= owed[LEFT_OWED]
            if machine.contended:
                # The first task after a communication has paid it, without waiting for anything.
                machine.free_ns_R[device] += machine.debt_ns_D[device]
                machine.debt_ns_D[device] = 0
        owed[MOST_LEFT] -= owed[LEFT_OWED]
        owed[FREE_OWED] = owed[LEFT_OWED] = owed[COMPUTED] = 0


@inner
def settle_links(holds: Holds, machine: Machine) -> None:
    """Write to links and devices all that a communication by itself must find there."""
    if machine.owed[HELD] >= 0:
        settle_held(holds, machine)
    if machine.contended:
        settle(machine)


@inner
def carry_together(
    holds: Holds, machine: Machine, hold: int, ready_ns: int, run_ns: int, bound_ns: int
) -> int:
    """Serve a collective as `carry` does.

    Of several over the same devices, one after the other, the links are written once.
    """
    owed = machine.owed
    if owed[HELD] != hold:
        if owed[HELD] >= 0:
            settle_held(holds, machine)
        owed[HELD], owed[HELD_END], owed[HELD_OWED], owed[HELD_LEFT] = hold, 0, 0, 0
        for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
            resource = holds.resource[place]
            owed[HELD_END] = max(owed[HELD_END], machine.free_ns_R[resource])
            owed[HELD_LEFT] = max(owed[HELD_LEFT], machine.left_ns_R[resource])
    if machine.contended:
        settle(machine)
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            device = holds.end[place]
            machine.debt_ns_D[device] += slowed_ns(
                machine.contention_ppm_D[device] * holds.flows[hold], run_ns
            )
    end_ns = max(ready_ns, owed[HELD_END]) + run_ns
    owed[HELD_END] = end_ns
    owed[HELD_OWED] += run_ns
    return int(end_ns) if end_ns <= bound_ns - (owed[HELD_LEFT] - owed[HELD_OWED]) else -1


@inner
def find_even(machine: Machine) -> None:
    """Find whether all devices are free at the same time; `settle` has run."""
    owed = machine.owed
    owed[EVEN] = 0
    if machine.contended:
        return
    most_left = 0
    for device in range(len(machine.debt_ns_D)):
        if machine.free_ns_R[device] != machine.free_ns_R[0]:
            return
        most_left = max(most_left, machine.left_ns_R[device])
    owed[EVEN], owed[MOST_LEFT] = 1, most_left


@inner
def compute_everywhere(machine: Machine, ready_ns: int, run_ns: int, bound_ns: int) -> int:
    """Serve a task on every device, all being free at the same time; return their end, or -1 as `compute` does."""
    owed = machine.owed
    free_ns = machine.free_ns_R[0] + owed[FREE_OWED]
    end_ns = max(ready_ns, free_ns) + run_ns
    owed[FREE_OWED] += end_ns - free_ns
    owed[LEFT_OWED] += run_ns
    owed[COMPUTED] = 1
    return int(end_ns) if end_ns <= bound_ns - (owed[MOST_LEFT] - owed[LEFT_OWED]) else -1


@hot
def owe(owed: Array, run_ns: int) -> None:
    """Serve a task on every device that waits for nothing and that nobody waits for: no end is asked for."""
    owed[FREE_OWED] += run_ns
    owed[LEFT_OWED] += run_ns
    owed[COMPUTED] = 1


@inner
def compute_apart(machine: Machine, arena: Array, at: int, word: int, pool: Array, active_at: int) -> None:
    """Serve the tasks of an operator that wait for nothing and that nobody waits for, before what is owed.

    Such a task makes a device free later by as much as it has less left: nothing new exceeds the bound.
    word: where a task has its time. active_at: where the pool has which tasks there are, or -1.
    """
    machine.owed[EVEN] = 0
    for task in range(arena[at]):
        if active_at < 0 or pool[active_at + task]:
            place = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device, task_ns = arena[place], arena[place + word]
            machine.left_ns_R[device] -= task_ns
            if machine.contended:
                task_ns += machine.debt_ns_D[device]
                machine.debt_ns_D[device] = 0
            machine.free_ns_R[device] += task_ns


@hot
def carry(holds: Holds, machine: Machine, hold: int, ready_ns: int, run_ns: int, bound_ns: int) -> int:
    """Serve a transfer or a collective; return its end, or -1 where the makespan is sure to exceed the bound.

    `settle_links` has run.
    """
    first, last = holds.resource_ptr[hold], holds.resource_ptr[hold + 1]
    begin_ns = ready_ns
    for place in range(first, last):
        begin_ns = max(begin_ns, machine.free_ns_R[holds.resource[place]])
    if machine.contended:
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            device = holds.end[place]
            machine.debt_ns_D[device] += slowed_ns(
                machine.contention_ppm_D[device] * holds.flows[hold], run_ns
            )
    end_ns = begin_ns + run_ns
    longest_ns = 0
    for place in range(first, last):
        resource = holds.resource[place]
        machine.free_ns_R[resource] = end_ns
        left_ns = machine.left_ns_R[resource] - run_ns
        machine.left_ns_R[resource] = left_ns
        longest_ns = max(longest_ns, left_ns)
    return end_ns if end_ns <= bound_ns - longest_ns else -1


@hot
def compute(machine: Machine, device: int, ready_ns: int, run_ns: int, bound_ns: int) -> int:
    """Serve a task of a device; return its end, or -1 where the makespan is sure to exceed the bound."""
    begin_ns = max(ready_ns, machine.free_ns_R[device])
    left_ns = machine.left_ns_R[device] - run_ns
    machine.left_ns_R[device] = left_ns
    if machine.contended:
        extra_ns = machine.debt_ns_D[device] - (begin_ns - machine.free_ns_R[device])
        if extra_ns > 0:
            run_ns += extra_ns
        machine.debt_ns_D[device] = 0
    end_ns = begin_ns + run_ns
    machine.free_ns_R[device] = end_ns
    return end_ns if end_ns <= bound_ns - left_ns else -1


@inner
def assigned_to(arena: Array, unit: int, reading: int) -> int:
    """Return where a value unit says which assembly each task of a reading takes."""
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    reading_at = piece_at + PIECE_STRIDE * arena[unit + 1] + 2 * arena[unit + 2]
    return int(reading_at + arena[unit + 5] + arena[reading_at + reading])
