"""The incremental simulation of the forward, operator by operator, without a task graph."""

from __future__ import annotations

from search.kernels.cache import inner
from search.kernels.collective_formulas import collective_ns
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    first_readers_of,
    piece_sources_of,
    read_assemblies_of,
    served_assemblies_of,
    served_sources_of,
    source_devices_of,
    tasks_of,
    transfer_times_of,
    value_header,
)
from search.kernels.hosts import issue
from search.kernels.machine import (
    carry,
    carry_collective,
    compute,
    compute_everywhere,
    compute_unawaited,
    defer,
    find_even,
    settle,
    settle_links,
)
from search.kernels.messages import route_set
from search.kernels.records import (
    COMPUTED,
    EVEN,
    HELD,
    LOCAL,
    ONE_COLLECTIVE,
    Machine,
    Step,
    StepTimes,
    Workload,
)
from search.kernels.weight_gathers import next_gathers, takes_part


@inner
def simulate_forward(
    step: Step, machine: Machine, work: Workload, times: StepTimes, first_place: int, last_place: int
) -> bool:
    """Serve the forward tasks of operators at places of the order, and the exchanges of their outputs.

    What a task reads on its own device is there when the device is free: only what comes from others is waited for.
    Returns False beyond the bound.
    """
    for position in range(first_place, last_place):
        operator = step.graph.order[position]
        if step.gathers.counts[1] and not simulate_gathers(step, machine, 0, operator):
            return False
        uniform_ns, exchange = work.uniform_ns_2O[0, operator], work.exchange_2O[0, operator]
        if machine.folds and exchange == LOCAL:
            if uniform_ns >= 0:
                defer(machine, uniform_ns)
            else:
                at = step.fragments.operator_at[operator]
                compute_unawaited(machine, step.arena, at, work.derivation, -1)
        elif machine.folds and exchange == ONE_COLLECTIVE and uniform_ns >= 0 and machine.deferred[EVEN]:
            if not simulate_folded_forward(step, machine, work, times, operator):
                return False
        elif not simulate_operator_forward(step, machine, work, times, operator):
            return False
    return True


@inner
def simulate_operator_forward(
    step: Step, machine: Machine, work: Workload, times: StepTimes, operator: int
) -> bool:
    """Serve the forward tasks of one operator, and the exchanges of its outputs; return False beyond the bound."""
    graph, fragments, arena = step.graph, step.fragments, step.arena
    if machine.deferred[COMPUTED]:
        settle(machine)
    tasks, active_at = tasks_of(arena, fragments.operator_at[operator]), work.derivation.active_at[operator]
    waits = find_ready(step, work, times, operator)
    for part in range(len(tasks)):
        task = tasks[part]
        ready_ns = times.forward_ns[active_at + part] if waits else 0
        if step.gathers.counts[1]:
            ready_ns = max(ready_ns, gathered_ns(step, 0, operator, task.device))
        end_ns = compute(machine, task.device, ready_ns, task.forward_ns, task.forward_launch_ns)
        if end_ns < 0:
            return False
        times.forward_ns[active_at + part] = end_ns
    machine.deferred[EVEN] = 0
    if work.uniform_ns_2O[0, operator] >= 0:
        find_even(machine)
    first, last = graph.output_ptr[operator], graph.output_ptr[operator + 1]
    for output in range(first, last):
        value = graph.output_value[output]
        fragment, last_at = fragments.value_at[value], work.derivation.last_at[value]
        header = value_header(arena, fragment)
        if header.remote_pieces > 0:
            for assembly in range(header.assemblies):
                times.forward_ns[last_at + assembly] = 0
            if not simulate_collectives(step, machine, times, fragment, active_at, last_at, 0):
                return False
    for output in range(first, last):
        value = graph.output_value[output]
        last_at = work.derivation.last_at[value]
        if not simulate_transfers(step, machine, times, fragments.value_at[value], active_at, last_at):
            return False
    return True


@inner
def simulate_folded_forward(
    step: Step, machine: Machine, work: Workload, times: StepTimes, operator: int
) -> bool:
    """Serve the forward tasks of an operator that take the same time, all devices being free at the same time.

    Returns False beyond the bound.
    """
    graph, fragments, arena, derivation = step.graph, step.fragments, step.arena, work.derivation
    ready_ns = 0
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value >= 0 and value_header(arena, fragments.value_at[value]).remote_pieces > 0:
            # One collective makes all of it.
            ready_ns = max(ready_ns, times.forward_ns[derivation.last_at[value]])
    end_ns = compute_everywhere(machine, ready_ns, work.uniform_ns_2O[0, operator])
    if end_ns < 0:
        return False
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        value = graph.output_value[output]
        fragment, last_at = fragments.value_at[value], derivation.last_at[value]
        if not simulate_collectives(step, machine, times, fragment, -1, last_at, end_ns):
            return False
    return True


@inner
def simulate_collectives(
    step: Step, machine: Machine, times: StepTimes, fragment: int, active_at: int, last_at: int, ended_ns: int
) -> bool:
    """Serve the collectives of a value; return False beyond the bound.

    active_at: where the tasks of its producer have their ends; -1: all end at `ended_ns`. last_at: where its
    assemblies have when they are there; -1: nobody asks.
    """
    arena, forward_ns = step.arena, times.forward_ns
    count = value_header(arena, fragment).collectives
    if count == 0:
        return True
    collectives = collectives_of(arena, fragment)
    served, sources = served_assemblies_of(arena, fragment), served_sources_of(arena, fragment)
    for number in range(count):
        collective = collectives[number]
        ready_ns = max(ended_ns, issue(step.resource_sets, machine, collective.resource_set))
        if active_at >= 0:
            for source in range(collective.first_source, collectives[number + 1].first_source):
                ready_ns = max(ready_ns, forward_ns[active_at + sources[source]])
        end_ns = carry_collective(
            step.resource_sets, machine, collective.resource_set, ready_ns, collective.run_ns
        )
        if end_ns < 0:
            return False
        if last_at >= 0:
            for member in range(collective.first_assembly, collectives[number + 1].first_assembly):
                forward_ns[last_at + served[member]] = end_ns
    return True


@inner
def simulate_transfers(
    step: Step, machine: Machine, times: StepTimes, fragment: int, active_at: int, last_at: int
) -> bool:
    """Serve the transfers of a value; return False beyond the bound. Arguments as of `simulate_collectives`."""
    arena, sets, forward_ns = step.arena, step.resource_sets, times.forward_ns
    if value_header(arena, fragment).transfers == 0:
        return True
    if machine.deferred[HELD] >= 0 or machine.contended:
        settle_links(sets, machine)
    assemblies, pieces = assemblies_of(arena, fragment), piece_sources_of(arena, fragment)
    transfer_times = transfer_times_of(arena, fragment)
    device_T = source_devices_of(arena, fragment)
    transfer = 0
    for number in range(len(assemblies) - 1):
        assembly = assemblies[number]
        if assembly.collective >= 0:
            continue
        for index in range(assembly.first_piece, assembly.first_piece + assembly.pieces):
            source = device_T[pieces[index]]
            if source == assembly.device:
                continue
            resource_set = route_set(step.links, source, assembly.device)
            run_ns = transfer_times[transfer].run_ns
            ready_ns = max(forward_ns[active_at + pieces[index]], issue(sets, machine, resource_set))
            transfer += 1
            end_ns = carry(sets, machine, resource_set, ready_ns, run_ns)
            if end_ns < 0:
                return False
            if last_at >= 0:
                forward_ns[last_at + number] = max(forward_ns[last_at + number], end_ns)
    return True


@inner
def simulate_gathers(step: Step, machine: Machine, side: int, operator: int) -> bool:
    """Serve the gathers of weights that begin before an operator; return False beyond the bound."""
    sets, gathers = step.resource_sets, step.gathers
    begin, end = next_gathers(gathers, side, operator)
    for gather in range(begin, end):
        resource_set = gathers.resource_set[gather]
        ready_ns = issue(sets, machine, resource_set)
        for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
            ready_ns = max(ready_ns, machine.free_ns_R[sets.end[index]])
        settle_links(sets, machine)
        run_ns = collective_ns(sets, resource_set, gathers.size_bytes[gather])
        end_ns = carry(sets, machine, resource_set, ready_ns, run_ns)
        if end_ns < 0:
            return False
        gathers.task[gather] = end_ns
    return True


@inner
def gathered_ns(step: Step, side: int, operator: int, device: int) -> int:
    """Return when the weights that an operator reads on a device are gathered."""
    graph, gathers = step.graph, step.gathers
    ready_ns = 0
    for index in range(graph.behind_ptr[operator], graph.behind_ptr[operator + 1]):
        gathering = gathers.weight_2W[side, graph.behind_weight[index]]
        if gathering < 0:
            continue
        for gather in range(gathers.first_2O[side, gathering], gathers.last_2O[side, gathering]):
            if takes_part(step.resource_sets, gathers.resource_set[gather], device):
                ready_ns = max(ready_ns, gathers.task[gather])
    return ready_ns


@inner
def find_ready(step: Step, work: Workload, times: StepTimes, operator: int) -> bool:
    """Write when all that comes to each forward task from other devices is there; return whether anything comes."""
    graph, fragments, arena, forward_ns = step.graph, step.fragments, step.arena, times.forward_ns
    count = len(tasks_of(arena, fragments.operator_at[operator]))
    active_at = work.derivation.active_at[operator]
    waits = False
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value < 0 or value_header(arena, fragments.value_at[value]).remote_pieces == 0:
            continue
        if not waits:
            waits = True
            for part in range(count):
                forward_ns[active_at + part] = 0
        fragment, last_at = fragments.value_at[value], work.derivation.last_at[value]
        read, first_reader = (
            read_assemblies_of(arena, fragment),
            first_readers_of(arena, fragment)[graph.slot_reading[slot]],
        )
        for part in range(count):
            there_ns = forward_ns[last_at + read[first_reader + part]]
            forward_ns[active_at + part] = max(forward_ns[active_at + part], there_ns)
    return waits
