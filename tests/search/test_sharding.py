"""Weights that their holders share: the task graph is the plan's, and what changes costs what the whole does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from graph.collectives import CollectiveKind
from graph.operators import OperatorGraph
from graph.strategy import Sharding, Strategy, stays_whole
from graph.topology import Topology
from search.algorithms.chain import SearchOptions
from search.algorithms.mcmc import search
from search.algorithms.weight_sharding import share_weights
from search.bounds.lower_bound import best_times_bound
from search.cost.cost_table import CostTable
from search.cost.link_costs import Curve, LinkCosts
from search.evaluate.evaluator import Evaluation, FullEvaluation, evaluation
from search.evaluate.incremental import IncrementalEvaluation
from search.orders import Order
from search.outcome import NEVER_NS, Outcome
from search.problem import Problem
from search.simulate.simulator import simulate
from search.simulate.strategy_state import Layout
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import data_parallel, fsdp, shared, zero
from tests.reference import taskgraph as reference
from tests.search.builders import MadeUpCosts, devices, local_calls, random_anywhere, random_mesh, viewed
from tests.search.test_delta import GRAPHS as OTHERS
from tests.search.test_delta import TOPOLOGIES, builder_of, reference_ns
from tests.search.test_taskgraph import BUCKET_BYTES, LINKS, TRAINING, built, check_equal

# Two of three rows are slow on a topology: this one is not on one node, and on two.
GRAPHS = {**OTHERS, "viewed": viewed()}
EVENT_DRIVEN: tuple[Order, ...] = ("fifo", "priority")


def sharded(strategy: Strategy, graph: OperatorGraph, rng: np.random.Generator) -> Strategy:
    """Return the strategy with what is shared of each weight drawn at random."""
    whole = stays_whole(graph)
    levels = [
        Sharding.OPTIMIZER if weight.name in whole else list(Sharding)[rng.integers(3)]
        for weight in graph.weights
    ]
    return replace(strategy, sharding=tuple(levels))


def strategies_of(graph: OperatorGraph, count: int, seed: int, times: int) -> list[Strategy]:
    """Return data parallelism with each kind of sharing, and random strategies with random sharing."""
    rng = np.random.default_rng(seed)
    plain = data_parallel(graph, count)
    found = [shared(graph, plain, level) for level in (Sharding.OPTIMIZER, Sharding.PARAMETERS)]
    for _ in range(times):
        found.append(sharded(random_anywhere(graph, count, rng), graph, rng))
        found.append(sharded(random_mesh(graph, count, rng), graph, rng))
    return found


# Each graph on one topology; the others only under scripts/test --all.
PAIRS = [
    pytest.param(
        name, topology, id=f"{name} on {topology}", marks=() if (row + column) % 3 == 0 else pytest.mark.slow
    )
    for row, name in enumerate(GRAPHS)
    for column, topology in enumerate(TOPOLOGIES)
]


def check_plans(graph: OperatorGraph, machines: Topology, strategies: Sequence[Strategy]) -> None:
    """Task graphs and memory are those of the slow reference."""
    for strategy in strategies:
        deriver = reference.Deriver(
            graph, strategy, machines, MadeUpCosts(), TRAINING, local_calls, BUCKET_BYTES, LINKS
        )
        tasks = built(graph, strategy, machines, LINKS)
        check_equal(tasks, deriver.derive())
        assert tasks.peak_memory_D.tolist() == deriver.peak_memory()


@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_task_graph_is_the_plan(name: str, topology: str) -> None:
    graph, machines = GRAPHS[name], TOPOLOGIES[topology]
    check_plans(graph, machines, strategies_of(graph, len(machines.devices), 5, 4))


@pytest.mark.parametrize(("name", "topology"), PAIRS)
def test_what_changes_costs_what_the_whole_does(name: str, topology: str) -> None:
    """By what changes, in full in every order, and by the slow reference; some proposals are kept."""
    graph, machines = GRAPHS[name], TOPOLOGIES[topology]
    count, rng = len(machines.devices), np.random.default_rng(17)
    builder = builder_of(graph, machines)
    for start in strategies_of(graph, count, 23, 1)[:3]:
        delta = IncrementalEvaluation(builder.layout(start))
        program = FullEvaluation(builder.layout(start), "program")
        others = {order: evaluation(builder.layout(start), order) for order in EVENT_DRIVEN}
        for step in range(8):
            assert delta.current() == program.current()
            draw = random_mesh if step % 2 else random_anywhere
            other = draw(graph, count, rng).configurations
            places = rng.choice(len(other), size=min(2, len(other)), replace=False).tolist()
            changed = {place: other[place] for place in places}
            ways: list[Evaluation] = [delta, program, *others.values()]
            found = [way.propose(changed, NEVER_NS) for way in ways]
            assert found[0] == found[1]
            now = replace(start, configurations=tuple(delta.configurations))
            tasks = builder.build(now)
            assert found[1] is not None
            assert found[1].step_time_ns == reference_ns(tasks, "program")
            for order, outcome in zip(others, found[2:], strict=True):
                assert outcome == Outcome(found[1].excess_bytes, reference_ns(tasks, order))
            for way in ways:
                if step % 3:
                    way.commit()
                else:
                    way.roll_back()


def test_a_walk_goes_on_from_what_is_not_shared() -> None:
    """From a strategy whose weights are gathered to one whose weights are not, and back."""
    graph, machines = GRAPHS["unrolled"], TOPOLOGIES["one node"]
    builder = builder_of(graph, machines)
    plain = data_parallel(graph, 3)
    levels = [None, Sharding.PARAMETERS, None, Sharding.OPTIMIZER, Sharding.PARAMETERS, None]
    delta = IncrementalEvaluation(builder.layout(plain))
    for level in levels:
        sharding = tuple(level or Sharding.NONE for _ in graph.weights)
        expected = FullEvaluation(builder.layout(replace(plain, sharding=sharding)), "program").current()
        layout: Layout = delta.layout
        layout.share(dict(enumerate(sharding)))
        assert delta.propose({}, NEVER_NS) == expected
        delta.commit()
        place = len(graph.operators) - 1
        other = random_mesh(graph, 3, np.random.default_rng(place)).configurations[place]
        found = delta.propose({place: other}, NEVER_NS)
        moved = (*plain.configurations[:place], other)
        strategy = Strategy(graph.digest, moved, sharding)
        assert found == FullEvaluation(builder.layout(strategy), "program").current()
        delta.roll_back()


def problem_of(graph: OperatorGraph, machines: Topology, links: LinkCosts) -> Problem:
    return Problem(graph, machines, CostTable(MadeUpCosts()), TRAINING, links, local_calls)


def test_weights_are_shared_where_else_they_do_not_fit() -> None:
    """With plenty of memory and dear gathers nothing is shared; with less than plain strategies take, something is."""
    graph = GRAPHS["two_layers"]
    plain = data_parallel(graph, 4)
    dear = LinkCosts({(CollectiveKind.ALL_GATHER, 4): Curve.line(1.0, 0.0)})
    roomy = problem_of(graph, devices(4), dear)
    assert share_weights(roomy, (plain,), most=200).strategy.sharding == ()

    def peak(strategy: Strategy) -> int:
        tasks = TaskGraphBuilder(
            graph, roomy.topology, roomy.costs, TRAINING, links=dear, local_calls=local_calls
        ).build(strategy)
        return int(tasks.peak_memory_D.max())

    assert peak(fsdp(graph, 4)) < peak(zero(graph, 4)) < peak(plain)
    found = share_weights(
        problem_of(graph, devices(4, memory_bytes=peak(zero(graph, 4))), dear), (plain,), most=200
    )
    assert found.outcome.excess_bytes == 0
    assert Sharding.OPTIMIZER in found.strategy.sharding


def test_an_update_that_takes_long_is_shared() -> None:
    """Adam over many elements against links that cost nothing."""
    graph = GRAPHS["two_layers"]
    free = LinkCosts({(kind, 4): Curve.line(0.0, 0.0) for kind in CollectiveKind})
    problem = problem_of(graph, devices(4), free)
    found = share_weights(problem, (data_parallel(graph, 4),), most=200)
    assert found.strategy.sharding
    assert best_times_bound(problem, shared=True).time_ns <= found.outcome.step_time_ns


def test_a_walk_keeps_what_its_start_shares() -> None:
    graph, machines = GRAPHS["unrolled"], TOPOLOGIES["one node"]
    start = sharded(data_parallel(graph, 3), graph, np.random.default_rng(1))
    options = SearchOptions(proposals=60, chains=1)
    problem = Problem(graph, machines, CostTable(MadeUpCosts()), TRAINING, LINKS, local_calls)
    chain = search(problem, options, known=(start,)).chains[-1]
    assert chain.strategy.sharding == start.sharding
    simulated = simulate(
        graph,
        chain.strategy,
        machines,
        CostTable(MadeUpCosts()),
        TRAINING,
        links=LINKS,
        local_calls=local_calls,
    )
    assert simulated.step_time_s == chain.best_s
