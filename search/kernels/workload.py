"""What a proposal changes in the work of every resource, and in which operators can be folded."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import inner, section
from search.kernels.derivation import (
    copy_derivation,
    find_backwards,
    find_changed_fragments,
)
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    loads_of,
    piece_sources_of,
    source_devices_of,
    tasks_of,
    value_header,
)
from search.kernels.gradient_buckets import fill_buckets
from search.kernels.memory_accounting import account_statics
from search.kernels.messages import gradient_ns, route_set
from search.kernels.records import (
    LOCAL,
    MIXED,
    ONE_COLLECTIVE,
    Array,
    Derivation,
    Fragments,
    GraphArrays,
    Machines,
    ResourceSets,
    Step,
    Workload,
)
from search.kernels.weight_gathers import find_gathers


@section
def derive_changes(
    old_fragments: Fragments, step: Step, old: Workload, new: Workload, machines: Machines
) -> int:
    """Make `new` that of the strategy that has the step's fragments from `old`, but for tensors; and fill its buckets.

    old_fragments: -1 where nothing is known of an operator, a value or a static tensor.
    Returns -2 where the pool is too short, -3 where the buckets are, -4 where the gathers are, else 0.
    """
    graph, fragments, arena, groups = step.graph, step.fragments, step.arena, step.groups
    copy_workload(old, new)
    derivation = new.derivation
    dirty = np.empty(len(fragments.operator_at), np.int64)
    find_changed_fragments(graph, old_fragments, fragments, arena, derivation, dirty)
    if derivation.counts[1] + derivation.counts[0] > len(derivation.pool):
        return -2
    find_backwards(graph, fragments, arena, derivation, dirty)
    account_statics(
        graph, old_fragments, fragments, arena, machines.state_tensors, old.derivation, derivation
    )
    account_work(old_fragments, step, old, new, dirty, np.empty(len(derivation.memory_D), np.int64))
    active, bucket_bytes = derivation.operator_active, machines.bucket_bytes
    if not fill_buckets(graph, fragments, arena, active, step.buckets, bucket_bytes, np.zeros(1, np.int64)):
        return -3
    if not find_gathers(graph, fragments, arena, active, groups, step.gathers, bucket_bytes):
        return -4
    return 0


@inner
def copy_workload(source: Workload, target: Workload) -> None:
    """Make `target` equal to `source`, of which it shares the pool."""
    copy_derivation(source.derivation, target.derivation)
    for operator in range(source.uniform_ns_2O.shape[1]):
        for side in range(2):
            target.uniform_ns_2O[side, operator] = source.uniform_ns_2O[side, operator]
            target.exchange_2O[side, operator] = source.exchange_2O[side, operator]
    for resource in range(len(source.load_ns_R)):
        target.load_ns_R[resource] = source.load_ns_R[resource]


@inner
def account_work(
    old_fragments: Fragments, step: Step, old: Workload, new: Workload, dirty: Array, latest_D: Array
) -> None:
    """Bring the work of every resource, and what can be folded, from the old strategy's to the new one's.

    dirty: of operators, and latest_D: of devices, are overwritten.
    """
    graph, fragments, arena = step.graph, step.fragments, step.arena
    was_derived, derived = old.derivation, new.derivation
    dirty[:] = 0
    latest_D[:] = -1
    for operator in range(len(fragments.operator_at)):
        was, now = old_fragments.operator_at[operator], fragments.operator_at[operator]
        if was != now or was_derived.active_at[operator] != derived.active_at[operator]:
            group = step.groups.of_O[operator]
            if was >= 0:
                add_tasks(arena, was, new, was_derived.active_at[operator], group, -1)
            add_tasks(arena, now, new, derived.active_at[operator], group, 1)
            find_uniform(arena, now, new, operator, latest_D)
            dirty[operator] |= was < 0
    for value in range(len(fragments.value_at)):
        was, now = old_fragments.value_at[value], fragments.value_at[value]
        if was != now or was_derived.last_at[value] != derived.last_at[value]:
            if was >= 0:
                add_exchange(step, was, new, was_derived.last_at[value], was_derived.collective_at[value], -1)
            add_exchange(step, now, new, derived.last_at[value], derived.collective_at[value], 1)
            dirty[graph.producer[value]] = 1
            for reading in range(graph.reading_ptr[value], graph.reading_ptr[value + 1]):
                dirty[graph.reading_operator[reading]] = 1
    for operator in range(len(fragments.operator_at)):
        if dirty[operator]:
            find_exchanges(graph, fragments, arena, new, operator)
    for value in range(graph.value_count, graph.value_count + graph.buffer_count):
        if value_header(arena, fragments.value_at[value]).remote_pieces > 0:
            # When each task of its producer ends is asked for.
            new.exchange_2O[0, graph.producer[value]] = MIXED


@inner
def add_load(sets: ResourceSets, resource_set: int, run_ns: int, load_ns_R: Array) -> None:
    """Add a task's time to all that it holds."""
    for index in range(sets.resource_ptr[resource_set], sets.resource_ptr[resource_set + 1]):
        load_ns_R[sets.resource[index]] += run_ns


@inner
def add_tasks(arena: Array, at: int, new: Workload, active_at: int, group: int, sign: int) -> None:
    """Add (sign 1) or take away (-1) the time of an operator's tasks."""
    tasks = tasks_of(arena, at)
    for part in range(len(tasks)):
        task = tasks[part]
        run_ns = task.forward_ns
        if new.derivation.pool[active_at + part]:
            run_ns += task.backward_ns
            if group >= 0:
                run_ns += task.forward_ns
        new.load_ns_R[task.device] += sign * run_ns


@inner
def add_exchange(
    step: Step, fragment: int, new: Workload, last_at: int, collective_at: int, sign: int
) -> None:
    """Add or take away the time of a value's transfers and collectives; `last_at` -1: no gradient."""
    arena, sets = step.arena, step.resource_sets
    header = value_header(arena, fragment)
    if header.remote_pieces == 0:
        return
    pool, load_ns_R, devices = new.derivation.pool, new.load_ns_R, len(new.derivation.memory_D)
    goes_back = last_at >= 0 and pool[last_at] >= 0
    # All gradients go back as what they are of came, or none does.
    is_alike = True
    if last_at >= 0:
        for index in range(last_at, last_at + header.assemblies):
            is_alike = is_alike and (pool[index] >= 0) == goes_back
        for index in range(collective_at, collective_at + header.collectives):
            is_alike = is_alike and (pool[index] >= 0) == goes_back
    loads = loads_of(arena, fragment)
    for number in range(len(loads)):
        load = loads[number]
        run_ns = load.forward_ns
        if is_alike and goes_back:
            run_ns += load.back_ns
        load_ns_R[devices + load.link] += sign * run_ns
    if not is_alike:
        add_gradient_transfers(step, fragment, new, last_at, collective_at, sign)
    collectives = collectives_of(arena, fragment)
    for number in range(header.collectives):
        collective = collectives[number]
        add_load(sets, collective.resource_set, sign * collective.run_ns, load_ns_R)
        if last_at >= 0 and pool[collective_at + number] >= 0:
            add_load(sets, collective.back_resource_set, sign * collective.back_ns, load_ns_R)


@inner
def add_gradient_transfers(
    step: Step, fragment: int, new: Workload, last_at: int, collective_at: int, sign: int
) -> None:
    """Add or take away the time of a value's gradients that go back by themselves."""
    arena, pool = step.arena, new.derivation.pool
    assemblies, pieces = assemblies_of(arena, fragment), piece_sources_of(arena, fragment)
    device_T = source_devices_of(arena, fragment)
    for number in range(len(assemblies) - 1):
        assembly = assemblies[number]
        served_by = assembly.collective
        if pool[last_at + number] < 0 or (served_by >= 0 and pool[collective_at + served_by] >= 0):
            continue
        remote = 0
        for position in range(assembly.pieces):
            source = device_T[pieces[assembly.first_piece + position]]
            if source != assembly.device:
                resource_set = route_set(step.links, assembly.device, source)
                back_ns = gradient_ns(arena, fragment, number, position, remote, step.links)
                remote += 1
                add_load(step.resource_sets, resource_set, sign * back_ns, new.load_ns_R)


@inner
def find_uniform(arena: Array, at: int, new: Workload, operator: int, latest_D: Array) -> None:
    """Find how long an operator's tasks take where each device has one and all take the same time.

    latest_D: scratch; of each device, no operator that is looked at later.
    """
    derivation, tasks = new.derivation, tasks_of(arena, at)
    new.uniform_ns_2O[:, operator] = -1
    if len(tasks) != len(derivation.memory_D):
        return
    for part in range(len(tasks)):
        device = tasks[part].device
        if latest_D[device] == operator or tasks[part].forward_ns != tasks[0].forward_ns:
            return
        latest_D[device] = operator
    new.uniform_ns_2O[0, operator] = tasks[0].forward_ns
    active_at = derivation.active_at[operator]
    for part in range(len(tasks)):
        if not derivation.pool[active_at + part] or tasks[part].backward_ns != tasks[0].backward_ns:
            return
    new.uniform_ns_2O[1, operator] = tasks[0].backward_ns


@inner
def exchange_of(arena: Array, fragment: int) -> int:
    """Return how the tasks that make and those that read a value exchange it: a code of `Workload.exchange_2O`."""
    header = value_header(arena, fragment)
    if header.remote_pieces == 0:
        return LOCAL
    if header.collectives != 1 or header.transfers != 0:
        return MIXED
    following = collectives_of(arena, fragment)[1]
    serves_all = following.first_assembly == header.assemblies and following.first_source == header.sources
    return ONE_COLLECTIVE if serves_all else MIXED


@inner
def gradient_exchange_of(
    graph: GraphArrays, arena: Array, fragment: int, derivation: Derivation, value: int
) -> int:
    """Return how the gradient of a value goes back, as `exchange_of` does."""
    if value_header(arena, fragment).remote_pieces == 0 or not graph.needs_gradient[value]:
        return LOCAL
    goes_as_one = exchange_of(arena, fragment) == ONE_COLLECTIVE and (
        derivation.pool[derivation.collective_at[value]] >= 0
    )
    return ONE_COLLECTIVE if goes_as_one else MIXED


@inner
def find_exchanges(
    graph: GraphArrays, fragments: Fragments, arena: Array, new: Workload, operator: int
) -> None:
    """Find how an operator exchanges what it reads and what it makes, and their gradients."""
    forward = backward = LOCAL
    for slot in range(graph.slot_ptr[operator], graph.slot_ptr[operator + 1]):
        value = graph.slot_value[slot]
        if value >= 0:
            fragment = fragments.value_at[value]
            forward = max(forward, exchange_of(arena, fragment))
            backward = max(backward, gradient_exchange_of(graph, arena, fragment, new.derivation, value))
    for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
        value = graph.output_value[output]
        fragment = fragments.value_at[value]
        forward = max(forward, exchange_of(arena, fragment))
        backward = max(backward, gradient_exchange_of(graph, arena, fragment, new.derivation, value))
    new.exchange_2O[0, operator], new.exchange_2O[1, operator] = forward, backward
