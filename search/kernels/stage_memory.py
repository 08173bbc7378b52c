"""The memory of a step in micro-batches: bytes by stage and device, and the peak over an order of units.

A stage keeps what its backward needs from its forward of a micro-batch to its backward of it, and what the weight
part needs, where that is apart, from there on; what it receives counts as its own. Gradients add up over the
micro-batches, so that each device has whole ones of what it holds, also of weights whose optimizer is shared, or that
are kept in shares; but for those that are summed in every micro-batch, of which it has what it updates.
"""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.fragments import assemblies_of, holders_of, readers_of, tasks_of
from search.kernels.memory_accounting import is_trained
from search.kernels.records import BACKWARD_UNIT, FORWARD_UNIT, Array, Derivation, Emission, StageMemory


@entry
def account_stages(
    emission: Emission,
    stage_O: Array,
    on_stage_SD: Array,
    is_input_S: Array,
    state_tensors: int,
    memory: StageMemory,
) -> None:
    """Write the memory of a derived strategy by stage.

    stage_O: the stage of each operator. on_stage_SD: the devices of each stage; no stages where gradients are summed
    in the last micro-batch alone. is_input_S: of static tensors, whether each micro-batch has its own. state_tensors:
    of the optimizer, for each weight.
    """
    for sums in (memory.static_D, memory.input_D):
        sums[:] = 0
    memory.kept_SD[:] = 0
    memory.again_SD[:] = 0
    derivation = emission.derivation
    again_2GD = np.zeros_like(derivation.again_2GD)
    account_static_tensors(emission, on_stage_SD, is_input_S, state_tensors, memory)
    stage_G = np.full(again_2GD.shape[1], -1, np.int64)
    for operator in range(len(stage_O)):
        if emission.groups.first_O[operator] >= 0 and emission.groups.of_O[operator] >= 0:
            stage_G[emission.groups.of_O[operator]] = stage_O[operator]
    for operator in range(len(stage_O)):
        account_operator_of_stage(emission, operator, stage_O, stage_G, memory, again_2GD)
    for value in range(emission.graph.value_count):
        account_value_of_stage(emission, value, stage_O, stage_G, memory, again_2GD)
    add_groups(again_2GD, stage_G, memory)


@inner
def is_held_by_one_stage(emission: Emission, static: int, on_stage_SD: Array) -> bool:
    """Return whether some stage has all devices that hold a static tensor."""
    holders = holders_of(emission.arena, emission.fragments.static_at[static])
    for stage in range(len(on_stage_SD)):
        has_all = True
        for number in range(len(holders)):
            has_all = has_all and on_stage_SD[stage, holders[number].device]
        if has_all:
            return True
    return False


@inner
def account_static_tensors(
    emission: Emission, on_stage_SD: Array, is_input_S: Array, state_tensors: int, memory: StageMemory
) -> None:
    """Add weights, with gradients and the optimizer's state, buffers and inputs."""
    graph, derivation = emission.graph, emission.derivation
    for static in range(graph.static_count):
        holders = holders_of(emission.arena, emission.fragments.static_at[static])
        trained = is_trained(graph, static, derivation.operator_active)
        in_shares = trained and is_held_by_one_stage(emission, static, on_stage_SD)
        for number in range(len(holders)):
            holder = holders[number]
            elements = holder.kept
            if trained:
                elements += holder.updated if in_shares else holder.held
                elements += holder.updated * state_tensors
            size_bytes = elements * graph.static_item_bytes[static]
            if is_input_S[static]:
                memory.input_D[holder.device] += size_bytes
            else:
                memory.static_D[holder.device] += size_bytes


@inner
def group_before(emission: Emission, operator: int, stage: int, stage_G: Array) -> int:
    """Return the last group that is all before an operator, where it ends in the same stage, else -1."""
    group = emission.groups.ended_O[operator] - 1
    return group if group >= 0 and stage_G[group] == stage else -1


@inner
def account_operator_of_stage(
    emission: Emission, operator: int, stage_O: Array, stage_G: Array, memory: StageMemory, again_2GD: Array
) -> None:
    """Add the bytes that an operator's tasks keep for their backward."""
    derivation: Derivation = emission.derivation
    stage, group = stage_O[operator], emission.groups.of_O[operator]
    before = group_before(emission, operator, stage, stage_G)
    tasks = tasks_of(emission.arena, emission.fragments.operator_at[operator])
    for part in range(len(tasks)):
        if derivation.pool[derivation.active_at[operator] + part]:
            task = tasks[part]
            memory.kept_SD[stage, task.device] += task.kept_bytes
            if group >= 0:
                again_2GD[0, group, task.device] += task.recomputed_bytes
            if before >= 0:
                again_2GD[1, before, task.device] += task.kept_bytes


@inner
def account_value_of_stage(
    emission: Emission, value: int, stage_O: Array, stage_G: Array, memory: StageMemory, again_2GD: Array
) -> None:
    """Add the bytes of a value's assemblies that have a gradient, to the first stage that reads each."""
    graph, derivation, arena = emission.graph, emission.derivation, emission.arena
    fragment, producer = emission.fragments.value_at[value], graph.producer[value]
    assemblies, readers = assemblies_of(arena, fragment), readers_of(arena, fragment)
    for number in range(len(assemblies) - 1):
        if derivation.pool[derivation.last_at[value] + number] < 0:
            continue
        assembly = assemblies[number]
        reader = readers[assembly.first_reader]
        stage = stage_O[graph.reading_operator[graph.reading_ptr[value] + reader.reading]]
        memory.kept_SD[stage, assembly.device] += assembly.copied_bytes
        before = group_before(emission, producer, stage, stage_G)
        if before >= 0:
            again_2GD[1, before, assembly.device] += assembly.copied_bytes


@inner
def add_groups(again_2GD: Array, stage_G: Array, memory: StageMemory) -> None:
    """Find the most that recomputation adds; what lies in a stage behind a group is gone when it is made again."""
    for device in range(again_2GD.shape[2]):
        later = 0
        for group in range(again_2GD.shape[1] - 1, -1, -1):
            stage = stage_G[group]
            if stage < 0:
                continue
            if group + 1 < len(stage_G) and stage_G[group + 1] != stage:
                later = 0
            later += again_2GD[1, group, device]
            most = max(memory.again_SD[stage, device], again_2GD[0, group, device] - later)
            memory.again_SD[stage, device] = most


@entry
def find_step_peak(
    phase_U: Array, stage_U: Array, memory: StageMemory, micro_batches: int, peak_D: Array
) -> None:
    """Write the peak memory of every device over the order of units, in bytes.

    It has the inputs of all micro-batches throughout, what begun units keep until their backward ends, in a backward
    what is there beyond it while a group is made again, and what a backward leaves until its weight part ends.
    """
    for device in range(len(peak_D)):
        now = most = 0
        for unit in range(len(stage_U)):
            stage = stage_U[unit]
            if phase_U[unit] == FORWARD_UNIT:
                now += memory.kept_SD[stage, device]
                most = max(most, now)
            elif phase_U[unit] == BACKWARD_UNIT:
                most = max(most, now + memory.again_SD[stage, device])
                now += memory.weight_SD[stage, device] - memory.kept_SD[stage, device]
                most = max(most, now)
            else:
                now -= memory.weight_SD[stage, device]
        peak_D[device] = memory.static_D[device] + micro_batches * memory.input_D[device] + most
