"""The incremental simulation of the backward, of what is made again, and of the sums of gradients."""

from __future__ import annotations

from search.kernels.cache import inner
from search.kernels.changes import meeting
from search.kernels.collective_cost import collective_ns
from search.kernels.derivation import collectives_of
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
    Buckets,
    Gathers,
    GraphArrays,
    Groups,
    Holds,
    Machine,
    Units,
    Versions,
    Walk,
)
from search.kernels.walk_forward import gathered_ns, walk_gathers


@inner
def walk_gradients(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    walk: Walk,
    operator: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the collectives, then the transfers, of the gradients that one operator's backward completes.

    Returns the latest end, or -1 beyond the bound.
    """
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        found = arena[unit + VALUE_COLLECTIVES]
        if found == 0:
            continue
        collective_at, gradient_at = versions.derivation.collective_at[value], walk.gradient_at[value]
        task_at = walk.task_at[graph.producer[value]]
        member_at = collectives_of(arena, unit) + COLLECTIVE_STRIDE * (found + 1)
        source_at = member_at + arena[member_at - COLLECTIVE_STRIDE + 4]
        for collective in range(found):
            if pool[collective_at + collective] != operator:
                continue
            where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
            ready_ns = walk.gradient_ns_V[value]
            for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
                ready_ns = max(ready_ns, pool[gradient_at + arena[member_at + member]])
            end_ns = carry_together(holds, machine, arena[where + 8], ready_ns, arena[where + 9], bound_ns)
            if end_ns < 0:
                return -1
            latest_ns = max(latest_ns, end_ns)
            if meeting(arena, unit) == TOGETHER:
                producer = graph.producer[value]
                walk.gradients_ns_O[producer] = max(walk.gradients_ns_O[producer], end_ns)
                continue
            for source in range(arena[where + 5], arena[where + 5 + COLLECTIVE_STRIDE]):
                place = task_at + arena[source_at + source]
                pool[place] = max(pool[place], end_ns)
    for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
        value = graph.read_value[position]
        unit = units.value_at[value]
        if arena[unit + 4] == 0:
            continue
        last_at, collective_at = versions.derivation.last_at[value], versions.derivation.collective_at[value]
        task_at, gradient_at = walk.task_at[graph.producer[value]], walk.gradient_at[value]
        piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
        for assembly in range(arena[unit]):
            if pool[last_at + assembly] != operator:
                continue
            where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
            collective = arena[where + 4]
            if collective >= 0 and pool[collective_at + collective] >= 0:
                continue
            if machine.owed[HELD] >= 0 or machine.contended:
                settle_links(holds, machine)
            ready_ns = pool[gradient_at + assembly]
            first, last = arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]
            for word in range(piece_at + PIECE_STRIDE * first, piece_at + PIECE_STRIDE * last, PIECE_STRIDE):
                if arena[word + 4] < 0:
                    continue
                end_ns = carry(holds, machine, arena[word + 6], ready_ns, arena[word + 7], bound_ns)
                if end_ns < 0:
                    return -1
                latest_ns = max(latest_ns, end_ns)
                place = task_at + arena[word]
                pool[place] = max(pool[place], end_ns)
    return latest_ns


@inner
def walk_again(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    gathers: Gathers,
    first: int,
    last: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the forward tasks of a group that are made again; return the latest end, or -1 beyond the bound."""
    for operator in range(first, last + 1):
        at, active_at = units.operator_at[operator], versions.derivation.active_at[operator]
        for task in range(arena[at]):
            if pool[active_at + task]:
                word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
                ready_ns = gathers.blocked_D[arena[word]]
                if gathers.counts[1]:
                    ready_ns = max(ready_ns, gathered_ns(graph, holds, gathers, 1, operator, arena[word]))
                end_ns = compute(machine, arena[word], ready_ns, arena[word + 1], bound_ns)
                if end_ns < 0:
                    return -1
                latest_ns = max(latest_ns, end_ns)
    return latest_ns


@inner
def walk_operator_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    walk: Walk,
    gathers: Gathers,
    operator: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve the backward tasks of one operator; return the latest end, or -1 beyond the bound."""
    at, active_at, task_at = (
        units.operator_at[operator],
        versions.derivation.active_at[operator],
        walk.task_at[operator],
    )
    count = arena[at]
    together_ns = walk.gradients_ns_O[operator]
    if machine.owed[COMPUTED]:
        settle(machine)
    for task in range(count):
        if pool[active_at + task]:
            word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
            device = arena[word]
            ready_ns = max(pool[task_at + task], together_ns, gathers.blocked_D[device])
            if gathers.counts[1]:
                ready_ns = max(ready_ns, gathered_ns(graph, holds, gathers, 1, operator, device))
            end_ns = compute(machine, device, ready_ns, arena[word + 2], bound_ns)
            if end_ns < 0:
                return -1
            pool[task_at + task] = end_ns
            latest_ns = max(latest_ns, end_ns)
    machine.owed[EVEN] = 0
    if versions.alike_ns_2O[1, operator] >= 0:
        find_even(machine)
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value, reading = graph.slot_value[slot], graph.slot_reading[slot]
        if value < 0 or not graph.needs_gradient[value] or arena[units.value_at[value] + 4] == 0:
            continue
        if not graph.reading_gradient[graph.reading_ptr[value] + reading]:
            continue
        assigned = assigned_to(arena, units.value_at[value], reading)
        gradient_at = walk.gradient_at[value]
        for task in range(count):
            if pool[active_at + task]:
                place = gradient_at + arena[assigned + task]
                pool[place] = max(pool[place], pool[task_at + task])
    return latest_ns


@inner
def walk_backward_together(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    machine: Machine,
    versions: Versions,
    walk: Walk,
    operator: int,
    bound_ns: int,
) -> int:
    """Serve the backward tasks of an operator that are alike, all devices being free at the same time.

    Returns their end, or -1 beyond the bound.
    """
    run_ns = versions.alike_ns_2O[1, operator]
    end_ns = compute_everywhere(machine, walk.gradients_ns_O[operator], run_ns, bound_ns)
    walk.end_ns_O[operator] = end_ns
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value, reading = graph.slot_value[slot], graph.slot_reading[slot]
        if (
            value >= 0
            and arena[units.value_at[value] + 4] > 0
            and graph.reading_gradient[graph.reading_ptr[value] + reading]
        ):
            walk.gradient_ns_V[value] = max(walk.gradient_ns_V[value], end_ns)
    return end_ns


@inner
def bucket_ns(holds: Holds, buckets: Buckets, bucket: int) -> int:
    """Return how long a bucket's all-reduce takes."""
    return collective_ns(holds, buckets.hold[bucket], buckets.size_bytes[bucket])


@inner
def find_awaited(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    pool: Array,
    versions: Versions,
    walk: Walk,
    buckets: Buckets,
    bucket_count: int,
) -> None:
    """Find which operators' backward the buckets wait for.

    A device's tasks end one after the other: where the last operator that contributes to a bucket has a backward on
    each of its devices, that is all that the bucket waits for.
    """
    for position in range(bucket_count):
        bucket = buckets.order[position]
        last = buckets.entry_weight[buckets.last_entry[bucket]]
        close = -1
        for user in range(graph.weight_ptr[last], graph.weight_ptr[last + 1]):
            if versions.derivation.operator_active[graph.weight_user[user]]:
                close = graph.weight_user[user]
                break
        covers = versions.alike_ns_2O[1, close] >= 0
        if not covers:
            at, active_at = units.operator_at[close], versions.derivation.active_at[close]
            for task in range(arena[at]):
                if pool[active_at + task]:
                    walk.member_D[arena[at + OPERATOR_HEADER + OPERATOR_STRIDE * task]] = position
            hold = buckets.hold[bucket]
            covers = True
            for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
                covers = covers and walk.member_D[holds.end[place]] == position
        walk.close_B[position] = close if covers else -1
        if covers:
            walk.is_awaited_O[close] = 1
            continue
        entry = buckets.first_entry[bucket]
        while entry >= 0:
            weight = buckets.entry_weight[entry]
            for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
                walk.is_awaited_O[graph.weight_user[user]] = 1
            entry = buckets.entry_next[entry]
    walk.member_D[:] = -1


@inner
def ended_ns(
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    walk: Walk,
    operator: int,
    position: int,
) -> int:
    """Return when an operator's backward has ended on the members of the bucket at hand."""
    if walk.end_ns_O[operator] >= 0:
        return int(walk.end_ns_O[operator])
    ready_ns = 0
    at, active_at = units.operator_at[operator], versions.derivation.active_at[operator]
    for task in range(arena[at]):
        device = arena[at + OPERATOR_HEADER + OPERATOR_STRIDE * task]
        if pool[active_at + task] and walk.member_D[device] == position:
            ready_ns = max(ready_ns, pool[walk.task_at[operator] + task])
    return ready_ns


@inner
def walk_bucket(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    versions: Versions,
    walk: Walk,
    buckets: Buckets,
    gathers: Gathers,
    position: int,
    bound_ns: int,
) -> int:
    """Serve the sum of one bucket; return its end, or -1 beyond the bound."""
    bucket = buckets.order[position]
    hold = buckets.hold[bucket]
    ready_ns = 0
    for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        device = holds.end[place]
        walk.member_D[device] = position
        if buckets.sharing[bucket]:
            ready_ns = max(ready_ns, gathers.reduced_D[device])
    close = walk.close_B[position]
    if close >= 0:
        ready_ns = max(ready_ns, ended_ns(units, arena, pool, versions, walk, close, position))
    else:
        entry = buckets.first_entry[bucket]
        while entry >= 0:
            weight = buckets.entry_weight[entry]
            for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
                operator = graph.weight_user[user]
                ready_ns = max(ready_ns, ended_ns(units, arena, pool, versions, walk, operator, position))
            entry = buckets.entry_next[entry]
    end_ns = carry_together(holds, machine, hold, ready_ns, bucket_ns(holds, buckets, bucket), bound_ns)
    for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
        device = holds.end[place]
        walk.sync_end_D[device] = max(walk.sync_end_D[device], end_ns)
        if buckets.sharing[bucket]:
            gathers.blocked_D[device] = gathers.reduced_D[device]
            gathers.reduced_D[device] = end_ns
    return end_ns


@inner
def walk_backward(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    machine: Machine,
    pool: Array,
    pool_end: int,
    versions: Versions,
    walk: Walk,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    bucket_count: int,
    folds: int,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve all backward tasks, gradients and buckets; return the latest end, -1 beyond the bound, -2 without room.

    A backward task waits for its own forward, and for readers on its device, by the device alone.
    """
    find_awaited(graph, units, arena, holds, pool, versions, walk, buckets, bucket_count)
    place = pool_end
    for operator in range(len(units.operator_at)):
        walk.task_at[operator] = place
        if versions.derivation.operator_active[operator] and not (
            folds and versions.meets_2O[1, operator] == APART and not walk.is_awaited_O[operator]
        ):
            place += arena[units.operator_at[operator]]
    for value in range(graph.value_count):
        walk.gradient_at[value] = place
        if graph.needs_gradient[value] and arena[units.value_at[value] + 4] > 0:
            place += arena[units.value_at[value]]
    if place > len(pool):
        return -2
    for word in range(pool_end, place):
        pool[word] = 0
    position = 0
    for operator in range(len(units.operator_at) - 1, -1, -1):
        if gathers.counts[1]:
            latest_ns = walk_gathers(holds, machine, gathers, 1, operator, latest_ns, bound_ns)
            if latest_ns < 0:
                return -1
        if groups.first_O[operator] >= 0:
            settle(machine)
            machine.owed[EVEN] = 0
            latest_ns = walk_again(
                graph,
                units,
                arena,
                holds,
                machine,
                pool,
                versions,
                gathers,
                groups.first_O[operator],
                operator,
                latest_ns,
                bound_ns,
            )
            if latest_ns < 0:
                return -1
        meets, alike_ns = versions.meets_2O[1, operator], versions.alike_ns_2O[1, operator]
        if not versions.derivation.operator_active[operator]:
            pass
        elif folds and meets == APART and not walk.is_awaited_O[operator]:
            at, active_at = units.operator_at[operator], versions.derivation.active_at[operator]
            if alike_ns >= 0:
                owe(machine.owed, alike_ns)
            else:
                compute_apart(machine, arena, at, 2, pool, active_at)
        else:
            if folds and meets <= TOGETHER and alike_ns >= 0 and machine.owed[EVEN]:
                end_ns = walk_backward_together(
                    graph, units, arena, machine, versions, walk, operator, bound_ns
                )
                latest_ns = end_ns if end_ns < 0 else latest_ns
            else:
                latest_ns = walk_operator_backward(
                    graph, units, arena, holds, machine, pool, versions, walk, gathers, operator, latest_ns,
                    bound_ns,
                )  # fmt: skip
            if latest_ns < 0:
                return -1
            if meets != APART:
                latest_ns = walk_gradients(
                    graph, units, arena, holds, machine, pool, versions, walk, operator, latest_ns, bound_ns
                )
                if latest_ns < 0:
                    return -1
        while position < bucket_count and buckets.after[buckets.order[position]] == operator:
            end_ns = walk_bucket(
                graph,
                units,
                arena,
                holds,
                machine,
                pool,
                versions,
                walk,
                buckets,
                gathers,
                position,
                bound_ns,
            )
            if end_ns < 0:
                return -1
            latest_ns = max(latest_ns, end_ns)
            position += 1
    return latest_ns
