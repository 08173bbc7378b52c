"""Which tasks of a strategy have a backward, how many tasks and dependencies there are, and memory."""

from __future__ import annotations

from search.kernels.cache import inner, quick_entry
from search.kernels.records import (
    ASSEMBLY_STRIDE,
    COLLECTIVE_STRIDE,
    HOLDER_STRIDE,
    OPERATOR_HEADER,
    OPERATOR_STRIDE,
    PIECE_STRIDE,
    STATIC_HEADER,
    VALUE_HEADER,
    Array,
    GraphArrays,
    Groups,
    Scratch,
    Units,
)


@quick_entry
def find_activity(graph: GraphArrays, units: Units, arena: Array, scratch: Scratch) -> None:
    """Find which tasks and assemblies take part in the backward, as `graph.plan` does.

    `scratch.task_base` and `scratch.assembly_base` are already there.
    """
    active = scratch.active
    active[: scratch.task_base[-1]] = 0
    scratch.operator_active[:] = 0
    for operator in range(len(units.operator_at) - 1, -1, -1):
        base = scratch.task_base[operator]
        count = scratch.task_base[operator + 1] - base
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            value = graph.output_value[output]
            at = units.value_at[value]
            piece_at = at + VALUE_HEADER + ASSEMBLY_STRIDE * (arena[at] + 1)
            reader_at = piece_at + PIECE_STRIDE * arena[at + 1]
            for assembly in range(arena[at]):
                where = at + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
                last = -1
                if graph.needs_gradient[value]:
                    for reader in range(arena[where + 3], arena[where + 3 + ASSEMBLY_STRIDE]):
                        reading = graph.reading_ptr[value] + arena[reader_at + 2 * reader]
                        user = graph.reading_operator[reading]
                        task = scratch.task_base[user] + arena[reader_at + 2 * reader + 1]
                        # Readers with a backward are in topological order: it reaches the first of them last.
                        if graph.reading_gradient[reading] and active[task]:
                            last = user
                            break
                scratch.last_reader[scratch.assembly_base[value] + assembly] = last
                if last >= 0:
                    for piece in range(arena[where + 2], arena[where + 2 + ASSEMBLY_STRIDE]):
                        active[base + arena[piece_at + PIECE_STRIDE * piece]] = 1
            if value == graph.loss_value and graph.needs_gradient[value]:
                for task in range(0, count, arena[units.operator_at[operator] + 1]):
                    active[base + task] = 1
        for task in range(count):
            if active[base + task]:
                scratch.operator_active[operator] = 1
                break
    for value in range(graph.value_count):
        find_gradient_collectives(units.value_at[value], value, arena, scratch)


@quick_entry
def collectives_of(arena: Array, unit: int) -> int:
    """Return where the collectives of a value unit start."""
    return int(unit + arena[unit + 6])


@inner
def find_gradient_collectives(unit: int, value: int, arena: Array, scratch: Scratch) -> None:
    """Find after which operator's backward each collective of a value goes back as one, if it does."""
    found = arena[unit + 7]
    if found == 0:
        return
    collective_at = collectives_of(arena, unit)
    member_at = collective_at + COLLECTIVE_STRIDE * (found + 1)
    for collective in range(found):
        where = collective_at + COLLECTIVE_STRIDE * collective
        after = -2
        for member in range(arena[where + 4], arena[where + 4 + COLLECTIVE_STRIDE]):
            last = scratch.last_reader[scratch.assembly_base[value] + arena[member_at + member]]
            after = last if after == -2 or after == last else -1
            if after == -1:
                break
        scratch.collective_after[scratch.collective_base[value] + collective] = after


@quick_entry
def count_tasks(graph: GraphArrays, units: Units, arena: Array, scratch: Scratch) -> tuple[int, int, int]:
    """Set the bases of tasks, assemblies and collectives; return their totals."""
    total = 0
    for operator in range(len(units.operator_at)):
        scratch.task_base[operator] = total
        total += arena[units.operator_at[operator]]
    scratch.task_base[len(units.operator_at)] = total
    assemblies = 0
    for value in range(graph.value_count):
        scratch.assembly_base[value] = assemblies
        assemblies += arena[units.value_at[value]]
    scratch.assembly_base[graph.value_count] = assemblies
    collectives = 0
    for value in range(graph.value_count + graph.buffer_count):
        scratch.collective_base[value] = collectives
        collectives += arena[units.value_at[value] + 7]
    scratch.collective_base[graph.value_count + graph.buffer_count] = collectives
    return total, assemblies, collectives


@quick_entry
def weigh(
    graph: GraphArrays, units: Units, arena: Array, scratch: Scratch, groups: Groups, state_tensors: int
) -> None:
    """Find the elements that each device updates, and its peak memory (`search.simulate.simulator.Simulation`)."""
    elements_D = scratch.elements_D
    memory_D = scratch.memory_D
    elements_D[:] = 0
    memory_D[:] = 0
    scratch.again_2GD[:] = 0
    for static in range(graph.static_count):
        at = units.static_at[static]
        trained = False
        if static < graph.weight_count:
            for user in range(graph.weight_ptr[static], graph.weight_ptr[static + 1]):
                trained = trained or scratch.operator_active[graph.weight_user[user]] != 0
        for holder in range(arena[at]):
            word = at + STATIC_HEADER + HOLDER_STRIDE * holder
            device, kept, updated = arena[word], arena[word + 1], arena[word + 2]
            if trained:
                kept += updated * (1 + state_tensors)
                elements_D[device] += updated
            memory_D[device] += kept * graph.static_item_bytes[static]
    for operator in range(len(units.operator_at)):
        at = units.operator_at[operator] + OPERATOR_HEADER
        group, ended = groups.of_O[operator], groups.ended_O[operator]
        for task in range(arena[units.operator_at[operator]]):
            if scratch.active[scratch.task_base[operator] + task]:
                word = at + OPERATOR_STRIDE * task
                memory_D[arena[word]] += arena[word + 3]
                if group >= 0:
                    scratch.again_2GD[0, group, arena[word]] += arena[word + 5]
                if ended > 0:
                    scratch.again_2GD[1, ended - 1, arena[word]] += arena[word + 3]
    for value in range(graph.value_count):
        at = units.value_at[value]
        ended = groups.ended_O[graph.producer[value]]
        for assembly in range(arena[at]):
            if scratch.last_reader[scratch.assembly_base[value] + assembly] >= 0:
                where = at + VALUE_HEADER + ASSEMBLY_STRIDE * assembly
                memory_D[arena[where]] += arena[where + 1]
                if ended > 0:
                    scratch.again_2GD[1, ended - 1, arena[where]] += arena[where + 1]
    add_again(scratch.again_2GD, memory_D)


@inner
def add_again(again_2GD: Array, memory_D: Array) -> None:
    """Add to what is kept what is there beyond it while that group is made again at which most is.

    By then all that lies behind the group is gone.
    """
    for device in range(len(memory_D)):
        most = later = 0
        for group in range(again_2GD.shape[1] - 1, -1, -1):
            later += again_2GD[1, group, device]
            most = max(most, again_2GD[0, group, device] - later)
        memory_D[device] += most
