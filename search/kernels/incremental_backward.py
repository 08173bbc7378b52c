"""The incremental simulation of the backward, of what is recomputed, and of the sums of gradients."""

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
    value_header,
)
from search.kernels.hosts import issue
from search.kernels.incremental_forward import gathered_ns, simulate_gathers
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
from search.kernels.messages import gradient_ns, route_set
from search.kernels.records import (
    COMPUTED,
    EVEN,
    HELD,
    LOCAL,
    MIXED,
    ONE_COLLECTIVE,
    Buckets,
    Machine,
    ResourceSets,
    Step,
    StepTimes,
    Workload,
)
from search.kernels.workload import exchange_of


@inner
def simulate_backward(step: Step, machine: Machine, work: Workload, times: StepTimes) -> bool:
    """Serve all backward tasks, exchanges of gradients and sums of buckets; return False beyond the bound.

    A backward task waits for its own forward, and for readers on its device, by the device alone.
    """
    buckets, derivation = step.buckets, work.derivation
    find_awaited(step, work, times)
    clear_gradients(step, machine, work, times)
    position = 0
    for operator in range(len(step.fragments.operator_at) - 1, -1, -1):
        if step.gathers.counts[1] and not simulate_gathers(step, machine, 1, operator):
            return False
        if step.groups.first_O[operator] >= 0:
            settle(machine)
            machine.deferred[EVEN] = 0
            if not simulate_recompute(step, machine, work, step.groups.first_O[operator], operator):
                return False
        uniform_ns, exchange = work.uniform_ns_2O[1, operator], work.exchange_2O[1, operator]
        if not derivation.operator_active[operator]:
            pass
        elif is_unawaited(machine, work, times, operator):
            if uniform_ns >= 0:
                defer(machine, uniform_ns)
            else:
                at = step.fragments.operator_at[operator]
                compute_unawaited(machine, step.arena, at, derivation, derivation.active_at[operator])
        else:
            if machine.folds and exchange != MIXED and uniform_ns >= 0 and machine.deferred[EVEN]:
                if not simulate_folded_backward(step, machine, work, times, operator):
                    return False
            elif not simulate_operator_backward(step, machine, work, times, operator):
                return False
            if exchange != LOCAL and not simulate_gradients(step, machine, work, times, operator):
                return False
        while position < buckets.counts[0] and buckets.after[buckets.order[position]] == operator:
            if not simulate_bucket(step, machine, work, times, position):
                return False
            position += 1
    return True


@inner
def is_unawaited(machine: Machine, work: Workload, times: StepTimes, operator: int) -> bool:
    """Return whether nobody asks when the backward tasks of an operator end, which wait for nothing."""
    is_local = work.exchange_2O[1, operator] == LOCAL
    return bool(machine.folds and is_local and not times.is_awaited_O[operator])


@inner
def clear_gradients(step: Step, machine: Machine, work: Workload, times: StepTimes) -> None:
    """Write 0 where the latest of several times is to come."""
    derivation = work.derivation
    for operator in range(len(step.fragments.operator_at)):
        if derivation.operator_active[operator] and not is_unawaited(machine, work, times, operator):
            active_at = derivation.active_at[operator]
            for index in range(
                active_at, active_at + len(tasks_of(step.arena, step.fragments.operator_at[operator]))
            ):
                times.backward_ns[index] = 0
    for value in range(step.graph.value_count):
        header = value_header(step.arena, step.fragments.value_at[value])
        if step.graph.needs_gradient[value] and header.remote_pieces > 0:
            last_at = derivation.last_at[value]
            for index in range(last_at, last_at + header.assemblies):
                times.backward_ns[index] = 0


@inner
def simulate_recompute(step: Step, machine: Machine, work: Workload, first: int, last: int) -> bool:
    """Serve the forward tasks of a group that are recomputed; return False beyond the bound."""
    derivation, gathers = work.derivation, step.gathers
    for operator in range(first, last + 1):
        tasks = tasks_of(step.arena, step.fragments.operator_at[operator])
        for part in range(len(tasks)):
            task = tasks[part]
            if not derivation.pool[derivation.active_at[operator] + part]:
                continue
            ready_ns = gathers.blocked_D[task.device]
            if gathers.counts[1]:
                ready_ns = max(ready_ns, gathered_ns(step, 1, operator, task.device))
            if compute(machine, task.device, ready_ns, task.forward_ns, task.forward_launch_ns) < 0:
                return False
    return True


@inner
def simulate_operator_backward(
    step: Step, machine: Machine, work: Workload, times: StepTimes, operator: int
) -> bool:
    """Serve the backward tasks of one operator; return False beyond the bound."""
    graph, arena, derivation, gathers = step.graph, step.arena, work.derivation, step.gathers
    tasks, active_at = tasks_of(arena, step.fragments.operator_at[operator]), derivation.active_at[operator]
    pool, backward_ns = derivation.pool, times.backward_ns
    if machine.deferred[COMPUTED]:
        settle(machine)
    for part in range(len(tasks)):
        if pool[active_at + part]:
            task = tasks[part]
            ready_ns = max(
                backward_ns[active_at + part], times.gradients_ns_O[operator], gathers.blocked_D[task.device]
            )
            if gathers.counts[1]:
                ready_ns = max(ready_ns, gathered_ns(step, 1, operator, task.device))
            end_ns = compute(machine, task.device, ready_ns, task.backward_ns, task.backward_launch_ns)
            if end_ns < 0:
                return False
            backward_ns[active_at + part] = end_ns
    machine.deferred[EVEN] = 0
    if work.uniform_ns_2O[1, operator] >= 0:
        find_even(machine)
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        if sends_gradient(step, slot):
            value = graph.slot_value[slot]
            fragment, last_at = step.fragments.value_at[value], derivation.last_at[value]
            read = read_assemblies_of(arena, fragment)
            first_reader = first_readers_of(arena, fragment)[graph.slot_reading[slot]]
            for part in range(len(tasks)):
                if pool[active_at + part]:
                    at = last_at + read[first_reader + part]
                    backward_ns[at] = max(backward_ns[at], backward_ns[active_at + part])
    return True


@inner
def sends_gradient(step: Step, slot: int) -> bool:
    """Return whether a gradient of what is read through a slot may go to other devices."""
    graph, value = step.graph, step.graph.slot_value[slot]
    if value < 0 or value_header(step.arena, step.fragments.value_at[value]).remote_pieces == 0:
        return False
    reading = graph.reading_ptr[value] + graph.slot_reading[slot]
    return bool(graph.needs_gradient[value] and graph.reading_gradient[reading])


@inner
def simulate_folded_backward(
    step: Step, machine: Machine, work: Workload, times: StepTimes, operator: int
) -> bool:
    """Serve the backward tasks of an operator that take the same time, all devices being free at the same time.

    Returns False beyond the bound.
    """
    graph = step.graph
    end_ns = compute_everywhere(machine, times.gradients_ns_O[operator], work.uniform_ns_2O[1, operator])
    times.end_ns_O[operator] = end_ns
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        if sends_gradient(step, slot):
            value = graph.slot_value[slot]
            times.gradient_ns_V[value] = max(times.gradient_ns_V[value], end_ns)
    return bool(end_ns >= 0)


@inner
def simulate_gradients(step: Step, machine: Machine, work: Workload, times: StepTimes, operator: int) -> bool:
    """Serve the collectives, then the transfers, of the gradients that one operator's backward completes.

    Returns False beyond the bound.
    """
    graph = step.graph
    first, last = graph.read_ptr[operator], graph.read_ptr[operator + 1]
    for position in range(first, last):
        if not simulate_gradient_collectives(
            step, machine, work, times, operator, graph.read_value[position]
        ):
            return False
    for position in range(first, last):
        if not simulate_gradient_transfers(step, machine, work, times, operator, graph.read_value[position]):
            return False
    return True


@inner
def simulate_gradient_collectives(
    step: Step, machine: Machine, work: Workload, times: StepTimes, operator: int, value: int
) -> bool:
    """Serve the collectives of a value's gradient that an operator completes; return False beyond the bound."""
    arena, fragment, derivation = step.arena, step.fragments.value_at[value], work.derivation
    count = value_header(arena, fragment).collectives
    if count == 0:
        return True
    collectives, producer = collectives_of(arena, fragment), step.graph.producer[value]
    served, sources = served_assemblies_of(arena, fragment), served_sources_of(arena, fragment)
    last_at, active_at = derivation.last_at[value], derivation.active_at[producer]
    for number in range(count):
        if derivation.pool[derivation.collective_at[value] + number] != operator:
            continue
        collective, following = collectives[number], collectives[number + 1]
        issued_ns = issue(step.resource_sets, machine, collective.back_resource_set)
        ready_ns = max(times.gradient_ns_V[value], issued_ns)
        for member in range(collective.first_assembly, following.first_assembly):
            ready_ns = max(ready_ns, times.backward_ns[last_at + served[member]])
        end_ns = carry_collective(
            step.resource_sets, machine, collective.back_resource_set, ready_ns, collective.back_ns
        )
        if end_ns < 0:
            return False
        if exchange_of(arena, fragment) == ONE_COLLECTIVE:
            times.gradients_ns_O[producer] = max(times.gradients_ns_O[producer], end_ns)
            continue
        for source in range(collective.first_source, following.first_source):
            at = active_at + sources[source]
            times.backward_ns[at] = max(times.backward_ns[at], end_ns)
    return True


@inner
def simulate_gradient_transfers(
    step: Step, machine: Machine, work: Workload, times: StepTimes, operator: int, value: int
) -> bool:
    """Serve the transfers of a value's gradient that an operator completes; return False beyond the bound."""
    arena, fragment, derivation = step.arena, step.fragments.value_at[value], work.derivation
    if value_header(arena, fragment).remote_pieces == 0:
        return True
    pool, last_at = derivation.pool, derivation.last_at[value]
    active_at = derivation.active_at[step.graph.producer[value]]
    assemblies, pieces = assemblies_of(arena, fragment), piece_sources_of(arena, fragment)
    device_T = source_devices_of(arena, fragment)
    for number in range(len(assemblies) - 1):
        if pool[last_at + number] != operator:
            continue
        assembly = assemblies[number]
        if assembly.collective >= 0 and pool[derivation.collective_at[value] + assembly.collective] >= 0:
            continue
        if machine.deferred[HELD] >= 0 or machine.contended:
            settle_links(step.resource_sets, machine)
        ready_ns = times.backward_ns[last_at + number]
        remote = 0
        for position in range(assembly.pieces):
            task = pieces[assembly.first_piece + position]
            if device_T[task] == assembly.device:
                continue
            resource_set = route_set(step.links, assembly.device, device_T[task])
            back_ns = gradient_ns(arena, fragment, number, position, remote, step.links)
            remote += 1
            issued_ns = issue(step.resource_sets, machine, resource_set)
            end_ns = carry(step.resource_sets, machine, resource_set, max(ready_ns, issued_ns), back_ns)
            if end_ns < 0:
                return False
            times.backward_ns[active_at + task] = max(times.backward_ns[active_at + task], end_ns)
    return True


@inner
def bucket_ns(sets: ResourceSets, buckets: Buckets, bucket: int) -> int:
    """Return how long a bucket's all-reduce takes."""
    return collective_ns(sets, buckets.resource_set[bucket], buckets.size_bytes[bucket])


@inner
def find_awaited(step: Step, work: Workload, times: StepTimes) -> None:
    """Find which operators' backward the buckets wait for.

    A device's tasks end one after the other: where the last operator that contributes to a bucket has a backward on
    each of its devices, that is all that the bucket waits for.
    """
    graph, sets, buckets, derivation = step.graph, step.resource_sets, step.buckets, work.derivation
    for position in range(buckets.counts[0]):
        bucket = buckets.order[position]
        last = buckets.entry_weight[buckets.last_entry[bucket]]
        close = -1
        for user in range(graph.weight_ptr[last], graph.weight_ptr[last + 1]):
            if derivation.operator_active[graph.weight_user[user]]:
                close = graph.weight_user[user]
                break
        covers = work.uniform_ns_2O[1, close] >= 0
        if not covers:
            tasks = tasks_of(step.arena, step.fragments.operator_at[close])
            for part in range(len(tasks)):
                if derivation.pool[derivation.active_at[close] + part]:
                    times.member_D[tasks[part].device] = position
            resource_set = buckets.resource_set[bucket]
            covers = True
            for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
                covers = covers and times.member_D[sets.end[index]] == position
        times.close_B[position] = close if covers else -1
        if covers:
            times.is_awaited_O[close] = 1
            continue
        entry = buckets.first_entry[bucket]
        while entry >= 0:
            weight = buckets.entry_weight[entry]
            for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
                times.is_awaited_O[graph.weight_user[user]] = 1
            entry = buckets.entry_next[entry]
    times.member_D[:] = -1


@inner
def ended_ns(step: Step, work: Workload, times: StepTimes, operator: int, position: int) -> int:
    """Return when an operator's backward has ended on the members of the bucket at hand."""
    if times.end_ns_O[operator] >= 0:
        return int(times.end_ns_O[operator])
    ready_ns = 0
    tasks, active_at = (
        tasks_of(step.arena, step.fragments.operator_at[operator]),
        work.derivation.active_at[operator],
    )
    for part in range(len(tasks)):
        if work.derivation.pool[active_at + part] and times.member_D[tasks[part].device] == position:
            ready_ns = max(ready_ns, times.backward_ns[active_at + part])
    return ready_ns


@inner
def simulate_bucket(step: Step, machine: Machine, work: Workload, times: StepTimes, position: int) -> bool:
    """Serve the sum of one bucket; return False beyond the bound."""
    graph, sets, buckets, gathers = step.graph, step.resource_sets, step.buckets, step.gathers
    bucket = buckets.order[position]
    resource_set = buckets.resource_set[bucket]
    ready_ns = issue(sets, machine, resource_set)
    for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
        device = sets.end[index]
        times.member_D[device] = position
        if buckets.sharing[bucket]:
            ready_ns = max(ready_ns, gathers.reduced_D[device])
    close = times.close_B[position]
    if close >= 0:
        ready_ns = max(ready_ns, ended_ns(step, work, times, close, position))
    else:
        entry = buckets.first_entry[bucket]
        while entry >= 0:
            weight = buckets.entry_weight[entry]
            for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
                ready_ns = max(ready_ns, ended_ns(step, work, times, graph.weight_user[user], position))
            entry = buckets.entry_next[entry]
    end_ns = carry_collective(sets, machine, resource_set, ready_ns, bucket_ns(sets, buckets, bucket))
    for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
        device = sets.end[index]
        times.sync_end_D[device] = max(times.sync_end_D[device], end_ns)
        if buckets.sharing[bucket]:
            gathers.blocked_D[device] = gathers.reduced_D[device]
            gathers.reduced_D[device] = end_ns
    return bool(end_ns >= 0)
