"""The tasks of the backward: operators, what is recomputed, gradients of values, sums of buckets."""

from __future__ import annotations

from search.kernels.cache import inner
from search.kernels.collective_formulas import collective_ns
from search.kernels.forward_tasks import await_gathers, emit_gathers, put, put_communication
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    piece_sources_of,
    readers_of,
    served_assemblies_of,
    served_sources_of,
    sizes_of,
    source_devices_of,
    tasks_of,
    value_header,
)
from search.kernels.messages import gradient_ns, route_set
from search.kernels.records import (
    BACKWARD,
    GRADIENT_COLLECTIVE,
    GRADIENT_TRANSFER,
    RECOMPUTE,
    STAYS,
    SUMMED,
    SYNCHRONIZE,
    Array,
    Emission,
    GradientsBySource,
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
            tasks.launch_ns[n] = task.forward_launch_ns
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
def await_gradients(emission: Emission, part: int, by_source: GradientsBySource, e: int) -> int:
    """Let a backward task wait for the gradients of its pieces; return the end of the dependencies."""
    derivation, scratch, tasks, arena = emission.derivation, emission.scratch, emission.tasks, emission.arena
    for entry in range(by_source.first_T[part], by_source.first_T[part + 1]):
        value, number, message = (
            by_source.value_G[entry],
            by_source.assembly_G[entry],
            by_source.message_G[entry],
        )
        if message == STAYS:
            e = await_readers(emission, value, number, e)
            continue
        if message == SUMMED:
            assembly = assemblies_of(arena, emission.fragments.value_at[value])[number]
            collective = derivation.collective_at[value] + assembly.collective
            tasks.pred[e] = scratch.gradient_collective[collective]
        else:
            tasks.pred[e] = scratch.gradient_base[derivation.last_at[value] + number] + message
        e += 1
    return e


@inner
def sort_gradients(emission: Emission, operator: int, by_source: GradientsBySource) -> None:
    """Write which gradients each backward task of an operator waits for."""
    graph, derivation, arena = emission.graph, emission.derivation, emission.arena
    first_T, count = by_source.first_T, len(tasks_of(arena, emission.fragments.operator_at[operator]))
    first_T[: count + 1] = 0
    for writes in range(2):
        for output in range(graph.output_ptr[operator + 1] - 1, graph.output_ptr[operator] - 1, -1):
            value = graph.output_value[output]
            fragment, last_at = emission.fragments.value_at[value], derivation.last_at[value]
            assemblies, pieces = assemblies_of(arena, fragment), piece_sources_of(arena, fragment)
            device_T = source_devices_of(arena, fragment)
            for number in range(len(assemblies) - 2, -1, -1):
                assembly = assemblies[number]
                if derivation.pool[last_at + number] < 0:
                    continue
                served_by, first, message = (
                    assembly.collective,
                    assembly.first_piece,
                    assembly.pieces - assembly.locals,
                )
                if served_by < 0 or derivation.pool[derivation.collective_at[value] + served_by] < 0:
                    for index in range(first + assembly.pieces - 1, first - 1, -1):
                        task = pieces[index]
                        if device_T[task] == assembly.device:
                            add_gradient(by_source, writes, task, value, number, STAYS)
                        else:
                            message -= 1
                            add_gradient(by_source, writes, task, value, number, message)
                    continue
                # One task stands for all assemblies that the collective serves.
                collective, following = (
                    collectives_of(arena, fragment)[served_by],
                    collectives_of(arena, fragment)[served_by + 1],
                )
                if served_assemblies_of(arena, fragment)[collective.first_assembly] == number:
                    sources = served_sources_of(arena, fragment)
                    for index in range(following.first_source - 1, collective.first_source - 1, -1):
                        add_gradient(by_source, writes, sources[index], value, number, SUMMED)
        if not writes:
            # To where those of each task end; then backwards to where they begin.
            for task in range(1, count + 1):
                first_T[task] += first_T[task - 1]


@inner
def add_gradient(
    by_source: GradientsBySource, writes: int, task: int, value: int, number: int, message: int
) -> None:
    """Count a gradient that a task waits for, or write it before those of the task that are written."""
    if not writes:
        by_source.first_T[task] += 1
        return
    by_source.first_T[task] -= 1
    entry = by_source.first_T[task]
    by_source.value_G[entry], by_source.assembly_G[entry] = value, number
    by_source.message_G[entry] = message


@inner
def emit_operator_backward(emission: Emission, operator: int, by_source: GradientsBySource) -> None:
    """Emit the backward tasks of one operator."""
    derivation = emission.derivation
    scratch, tasks = emission.scratch, emission.tasks
    n, e = scratch.counts[0], scratch.counts[1]
    parts = tasks_of(emission.arena, emission.fragments.operator_at[operator])
    recomputed = emission.groups.of_O[operator] >= 0
    sort_gradients(emission, operator, by_source)
    for part in range(len(parts)):
        flat = derivation.active_at[operator] + part
        if not derivation.pool[flat]:
            continue
        task = parts[part]
        put(tasks, n, BACKWARD, operator, part, task.device, task.backward_ns, task.origin)
        tasks.launch_ns[n] = task.backward_launch_ns
        tasks.pred[e] = scratch.backward_task[flat] if recomputed else scratch.forward_base[operator] + part
        scratch.backward_task[flat] = n
        e = await_device(emission, operator, task.device, n, e + 1)
        e = await_gradients(emission, part, by_source, e)
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
    for index in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[index]
        fragment = emission.fragments.value_at[value]
        assemblies, pieces = assemblies_of(arena, fragment), piece_sources_of(arena, fragment)
        device_T, sizes = source_devices_of(arena, fragment), sizes_of(arena, fragment)
        # The number of a piece counts those of all assemblies, though these share lists.
        following = 0
        for number in range(len(assemblies) - 1):
            assembly, piece, flat = assemblies[number], following, derivation.last_at[value] + number
            following += assembly.pieces
            if derivation.pool[flat] != operator:
                continue
            if (
                assembly.collective >= 0
                and derivation.pool[derivation.collective_at[value] + assembly.collective] >= 0
            ):
                continue
            scratch.gradient_base[flat] = n
            remote = 0
            for position in range(assembly.pieces):
                task = pieces[assembly.first_piece + position]
                if device_T[task] == assembly.device:
                    continue
                resource_set = route_set(emission.links, assembly.device, device_T[task])
                back_ns = gradient_ns(arena, fragment, number, position, remote, emission.links)
                size_bytes = sizes[assembly.first_size + position]
                put_communication(
                    emission, n, GRADIENT_TRANSFER, value, piece + position, resource_set, back_ns, size_bytes
                )
                remote += 1
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
def emit_backward(emission: Emission, by_source: GradientsBySource, member_D: Array) -> None:
    """Emit backward tasks, what is recomputed before them, exchanges of gradients and sums of buckets.

    by_source: scratch. member_D: -1 everywhere.
    """
    groups, buckets = emission.groups, emission.buckets
    position = 0
    for operator in range(len(emission.fragments.operator_at) - 1, -1, -1):
        if emission.gathers.counts[1]:
            emit_gathers(emission, 1, operator)
        if groups.first_O[operator] >= 0:
            emit_recompute(emission, groups.first_O[operator], operator)
        emit_operator_backward(emission, operator, by_source)
        emit_gradient_collectives(emission, operator)
        emit_gradient_transfers(emission, operator)
        while position < buckets.counts[0] and buckets.after[buckets.order[position]] == operator:
            emit_bucket(emission, position, member_D)
            position += 1
