"""The evaluation of a proposal in program order, from its changes to its makespan (`search.evaluate.incremental`)."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner, quick_entry, section
from search.kernels.changes import add_load, prepare
from search.kernels.collective_cost import collective_ns
from search.kernels.derivation import find_peak_memory
from search.kernels.machine import carry, compute, find_even, settle, settle_links
from search.kernels.records import (
    HELD,
    HELD_LEFT,
    SCATTERED,
    SHARED_UPDATE,
    VALUE_COLLECTIVES,
    Array,
    Buckets,
    Checkpoints,
    Derivation,
    Gathers,
    GraphArrays,
    Groups,
    Holds,
    Machine,
    Machines,
    Units,
    Versions,
    Walk,
)
from search.kernels.walk_backward import bucket_ns, walk_backward
from search.kernels.walk_forward import walk_collectives, walk_forward, walk_transfers


@inner
def walk_end(
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
    bucket_count: int,
    update_ns_D: Array,
    latest_ns: int,
    bound_ns: int,
) -> int:
    """Serve what renews buffers, the updates, and the gathers of updated shares.

    Returns the end of all, -1 beyond the bound, -2 without room.
    """
    settle(machine)
    last = graph.value_count + graph.buffer_count
    for value in range(graph.value_count, last):
        if pool_end + arena[units.value_at[value]] > len(pool):
            return -2
    # Nobody waits for a renewed buffer: what is written from `pool_end` on is not read.
    for value in range(graph.value_count, last):
        unit, ends_at = units.value_at[value], versions.ends_at[graph.producer[value]]
        if arena[unit + VALUE_COLLECTIVES] == 0:
            continue
        latest_ns = walk_collectives(
            arena, holds, machine, pool, unit, ends_at, pool_end, latest_ns, bound_ns
        )
        if latest_ns < 0:
            return -1
    for value in range(graph.value_count, last):
        unit, ends_at = units.value_at[value], versions.ends_at[graph.producer[value]]
        if arena[unit + 8] == 0:
            continue
        latest_ns = walk_transfers(arena, holds, machine, pool, unit, ends_at, pool_end, latest_ns, bound_ns)
        if latest_ns < 0:
            return -1
    for device in range(len(update_ns_D)):
        if versions.derivation.elements_D[device]:
            end_ns = compute(machine, device, walk.sync_end_D[device], update_ns_D[device], bound_ns)
            if end_ns < 0:
                return -1
            latest_ns = max(latest_ns, end_ns)
    for position in range(bucket_count):
        bucket = buckets.order[position]
        if buckets.sharing[bucket] != SHARED_UPDATE:
            continue
        hold = buckets.gather[bucket]
        ready_ns = 0
        for place in range(holds.end_ptr[hold], holds.end_ptr[hold + 1]):
            device = holds.end[place]
            if versions.derivation.elements_D[device]:
                # The update is the last that the device computes.
                ready_ns = max(ready_ns, machine.free_ns_R[device])
        run_ns = collective_ns(holds, hold, buckets.size_bytes[bucket])
        settle_links(holds, machine)
        end_ns = carry(holds, machine, hold, ready_ns, run_ns, bound_ns)
        if end_ns < 0:
            return -1
        latest_ns = max(latest_ns, end_ns)
    # When tasks end that were not asked for: a device is free after its last one.
    for device in range(len(update_ns_D)):
        latest_ns = max(latest_ns, machine.free_ns_R[device])
    return latest_ns if latest_ns <= bound_ns else -1


@section
def walk_program_order(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    holds: Holds,
    contention_ppm_D: Array,
    pool: Array,
    pool_end: int,
    versions: Versions,
    buckets: Buckets,
    groups: Groups,
    gathers: Gathers,
    bucket_count: int,
    update_s_D: Array,
    keeps_ends: Array,
    checkpoints: Checkpoints,
    number: int,
    folds: int,
    saves: int,
    bound_ns: int,
) -> tuple[int, int]:
    """Simulate in program order without a task graph, from a checkpoint on; the same makespan as of the task graph.

    `prepare` has run. A resource is never done before it is free and has done what it still has to do: where that
    exceeds the bound, so does the makespan.
    Returns the makespan, -1 beyond the bound, -2 where the pool is too short; and the pool's new end.
    """
    devices, resources = len(contention_ppm_D), len(versions.load_ns_R)
    row = checkpoints.row[number, checkpoints.side[number]]
    latest_ns = row[2 * resources + devices]
    total_ns_R = versions.load_ns_R.copy()
    # Where devices wait for gathers or for sums of others before them, every task is served by itself.
    if gathers.counts[1]:
        folds = 0
    for position in range(bucket_count):
        bucket = buckets.order[position]
        if buckets.sharing[bucket]:
            folds = 0
        add_load(holds, buckets.hold[bucket], bucket_ns(holds, buckets, bucket), total_ns_R)
        if buckets.sharing[bucket] == SHARED_UPDATE:
            hold = buckets.gather[bucket]
            add_load(holds, hold, collective_ns(holds, hold, buckets.size_bytes[bucket]), total_ns_R)
    for gather in range(gathers.counts[1]):
        hold = gathers.hold[gather]
        add_load(holds, hold, collective_ns(holds, hold, gathers.size_bytes[gather]), total_ns_R)
    gathers.blocked_D[:] = 0
    gathers.reduced_D[:] = 0
    update_ns_D = np.zeros(devices, np.int64)
    for device in range(devices):
        if versions.derivation.elements_D[device]:
            # The same expression as `search.cost.cost_table.nanoseconds`.
            update_ns_D[device] = int(versions.derivation.elements_D[device] * update_s_D[device] * 1e9 + 0.5)
            total_ns_R[device] += update_ns_D[device]
    contended = False
    for device in range(devices):
        contended = contended or contention_ppm_D[device] > 0
    machine = Machine(
        row[:resources].copy(),
        row[resources : resources + devices].copy(),
        total_ns_R - row[resources + devices : 2 * resources + devices],
        total_ns_R,
        contention_ppm_D,
        contended,
        np.zeros(HELD_LEFT + 1, np.int64),
    )
    machine.owed[HELD] = -1
    find_even(machine)
    for resource in range(resources):
        if machine.free_ns_R[resource] > bound_ns - machine.left_ns_R[resource]:
            return -1, pool_end
    operators = len(units.operator_at)
    walk = Walk(
        np.zeros(devices, np.int64),
        np.full(devices, -1, np.int64),
        np.empty(operators, np.int64),
        np.empty(graph.value_count, np.int64),
        np.zeros(operators, np.int64),
        np.zeros(graph.value_count, np.int64),
        np.full(operators, -1, np.int64),
        np.zeros(operators, np.int64),
        np.empty(bucket_count, np.int64),
    )
    # A stride beyond all places: no checkpoint.
    none = Checkpoints(checkpoints.row, checkpoints.side, operators + 1)
    latest_ns, pool_end = walk_forward(
        graph, units, arena, holds, machine, pool, pool_end, versions, gathers, keeps_ends,
        checkpoints if saves else none,
        number * checkpoints.stride, graph.loss_operators, folds, latest_ns, bound_ns,
    )  # fmt: skip
    if latest_ns < 0 or pool_end < 0:
        return -1 if latest_ns < 0 else -2, pool_end
    kept_end = pool_end
    latest_ns = walk_backward(
        graph, units, arena, holds, machine, pool, pool_end, versions, walk, buckets, groups, gathers,
        bucket_count, folds, latest_ns, bound_ns,
    )  # fmt: skip
    if latest_ns < 0:
        return latest_ns, kept_end
    # What the backward wrote is overwritten.
    latest_ns, pool_end = walk_forward(
        graph, units, arena, holds, machine, pool, pool_end, versions, gathers, keeps_ends, none,
        graph.loss_operators, operators, folds, latest_ns, bound_ns,
    )  # fmt: skip
    if latest_ns < 0 or pool_end < 0:
        return -1 if latest_ns < 0 else -2, kept_end
    latest_ns = walk_end(
        graph, units, arena, holds, machine, pool, pool_end, versions, walk, buckets, bucket_count, update_ns_D,
        latest_ns, bound_ns,
    )  # fmt: skip
    return latest_ns, pool_end


@entry
def evaluate_program_order(
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
    machines: Machines,
    place_of: Array,
    keeps_ends: Array,
    checkpoints: Checkpoints,
    bucket_bytes: int,
    state_tensors: int,
    folds: int,
    saves: int,
    bound_ns: int,
) -> tuple[int, int, int]:
    """Make `new` that of the strategy that has `units` from `old`, and simulate it in program order.

    folds: what devices do alike is served together. saves: checkpoints, without which it cannot be accepted.

    Returns the makespan, -1 beyond the bound, -2 where the pool is too short, -3 where the buckets are, -4 where the
    gathers are; the number of the checkpoint that it was simulated from; and the bytes beyond the devices' memories.
    """
    derivation = new.derivation
    shortage, first = prepare(
        graph, old_units, units, arena, holds, old, new, buckets, groups, gathers, bucket_bytes,
        state_tensors, place_of, keeps_ends,
    )  # fmt: skip
    if shortage < 0:
        return shortage, 0, 0
    number = first // checkpoints.stride
    makespan_ns, derivation.counts[1] = walk_program_order(
        graph, units, arena, holds, machines.contention_ppm_D, derivation.pool, derivation.counts[1], new,
        buckets, groups, gathers, buckets.counts[0], machines.update_s_D, keeps_ends, checkpoints, number, folds,
        saves, bound_ns,
    )  # fmt: skip
    if makespan_ns < 0:
        return makespan_ns, number, 0
    find_peak_memory(derivation)
    excess_bytes = 0
    for device in range(len(derivation.peak_D)):
        excess_bytes += max(derivation.peak_D[device] - machines.capacity_bytes_D[device], 0)
    return makespan_ns, number, excess_bytes


@inner
def move_words(at: Array, place: int, count: int, derivation: Derivation, target: Array) -> None:
    """Copy what is at `at[place]` in the pool to the end of another one."""
    end = derivation.counts[1]
    for word in range(count):
        target[end + word] = derivation.pool[at[place] + word]
    at[place] = end
    derivation.counts[1] = end + count


@quick_entry
def compact(
    graph: GraphArrays, units: Units, arena: Array, keeps_ends: Array, versions: Versions, target: Array
) -> None:
    """Copy all that `versions` refer to to another pool of the same length."""
    derivation = versions.derivation
    derivation.counts[1] = 0
    for operator in range(len(units.operator_at)):
        count = arena[units.operator_at[operator]]
        move_words(derivation.active_at, operator, count, derivation, target)
        if keeps_ends[operator] and versions.meets_2O[0, operator] == SCATTERED:
            move_words(versions.ends_at, operator, count, derivation, target)
    for value in range(graph.value_count):
        unit = units.value_at[value]
        count = arena[unit]
        move_words(derivation.last_at, value, count, derivation, target)
        move_words(derivation.collective_at, value, arena[unit + VALUE_COLLECTIVES], derivation, target)
        if arena[unit + 4] > 0:
            move_words(versions.ready_at, value, count, derivation, target)
