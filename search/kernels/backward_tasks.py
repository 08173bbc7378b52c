"""The task graph of the backward: operators, what is made again, gradients of values, sums of buckets."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.collective_cost import collective_ns
from search.kernels.derivation import collectives_of
from search.kernels.forward_tasks import add_gathers, lay_out_gathers, put
from search.kernels.records import (
    ASSEMBLY_STRIDE,
    BACKWARD,
    COLLECTIVE_STRIDE,
    GRADIENT_COLLECTIVE,
    GRADIENT_TRANSFER,
    OPERATOR_HEADER,
    OPERATOR_STRIDE,
    PIECE_STRIDE,
    RECOMPUTE,
    SYNCHRONIZE,
    VALUE_HEADER,
    Array,
    Buckets,
    Gathers,
    GraphArrays,
    Groups,
    Holds,
    Scratch,
    Tasks,
    Units,
)


@inner
def add_readers(
    graph: GraphArrays,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    value: int,
    unit: int,
    assembly: int,
    e: int,
) -> int:
    """Append the backward tasks that give an assembly its gradient; return the next place, or -1 if too short."""
    reader_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1) + PIECE_STRIDE * arena[unit + 1]
    where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
    first, last = arena[where + 3], arena[where + 3 + ASSEMBLY_STRIDE]
    if e + last - first > len(tasks.pred):
        return -1
    for reader in range(first, last):
        reading = graph.reading_ptr[value] + arena[reader_at + 2 * reader]
        task = scratch.task_base[graph.reading_operator[reading]] + arena[reader_at + 2 * reader + 1]
        if graph.reading_gradient[reading] and scratch.active[task]:
            tasks.pred[e] = scratch.backward_task[task]
            e += 1
    return e


@inner
def lay_out_again(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    gathers: Gathers,
    first: int,
    last: int,
) -> bool:
    """Write the forward tasks of a group that are made again; return False where arrays are too short.

    What they read is on their device. Each waits for what the device computes before it, that none comes too early
    where tasks are not served in program order.
    """
    n, e = scratch.counts[0], scratch.counts[1]
    for operator in range(first, last + 1):
        at = units.operator_at[operator]
        if n + arena[at] > len(tasks.kind):
            return False
        for task in range(arena[at]):
            flat = scratch.task_base[operator] + task
            if not scratch.active[flat]:
                continue
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device = arena[word]
            put(tasks, n, RECOMPUTE, arena[word + 1], device, arena[word + 4], operator, task, 0)
            # Where the backward of the task looks for it.
            scratch.backward_task[flat] = n
            if e + 2 > len(tasks.pred):
                return False
            tasks.pred[e] = gathers.latest_D[device]
            e += 1
            if gathers.blocked_D[device] >= 0:
                tasks.pred[e] = gathers.blocked_D[device]
                e += 1
            if gathers.counts[1]:
                e = add_gathers(graph, tasks, holds, gathers, 1, operator, device, e)
                if e < 0:
                    return False
            gathers.latest_D[device] = n
            n += 1
            tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def lay_out_operator_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    groups: Groups,
    gathers: Gathers,
    operator: int,
) -> bool:
    """Write the backward tasks of one operator; return False where arrays are too short."""
    n, e = scratch.counts[0], scratch.counts[1]
    at = units.operator_at[operator]
    if n + arena[at] > len(tasks.kind):
        return False
    for task in range(arena[at]):
        flat = scratch.task_base[operator] + task
        if not scratch.active[flat]:
            continue
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        put(tasks, n, BACKWARD, arena[word + 2], arena[word], arena[word + 4], operator, task, 0)
        if e + 1 > len(tasks.pred):
            return False
        made_again = groups.of_O[operator] >= 0
        tasks.pred[e] = scratch.backward_task[flat] if made_again else scratch.forward_base[operator] + task
        e += 1
        scratch.backward_task[flat] = n
        device = arena[word]
        if gathers.blocked_D[device] >= 0:
            if e + 1 > len(tasks.pred):
                return False
            tasks.pred[e] = gathers.blocked_D[device]
            e += 1
        if gathers.counts[1]:
            e = add_gathers(graph, tasks, holds, gathers, 1, operator, device, e)
            if e < 0:
                return False
        gathers.latest_D[device] = n
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit = units.value_at[value]
            sources = arena[unit + 3]
            piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
            source_at = unit + arena[unit + 6]
            latest = -1
            for position in range(arena[source_at + task], arena[source_at + task + 1]):
                word = piece_at + PIECE_STRIDE * arena[source_at + sources + 1 + position]
                assembly = arena[word + 5]
                if scratch.last_reader[scratch.assembly_base[value] + assembly] < 0:
                    continue
                collective = arena[unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly + 4]
                if collective >= 0:
                    flat_collective = scratch.collective_base[value] + collective
                    if scratch.collective_after[flat_collective] >= 0:
                        # One task stands for all assemblies that the collective serves.
                        if latest != collective:
                            if e + 1 > len(tasks.pred):
                                return False
                            tasks.pred[e] = scratch.gradient_collective[flat_collective]
                            e += 1
                            latest = collective
                        continue
                if arena[word + 4] >= 0:
                    if e + 1 > len(tasks.pred):
                        return False
                    base = scratch.gradient_base[scratch.assembly_base[value] + assembly]
                    tasks.pred[e] = base + arena[word + 4]
                    e += 1
                else:
                    e = add_readers(graph, arena, scratch, tasks, value, unit, assembly, e)
                    if e < 0:
                        return False
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def lay_out_gradient_collectives(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    operator: int,
) -> bool:
    """Write the gradient collectives that one operator's backward completes; False where too short."""
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        found = arena[unit + 7]
        if found == 0:
            continue
        collective_at = collectives_of(arena, unit)
        member_at = collective_at + COLLECTIVE_STRIDE * (found + 1)
        for collective in range(found):
            flat = scratch.collective_base[value] + collective
            if scratch.collective_after[flat] != operator:
                continue
            n, e = scratch.counts[0], scratch.counts[1]
            if n + 1 > len(tasks.kind):
                return False
            where = collective_at + COLLECTIVE_STRIDE * collective
            hold = arena[where + 8]
            run_ns, size_bytes = arena[where + 9], arena[where + 2]
            put(
                tasks,
                n,
                GRADIENT_COLLECTIVE,
                run_ns,
                hold,
                holds.origin[hold],
                value,
                collective,
                size_bytes,
            )
            scratch.gradient_collective[flat] = n
            for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
                e = add_readers(graph, arena, scratch, tasks, value, unit, arena[member_at + member], e)
                if e < 0:
                    return False
            tasks.pred_ptr[n + 1] = e
            scratch.counts[0] = n + 1
            scratch.counts[1] = e
    return True


@inner
def lay_out_gradient_transfers(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    operator: int,
    link_origin: int,
) -> bool:
    """Write the transfers of the gradients that one operator's backward completes; False where too short."""
    n, e = scratch.counts[0], scratch.counts[1]
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
        for assembly in range(arena[unit]):
            flat = scratch.assembly_base[value] + assembly
            if scratch.last_reader[flat] != operator:
                continue
            where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
            collective = arena[where + 4]
            if collective >= 0 and scratch.collective_after[scratch.collective_base[value] + collective] >= 0:
                continue
            based = False
            for piece in range(arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]):
                word = piece_at + PIECE_STRIDE * piece
                if arena[word + 4] < 0:
                    continue
                if not based:
                    scratch.gradient_base[flat] = n - arena[word + 4]
                    based = True
                if n + 1 > len(tasks.kind):
                    return False
                size_bytes = arena[word + 3]
                run_ns, hold = arena[word + 7], arena[word + 6]
                put(tasks, n, GRADIENT_TRANSFER, run_ns, hold, link_origin, value, piece, size_bytes)
                e = add_readers(graph, arena, scratch, tasks, value, unit, assembly, e)
                if e < 0:
                    return False
                n += 1
                tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def lay_out_bucket(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    buckets: Buckets,
    gathers: Gathers,
    position: int,
    member_D: Array,
) -> bool:
    """Write the sum of one bucket; return False where arrays are too short.

    Of gradients that are shared, a device has two buckets at most in its hands: it waits for the one before.
    """
    n, e = scratch.counts[0], scratch.counts[1]
    bucket = buckets.order[position]
    hold = buckets.hold[bucket]
    size_bytes = buckets.size_bytes[bucket]
    if n + 1 > len(tasks.kind):
        return False
    run_ns = collective_ns(holds, hold, size_bytes)
    put(tasks, n, SYNCHRONIZE, run_ns, hold, holds.origin[hold], position, 0, size_bytes)
    for end in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        device = holds.end[end]
        member_D[device] = position
        if buckets.sharing[bucket]:
            if gathers.reduced_D[device] >= 0:
                if e + 1 > len(tasks.pred):
                    return False
                tasks.pred[e] = gathers.reduced_D[device]
                e += 1
            gathers.blocked_D[device] = gathers.reduced_D[device]
            gathers.reduced_D[device] = n
    entry = buckets.first_entry[bucket]
    while entry >= 0:
        weight = buckets.entry_weight[entry]
        for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
            operator = graph.weight_user[user]
            at = units.operator_at[operator]
            if e + arena[at] > len(tasks.pred):
                return False
            for task in range(arena[at]):
                flat = scratch.task_base[operator] + task
                device = arena[at + OPERATOR_HEADER + OPERATOR_STRIDE * task]
                if scratch.active[flat] and member_D[device] == position:
                    tasks.pred[e] = scratch.backward_task[flat]
                    e += 1
        entry = buckets.entry_next[entry]
    tasks.pred_ptr[n + 1] = e
    scratch.counts[0] = n + 1
    scratch.counts[1] = e
    return True


@entry
def lay_out_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    link_origin: int,
) -> bool:
    """Write backward tasks, what is made again before them, gradient transfers and all-reduces.

    Returns False where arrays are too short.
    """
    member_D = np.full(len(scratch.memory_D), -1, np.int64)
    position = 0
    for operator in range(len(units.operator_at) - 1, -1, -1):
        if gathers.counts[1] and not lay_out_gathers(scratch, tasks, holds, gathers, 1, operator):
            return False
        first = groups.first_O[operator]
        if first >= 0 and not lay_out_again(
            graph, units, arena, scratch, tasks, holds, gathers, first, operator
        ):
            return False
        if not lay_out_operator_backward(
            graph, units, arena, scratch, tasks, holds, groups, gathers, operator
        ):
            return False
        if not lay_out_gradient_collectives(graph, units, arena, scratch, tasks, holds, operator):
            return False
        if not lay_out_gradient_transfers(graph, units, arena, scratch, tasks, operator, link_origin):
            return False
        while position < buckets.counts[0] and buckets.after[buckets.order[position]] == operator:
            if not lay_out_bucket(
                graph, units, arena, scratch, tasks, holds, buckets, gathers, position, member_D
            ):
                return False
            position += 1
    return True
