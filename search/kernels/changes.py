"""What a proposal changes in what the walk knows of a strategy: work of resources, and tasks that are alike."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import inner, section
from search.kernels.derivation import (
    account_memory,
    collectives_of,
    copy_derivation,
    find_backwards,
    find_changed_units,
)
from search.kernels.gradient_buckets import fill_buckets, find_gathers
from search.kernels.records import (
    APART,
    ASSEMBLY_STRIDE,
    COLLECTIVE_STRIDE,
    OPERATOR_HEADER,
    OPERATOR_STRIDE,
    PIECE_STRIDE,
    SCATTERED,
    SHARED_WEIGHT,
    TOGETHER,
    VALUE_COLLECTIVES,
    VALUE_HEADER,
    Array,
    Buckets,
    Derivation,
    Gathers,
    GraphArrays,
    Groups,
    Holds,
    Units,
    Versions,
)


@inner
def add_load(holds: Holds, hold: int, run_ns: int, load_ns_R: Array) -> None:
    """Add a task's time to all that it holds."""
    for place in range(holds.resource_ptr[hold], holds.resource_ptr[hold + 1]):
        load_ns_R[holds.resource[place]] += run_ns


@inner
def add_operator_load(arena: Array, at: int, new: Versions, active_at: int, group: int, sign: int) -> None:
    """Add (sign 1) or take away (-1) the time of an operator's tasks."""
    for task in range(arena[at]):
        word = at + OPERATOR_HEADER + OPERATOR_STRIDE * task
        run_ns = arena[word + 1]
        if new.derivation.pool[active_at + task]:
            run_ns += arena[word + 2]
            if group >= 0:
                run_ns += arena[word + 1]
        new.load_ns_R[arena[word]] += sign * run_ns


@inner
def add_value_load(
    arena: Array, unit: int, holds: Holds, new: Versions, last_at: int, collective_at: int, sign: int
) -> None:
    """Add or take away the time of a value's transfers and collectives; `last_at` -1: no gradient."""
    if arena[unit + 4] == 0:
        return
    pool, load_ns_R = new.derivation.pool, new.load_ns_R
    piece_at = unit + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[unit] + 1)
    for word in range(piece_at, piece_at + PIECE_STRIDE * arena[unit + 1], PIECE_STRIDE):
        if arena[word + 4] < 0:
            continue
        if arena[word + 4] < arena[unit + 8]:
            add_load(holds, arena[word + 1], sign * arena[word + 2], load_ns_R)
        assembly = arena[word + 5]
        if last_at >= 0 and pool[last_at + assembly] >= 0:
            collective = arena[unit + VALUE_HEADER + ASSEMBLY_STRIDE * assembly + 4]
            if collective < 0 or pool[collective_at + collective] < 0:
                add_load(holds, arena[word + 6], sign * arena[word + 7], load_ns_R)
    for collective in range(arena[unit + VALUE_COLLECTIVES]):
        where = collectives_of(arena, unit) + COLLECTIVE_STRIDE * collective
        add_load(holds, arena[where + 6], sign * arena[where + 7], load_ns_R)
        if last_at >= 0 and pool[collective_at + collective] >= 0:
            add_load(holds, arena[where + 8], sign * arena[where + 9], load_ns_R)


@inner
def find_uniform(arena: Array, at: int, versions: Versions, operator: int) -> None:
    """Find how long an operator's tasks take where each device has one and all are alike."""
    devices = len(versions.derivation.memory_D)
    derivation = versions.derivation
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
        if (
            not derivation.pool[derivation.active_at[operator] + task]
            or arena[word + 2] != arena[at + OPERATOR_HEADER + 2]
        ):
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
def meeting_back(graph: GraphArrays, arena: Array, unit: int, derivation: Derivation, value: int) -> int:
    """Return how they meet where gradients go back."""
    if arena[unit + 4] == 0 or not graph.needs_gradient[value]:
        return APART
    goes_as_one = meeting(arena, unit) == TOGETHER and derivation.pool[derivation.collective_at[value]] >= 0
    return TOGETHER if goes_as_one else SCATTERED


@inner
def find_meetings(
    graph: GraphArrays, units: Units, arena: Array, versions: Versions, operator: int, keeps_ends: Array
) -> None:
    """Find how an operator meets other devices."""
    there = back = APART
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value >= 0:
            unit = units.value_at[value]
            there = max(there, meeting(arena, unit))
            back = max(back, meeting_back(graph, arena, unit, versions.derivation, value))
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        value = graph.output_value[output]
        unit = units.value_at[value]
        there = max(there, meeting(arena, unit))
        back = max(back, meeting_back(graph, arena, unit, versions.derivation, value))
    if keeps_ends[operator]:
        for value in range(graph.value_count, graph.value_count + graph.buffer_count):
            if graph.producer[value] == operator and arena[units.value_at[value] + 4] > 0:
                there = SCATTERED
    versions.meets_2O[0, operator] = there
    versions.meets_2O[1, operator] = back


@inner
def find_changed_loads(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    holds: Holds,
    groups: Groups,
    old: Versions,
    new: Versions,
    keeps_ends: Array,
    dirty: Array,
) -> None:
    """Bring the work of every resource from the old strategy's to the new one's, and how operators meet.

    dirty: of operators, is overwritten.
    """
    dirty[:] = 0
    was_derived, derived = old.derivation, new.derivation
    for operator in range(len(units.operator_at)):
        was, now = old_units.operator_at[operator], units.operator_at[operator]
        if was != now or was_derived.active_at[operator] != derived.active_at[operator]:
            group = groups.of_O[operator]
            if was >= 0:
                add_operator_load(arena, was, new, was_derived.active_at[operator], group, -1)
            else:
                dirty[operator] = 1
            add_operator_load(arena, now, new, derived.active_at[operator], group, 1)
            find_uniform(arena, now, new, operator)
    for value in range(len(units.value_at)):
        was, now = old_units.value_at[value], units.value_at[value]
        if was != now or was_derived.last_at[value] != derived.last_at[value]:
            if was >= 0:
                last_at, collective_at = was_derived.last_at[value], was_derived.collective_at[value]
                add_value_load(arena, was, holds, new, last_at, collective_at, -1)
            last_at, collective_at = derived.last_at[value], derived.collective_at[value]
            add_value_load(arena, now, holds, new, last_at, collective_at, 1)
            dirty[graph.producer[value]] = 1
            for reading in range(graph.reading_ptr[value], graph.reading_ptr[value + 1]):
                dirty[graph.reading_operator[reading]] = 1
    for operator in range(len(units.operator_at)):
        if dirty[operator]:
            find_meetings(graph, units, arena, new, operator, keeps_ends)


@inner
def copy_versions(source: Versions, target: Versions) -> None:
    """Make `target` equal to `source`."""
    copy_derivation(source.derivation, target.derivation)
    for operator in range(len(source.ends_at)):
        target.ends_at[operator] = source.ends_at[operator]
        for side in range(2):
            target.alike_ns_2O[side, operator] = source.alike_ns_2O[side, operator]
            target.meets_2O[side, operator] = source.meets_2O[side, operator]
    for value in range(len(source.ready_at)):
        target.ready_at[value] = source.ready_at[value]
    for resource in range(len(source.load_ns_R)):
        target.load_ns_R[resource] = source.load_ns_R[resource]


@section
def prepare(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    holds: Holds,
    old: Versions,
    new: Versions,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    bucket_bytes: int,
    state_tensors: int,
    place_of: Array,
    keeps_ends: Array,
) -> tuple[int, int]:
    """Make `new` that of the strategy that has `units`, all but times, from `old`; and fill its buckets.

    Returns -2 where the pool is too short, -3 where the buckets are, -4 where the gathers are, else 0; and the first
    place in the order of operators whose forward, or the exchanges that follow it, are not those of the old strategy.
    """
    copy_versions(old, new)
    derivation = new.derivation
    dirty = np.empty(len(units.operator_at), np.int64)
    find_changed_units(graph, old_units, units, arena, derivation, dirty)
    if derivation.counts[1] + derivation.counts[0] > len(derivation.pool):
        return -2, 0
    first = graph.loss_operators - 1
    for operator in range(len(units.operator_at)):
        if dirty[operator]:
            first = min(first, place_of[operator])
    for value in range(graph.value_count, graph.value_count + graph.buffer_count):
        was, now = old_units.value_at[value], units.value_at[value]
        if was >= 0 and was != now and arena[was + 4] == 0 and arena[now + 4] > 0:
            # Nobody has asked yet when the producer's tasks end.
            first = min(first, place_of[graph.producer[value]])
    for weight in range(graph.weight_count):
        was, now = old_units.static_at[weight], units.static_at[weight]
        if was >= 0 and (arena[was + 2] == SHARED_WEIGHT or arena[now + 2] == SHARED_WEIGHT):
            # Checkpoints do not say which gathers are under way.
            first = 0
    find_backwards(graph, units, arena, derivation, dirty)
    account_memory(graph, old_units, units, arena, groups, state_tensors, old.derivation, derivation)
    find_changed_loads(graph, old_units, units, arena, holds, groups, old, new, keeps_ends, dirty)
    if not fill_buckets(graph, units, arena, derivation.operator_active, buckets, bucket_bytes):
        return -3, 0
    if not find_gathers(graph, units, arena, derivation.operator_active, groups, gathers, bucket_bytes):
        return -4, 0
    return 0, first
