"""Activations that are made again: the task graph is the plan's, and what changes costs what the whole does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graph.operator_ranges import OperatorRange, OperatorRanges, check_ranges
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from graph.topology import Topology
from search.algorithms.activation_checkpointing import blocks, recompute
from search.algorithms.chain import SearchOptions
from search.algorithms.mcmc import search
from search.cost.cost_table import CostTable
from search.evaluate.evaluator import FullEvaluation, evaluation
from search.evaluate.incremental import IncrementalEvaluation
from search.kernels.task_graph import most_tasks
from search.outcome import NEVER_NS
from search.problem import Problem
from search.simulate.simulator import Simulation, simulate
from search.simulate.strategy_state import Layout
from search.simulate.task_graph import TaskKind
from search.space.baselines import data_parallel
from tests.search.builders import (
    MadeUpCosts,
    devices,
    local_calls,
    random_anywhere,
    random_mesh,
    unrolled,
)
from tests.search.test_delta import TOPOLOGIES, builder_of, reference_ns
from tests.search.test_sharding import GRAPHS, PAIRS, check_plans, sharded
from tests.search.test_taskgraph import LINKS, TRAINING


def random_groups(graph: OperatorGraph, rng: np.random.Generator) -> OperatorRanges:
    """Return groups of random lengths, now and then with operators between them that are in none."""
    groups, first = [], 0
    while first < len(graph.operators):
        last = min(first + int(rng.integers(6)), len(graph.operators) - 1)
        if rng.random() < 0.7:
            groups.append(OperatorRange(first, last))
        first = last + 1
    return tuple(groups)


def strategies_of(graph: OperatorGraph, count: int, seed: int, times: int) -> list[Strategy]:
    """Return data parallelism and random strategies with random groups, every second one with shared weights."""
    rng = np.random.default_rng(seed)
    found = [replace(data_parallel(graph, count), recomputation=random_groups(graph, rng))]
    for draw in (random_anywhere, random_mesh) * times:
        strategy = replace(draw(graph, count, rng), recomputation=random_groups(graph, rng))
        found.append(sharded(strategy, graph, rng) if len(found) % 2 else strategy)
    return found


@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_task_graph_is_the_plan(name: str, topology: str) -> None:
    graph, machines = GRAPHS[name], TOPOLOGIES[topology]
    check_plans(graph, machines, strategies_of(graph, len(machines.devices), 5, 4))


@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_a_task_graph_has_no_more_tasks_and_dependencies_than_are_counted_first(
    name: str, topology: str
) -> None:
    graph, machines = GRAPHS[name], TOPOLOGIES[topology]
    builder = builder_of(graph, machines)
    for strategy in strategies_of(graph, len(machines.devices), 9, 8):
        layout = builder.layout(strategy)
        tasks, _ = layout.assemble()
        most, most_dependencies = most_tasks(layout.emission())
        assert layout.task_count <= most
        assert tasks.pred_ptr[layout.task_count] <= most_dependencies


@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_what_changes_costs_what_the_whole_does(name: str, topology: str) -> None:
    """By what changes, in full in both orders, and by the slow reference; some proposals are kept."""
    graph, machines = GRAPHS[name], TOPOLOGIES[topology]
    count, rng = len(machines.devices), np.random.default_rng(19)
    builder = builder_of(graph, machines)
    for start in strategies_of(graph, count, 29, 1):
        delta = IncrementalEvaluation(builder.layout(start))
        fifo = evaluation(builder.layout(start), "fifo")
        program = FullEvaluation(builder.layout(start), "program")
        for step in range(8):
            assert delta.current() == program.current()
            draw = random_mesh if step % 2 else random_anywhere
            other = draw(graph, count, rng).configurations
            places = rng.choice(len(other), size=min(2, len(other)), replace=False).tolist()
            changed = {place: other[place] for place in places}
            bound_ns = NEVER_NS if step % 4 else int(1.1 * program.current().step_time_ns)
            full = program.propose(changed, NEVER_NS)
            found = delta.propose(changed, bound_ns)
            late = fifo.propose(changed, NEVER_NS)
            assert full is not None
            assert late is not None
            assert found == (full if full.step_time_ns <= bound_ns else None)
            tasks = builder.build(replace(start, configurations=tuple(program.configurations)))
            assert full.step_time_ns == reference_ns(tasks, "program")
            assert late.step_time_ns == reference_ns(tasks, "fifo")
            for way in (delta, program, fifo):
                if step % 3 and found is not None:
                    way.commit()
                else:
                    way.roll_back()


def test_a_layout_may_make_other_groups_again() -> None:
    graph, machines = GRAPHS["unrolled"], TOPOLOGIES["little memory"]
    builder = builder_of(graph, machines)
    plain, rng = data_parallel(graph, 4), np.random.default_rng(7)
    layout: Layout = builder.layout(plain)
    for groups in [random_groups(graph, rng) for _ in range(6)] + [()]:
        layout.recompute(groups)
        expected = FullEvaluation(builder.layout(replace(plain, recomputation=groups)), "program").current()
        found = layout.run("program")[0]
        assert (layout.excess_bytes, found) == (expected.excess_bytes, expected.step_time_ns)


def problem_of(graph: OperatorGraph, machines: Topology) -> Problem:
    return Problem(graph, machines, CostTable(MadeUpCosts()), TRAINING, LINKS, local_calls)


def simulation_of(graph: OperatorGraph, strategy: Strategy, machines: Topology) -> Simulation:
    return simulate(
        graph, strategy, machines, CostTable(MadeUpCosts()), TRAINING, links=LINKS, local_calls=local_calls
    )


@pytest.mark.parametrize("name", ["unrolled", "branches"])
def test_blocks_cover_every_backward_once_and_are_about_as_many_as_asked_for(name: str) -> None:
    graph = GRAPHS[name]
    for count in range(1, len(graph.operators)):
        groups = blocks(graph, count)
        check_ranges(graph, groups, "recomputation")
        assert 1 <= len(groups) <= count
        within = {index for group in groups for index in range(group.first, group.last + 1)}
        assert {i for i, one in enumerate(graph.operators) if graph.has_backward(one)} <= within


@pytest.mark.parametrize("share", [0.99, 0.97, 0.95])
def test_only_what_must_be_is_made_again(share: float) -> None:
    """On one device there is nothing else to do: with plenty of memory nothing, with less so much that it fits."""
    graph = unrolled(12)
    plain = data_parallel(graph, 1)
    peak = max(simulation_of(graph, plain, devices(1)).peak_memory_bytes)
    assert recompute(problem_of(graph, devices(1)), (plain,), most=500).strategy.recomputation == ()
    machines = devices(1, memory_bytes=int(peak * share))
    found = recompute(problem_of(graph, machines), (plain,), most=500)
    strategy = found.strategy
    assert found.outcome.excess_bytes == 0
    assert simulation_of(graph, strategy, machines).feasible
    assert strategy.recomputation
    for group in strategy.recomputation:
        fewer = tuple(one for one in strategy.recomputation if one != group)
        assert not simulation_of(graph, replace(strategy, recomputation=fewer), machines).feasible


def test_what_is_made_again_takes_time_and_no_more_memory_than_is_kept() -> None:
    """Before the last block; the last is made again while all else is there."""
    graph = GRAPHS["unrolled"]
    plain, machines = data_parallel(graph, 3), devices(3)
    kept = simulation_of(graph, plain, machines)
    again = simulation_of(graph, replace(plain, recomputation=blocks(graph, 4)), machines)
    assert again.step_time_s > kept.step_time_s
    assert max(again.peak_memory_bytes) < max(kept.peak_memory_bytes)
    forward = kept.tasks.kind_T == TaskKind.FORWARD
    repeated = again.tasks.kind_T == TaskKind.RECOMPUTE
    assert 0 < again.tasks.run_ns_T[repeated].sum() <= kept.tasks.run_ns_T[forward].sum()


def test_a_walk_makes_again_what_its_start_does() -> None:
    graph, machines = GRAPHS["unrolled"], TOPOLOGIES["one node"]
    start = replace(data_parallel(graph, 3), recomputation=blocks(graph, 3))
    options = SearchOptions(proposals=60, chains=1)
    problem = Problem(graph, machines, CostTable(MadeUpCosts()), TRAINING, LINKS, local_calls)
    chain = search(problem, options, known=(start,)).chains[-1]
    assert chain.strategy.recomputation == start.recomputation
    assert simulation_of(graph, chain.strategy, machines).step_time_s == chain.best_s
