"""What a proposal changes in what is known of a strategy: backwards, last readers, loads, memory."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import inner, section
from search.kernels.derivation import collectives_of
from search.kernels.gradient_buckets import fill_buckets, find_gathers
from search.kernels.records import (
    ACTIVE,
    APART,
    ASSEMBLY_STRIDE,
    COLLECTIVE_STRIDE,
    HOLDER_STRIDE,
    OPERATOR_HEADER,
    OPERATOR_STRIDE,
    PARTLY_ACTIVE,
    PIECE_STRIDE,
    SCATTERED,
    SHARED_WEIGHT,
    STATIC_HEADER,
    TOGETHER,
    VALUE_COLLECTIVES,
    VALUE_HEADER,
    Array,
    Buckets,
    Gathers,
    GraphArrays,
    Groups,
    Holds,
    Units,
    Versions,
)


@inner
def find_changed_activity(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    pool_end: int,
    versions: Versions,
    dirty: Array,
) -> int:
    """Find activity as `find_activity` does, of the operators that are dirty and those that these make so.

    dirty: 0 not, 1 what it or its outputs' readers do may have changed, 2 it has another configuration.
    Returns the pool's new end, or -1 where it is too short.
    """
    for operator in range(len(units.operator_at) - 1, -1, -1):
        if dirty[operator] == 0:
            continue
        count = arena[units.operator_at[operator]]
        words = count
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            unit = units.value_at[graph.output_value[output]]
            words += arena[unit] + arena[unit + VALUE_COLLECTIVES]
        if pool_end + words > len(pool):
            return -1
        before, base = versions.active_at[operator], pool_end
        versions.active_at[operator] = base
        pool_end += count
        for task in range(count):
            pool[base + task] = 0
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            versions.last_at[value] = pool_end
            find_last_readers(graph, units, arena, pool, versions, value, base)
            unit = units.value_at[value]
            pool_end += arena[unit] + arena[unit + VALUE_COLLECTIVES]
            if value == graph.loss_value and graph.needs_gradient[value]:
                for task in range(0, count, arena[units.operator_at[operator] + 1]):
                    pool[base + task] = 1
        known = arena[units.operator_at[operator] + OPERATOR_HEADER + 4]
        if known == ACTIVE:
            for task in range(count):
                pool[base + task] = 1
        versions.operator_active[operator] = known == PARTLY_ACTIVE
        changed = dirty[operator] == 2
        for task in range(count):
            if pool[base + task]:
                versions.operator_active[operator] = 1
            changed = changed or pool[before + task] != pool[base + task]
        if changed:
            for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
                producer = graph.producer[graph.read_value[position]]
                dirty[producer] = max(dirty[producer], 1)
    return pool_end


@inner
def find_last_readers(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    value: int,
    active_at: int,
) -> None:
    """Write which operator's backward completes each gradient of a value, and mark the tasks that it goes to."""
    unit, last_at = units.value_at[value], versions.last_at[value]
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    reader_at = piece_at + PIECE_STRIDE * arena[unit + 1]
    is_partial = False
    for assembly in range(arena[unit]):
        where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
        last = -1
        perhaps = False
        if graph.needs_gradient[value]:
            for reader in range(arena[where + 3], arena[where + 3 + ASSEMBLY_STRIDE]):
                reading = graph.reading_ptr[value] + arena[reader_at + 2 * reader]
                user = graph.reading_operator[reading]
                task = versions.active_at[user] + arena[reader_at + 2 * reader + 1]
                if graph.reading_gradient[reading]:
                    if pool[task]:
                        last = user
                        break
                    if arena[units.operator_at[user] + OPERATOR_HEADER + 4] == PARTLY_ACTIVE:
                        # Some replica sends a gradient back: whose assembly that is, and so when, is not known.
                        perhaps = is_partial = True
                        break
        pool[last_at + assembly] = last
        if last >= 0 or perhaps:
            for piece in range(arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]):
                pool[active_at + arena[piece_at + PIECE_STRIDE * piece]] = 1
    found = arena[unit + VALUE_COLLECTIVES]
    member_at = collectives_of(arena, unit) + COLLECTIVE_STRIDE * (found + 1)
    for collective in range(found):
        where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
        after = -2
        for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
            last = pool[last_at + arena[member_at + member]]
            after = last if after == -2 or after == last else -1
            if after == -1:
                break
        pool[last_at + arena[unit] + collective] = after
    if is_partial:
        # What goes back with what is not known is left out as well.
        for place in range(arena[unit] + found):
            pool[last_at + place] = -1


@inner
def add_load(holds: Holds, hold: int, run_ns: int, load_ns_R: Array) -> None:
    """Add a task's time to all that it holds."""
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        load_ns_R[holds.resource[place]] += run_ns


@inner
def weigh_operator(
    arena: Array, at: int, pool: Array, active_at: int, group: int, ended: int, sign: int, versions: Versions
) -> None:
    """Add (sign 1) or take away (-1) the time and the activations of an operator's tasks."""
    for task in range(arena[at]):
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        device, run_ns = arena[word], arena[word + 1]
        if pool[active_at + task]:
            versions.memory_D[device] += sign * arena[word + 3]
            run_ns += arena[word + 2]
            if group >= 0:
                versions.again_2GD[0, group, device] += sign * arena[word + 5]
                run_ns += arena[word + 1]
            if ended > 0:
                versions.again_2GD[1, ended - 1, device] += sign * arena[word + 3]
        versions.load_ns_R[device] += sign * run_ns


@inner
def weigh_value(
    arena: Array,
    unit: int,
    pool: Array,
    last_at: int,
    ended: int,
    sign: int,
    holds: Holds,
    versions: Versions,
) -> None:
    """Add or take away a value's transfers and collectives, and its assemblies; `last_at` -1: no gradient."""
    if last_at >= 0:
        for assembly in range(arena[unit]):
            if pool[last_at + assembly] >= 0:
                where = unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
                versions.memory_D[arena[where]] += sign * arena[where + 1]
                if ended > 0:
                    versions.again_2GD[1, ended - 1, arena[where]] += sign * arena[where + 1]
    if arena[unit + 4] == 0:
        return
    load_ns_R = versions.load_ns_R
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    for word in range(piece_at, piece_at + PIECE_STRIDE * arena[unit + 1], PIECE_STRIDE):
        if arena[word + 4] < 0:
            continue
        if arena[word + 4] < arena[unit + 8]:
            add_load(holds, arena[word + 1], sign * arena[word + 2], load_ns_R)
        assembly = arena[word + 5]
        if last_at >= 0 and pool[last_at + assembly] >= 0:
            collective = arena[unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly + 4]
            if collective < 0 or pool[last_at + arena[unit] + collective] < 0:
                add_load(holds, arena[word + 6], sign * arena[word + 7], load_ns_R)
    for collective in range(arena[unit + VALUE_COLLECTIVES]):
        where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
        add_load(holds, arena[where + 6], sign * arena[where + 7], load_ns_R)
        if last_at >= 0 and pool[last_at + arena[unit] + collective] >= 0:
            add_load(holds, arena[where + 8], sign * arena[where + 9], load_ns_R)


@inner
def weigh_alike(
    arena: Array, at: int, pool: Array, active_at: int, versions: Versions, operator: int
) -> None:
    """Find how long an operator's tasks take where each device has one and all are alike."""
    devices = len(versions.memory_D)
    versions.alike_ns_2O[:, operator] = -1
    if arena[at] != devices:
        return
    for task in range(devices):
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        # In any other order of devices tasks count as different.
        if arena[word] != task or arena[word + 1] != arena[at + OPERATOR_HEADER + 1]:
            return
    versions.alike_ns_2O[0, operator] = arena[at + OPERATOR_HEADER + 1]
    for task in range(devices):
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        if not pool[active_at + task] or arena[word + 2] != arena[at + OPERATOR_HEADER + 2]:
            return
    versions.alike_ns_2O[1, operator] = arena[at + OPERATOR_HEADER + 2]


@inner
def meeting(arena: Array, unit: int) -> int:
    """Return how those that make and those that read a value meet."""
    if arena[unit + 4] == 0:
        return APART
    if arena[unit + VALUE_COLLECTIVES] != 1 or arena[unit + 8] != 0:
        return SCATTERED
    following = collectives_of(arena, unit) + COLLECTIVE_STRIDE
    serves_all = arena[following + 4] == arena[unit] and arena[following + 5] == arena[unit + 3]
    return TOGETHER if serves_all else SCATTERED


@inner
def meeting_back(graph: GraphArrays, arena: Array, unit: int, pool: Array, last_at: int, value: int) -> int:
    """Return how they meet where gradients go back."""
    if arena[unit + 4] == 0 or not graph.needs_gradient[value]:
        return APART
    goes_as_one = meeting(arena, unit) == TOGETHER and pool[last_at + arena[unit]] >= 0
    return TOGETHER if goes_as_one else SCATTERED


@inner
def find_meetings(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    pool: Array,
    versions: Versions,
    operator: int,
    keeps_ends: Array,
) -> None:
    """Find how an operator meets other devices."""
    there = back = APART
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value >= 0:
            unit, last_at = units.value_at[value], versions.last_at[value]
            there = max(there, meeting(arena, unit))
            back = max(back, meeting_back(graph, arena, unit, pool, last_at, value))
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        value = graph.output_value[output]
        unit, last_at = units.value_at[value], versions.last_at[value]
        there = max(there, meeting(arena, unit))
        back = max(back, meeting_back(graph, arena, unit, pool, last_at, value))
    if keeps_ends[operator]:
        for value in range(graph.value_count, graph.value_count + graph.buffer_count):
            if graph.producer[value] == operator and arena[units.value_at[value] + 4] > 0:
                there = SCATTERED
    versions.meets_2O[0, operator] = there
    versions.meets_2O[1, operator] = back


@inner
def is_trained(graph: GraphArrays, static: int, operator_active: Array) -> int:
    """Return whether a static tensor is a weight that some operator's backward gives a gradient."""
    if static < graph.weight_count:
        for user in range(graph.weight_ptr[static], graph.weight_ptr[static + 1]):
            if operator_active[graph.weight_user[user]]:
                return 1
    return 0


@inner
def weigh_static(
    graph: GraphArrays,
    arena: Array,
    static: int,
    at: int,
    trained: int,
    sign: int,
    state_tensors: int,
    versions: Versions,
) -> None:
    """Add or take away the memory and the elements to update of a static tensor."""
    for holder in range(arena[at]):
        word = at + STATIC_HEADER + HOLDER_STRIDE * holder
        device, kept, updated = arena[word], arena[word + 1], arena[word + 2]
        if trained:
            kept += updated * (1 + state_tensors)
            versions.elements_D[device] += sign * updated
        versions.memory_D[device] += sign * kept * graph.static_item_bytes[static]


@inner
def weigh_changes(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    pool: Array,
    old: Versions,
    new: Versions,
    holds: Holds,
    groups: Groups,
    state_tensors: int,
    keeps_ends: Array,
    dirty: Array,
    everything: int,
) -> None:
    """Bring the sums in `new` from those of the old strategy (or from nothing) to those of the new one.

    And find anew how operators meet, where that may have changed. dirty: of operators, is overwritten.
    """
    dirty[:] = everything
    for operator in range(len(units.operator_at)):
        was, now = old_units.operator_at[operator], units.operator_at[operator]
        if everything or was != now or old.active_at[operator] != new.active_at[operator]:
            group, ended = groups.of_O[operator], groups.ended_O[operator]
            if not everything:
                weigh_operator(arena, was, pool, old.active_at[operator], group, ended, -1, new)
            weigh_operator(arena, now, pool, new.active_at[operator], group, ended, 1, new)
            weigh_alike(arena, now, pool, new.active_at[operator], new, operator)
    for value in range(len(units.value_at)):
        was, now = old_units.value_at[value], units.value_at[value]
        if everything or was != now or old.last_at[value] != new.last_at[value]:
            ended = groups.ended_O[graph.producer[value]]
            if not everything:
                weigh_value(arena, was, pool, old.last_at[value], ended, -1, holds, new)
            weigh_value(arena, now, pool, new.last_at[value], ended, 1, holds, new)
            dirty[graph.producer[value]] = 1
            for reading in range(graph.reading_ptr[value], graph.reading_ptr[value + 1]):
                dirty[graph.reading_operator[reading]] = 1
    for operator in range(len(units.operator_at)):
        if dirty[operator]:
            find_meetings(graph, units, arena, pool, new, operator, keeps_ends)
    for static in range(graph.static_count):
        was, now = old_units.static_at[static], units.static_at[static]
        trained_before = is_trained(graph, static, old.operator_active)
        trained = is_trained(graph, static, new.operator_active)
        if everything or was != now or trained != trained_before:
            if not everything:
                weigh_static(graph, arena, static, was, trained_before, -1, state_tensors, new)
            weigh_static(graph, arena, static, now, trained, 1, state_tensors, new)


@inner
def copy_versions(source: Versions, target: Versions) -> None:
    """Make `target` equal to `source`."""
    for operator in range(len(source.active_at)):
        target.active_at[operator] = source.active_at[operator]
        target.ends_at[operator] = source.ends_at[operator]
        target.operator_active[operator] = source.operator_active[operator]
        for side in range(2):
            target.alike_ns_2O[side, operator] = source.alike_ns_2O[side, operator]
            target.meets_2O[side, operator] = source.meets_2O[side, operator]
    for value in range(len(source.last_at)):
        target.last_at[value] = source.last_at[value]
        target.ready_at[value] = source.ready_at[value]
    for device in range(len(source.elements_D)):
        target.elements_D[device] = source.elements_D[device]
        target.memory_D[device] = source.memory_D[device]
        for which in range(2):
            for group in range(source.again_2GD.shape[1]):
                target.again_2GD[which, group, device] = source.again_2GD[which, group, device]
    for resource in range(len(source.load_ns_R)):
        target.load_ns_R[resource] = source.load_ns_R[resource]


@section
def prepare(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    holds: Holds,
    pool: Array,
    pool_end: int,
    old: Versions,
    new: Versions,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    bucket_bytes: int,
    state_tensors: int,
    place_of: Array,
    keeps_ends: Array,
    everything: int,
) -> tuple[int, int]:
    """Make `new` that of the strategy that has `units`, all but times, from `old`; and fill its buckets.

    Returns the pool's new end (-2 where the pool is too short, -3 where the buckets are, -4 where the gathers are), and
    the first place in the order of operators whose forward, or the exchanges that follow it, are not those of the old
    strategy.
    """
    first = graph.loss_operators - 1
    dirty = np.zeros(len(units.operator_at), np.int64)
    if everything:
        first = 0
        dirty[:] = 2
        for sums in (new.memory_D, new.elements_D, new.load_ns_R):
            sums[:] = 0
        new.again_2GD[:] = 0
    else:
        copy_versions(old, new)
        for operator in range(len(units.operator_at)):
            if old_units.operator_at[operator] != units.operator_at[operator]:
                dirty[operator] = 2
                first = min(first, place_of[operator])
        for value in range(graph.value_count):
            if old_units.value_at[value] != units.value_at[value]:
                producer = graph.producer[value]
                dirty[producer] = max(dirty[producer], 1)
                first = min(first, place_of[producer])
        for value in range(graph.value_count, graph.value_count + graph.buffer_count):
            was, now = old_units.value_at[value], units.value_at[value]
            if was != now and arena[was + 4] == 0 and arena[now + 4] > 0:
                # Nobody has asked yet when the producer's tasks end.
                first = min(first, place_of[graph.producer[value]])
    pool_end = find_changed_activity(graph, units, arena, pool, pool_end, new, dirty)
    if pool_end < 0:
        return -2, 0
    weigh_changes(
        graph, old_units, units, arena, pool, old, new, holds, groups, state_tensors, keeps_ends, dirty, everything
    )  # fmt: skip
    if not fill_buckets(graph, units, arena, new.operator_active, buckets, bucket_bytes):
        return -3, 0
    if not find_gathers(graph, units, arena, new.operator_active, groups, gathers, bucket_bytes):
        return -4, 0
    if everything == 0:
        for weight in range(graph.weight_count):
            was, now = old_units.static_at[weight], units.static_at[weight]
            if arena[was + 2] == SHARED_WEIGHT or arena[now + 2] == SHARED_WEIGHT:
                # Checkpoints do not say which gathers are under way.
                first = 0
    return pool_end, first
