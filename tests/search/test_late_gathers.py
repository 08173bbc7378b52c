"""Gathers of shared updates under tic and tac, which go into the next step: a slow channel, and any strategy."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from graph.plan import build_plan
from graph.strategy import Sharding
from graph.synchronization import Policy, Synchronization
from search.simulate.simulator import simulate_tasks
from search.simulate.steady_state import gather_order
from search.simulate.task_graph import TaskKind
from search.space.baselines import data_parallel, shared
from tests.search.builders import check_bounds, random_mesh
from tests.search.chains import UNIT_NS
from tests.search.test_delta import BUCKET_BYTES, GRAPHS, TOPOLOGIES
from tests.search.test_steady_state import SUM_S, Window, gathers_ns, windowed


def late_gathers_ns(f: Sequence[int], b: Sequence[int], sent_ns: Sequence[int]) -> tuple[int, int]:
    """A slow channel, by layers: reduce-scatters as layers are ready, then gathers; these early, and before the loss.

    Of the sums that of a layer waits for that before it, and the next layer's backward for that of the one before.
    """
    layers = len(f)
    compute, ends = 0, [0]
    for layer in reversed(range(layers)):
        # Two sums are in a device's hands at most.
        compute = max(compute, ends[-2] if len(ends) > 1 else 0) + b[layer] * UNIT_NS
        ends.append(max(compute, ends[-1]) + sent_ns[layer])
    updated = max(compute, ends[-1])
    fifo = updated + sum(sent_ns) + sum(f) * UNIT_NS
    free, forward, awaited = updated, updated, [updated] * (layers + 2)
    for layer in range(layers):
        gathered = max(free, awaited[layer]) + sent_ns[layer]
        free = gathered
        # The gather after the next one starts once this layer's forward, and its gather, are waited for.
        awaited[layer + 2] = max(forward, gathered)
        forward = max(forward, gathered) + f[layer] * UNIT_NS
    return fifo, forward


@pytest.mark.parametrize("policy", [Policy.TIC, Policy.TAC])
@pytest.mark.parametrize("seed", range(8))
def test_late_gathers_take_what_a_slow_channel_takes_and_never_more_than_early_ones(
    seed: int, policy: Policy
) -> None:
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 7))
    # Even widths: the two shares of a weight are equal.
    widths = (2 * rng.choice(np.arange(2, 30), layers + 1, replace=False)).tolist()
    f, b = (rng.integers(0, 9, layers).tolist() for _ in range(2))
    sent_ns = [int(4 * inner * out * SUM_S / 2 * 1e9 + 0.5) for inner, out in pairwise(widths)]
    fifo, late = late_gathers_ns(f, b, sent_ns)
    assert gathers_ns(widths, f, b, Policy.FIFO) == fifo
    assert gathers_ns(widths, f, b, policy) == late <= fifo


def late_window(name: str, topology_name: str, seed: int, policy: Policy) -> Window:
    """Return the window of a random strategy that shares its updates."""
    graph = GRAPHS[name]
    mesh = random_mesh(graph, len(TOPOLOGIES[topology_name].devices), np.random.default_rng(seed))
    strategy = shared(graph, mesh, Sharding.OPTIMIZER)
    return windowed(
        name, topology_name, replace(strategy, synchronization=Synchronization(policy, BUCKET_BYTES))
    )


@pytest.mark.parametrize("policy", [Policy.TIC, Policy.TAC])
@pytest.mark.parametrize("topology_name", TOPOLOGIES)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_window_of_late_gathers_has_the_tasks_of_a_step(
    name: str, topology_name: str, policy: Policy
) -> None:
    for seed in range(3):
        strategy, step, window = late_window(name, topology_name, seed, policy)
        columns = [
            sorted(zip(of.kind_T, of.subject_T, of.part_T, of.run_ns_T, of.resource_set_T, strict=True))
            for of in (step, window)
        ]
        assert columns[0] == columns[1]
        nodes = [device.node for device in TOPOLOGIES[topology_name].devices]
        order = gather_order(window)
        plan = build_plan(GRAPHS[name], strategy, nodes, gather_order=order)
        assert plan.gather_order == order
        check_bounds(window)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_forward_waits_for_the_gathers_of_what_it_reads(name: str) -> None:
    waited = 0
    for seed in range(6):
        strategy, _, window = late_window(name, "one node", seed, Policy.TIC)
        plan = build_plan(GRAPHS[name], strategy, [0] * 3, gather_order=gather_order(window))
        simulation = simulate_tasks(window)
        gathers = window.kind_T == TaskKind.UPDATE_GATHER
        ends_ns = dict(
            zip(window.subject_T[gathers].tolist(), simulation.end_ns[gathers].tolist(), strict=True)
        )
        for task in np.flatnonzero(window.kind_T == TaskKind.FORWARD).tolist():
            reads = GRAPHS[name].operators[int(window.subject_T[task])].inputs
            for number, end_ns in ends_ns.items():
                bucket = plan.buckets[number]
                if int(window.resource_set_T[task]) in bucket.devices and any(
                    entry.weight in reads for entry in bucket.entries
                ):
                    waited += 1
                    assert simulation.start_ns[task] >= end_ns
    assert waited


@pytest.mark.parametrize("policy", [Policy.TIC, Policy.TAC])
@pytest.mark.parametrize("name", GRAPHS)
def test_with_computations_in_program_order_tic_and_tac_gather_first_what_is_read_first(
    name: str, policy: Policy
) -> None:
    graph = GRAPHS[name]
    strategy = replace(
        shared(graph, data_parallel(graph, 3), Sharding.OPTIMIZER), synchronization=Synchronization(policy, 8)
    )
    order = gather_order(windowed(name, "one node", strategy)[2])
    plan = build_plan(graph, strategy, [0] * 3, gather_order=order)
    places = {index: place for place, index in enumerate(graph.order.of_loss)}
    first = {weight: places[index] for index, names in plan.updated_before.items() for weight in names}
    needed = [min(first[entry.weight] for entry in plan.buckets[number].entries) for number in order]
    assert len(order) > 1
    assert needed == sorted(needed)


def test_strategies_that_share_no_update_have_nothing_to_gather() -> None:
    graph = GRAPHS["branches"]
    strategy = replace(data_parallel(graph, 3), synchronization=Synchronization(Policy.TIC, 64))
    _, tasks, window = windowed("branches", "one node", strategy)
    assert window is tasks
    assert not build_plan(graph, strategy, [0] * 3).gathers_late
