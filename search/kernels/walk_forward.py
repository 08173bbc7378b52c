"""The incremental simulation of the forward, operator by operator, without a task graph."""

from __future__ import annotations

from search.kernels.cache import inner
from search.kernels.collective_cost import collective_ns
from search.kernels.derivation import collectives_of
from search.kernels.gradient_buckets import next_gathers, takes_part
from search.kernels.machine import (
    assigned_to,
    carry,
    carry_together,
    compute,
    compute_apart,
    compute_everywhere,
    find_even,
    owe,
    settle,
    settle_links,
)
from search.kernels.records import (
    APART,
    ASSEMBLY_STRIDE,
    COLLECTIVE_STRIDE,
    COMPUTED,
    EVEN,
    HELD,
    OPERATOR_HEADER,
    OPERATOR_STRIDE,
    PIECE_STRIDE,
    TOGETHER,
    VALUE_COLLECTIVES,
    VALUE_HEADER,
    Array,
    Checkpoints,
    Gathers,
    GraphArrays,
    Holds,
    Machine,
    Units,
    Versions,
)


@inner
def walk_collectives(
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    unit: int,
    ends_at: int,
    ready_at: int,
    latest_ns: int,
    bound_ns: int,
    together_ns: int = 0,
) -> int:
    """Serve the collectives of a value whose producer's tasks end at `ends_at`; return the latest end or -1.

    ends_at: in the pool; -1 where they all end at `together_ns`.
    """
    found = arena[unit + VALUE_COLLECTIVES]
    member_at = collectives_of(arena, unit) + COLLECTIVE_STRIDE * (found + 1)
    source_at = member_at + arena[member_at - COLLECTIVE_STRIDE + 4] if found else 0
    for collective in range(found):
        where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
        ready_ns = together_ns
        if ends_at >= 0:
            for source in range(arena[where + 5], arena[where + 5 + COLLECTIVE_STRIDE]):
                ready_ns = max(ready_ns, pool[ends_at + arena[source_at + source]])
        end_ns = carry_together(holds, machine, arena[where + 6], ready_ns, arena[where + 7], bound_ns)
        if end_ns < 0:
            return -1
        latest_ns = max(latest_ns, end_ns)
        for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
            pool[ready_at + arena[member_at + member]] = end_ns
    return latest_ns


@inner
def walk_transfers(
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    unit: int,
    ends_at: int,
    ready_at: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the transfers of a value whose producer's tasks end at `ends_at`; return the latest end or -1."""
    transfers = arena[unit + 8]
    if transfers == 0:
        return latest_ns
    if machine.owed[HELD] >= 0 or machine.contended:
        settle_links(holds, machine)
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    for word in range(piece_at, piece_at + PIECE_STRIDE * arena[unit + 1], PIECE_STRIDE):
        if not 0 <= arena[word + 4] < transfers:
            continue
        ready_ns = pool[ends_at + arena[word]]
        end_ns = carry(holds, machine, arena[word + 1], ready_ns, arena[word + 2], bound_ns)
        if end_ns < 0:
            return -1
        latest_ns = max(latest_ns, end_ns)
        place = ready_at + arena[word + 5]
        pool[place] = max(pool[place], end_ns)
    return latest_ns


@inner
def walk_forward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    pool_end: int,
    versions: Versions,
    gathers: Gathers,
    keeps_ends: Array,
    checkpoints: Checkpoints,
    first_place: int,
    last_place: int,
    folds: int,
    latest_ns: int,
    bound_ns: int,
) -> tuple[int, int]:
    """Serve the forward tasks of some operators, and the exchanges of what they make.

    What a task reads on its own device is there when the device is free: only what comes from others is waited for.
    Returns the latest end, -1 beyond the bound, and the pool's new end, -1 where it is too short.
    """
    for order_place in range(first_place, last_place):
        if order_place > first_place and order_place % checkpoints.stride == 0:
            save_checkpoint(checkpoints, order_place // checkpoints.stride, holds, machine, latest_ns)
        operator = graph.order[order_place]
        if gathers.counts[1]:
            latest_ns = walk_gathers(holds, machine, gathers, 0, operator, latest_ns, bound_ns)
            if latest_ns < 0:
                return -1, pool_end
        at = units.operator_at[operator]
        alike_ns, meets = versions.alike_ns_2O[0, operator], versions.meets_2O[0, operator]
        if folds and meets == APART:
            if alike_ns >= 0:
                owe(machine.owed, alike_ns)
            else:
                compute_apart(machine, arena, at, 1, pool, -1)
            continue
        if folds and meets == TOGETHER and alike_ns >= 0 and machine.owed[EVEN]:
            latest_ns, pool_end = walk_together(
                graph, units, arena, holds, machine, pool, pool_end, versions, operator, latest_ns, bound_ns
            )
            if latest_ns < 0 or pool_end < 0:
                return latest_ns, pool_end
            continue
        if machine.owed[COMPUTED]:
            settle(machine)
        count = arena[at]
        words = 2 * count
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            words += arena[units.value_at[graph.output_value[output]]]
        if pool_end + words > len(pool):
            return latest_ns, -1
        ends_at = pool_end
        waits = find_ready(graph, units, arena, pool, versions, operator, ends_at + count)
        for task in range(count):
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            ready_ns = pool[ends_at + count + task] if waits else 0
            if gathers.counts[1]:
                ready_ns = max(ready_ns, gathered_ns(graph, holds, gathers, 0, operator, arena[word]))
            end_ns = compute(machine, arena[word], ready_ns, arena[word + 1], bound_ns)
            if end_ns < 0:
                return -1, pool_end
            pool[ends_at + task] = end_ns
            latest_ns = max(latest_ns, end_ns)
        machine.owed[EVEN] = 0
        if alike_ns >= 0:
            find_even(machine)
        fill = ends_at + count
        sends = False
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit = units.value_at[value]
            if arena[unit + 4] > 0:
                sends = True
                versions.ready_at[value] = fill
                for assembly in range(arena[unit]):
                    pool[fill + assembly] = 0
                fill += arena[unit]
        if keeps_ends[operator]:
            versions.ends_at[operator] = ends_at
        if sends or keeps_ends[operator]:
            pool_end = fill
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit, ready_at = units.value_at[value], versions.ready_at[value]
            if arena[unit + VALUE_COLLECTIVES] == 0:
                continue
            latest_ns = walk_collectives(
                arena, holds, machine, pool, unit, ends_at, ready_at, latest_ns, bound_ns
            )
            if latest_ns < 0:
                return -1, pool_end
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit, ready_at = units.value_at[value], versions.ready_at[value]
            if arena[unit + 8] == 0:
                continue
            latest_ns = walk_transfers(
                arena, holds, machine, pool, unit, ends_at, ready_at, latest_ns, bound_ns
            )
            if latest_ns < 0:
                return -1, pool_end
    return latest_ns, pool_end


@inner
def walk_together(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    pool_end: int,
    versions: Versions,
    operator: int,
    latest_ns: int,
    bound_ns: int,
) -> tuple[int, int]:
    """Serve the forward tasks of an operator that are alike, all devices being free at the same time.

    Returns as `walk_forward` does.
    """
    ready_ns = 0
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value >= 0 and arena[units.value_at[value] + 4] > 0:
            # One collective makes all of it.
            ready_ns = max(ready_ns, pool[versions.ready_at[value]])
    end_ns = compute_everywhere(machine, ready_ns, versions.alike_ns_2O[0, operator], bound_ns)
    if end_ns < 0:
        return -1, pool_end
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        value = graph.output_value[output]
        unit = units.value_at[value]
        if arena[unit + 4] > 0:
            if pool_end + arena[unit] > len(pool):
                return latest_ns, -1
            versions.ready_at[value] = pool_end
            latest_ns = walk_collectives(
                arena, holds, machine, pool, unit, -1, pool_end, latest_ns, bound_ns, end_ns
            )
            if latest_ns < 0:
                return -1, pool_end
            pool_end += arena[unit]
    return latest_ns, pool_end


@inner
def walk_gathers(
    holds: Holds, machine: Machine, gathers: Gathers, side: int, operator: int, latest_ns: int, bound_ns: int
) -> int:
    """Serve the gathers that begin before an operator; return the latest end, or -1 beyond the bound."""
    begin, end = next_gathers(gathers, side, operator)
    for gather in range(begin, end):
        hold = gathers.hold[gather]
        ready_ns = 0
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            ready_ns = max(ready_ns, machine.free_ns_R[holds.end[place]])
        run_ns = collective_ns(holds, hold, gathers.size_bytes[gather])
        settle_links(holds, machine)
        end_ns = carry(holds, machine, hold, ready_ns, run_ns, bound_ns)
        if end_ns < 0:
            return -1
        gathers.task[gather] = end_ns
        latest_ns = max(latest_ns, end_ns)
    return latest_ns


@inner
def gathered_ns(
    graph: GraphArrays, holds: Holds, gathers: Gathers, side: int, operator: int, device: int
) -> int:
    """Return when the weights that an operator reads on a device are gathered."""
    ready_ns = 0
    for place in range(graph.behind_ptr[operator], graph.behind_ptr[operator + 1]):
        weight = graph.behind_weight[place]
        if gathers.weight_2W[side, weight] < 0:
            continue
        gathering = gathers.weight_2W[side, weight]
        for gather in range(gathers.first_2O[side, gathering], gathers.last_2O[side, gathering]):
            if takes_part(holds, gathers.hold[gather], device):
                ready_ns = max(ready_ns, gathers.task[gather])
    return ready_ns


@inner
def find_ready(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    operator: int,
    ready_at: int,
) -> bool:
    """Write when all that comes to each forward task from other devices is there; return whether anything comes."""
    count = arena[units.operator_at[operator]]
    waits = False
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value < 0 or arena[units.value_at[value] + 4] == 0:
            continue
        if not waits:
            waits = True
            for task in range(count):
                pool[ready_at + task] = 0
        assigned = assigned_to(arena, units.value_at[value], graph.slot_reading[slot])
        there = versions.ready_at[value]
        for task in range(count):
            pool[ready_at + task] = max(pool[ready_at + task], pool[there + arena[assigned + task]])
    return waits


@inner
def save_checkpoint(
    checkpoints: Checkpoints, number: int, holds: Holds, machine: Machine, latest_ns: int
) -> None:
    """Write a checkpoint of the strategy that is proposed."""
    settle(machine)
    settle_links(holds, machine)
    resources, devices = len(machine.free_ns_R), len(machine.debt_ns_D)
    side = 1 - checkpoints.side[number]
    for resource in range(resources):
        checkpoints.row[number, side, resource] = machine.free_ns_R[resource]
        done_ns = machine.total_ns_R[resource] - machine.left_ns_R[resource]
        checkpoints.row[number, side, resources + devices + resource] = done_ns
    for device in range(devices):
        checkpoints.row[number, side, resources + device] = machine.debt_ns_D[device]
    checkpoints.row[number, side, 2 * resources + devices] = latest_ns
