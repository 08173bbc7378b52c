"""The tasks of the forward, of renewed buffers and of gathers of weights."""

from __future__ import annotations

from search.kernels.cache import hot, inner
from search.kernels.collective_formulas import collective_ns
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    first_readers_of,
    piece_sources_of,
    read_assemblies_of,
    served_sources_of,
    sizes_of,
    source_devices_of,
    tasks_of,
    transfer_times_of,
    value_header,
)
from search.kernels.messages import route_set
from search.kernels.records import (
    BUFFER_COLLECTIVE,
    BUFFER_TRANSFER,
    COLLECTIVE,
    FORWARD,
    FORWARD_GATHER,
    TRANSFER,
    Emission,
    Tasks,
)
from search.kernels.weight_gathers import next_gathers, takes_part


@hot
def put(
    tasks: Tasks, n: int, kind: int, subject: int, part: int, resource_set: int, run_ns: int, origin: int
) -> None:
    """Write task `n`, of no bytes, which no host has to issue so far."""
    tasks.kind[n] = kind
    tasks.subject[n] = subject
    tasks.part[n] = part
    tasks.resource_set[n] = resource_set
    tasks.run_ns[n] = run_ns
    tasks.origin[n] = origin
    tasks.size_bytes[n] = 0
    tasks.launch_ns[n] = 0


@hot
def put_communication(
    emission: Emission,
    n: int,
    kind: int,
    subject: int,
    part: int,
    resource_set: int,
    run_ns: int,
    size_bytes: int,
) -> None:
    """Write task `n`, a transfer or a collective."""
    put(
        emission.tasks,
        n,
        kind,
        subject,
        part,
        resource_set,
        run_ns,
        emission.resource_sets.origin[resource_set],
    )
    emission.tasks.size_bytes[n] = size_bytes
    emission.tasks.launch_ns[n] = emission.resource_sets.issue_ns[resource_set]


@inner
def emit_gathers(emission: Emission, side: int, operator: int) -> None:
    """Emit the gathers that begin before an operator, when their devices have computed all that comes before."""
    scratch, tasks, sets, gathers = emission.scratch, emission.tasks, emission.resource_sets, emission.gathers
    n, e = scratch.counts[0], scratch.counts[1]
    begin, end = next_gathers(gathers, side, operator)
    for gather in range(begin, end):
        resource_set, size_bytes = gathers.resource_set[gather], gathers.size_bytes[gather]
        run_ns, subject = collective_ns(sets, resource_set, size_bytes), gathers.operator[gather]
        put_communication(
            emission, n, FORWARD_GATHER + side, subject, gather, resource_set, run_ns, size_bytes
        )
        gathers.task[gather] = n
        for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
            if gathers.latest_D[sets.end[index]] >= 0:
                tasks.pred[e] = gathers.latest_D[sets.end[index]]
                e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def await_gathers(emission: Emission, side: int, operator: int, device: int, e: int) -> int:
    """Let a task wait for the gathers of the weights that it reads; return the end of the dependencies."""
    graph, gathers = emission.graph, emission.gathers
    for index in range(graph.behind_ptr[operator], graph.behind_ptr[operator + 1]):
        weight = graph.behind_weight[index]
        if gathers.weight_2W[side, weight] < 0:
            continue
        gathering = gathers.weight_2W[side, weight]
        for gather in range(gathers.first_2O[side, gathering], gathers.last_2O[side, gathering]):
            if takes_part(emission.resource_sets, gathers.resource_set[gather], device):
                emission.tasks.pred[e] = gathers.task[gather]
                e += 1
    return e


@inner
def emit_collectives(emission: Emission, operator: int, value: int, kind: int) -> None:
    """Emit the collectives of a value that `operator` makes."""
    scratch, tasks, arena, fragment = (
        emission.scratch,
        emission.tasks,
        emission.arena,
        emission.fragments.value_at[value],
    )
    count = value_header(arena, fragment).collectives
    if count == 0:
        return
    n, e = scratch.counts[0], scratch.counts[1]
    scratch.collective_base[value] = n
    collectives, sources = collectives_of(arena, fragment), served_sources_of(arena, fragment)
    for number in range(count):
        collective = collectives[number]
        put_communication(
            emission,
            n,
            kind,
            value,
            number,
            collective.resource_set,
            collective.run_ns,
            collective.size_bytes,
        )
        for position in range(collective.first_source, collectives[number + 1].first_source):
            tasks.pred[e] = scratch.forward_base[operator] + sources[position]
            e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def emit_transfers(emission: Emission, operator: int, value: int, kind: int) -> None:
    """Emit the transfers of a value that `operator` makes."""
    scratch, tasks, arena, fragment = (
        emission.scratch,
        emission.tasks,
        emission.arena,
        emission.fragments.value_at[value],
    )
    n, e = scratch.counts[0], scratch.counts[1]
    scratch.transfer_base[value] = n
    if value_header(arena, fragment).transfers == 0:
        return
    assemblies, pieces = assemblies_of(arena, fragment), piece_sources_of(arena, fragment)
    transfer_times, sizes = transfer_times_of(arena, fragment), sizes_of(arena, fragment)
    device_T = source_devices_of(arena, fragment)
    # The number of a piece counts those of all assemblies, though these share lists.
    transfer = following = 0
    for number in range(len(assemblies) - 1):
        assembly, piece = assemblies[number], following
        following += assembly.pieces
        if assembly.collective >= 0:
            continue
        for position in range(assembly.pieces):
            task = pieces[assembly.first_piece + position]
            if device_T[task] == assembly.device:
                continue
            resource_set, run_ns = (
                route_set(emission.links, device_T[task], assembly.device),
                transfer_times[transfer].run_ns,
            )
            size_bytes = sizes[assembly.first_size + position]
            put_communication(emission, n, kind, value, piece + position, resource_set, run_ns, size_bytes)
            tasks.pred[e] = scratch.forward_base[operator] + task
            transfer += 1
            n += 1
            e += 1
            tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def emit_operator_forward(emission: Emission, operator: int) -> None:
    """Emit the forward tasks of one operator."""
    graph, scratch, tasks, arena = emission.graph, emission.scratch, emission.tasks, emission.arena
    gathers = emission.gathers
    n, e = scratch.counts[0], scratch.counts[1]
    scratch.forward_base[operator] = n
    parts = tasks_of(arena, emission.fragments.operator_at[operator])
    for part in range(len(parts)):
        task = parts[part]
        put(tasks, n, FORWARD, operator, part, task.device, task.forward_ns, task.origin)
        tasks.launch_ns[n] = task.forward_launch_ns
        gathers.latest_D[task.device] = n
        if gathers.counts[1]:
            e = await_gathers(emission, 0, operator, task.device, e)
        for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
            value = graph.slot_value[slot]
            if value < 0:
                continue
            fragment = emission.fragments.value_at[value]
            assemblies, pieces = assemblies_of(arena, fragment), piece_sources_of(arena, fragment)
            device_T = source_devices_of(arena, fragment)
            first_reader = first_readers_of(arena, fragment)[graph.slot_reading[slot]]
            number = read_assemblies_of(arena, fragment)[first_reader + part]
            assembly = assemblies[number]
            if assembly.collective >= 0:
                tasks.pred[e] = scratch.collective_base[value] + assembly.collective
                e += 1
                continue
            transfer = scratch.transfer_base[value] + assembly.first_transfer
            for index in range(assembly.first_piece, assembly.first_piece + assembly.pieces):
                if device_T[pieces[index]] == assembly.device:
                    tasks.pred[e] = scratch.forward_base[graph.producer[value]] + pieces[index]
                else:
                    tasks.pred[e] = transfer
                    transfer += 1
                e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def emit_forward(emission: Emission, first_place: int, last_place: int) -> None:
    """Emit the forward tasks of operators at places of the order, and exchanges of their outputs."""
    graph = emission.graph
    for order_place in range(first_place, last_place):
        operator = graph.order[order_place]
        if emission.gathers.counts[1]:
            emit_gathers(emission, 0, operator)
        emit_operator_forward(emission, operator)
        first, last = graph.output_ptr[operator], graph.output_ptr[operator + 1]
        for output in range(first, last):
            emit_collectives(emission, operator, graph.output_value[output], COLLECTIVE)
        for output in range(first, last):
            emit_transfers(emission, operator, graph.output_value[output], TRANSFER)


@inner
def emit_renewals(emission: Emission) -> None:
    """Emit the exchanges that renew buffers."""
    graph = emission.graph
    first, last = graph.value_count, graph.value_count + graph.buffer_count
    for value in range(first, last):
        emit_collectives(emission, graph.producer[value], value, BUFFER_COLLECTIVE)
    for value in range(first, last):
        emit_transfers(emission, graph.producer[value], value, BUFFER_TRANSFER)
