"""The task graph of a strategy, in the order of `search.simulate.task_graph`, and how large it is at most."""

from __future__ import annotations

import numpy as np

from search.kernels.backward_tasks import emit_backward
from search.kernels.cache import entry, inner, inner_with_arrays, quick_entry
from search.kernels.forward_tasks import emit_forward, emit_renewals
from search.kernels.fragments import collectives_of, operator_header, value_header
from search.kernels.records import Emission, GradientsBySource, UpdateTimes
from search.kernels.update_tasks import emit_update_gathers, emit_updates


@quick_entry
def most_tasks(emission: Emission) -> tuple[int, int]:
    """Return how many tasks and dependencies a task graph has at most.

    Exact but for dependencies of gradients, which not all tasks give, and for devices that have no part in them.
    """
    graph, fragments, arena, derivation = (
        emission.graph,
        emission.fragments,
        emission.arena,
        emission.derivation,
    )
    sets, buckets, gathers = emission.resource_sets, emission.buckets, emission.gathers
    tasks, dependencies = len(derivation.elements_D), 0
    for operator in range(len(fragments.operator_at)):
        count = operator_header(arena, fragments.operator_at[operator]).tasks
        runs = 1
        if derivation.operator_active[operator]:
            recomputed = emission.groups.of_O[operator] >= 0
            runs += 1 + recomputed
            # Of the backward its forward, what blocks its device, and the update that waits for it.
            dependencies += count * (3 + 2 * recomputed)
        tasks += count * runs
        if gathers.counts[1]:
            dependencies += count * runs * gathers_of(emission, operator)
    for value in range(len(fragments.value_at)):
        fragment = fragments.value_at[value]
        header = value_header(arena, fragment)
        tasks += header.collectives + header.transfers
        dependencies += header.transfers
        if header.collectives:
            dependencies += collectives_of(arena, fragment)[header.collectives].first_source
        if value < graph.value_count:
            dependencies += header.reads
            if graph.needs_gradient[value]:
                tasks += header.collectives + header.remote_pieces
                dependencies += header.pieces + most_gradient_reads(emission, value)
    for gather in range(gathers.counts[1]):
        tasks += 1
        dependencies += (
            sets.end_ptr[gathers.resource_set[gather] + 1] - sets.end_ptr[gathers.resource_set[gather]]
        )
    for bucket in range(buckets.counts[0]):
        tasks += 2
        # Of each device the bucket before it, its update, and the gather of what is updated.
        dependencies += 3 * (
            sets.end_ptr[buckets.resource_set[bucket] + 1] - sets.end_ptr[buckets.resource_set[bucket]]
        )
    for number in range(buckets.counts[1]):
        weight = buckets.entry_weight[number]
        for user in range(graph.weight_ptr[weight], graph.weight_ptr[weight + 1]):
            dependencies += operator_header(arena, fragments.operator_at[graph.weight_user[user]]).tasks
    return tasks, dependencies


@inner
def gathers_of(emission: Emission, operator: int) -> int:
    """Return how many gathers of weights a forward and a backward of an operator wait for at most."""
    graph, gathers = emission.graph, emission.gathers
    count = 0
    for index in range(graph.behind_ptr[operator], graph.behind_ptr[operator + 1]):
        for side in range(2):
            gathering = gathers.weight_2W[side, graph.behind_weight[index]]
            if gathering >= 0:
                count += gathers.last_2O[side, gathering] - gathers.first_2O[side, gathering]
    return count


@inner
def most_gradient_reads(emission: Emission, value: int) -> int:
    """Return how many dependencies on its readers' backwards the gradient of a value has at most."""
    collective_at = emission.derivation.collective_at[value]
    header = value_header(emission.arena, emission.fragments.value_at[value])
    for index in range(collective_at, collective_at + header.collectives):
        if emission.derivation.pool[index] < 0:
            return int(header.piece_reads)
    return int(header.reads)


@inner_with_arrays
def room_by_source(emission: Emission) -> GradientsBySource:
    """Return room for the gradients that the backward tasks of any one operator wait for."""
    graph, fragments, arena = emission.graph, emission.fragments, emission.arena
    most_tasks = most_pieces = 0
    for operator in range(len(fragments.operator_at)):
        pieces = 0
        for output in range(graph.output_ptr[operator], graph.output_ptr[operator + 1]):
            pieces += value_header(arena, fragments.value_at[graph.output_value[output]]).pieces
        most_pieces = max(most_pieces, pieces)
        most_tasks = max(most_tasks, operator_header(arena, fragments.operator_at[operator]).tasks)
    return GradientsBySource(
        np.empty(most_tasks + 1, np.int64),
        np.empty(most_pieces, np.int32),
        np.empty(most_pieces, np.int32),
        np.empty(most_pieces, np.int32),
    )


@entry
def emit_task_graph(emission: Emission, updates: UpdateTimes) -> int:
    """Write the task graph; return the number of its tasks. `most_tasks` fit into `emission.tasks`."""
    graph, gathers, scratch = emission.graph, emission.gathers, emission.scratch
    devices = len(updates.run_ns_D)
    scratch.counts[:] = 0
    emission.tasks.pred_ptr[0] = 0
    gathers.latest_D[:] = -1
    gathers.blocked_D[:] = -1
    gathers.reduced_D[:] = -1
    emit_forward(emission, 0, graph.loss_operators)
    emit_backward(emission, room_by_source(emission), np.full(devices, -1, np.int64))
    emit_forward(emission, graph.loss_operators, len(graph.order))
    emit_renewals(emission)
    following_D = np.zeros(devices, np.int64)
    emit_updates(emission, updates, following_D)
    emit_update_gathers(emission, following_D)
    return int(scratch.counts[0])
