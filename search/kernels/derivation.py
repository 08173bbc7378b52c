"""The derivation of a strategy: which tasks have a backward, who completes which gradient, and peak memory.

A strategy is derived from another one by what differs between them, and from nothing where all of it does.
"""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.fragments import (
    assemblies_of,
    collectives_of,
    operator_header,
    piece_sources_of,
    readers_of,
    served_assemblies_of,
    tasks_of,
    value_header,
)
from search.kernels.memory_accounting import account_statics, account_tensors, find_peak_memory
from search.kernels.records import ACTIVE, PARTLY_ACTIVE, Array, Derivation, Fragments, GraphArrays, Groups


@entry
def derive(
    graph: GraphArrays,
    fragments: Fragments,
    arena: Array,
    groups: Groups,
    state_tensors: int,
    derivation: Derivation,
) -> int:
    """Derive a strategy from nothing; return the words that it takes, written only where the pool has them."""
    forget(derivation)
    nothing = Fragments(
        np.full_like(fragments.operator_at, -1),
        np.full_like(fragments.value_at, -1),
        np.full_like(fragments.static_at, -1),
    )
    dirty = np.empty(len(fragments.operator_at), np.int64)
    find_changed_fragments(graph, nothing, fragments, arena, derivation, dirty)
    if derivation.counts[0] <= len(derivation.pool):
        find_backwards(graph, fragments, arena, derivation, dirty)
        account_statics(graph, nothing, fragments, arena, state_tensors, derivation, derivation)
        account_tensors(graph, nothing, fragments, arena, groups, derivation, derivation)
        find_peak_memory(derivation)
    return int(derivation.counts[0])


@inner
def forget(derivation: Derivation) -> None:
    """Make a derivation that of nothing."""
    for sums in (derivation.counts, derivation.elements_D, derivation.memory_D):
        sums[:] = 0
    derivation.again_2GD[:] = 0


@inner
def find_changed_fragments(
    graph: GraphArrays,
    old_fragments: Fragments,
    fragments: Fragments,
    arena: Array,
    new: Derivation,
    dirty: Array,
) -> None:
    """Find which operators have other fragments, or make values that have, and count the words of the new strategy.

    dirty: of operators, as `find_backwards` takes it.
    """
    dirty[:] = 0
    for value in range(graph.value_count):
        was, now = old_fragments.value_at[value], fragments.value_at[value]
        if was != now:
            dirty[graph.producer[value]] = 1
            new.counts[0] += value_words(arena, now)
            if was >= 0:
                new.counts[0] -= value_words(arena, was)
    for operator in range(len(fragments.operator_at)):
        was, now = old_fragments.operator_at[operator], fragments.operator_at[operator]
        if was != now:
            dirty[operator] = 2
            new.counts[0] += operator_header(arena, now).tasks
            if was >= 0:
                new.counts[0] -= operator_header(arena, was).tasks


@inner
def value_words(arena: Array, fragment: int) -> int:
    """Return the words that a value has in the pool of a derivation."""
    header = value_header(arena, fragment)
    return int(header.assemblies + header.collectives)


@inner
def find_backwards(
    graph: GraphArrays, fragments: Fragments, arena: Array, new: Derivation, dirty: Array
) -> None:
    """Find which tasks have a backward, as `graph.plan` does, and who completes the gradients that they take.

    Of operators that are dirty, and of those that these make so: 0 not, 1 its outputs' readers may have changed, 2 it
    has another configuration.
    """
    pool = new.pool
    for operator in range(len(fragments.operator_at) - 1, -1, -1):
        if dirty[operator] == 0:
            continue
        at = fragments.operator_at[operator]
        header = operator_header(arena, at)
        before, active_at = new.active_at[operator], new.counts[1]
        new.active_at[operator] = active_at
        new.counts[1] += header.tasks
        pool[active_at : active_at + header.tasks] = 0
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            fragment = fragments.value_at[value]
            new.last_at[value] = new.counts[1]
            new.collective_at[value] = new.counts[1] + value_header(arena, fragment).assemblies
            new.counts[1] += value_words(arena, fragment)
            find_last_readers(graph, fragments, arena, new, value, active_at)
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
    graph: GraphArrays, fragments: Fragments, arena: Array, new: Derivation, value: int, active_at: int
) -> None:
    """Write which operator's backward completes each gradient of a value, and mark the tasks that it goes to."""
    pool, fragment = new.pool, fragments.value_at[value]
    last_at, collective_at = new.last_at[value], new.collective_at[value]
    assemblies, pieces, readers = (
        assemblies_of(arena, fragment),
        piece_sources_of(arena, fragment),
        readers_of(arena, fragment),
    )
    is_partial = False
    unmarked = value_header(arena, fragment).sources
    for number in range(len(assemblies) - 1):
        assembly, following = assemblies[number], assemblies[number + 1]
        last = -1
        perhaps = False
        if graph.needs_gradient[value]:
            for index in range(assembly.first_reader, following.first_reader):
                reading = graph.reading_ptr[value] + readers[index].reading
                user = graph.reading_operator[reading]
                if graph.reading_gradient[reading]:
                    # Readers with a backward are in topological order: it reaches the first of them last.
                    if pool[new.active_at[user] + readers[index].task]:
                        last = user
                        break
                    if tasks_of(arena, fragments.operator_at[user])[0].origin == PARTLY_ACTIVE:
                        # Some replica sends a gradient back: whose assembly that is, and so when, is not known.
                        perhaps = is_partial = True
                        break
        pool[last_at + number] = last
        # Where everybody reads all of it, the first assembly marks all tasks.
        if unmarked > 0 and (last >= 0 or perhaps):
            for index in range(assembly.first_piece, assembly.first_piece + assembly.pieces):
                at = active_at + pieces[index]
                unmarked -= pool[at] == 0
                pool[at] = 1
    find_gradient_collectives(arena, fragment, new, value)
    if is_partial:
        # What goes back with what is not known is left out as well.
        for index in range(last_at, collective_at + value_header(arena, fragment).collectives):
            pool[index] = -1


@inner
def find_gradient_collectives(arena: Array, fragment: int, new: Derivation, value: int) -> None:
    """Write after which operator's backward each collective of a value goes back as one, or -1."""
    count = value_header(arena, fragment).collectives
    if count == 0:
        return
    pool, last_at = new.pool, new.last_at[value]
    collectives, served = collectives_of(arena, fragment), served_assemblies_of(arena, fragment)
    for number in range(count):
        first, last = collectives[number].first_assembly, collectives[number + 1].first_assembly
        after = pool[last_at + served[first]]
        for member in range(first, last):
            if pool[last_at + served[member]] != after:
                after = -1
                break
        pool[new.collective_at[value] + number] = after


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
    for index in range(len(source.counts)):
        target.counts[index] = source.counts[index]
