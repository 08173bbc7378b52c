"""The memory model: bytes that every device keeps for its backward, its share of the weights, and the peak memory.

Per device: weights, their gradients and the optimizer's state, saved tensors, copies of remote inputs with a gradient,
and the most that one group's recomputation adds.
"""

from __future__ import annotations

from search.kernels.cache import inner
from search.kernels.fragments import assemblies_of, holders_of, tasks_of
from search.kernels.records import Array, Derivation, Fragments, GraphArrays, Groups


@inner
def account_tensors(
    graph: GraphArrays,
    old_fragments: Fragments,
    fragments: Fragments,
    arena: Array,
    groups: Groups,
    old: Derivation,
    new: Derivation,
) -> None:
    """Bring memory, but for weights, buffers and inputs, from the old strategy's to the new one's.

    Old fragments may be -1, here and in `account_statics`.
    """
    for operator in range(len(fragments.operator_at)):
        was, now = old_fragments.operator_at[operator], fragments.operator_at[operator]
        if was != now or old.active_at[operator] != new.active_at[operator]:
            group, ended = groups.of_O[operator], groups.ended_O[operator]
            if was >= 0:
                account_operator(arena, was, new, old.active_at[operator], group, ended, -1)
            account_operator(arena, now, new, new.active_at[operator], group, ended, 1)
    for value in range(graph.value_count):
        was, now = old_fragments.value_at[value], fragments.value_at[value]
        if was != now or old.last_at[value] != new.last_at[value]:
            ended = groups.ended_O[graph.producer[value]]
            if was >= 0:
                account_value(arena, was, new, old.last_at[value], ended, -1)
            account_value(arena, now, new, new.last_at[value], ended, 1)


@inner
def account_statics(
    graph: GraphArrays,
    old_fragments: Fragments,
    fragments: Fragments,
    arena: Array,
    state_tensors: int,
    old: Derivation,
    new: Derivation,
) -> None:
    """Bring the memory of weights, buffers and inputs, and the elements to update, to those of the new strategy."""
    for static in range(graph.static_count):
        was, now = old_fragments.static_at[static], fragments.static_at[static]
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
def account_value(arena: Array, fragment: int, new: Derivation, last_at: int, ended: int, sign: int) -> None:
    """Add or take away the bytes of a value's assemblies that have a gradient."""
    assemblies = assemblies_of(arena, fragment)
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
    """Write the peak memory of every device (`search.simulate.simulator.Simulation`), in bytes.

    The peak is what is kept through the step, and what one recomputed group adds to it while it is there again: the
    group of which that is most. What the groups behind it had kept is freed by then.
    """
    again_2GD = derivation.again_2GD
    for device in range(len(derivation.memory_D)):
        most = later = 0
        for group in range(again_2GD.shape[1] - 1, -1, -1):
            later += again_2GD[1, group, device]
            most = max(most, again_2GD[0, group, device] - later)
        derivation.peak_D[device] = derivation.memory_D[device] + most
