"""The task graph of the forward, of renewed buffers and of gathers of weights."""

from __future__ import annotations

from search.kernels.cache import inner, quick_entry
from search.kernels.collective_cost import collective_ns
from search.kernels.derivation import collectives_of
from search.kernels.gradient_buckets import next_gathers, takes_part
from search.kernels.records import (
    ASSEMBLY_STRIDE,
    BUFFER_COLLECTIVE,
    BUFFER_TRANSFER,
    COLLECTIVE,
    COLLECTIVE_STRIDE,
    FORWARD,
    FORWARD_GATHER,
    OPERATOR_HEADER,
    OPERATOR_STRIDE,
    PIECE_STRIDE,
    TRANSFER,
    VALUE_HEADER,
    Array,
    Gathers,
    GraphArrays,
    Holds,
    Scratch,
    Tasks,
    Units,
)


@inner
def lay_out_gathers(
    scratch: Scratch, tasks: Tasks, holds: Holds, gathers: Gathers, side: int, operator: int
) -> bool:
    """Write the gathers that begin before an operator; return False where arrays are too short.

    A gather begins when its devices have computed all that comes before.
    """
    begin, end = next_gathers(gathers, side, operator)
    for gather in range(begin, end):
        n, e = scratch.counts[0], scratch.counts[1]
        hold, size_bytes = gathers.hold[gather], gathers.size_bytes[gather]
        first, last = holds.end_ptr[hold], holds.end_ptr[hold + 1]
        if n + 1 > len(tasks.kind) or e + last - first > len(tasks.pred):
            return False
        run_ns = collective_ns(holds, hold, size_bytes)
        put(tasks, n, FORWARD_GATHER + side, run_ns, hold, holds.origin[hold], operator, gather, size_bytes)
        tasks.subject[n] = gathers.operator[gather]
        gathers.task[gather] = n
        for place in range(first, last):
            if gathers.latest_D[holds.end[place]] >= 0:
                tasks.pred[e] = gathers.latest_D[holds.end[place]]
                e += 1
        tasks.pred_ptr[n + 1] = e
        scratch.counts[0] = n + 1
        scratch.counts[1] = e
    return True


@inner
def add_gathers(
    graph: GraphArrays,
    tasks: Tasks,
    holds: Holds,
    gathers: Gathers,
    side: int,
    operator: int,
    device: int,
    e: int,
) -> int:
    """Let a task wait for the gathers of what it reads; return where dependencies end, -1 without room for them."""
    for place in range(graph.behind_ptr[operator], graph.behind_ptr[operator + 1]):
        weight = graph.behind_weight[place]
        if gathers.weight_2W[side, weight] < 0:
            continue
        gathering = gathers.weight_2W[side, weight]
        for gather in range(gathers.first_2O[side, gathering], gathers.last_2O[side, gathering]):
            if takes_part(holds, gathers.hold[gather], device):
                if e + 1 > len(tasks.pred):
                    return -1
                tasks.pred[e] = gathers.task[gather]
                e += 1
    return e


@inner
def put(
    tasks: Tasks,
    n: int,
    kind: int,
    run_ns: int,
    hold: int,
    origin: int,
    subject: int,
    part: int,
    size_bytes: int,
) -> None:
    """Write task `n`."""
    tasks.kind[n] = kind
    tasks.run_ns[n] = run_ns
    tasks.hold[n] = hold
    tasks.origin[n] = origin
    tasks.subject[n] = subject
    tasks.part[n] = part
    tasks.size_bytes[n] = size_bytes


@inner
def lay_out_collectives(
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    operator: int,
    value: int,
    kind: int,
) -> bool:
    """Write the collectives of a value that `operator` makes; return False where arrays are too short."""
    unit = units.value_at[value]
    found = arena[unit + 7]
    if found == 0:
        return True
    n, e = scratch.counts[0], scratch.counts[1]
    collective_at = collectives_of(arena, unit)
    last = collective_at + COLLECTIVE_STRIDE * found
    task_at = last + COLLECTIVE_STRIDE + arena[last + 4]
    if n + found > len(tasks.kind) or e + arena[last + 5] > len(tasks.pred):
        return False
    for collective in range(found):
        where = collective_at + COLLECTIVE_STRIDE * collective
        hold = arena[where + 6]
        size_bytes = arena[where + 2]
        put(tasks, n, kind, arena[where + 7], hold, holds.origin[hold], value, collective, size_bytes)
        scratch.collective_task[scratch.collective_base[value] + collective] = n
        for position in range(arena[where + 5], arena[where + 5 + COLLECTIVE_STRIDE]):
            tasks.pred[e] = scratch.forward_base[operator] + arena[task_at + position]
            e += 1
        n += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@inner
def lay_out_transfers(
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    operator: int,
    value: int,
    kind: int,
    link_origin: int,
) -> bool:
    """Write the transfers of a value that `operator` makes; return False where arrays are too short."""
    n, e = scratch.counts[0], scratch.counts[1]
    unit = units.value_at[value]
    scratch.transfer_base[value] = n
    transfers = arena[unit + 8]
    if n + transfers > len(tasks.kind) or e + transfers > len(tasks.pred):
        return False
    if transfers == 0:
        return True
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    for piece in range(arena[unit + 1]):
        word = piece_at + PIECE_STRIDE * piece
        if arena[word + 4] < 0 or arena[word + 4] >= transfers:
            continue
        size_bytes = arena[word + 3]
        put(tasks, n, kind, arena[word + 2], arena[word + 1], link_origin, value, piece, size_bytes)
        tasks.pred[e] = scratch.forward_base[operator] + arena[word]
        n += 1
        e += 1
        tasks.pred_ptr[n] = e
    scratch.counts[0] = n
    scratch.counts[1] = e
    return True


@quick_entry
def lay_out_forward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    gathers: Gathers,
    link_origin: int,
    first_place: int,
    last_place: int,
) -> bool:
    """Write the forward tasks of operators `first_place` to `last_place` of the order, and the exchanges of their
    outputs; return False where arrays are too short."""
    for order_place in range(first_place, last_place):
        operator = graph.order[order_place]
        if gathers.counts[1] and not lay_out_gathers(scratch, tasks, holds, gathers, 0, operator):
            return False
        n, e = scratch.counts[0], scratch.counts[1]
        at = units.operator_at[operator]
        count = arena[at]
        scratch.forward_base[operator] = n
        if n + count > len(tasks.kind):
            return False
        for task in range(count):
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device = arena[word]
            put(tasks, n, FORWARD, arena[word + 1], device, arena[word + 4], operator, task, 0)
            gathers.latest_D[device] = n
            if gathers.counts[1]:
                e = add_gathers(graph, tasks, holds, gathers, 0, operator, device, e)
                if e < 0:
                    return False
            for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
                value = graph.slot_value[slot]
                if value < 0:
                    continue
                unit = units.value_at[value]
                piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
                reading_at = piece_at + PIECE_STRIDE * arena[unit + 1] + 2 * arena[unit + 2]
                assigned = reading_at + arena[unit + 5] + arena[reading_at + graph.slot_reading[slot]] + task
                where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * arena[assigned]
                first, last = arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]
                if e + last - first > len(tasks.pred):
                    return False
                if arena[where + 4] >= 0:
                    tasks.pred[e] = scratch.collective_task[scratch.collective_base[value] + arena[where + 4]]
                    e += 1
                    continue
                for piece in range(first, last):
                    word = piece_at + PIECE_STRIDE * piece
                    if arena[word + 4] < 0:
                        tasks.pred[e] = scratch.forward_base[graph.producer[value]] + arena[word]
                    else:
                        tasks.pred[e] = scratch.transfer_base[value] + arena[word + 4]
                    e += 1
            n += 1
            tasks.pred_ptr[n] = e
        scratch.counts[0] = n
        scratch.counts[1] = e
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            if not lay_out_collectives(units, arena, scratch, tasks, holds, operator, value, COLLECTIVE):
                return False
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            if not lay_out_transfers(units, arena, scratch, tasks, operator, value, TRANSFER, link_origin):
                return False
    return True


@quick_entry
def lay_out_renewals(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    scratch: Scratch,
    tasks: Tasks,
    holds: Holds,
    link_origin: int,
) -> bool:
    """Write the exchanges that renew buffers; return False where arrays are too short."""
    for value in range(graph.value_count, graph.value_count + graph.buffer_count):
        operator = graph.producer[value]
        if not lay_out_collectives(units, arena, scratch, tasks, holds, operator, value, BUFFER_COLLECTIVE):
            return False
    for value in range(graph.value_count, graph.value_count + graph.buffer_count):
        operator = graph.producer[value]
        if not lay_out_transfers(units, arena, scratch, tasks, operator, value, BUFFER_TRANSFER, link_origin):
            return False
    return True
