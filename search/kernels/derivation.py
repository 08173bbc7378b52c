"""The derivation of a strategy: which tasks have a backward, who completes which gradient, and memory.

A strategy is derived from another one by what differs between them, and from nothing where all of it does.
"""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    holders_of,
    operator_header,
    pieces_of,
    readers_of,
    served_assemblies_of,
    tasks_of,
    value_header,
)
from search.kernels.records import ACTIVE, PARTLY_ACTIVE, Array, Derivation, GraphArrays, Groups, Units


@entry
def derive(
    graph: GraphArrays,
    units: Units,
    arena: Array,
    groups: Groups,
    state_tensors: int,
    derivation: Derivation,
) -> int:
    """Derive a strategy from nothing; return the words that it takes, written only where the pool has them."""
    forget(derivation)
    nothing = Units(
        np.full_like(units.operator_at, -1),
        np.full_like(units.value_at, -1),
        np.full_like(units.static_at, -1),
    )
    dirty = np.empty(len(units.operator_at), np.int64)
    find_changed_units(graph, nothing, units, arena, derivation, dirty)
    if derivation.counts[0] <= len(derivation.pool):
        find_backwards(graph, units, arena, derivation, dirty)
        account_memory(graph, nothing, units, arena, groups, state_tensors, derivation, derivation)
        find_peak_memory(derivation)
    return int(derivation.counts[0])


@inner
def forget(derivation: Derivation) -> None:
    """Make a derivation that of nothing."""
    for sums in (derivation.counts, derivation.elements_D, derivation.memory_D):
        sums[:] = 0
    derivation.again_2GD[:] = 0


@inner
def find_changed_units(
    graph: GraphArrays, old_units: Units, units: Units, arena: Array, new: Derivation, dirty: Array
) -> None:
    """Find which operators have other units, or make values that have, and count the words of the new strategy.

    dirty: of operators, as `find_backwards` takes it.
    """
    dirty[:] = 0
    for value in range(graph.value_count):
        was, now = old_units.value_at[value], units.value_at[value]
        if was != now:
            dirty[graph.producer[value]] = 1
            new.counts[0] += value_words(arena, now)
            if was >= 0:
                new.counts[0] -= value_words(arena, was)
    for operator in range(len(units.operator_at)):
        was, now = old_units.operator_at[operator], units.operator_at[operator]
        if was != now:
            dirty[operator] = 2
            new.counts[0] += operator_header(arena, now).tasks
            if was >= 0:
                new.counts[0] -= operator_header(arena, was).tasks


@inner
def value_words(arena: Array, unit: int) -> int:
    """Return the words that a value has in the pool of a derivation."""
    header = value_header(arena, unit)
    return int(header.assemblies + header.collectives)


@inner
def find_backwards(graph: GraphArrays, units: Units, arena: Array, new: Derivation, dirty: Array) -> None:
    """Find which tasks have a backward, as `graph.plan` does, and who completes the gradients that they take.

    Of operators that are dirty, and of those that these make so: 0 not, 1 its outputs' readers may have changed, 2 it
    has another configuration.
    """
    pool = new.pool
    for operator in range(len(units.operator_at) - 1, -1, -1):
        if dirty[operator] == 0:
            continue
        at = units.operator_at[operator]
        header = operator_header(arena, at)
        before, active_at = new.active_at[operator], new.counts[1]
        new.active_at[operator] = active_at
        new.counts[1] += header.tasks
        pool[active_at : active_at + header.tasks] = 0
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            unit = units.value_at[value]
            new.last_at[value] = new.counts[1]
            new.collective_at[value] = new.counts[1] + value_header(arena, unit).assemblies
            new.counts[1] += value_words(arena, unit)
            find_last_readers(graph, units, arena, new, value, active_at)
            if value == graph.loss_value and graph.needs_gradient[value]:
                for task in range(0, header.tasks, header.replicas):
                    pool[active_at + task] = 1
        code = tasks_of(arena, at)[0].origin
        if code == ACTIVE:
            pool[active_at : active_at + header.tasks] = 1
        new.operator_active[operator] = code == PARTLY_ACTIVE
        changed = dirty[operator] == 2
        for task in range(header.tasks):
            if pool[active_at + task]:
                new.operator_active[operator] = 1
            changed = changed or pool[before + task] != pool[active_at + task]
        if changed:
            for position in range(graph.read_ptr[operator], graph.read_ptr[operator + 1]):
                producer = graph.producer[graph.read_value[position]]
                dirty[producer] = max(dirty[producer], 1)


@inner
def find_last_readers(
    graph: GraphArrays, units: Units, arena: Array, new: Derivation, value: int, active_at: int
) -> None:
    """Write which operator's backward completes each gradient of a value, and mark the tasks that it goes to."""
    pool, unit = new.pool, units.value_at[value]
    last_at, collective_at = new.last_at[value], new.collective_at[value]
    assemblies, pieces, readers = assemblies_of(arena, unit), pieces_of(arena, unit), readers_of(arena, unit)
    is_partial = False
    for number in range(len(assemblies) - 1):
        assembly, following = assemblies[number], assemblies[number + 1]
        last = -1
        perhaps = False
        if graph.needs_gradient[value]:
            for place in range(assembly.first_reader, following.first_reader):
                reading = graph.reading_ptr[value] + readers[place].reading
                user = graph.reading_operator[reading]
                if graph.reading_gradient[reading]:
                    # Readers with a backward are in topological order: it reaches the first of them last.
                    if pool[new.active_at[user] + readers[place].task]:
                        last = user
                        break
                    if tasks_of(arena, units.operator_at[user])[0].origin == PARTLY_ACTIVE:
                        # Some replica sends a gradient back: whose assembly that is, and so when, is not known.
                        perhaps = is_partial = True
                        break
        pool[last_at + number] = last
        if last >= 0 or perhaps:
            for place in range(assembly.first_piece, following.first_piece):
                pool[active_at + pieces[place].source] = 1
    find_gradient_collectives(arena, unit, new, value)
    if is_partial:
        # What goes back with what is not known is left out as well.
        for place in range(last_at, collective_at + value_header(arena, unit).collectives):
            pool[place] = -1


@inner
def find_gradient_collectives(arena: Array, unit: int, new: Derivation, value: int) -> None:
    """Write after which operator's backward each collective of a value goes back as one, or -1."""
    count = value_header(arena, unit).collectives
    if count == 0:
        return
    pool, last_at = new.pool, new.last_at[value]
    collectives, served = collectives_of(arena, unit), served_assemblies_of(arena, unit)
    for number in range(count):
        first, last = collectives[number].first_assembly, collectives[number + 1].first_assembly
        after = pool[last_at + served[first]]
        for member in range(first, last):
            if pool[last_at + served[member]] != after:
                after = -1
                break
        pool[new.collective_at[value] + number] = after


@inner
def account_memory(
    graph: GraphArrays,
    old_units: Units,
    units: Units,
    arena: Array,
    groups: Groups,
    state_tensors: int,
    old: Derivation,
    new: Derivation,
) -> None:
    """Bring memory and the elements to update from the old strategy's to the new one's; old units may be -1."""
    for operator in range(len(units.operator_at)):
        was, now = old_units.operator_at[operator], units.operator_at[operator]
        if was != now or old.active_at[operator] != new.active_at[operator]:
            group, ended = groups.of_O[operator], groups.ended_O[operator]
            if was >= 0:
                account_operator(arena, was, new, old.active_at[operator], group, ended, -1)
            account_operator(arena, now, new, new.active_at[operator], group, ended, 1)
    for value in range(graph.value_count):
        was, now = old_units.value_at[value], units.value_at[value]
        if was != now or old.last_at[value] != new.last_at[value]:
            ended = groups.ended_O[graph.producer[value]]
            if was >= 0:
                account_value(arena, was, new, old.last_at[value], ended, -1)
            account_value(arena, now, new, new.last_at[value], ended, 1)
    for static in range(graph.static_count):
        was, now = old_units.static_at[static], units.static_at[static]
        trained_before = was >= 0 and is_trained(graph, static, old.operator_active)
        trained = is_trained(graph, static, new.operator_active)
        if was != now or trained != trained_before:
            tensors = 1 + state_tensors
            item_bytes = graph.static_item_bytes[static]
            if was >= 0:
                account_static(arena, was, new, item_bytes, tensors if trained_before else 0, -1)
            account_static(arena, now, new, item_bytes, tensors if trained else 0, 1)


@inner
def account_operator(
    arena: Array, at: int, new: Derivation, active_at: int, group: int, ended: int, sign: int
) -> None:
    """Add (sign 1) or take away (-1) the bytes that an operator's tasks keep for their backward."""
    tasks = tasks_of(arena, at)
    for part in range(len(tasks)):
        if new.pool[active_at + part]:
            task = tasks[part]
            new.memory_D[task.device] += sign * task.kept_bytes
            if group >= 0:
                new.again_2GD[0, group, task.device] += sign * task.recomputed_bytes
            if ended > 0:
                new.again_2GD[1, ended - 1, task.device] += sign * task.kept_bytes


@inner
def account_value(arena: Array, unit: int, new: Derivation, last_at: int, ended: int, sign: int) -> None:
    """Add or take away the bytes of a value's assemblies that have a gradient."""
    assemblies = assemblies_of(arena, unit)
    for number in range(len(assemblies) - 1):
        if new.pool[last_at + number] >= 0:
            assembly = assemblies[number]
            new.memory_D[assembly.device] += sign * assembly.copied_bytes
            if ended > 0:
                new.again_2GD[1, ended - 1, assembly.device] += sign * assembly.copied_bytes


@inner
def account_static(arena: Array, at: int, new: Derivation, item_bytes: int, tensors: int, sign: int) -> None:
    """Add or take away the memory and the elements to update of a static tensor.

    tensors: how many more there are of what is trained: its gradient and the optimizer's state.
    """
    holders = holders_of(arena, at)
    for number in range(len(holders)):
        holder = holders[number]
        elements = holder.kept
        if tensors > 0:
            elements += holder.updated * tensors
            new.elements_D[holder.device] += sign * holder.updated
        new.memory_D[holder.device] += sign * elements * item_bytes


@inner
def is_trained(graph: GraphArrays, static: int, operator_active: Array) -> bool:
    """Return whether a static tensor is a weight that some operator's backward gives a gradient."""
    if static < graph.weight_count:
        for user in range(graph.weight_ptr[static], graph.weight_ptr[static + 1]):
            if operator_active[graph.weight_user[user]]:
                return True
    return False


@inner
def find_peak_memory(derivation: Derivation) -> None:
    """Find the peak memory of every device (`search.simulate.simulator.Simulation`), in bytes.

    To what is kept comes what is there beyond it while that group is recomputed at which most is; by then all that
    lies behind the group is gone.
    """
    again_2GD = derivation.again_2GD
    for device in range(len(derivation.memory_D)):
        most = later = 0
        for group in range(again_2GD.shape[1] - 1, -1, -1):
            later += again_2GD[1, group, device]
            most = max(most, again_2GD[0, group, device] - later)
        derivation.peak_D[device] = derivation.memory_D[device] + most


@inner
def copy_derivation(source: Derivation, target: Derivation) -> None:
    """Make `target` equal to `source`, of which it shares the pool."""
    for operator in range(len(source.active_at)):
        target.active_at[operator] = source.active_at[operator]
        target.operator_active[operator] = source.operator_active[operator]
    for value in range(len(source.last_at)):
        target.last_at[value] = source.last_at[value]
        target.collective_at[value] = source.collective_at[value]
    for device in range(len(source.memory_D)):
        target.elements_D[device] = source.elements_D[device]
        target.memory_D[device] = source.memory_D[device]
        for which in range(2):
            for group in range(source.again_2GD.shape[1]):
                target.again_2GD[which, group, device] = source.again_2GD[which, group, device]
    for place in range(len(source.counts)):
        target.counts[place] = source.counts[place]
