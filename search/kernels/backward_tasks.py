"""The tasks of the backward: operators, what is recomputed, gradients of values, sums of buckets."""

from __future__ import annotations

from search.kernels.cache import inner
from search.kernels.collective_formulas import collective_ns
from search.kernels.forward_tasks import await_gathers, emit_gathers, launch, put, put_communication
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    first_pieces_of,
    pieces_by_source_of,
    pieces_of,
    readers_of,
    served_assemblies_of,
    source_devices_of,
    tasks_of,
    value_header,
)
from search.kernels.messages import gradient_ns, piece_bytes, route_set
from search.kernels.records import (
    BACKWARD,
    GRADIENT_COLLECTIVE,
    GRADIENT_TRANSFER,
    RECOMPUTE,
    SYNCHRONIZE,
    Array,
    Emission,
)


@inner
def await_readers(emission: Emission, value: int, assembly: int, e: int) -> int:
    """Let a task wait for the backwards that give an assembly its gradient; return the end of the dependencies."""
    derivation = emission.derivation
    graph, scratch, fragment = emission.graph, emission.scratch, emission.fragments.value_at[value]
    assemblies, readers = assemblies_of(emission.arena, fragment), readers_of(emission.arena, fragment)
    for index in range(assemblies[assembly].first_reader, assemblies[assembly + 1].first_reader):
        reader = readers[index]
        reading = graph.reading_ptr[value] + reader.reading
        task = derivation.active_at[graph.reading_operator[reading]] + reader.task
        if graph.reading_gradient[reading] and derivation.pool[task]:
            emission.tasks.pred[e] = scratch.backward_task[task]
            e += 1
    return e


@inner
def emit_recompute(emission: Emission, first: int, last: int) -> None:
    """Emit the forward tasks of a group that is recomputed.

    What they read is on their device. Each waits for what the device computes before it, that none comes too early
    where tasks are not served in program order.
    """
    derivation = emission.derivation
    scratch, tasks, gathers = emission.scratch, emission.tasks, emission.gathers
    n, e = scratch.counts[0], scratch.counts[1]
    for operator in range(first, last + 1):
        parts = tasks_of(emission.arena, emission.fragments.operator_at[operator])
        for part in range(len(parts)):
            flat = derivation.active_at[operator] + part
            if not derivation.pool[flat]:
                continue
            task = parts[part]
            put(tasks, n, RECOMPUTE, operator, part, task.device, task.forward_ns, task.origin)
            launch(emission, n, task.device, task.forward_launch_ns)
            # Where the backward of the task looks for it.
            scratch.backward_task[flat] = n
            tasks.pred[e] = gathers.latest_D[task.device]
            e = await_device(emission, operator, task.device, n, e + 1)
            n += 1
            tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def await_device(emission: Emission, operator: int, device: int, n: int, e: int) -> int:
    """Let task `n` of the backward wait for sums of gradients and gathers of weights; return the dependencies' end."""
    gathers = emission.gathers
    if gathers.blocked_D[device] >= 0:
        emission.tasks.pred[e] = gathers.blocked_D[device]
        e += 1
    if gathers.counts[1]:
        e = await_gathers(emission, 1, operator, device, e)
    gathers.latest_D[device] = n
    return e


@inner
def await_gradients(emission: Emission, value: int, part: int, e: int) -> int:
    """Let a backward task wait for the gradients of its pieces of a value; return the end of the dependencies."""
    derivation = emission.derivation
    scratch, tasks, arena = emission.scratch, emission.tasks, emission.arena
    fragment = emission.fragments.value_at[value]
    assemblies, pieces = assemblies_of(arena, fragment), pieces_of(arena, fragment)
    first_pieces, by_source = first_pieces_of(arena, fragment), pieces_by_source_of(arena, fragment)
    latest = -1
    number = 0
    for position in range(first_pieces[part], first_pieces[part + 1]):
        piece = pieces[by_source[position]]
        while by_source[position] >= assemblies[number + 1].first_piece:
            number += 1
        flat = derivation.last_at[value] + number
        if derivation.pool[flat] < 0:
            continue
        collective = assemblies[number].collective
        if collective >= 0:
            flat_collective = derivation.collective_at[value] + collective
            if derivation.pool[flat_collective] >= 0:
                # One task stands for all assemblies that the collective serves.
                if latest != collective:
                    tasks.pred[e] = scratch.gradient_collective[flat_collective]
                    e += 1
                    latest = collective
                continue
        if piece.rank >= 0:
            tasks.pred[e] = scratch.gradient_base[flat] + piece.rank
            e += 1
        else:
            e = await_readers(emission, value, number, e)
    return e


@inner
def sort_by_source(arena: Array, fragment: int) -> None:
    """Write the pieces of a value by source task, unless they are: a walk in program order never asks for them."""
    first_pieces, by_source = first_pieces_of(arena, fragment), pieces_by_source_of(arena, fragment)
    if first_pieces[0] >= 0:
        return
    pieces, sources = pieces_of(arena, fragment), len(first_pieces) - 1
    first_pieces[:] = 0
    for number in range(len(pieces)):
        first_pieces[pieces[number].source] += 1
    for task in range(1, sources + 1):
        first_pieces[task] += first_pieces[task - 1]
    # From each task's end backwards, to where it begins.
    for number in range(len(pieces) - 1, -1, -1):
        task = pieces[number].source
        first_pieces[task] -= 1
        by_source[first_pieces[task]] = number


@inner
def emit_operator_backward(emission: Emission, operator: int) -> None:
    """Emit the backward tasks of one operator."""
    derivation = emission.derivation
    graph, scratch, tasks = emission.graph, emission.scratch, emission.tasks
    n, e = scratch.counts[0], scratch.counts[1]
    parts = tasks_of(emission.arena, emission.fragments.operator_at[operator])
    recomputed = emission.groups.of_O[operator] >= 0
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        sort_by_source(emission.arena, emission.fragments.value_at[graph.output_value[output]])
    for part in range(len(parts)):
        flat = derivation.active_at[operator] + part
        if not derivation.pool[flat]:
            continue
        task = parts[part]
        put(tasks, n, BACKWARD, operator, part, task.device, task.backward_ns, task.origin)
        launch(emission, n, task.device, task.backward_launch_ns)
        tasks.pred[e] = scratch.backward_task[flat] if recomputed else scratch.forward_base[operator] + part
        scratch.backward_task[flat] = n
        e = await_device(emission, operator, task.device, n, e + 1)
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            e = await_gradients(emission, graph.output_value[output], part, e)
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def emit_gradient_collectives(emission: Emission, operator: int) -> None:
    """Emit the collectives of the gradients that one operator's backward completes."""
    derivation = emission.derivation
    graph, scratch, arena = emission.graph, emission.scratch, emission.arena
    n, e = scratch.counts[0], scratch.counts[1]
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        fragment = emission.fragments.value_at[value]
        count = value_header(arena, fragment).collectives
        if count == 0:
            continue
        collectives, served = collectives_of(arena, fragment), served_assemblies_of(arena, fragment)
        for number in range(count):
            flat = derivation.collective_at[value] + number
            if derivation.pool[flat] != operator:
                continue
            collective = collectives[number]
            put_communication(
                emission, n, GRADIENT_COLLECTIVE, value, number, collective.back_resource_set, collective.back_ns,
                collective.size_bytes,
            )  # fmt: skip
            scratch.gradient_collective[flat] = n
            for member in range(collective.first_assembly, collectives[number + 1].first_assembly):
                e = await_readers(emission, value, served[member], e)
            n += 1
            emission.tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def emit_gradient_transfers(emission: Emission, operator: int) -> None:
    """Emit the transfers of the gradients that one operator's backward completes."""
    derivation = emission.derivation
    graph, scratch, arena = emission.graph, emission.scratch, emission.arena
    n, e = scratch.counts[0], scratch.counts[1]
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        fragment = emission.fragments.value_at[value]
        assemblies, pieces = assemblies_of(arena, fragment), pieces_of(arena, fragment)
        device_T, devices = source_devices_of(arena, fragment), len(emission.links.node_D)
        for number in range(len(assemblies) - 1):
            flat = derivation.last_at[value] + number
            if derivation.pool[flat] != operator:
                continue
            assembly = assemblies[number]
            if (
                assembly.collective >= 0
                and derivation.pool[derivation.collective_at[value] + assembly.collective] >= 0
            ):
                continue
            based = False
            for index in range(assembly.first_piece, assemblies[number + 1].first_piece):
                piece = pieces[index]
                if piece.rank < 0:
                    continue
                if not based:
                    scratch.gradient_base[flat] = n - piece.rank
                    based = True
                resource_set = route_set(assembly.device, device_T[piece.source], devices)
                back_ns = gradient_ns(arena, fragment, number, index, emission.links)
                size_bytes = piece_bytes(arena, fragment, number, index)
                put_communication(
                    emission, n, GRADIENT_TRANSFER, value, index, resource_set, back_ns, size_bytes
                )
                e = await_readers(emission, value, number, e)
                n += 1
                emission.tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e


@inner
def emit_bucket(emission: Emission, position: int, member_D: Array) -> None:
    """Emit the sum of one bucket.

    Of gradients that are shared, a device has two buckets at most in its hands: it waits for the one before.
    """
    derivation = emission.derivation
    graph, scratch, tasks = emission.graph, emission.scratch, emission.tasks
    sets, buckets, gathers = emission.resource_sets, emission.buckets, emission.gathers
    n, e = scratch.counts[0], scratch.counts[1]
    bucket = buckets.order[position]
    resource_set, size_bytes = buckets.resource_set[bucket], buckets.size_bytes[bucket]
    run_ns = collective_ns(sets, resource_set, size_bytes)
    put_communication(emission, n, SYNCHRONIZE, position, 0, resource_set, run_ns, size_bytes)
    for end in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
        device = sets.end[end]
        member_D[device] = position
        if buckets.sharing[bucket]:
            if gathers.reduced_D[device] >= 0:
                tasks.pred[e] = gathers.reduced_D[device]
                e += 1
            gathers.blocked_D[device] = gathers.reduced_D[device]
            gathers.reduced_D[device] = n
    entry = buckets.first_entry[bucket]
    while entry >= 0:
        weight = buckets.entry_weight[entry]
        for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
            operator = graph.weight_user[user]
            parts = tasks_of(emission.arena, emission.fragments.operator_at[operator])
            for part in range(len(parts)):
                flat = derivation.active_at[operator] + part
                if derivation.pool[flat] and member_D[parts[part].device] == position:
                    tasks.pred[e] = scratch.backward_task[flat]
                    e += 1
        entry = buckets.entry_next[entry]
    tasks.pred_ptr[n + 1] = e
    scratch.counts[0] = n + 1
    scratch.counts[1] = e


@inner
def emit_backward(emission: Emission, member_D: Array) -> None:
    """Emit backward tasks, what is recomputed before them, exchanges of gradients and sums of buckets.

    member_D: -1 everywhere.
    """
    groups, buckets = emission.groups, emission.buckets
    position = 0
    for operator in range(len(emission.fragments.operator_at) - 1, -1, -1):
        if emission.gathers.counts[1]:
            emit_gathers(emission, 1, operator)
        if groups.first_O[operator] >= 0:
            emit_recompute(emission, groups.first_O[operator], operator)
        emit_operator_backward(emission, operator)
        emit_gradient_collectives(emission, operator)
        emit_gradient_transfers(emission, operator)
        while position < buckets.counts[0] and buckets.after[buckets.order[position]] == operator:
            emit_bucket(emission, position, member_D)
            position += 1
