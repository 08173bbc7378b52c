"""A proposal simulated by what it changes costs what a simulation in full and the reference say, to the nanosecond."""

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from graph.operators import OperatorGraph
from graph.strategy import Configuration, Strategy
from graph.topology import Topology, load_topology, local_topology
from graph.training import Training
from search.algorithms.chain import STOPPED, Chain, SearchOptions, start_chain
from search.algorithms.moves import Moves, MoveShares
from search.algorithms.proposal_log import ProposalBatch, Recorder
from search.cost.cost_table import CostTable
from search.evaluate.evaluator import Evaluation, FullEvaluation, evaluation
from search.evaluate.incremental import IncrementalEvaluation, Mechanisms
from search.orders import Order
from search.outcome import NEVER_NS, Outcome
from search.simulate.task_graph import COMPUTE_KINDS, TaskGraph, TaskGraphBuilder
from search.space.baselines import data_parallel
from tests.graphs import small_graph
from tests.reference import policies
from tests.reference import simulate as reference
from tests.search.builders import (
    ISSUED,
    SOME_MEASURED,
    CoarseCosts,
    LaunchedCosts,
    MadeUpCosts,
    branches,
    cluster,
    device_kind,
    devices,
    joined,
    local_calls,
    random_anywhere,
    random_mesh,
    statistics,
    two_layers,
    unrolled,
)
from tests.search.test_mcmc import Record

TRAINING = Training(8, optimizer="adam")
BUCKET_BYTES = 200
LINKS = SOME_MEASURED
GRAPHS = {
    "two_layers": two_layers(),
    "branches": branches(),
    "joined": joined(),
    "statistics": statistics(),
    "unrolled": unrolled(),
}
EVENT_DRIVEN: tuple[Order, ...] = ("fifo", "priority")
# More moves of several groups than of one.
FAR = MoveShares(alike=0.3, sharing=0.2, spread=0.3)
TOPOLOGIES = {
    "one node": devices(3, contention=0.5),
    "little memory": devices(4, contention=0.25, memory_bytes=6_000),
    "two nodes": cluster(),
}


def builder_of(
    graph: OperatorGraph, topology: Topology, costs: MadeUpCosts | None = None
) -> TaskGraphBuilder:
    return TaskGraphBuilder(
        graph,
        topology,
        CostTable(costs or MadeUpCosts()),
        TRAINING,
        links=ISSUED if isinstance(costs, LaunchedCosts) else LINKS,
        bucket_bytes=BUCKET_BYTES,
        local_calls=local_calls,
    )


def reference_ns(tasks: TaskGraph, order: Order) -> int:
    """Simulate a task graph with the slow reference."""
    listed = [
        reference.Task(
            run_ns=int(tasks.run_ns_T[task]),
            predecessors=tuple(
                dict.fromkeys(tasks.pred_E[tasks.pred_ptr_T1[task] : tasks.pred_ptr_T1[task + 1]].tolist())
            ),
            resources=tasks.resources(task),
            device=int(tasks.resource_set_T[task]) if tasks.kind_T[task] in COMPUTE_KINDS else None,
            ends=() if tasks.kind_T[task] in COMPUTE_KINDS else tasks.ends(task),
            flows=int(tasks.resource_sets.flows[tasks.resource_set_T[task]]),
            launch_ns=int(tasks.launch_ns_T[task]),
        )
        for task in range(tasks.task_count)
    ]
    contention_ppm = tasks.contention_ppm_D.tolist()
    if order == "priority":
        times = reference.priority_order(listed, contention_ppm, policies.layer(tasks))
    else:
        times = {"program": reference.program_order, "fifo": reference.fifo_order}[order](
            listed, contention_ppm
        )
    return max(end for _, end in times)


class Walk(RuleBasedStateMachine):
    """One strategy, changed step by step: by what changes, in full in every order, and by the reference."""

    @initialize(
        graph=st.sampled_from(sorted(GRAPHS)),
        topology=st.sampled_from(sorted(TOPOLOGIES)),
        seed=st.integers(0, 1000),
        costs=st.sampled_from([MadeUpCosts(), CoarseCosts(), LaunchedCosts()]),
    )
    def begin(self, graph: str, topology: str, seed: int, costs: MadeUpCosts) -> None:
        self.graph, self.topology, self.costs = GRAPHS[graph], TOPOLOGIES[topology], costs
        strategy = random_mesh(self.graph, len(self.topology.devices), np.random.default_rng(seed))
        builder = builder_of(self.graph, self.topology, costs)
        self.delta = IncrementalEvaluation(builder.layout(strategy))
        self.ways: dict[Order, Evaluation] = {
            "program": self.delta,
            # As far as the bound lets them.
            "fifo": FullEvaluation(builder.layout(strategy), "fifo", stops=True),
            "priority": FullEvaluation(builder.layout(strategy), "priority", stops=True),
        }
        self.check(
            {order: one.current() for order, one in self.ways.items()}, dict.fromkeys(self.ways, NEVER_NS)
        )

    @rule(
        seed=st.integers(0, 10**6),
        mesh=st.booleans(),
        count=st.integers(1, 4),
        share=st.sampled_from([0.8, 0.95, 1.0, 1.05, 1.2, float("inf")]),
        kept=st.booleans(),
    )
    def change(self, *, seed: int, mesh: bool, count: int, share: float, kept: bool) -> None:
        rng = np.random.default_rng(seed)
        draw = random_mesh if mesh else random_anywhere
        other = draw(self.graph, len(self.topology.devices), rng).configurations
        places = rng.choice(len(other), size=min(count, len(other)), replace=False).tolist()
        self.propose({place: other[place] for place in places}, share, kept=kept)

    @rule(
        seed=st.integers(0, 10**6),
        share=st.sampled_from([0.8, 0.95, 1.0, 1.05, 1.2, float("inf")]),
        kept=st.booleans(),
    )
    def move(self, *, seed: int, share: float, kept: bool) -> None:
        """Change what a move of the walk changes, of one group or of many."""
        moves = Moves(self.graph, len(self.topology.devices), FAR)
        move = moves.propose(self.delta.configurations, np.random.default_rng(seed))
        self.propose(move.changed, share, kept=kept)

    def propose(self, changed: Mapping[int, Configuration], share: float, *, kept: bool) -> None:
        bounds_ns = {
            order: NEVER_NS if share == float("inf") else int(share * one.current().step_time_ns)
            for order, one in self.ways.items()
        }
        found = {order: one.propose(changed, bounds_ns[order]) for order, one in self.ways.items()}
        self.check(found, bounds_ns)
        # What was not simulated to its end cannot be kept; all stay at one strategy.
        for one in self.ways.values():
            if kept and None not in found.values():
                one.commit()
            else:
                one.roll_back()
        assert all(one.configurations == self.delta.configurations for one in self.ways.values())

    def check(self, found: dict[Order, Outcome | None], bounds_ns: dict[Order, int]) -> None:
        strategy = Strategy(self.graph.digest, tuple(self.delta.configurations))
        builder = builder_of(self.graph, self.topology, self.costs)
        full, tasks = FullEvaluation(builder.layout(strategy), "program").current(), builder.build(strategy)
        for order, outcome in found.items():
            expected = Outcome(full.excess_bytes, reference_ns(tasks, order))
            assert outcome == (expected if expected.step_time_ns <= bounds_ns[order] else None)
            assert order != "program" or expected == full


def walk(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_changes_cost_what_the_reference_says() -> None:
    walk(examples=12, steps=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_changes_cost_what_the_reference_says() -> None:
    walk(examples=60, steps=40)


def columns(record: Record) -> list[tuple[object, ...]]:
    """All proposals, but for times beyond the bound, that only one of two chains knows."""
    batches: list[ProposalBatch] = record.batches
    return [
        (int(step), int(head), configuration, int(bound_ns), bool(accepted), int(time_ns) if accepted else 0)
        for batch in batches
        for step, head, configuration, bound_ns, accepted, time_ns in zip(
            batch.step,
            batch.operator,
            batch.configurations,
            batch.bound_ns,
            batch.accepted,
            batch.simulated_ns,
            strict=True,
        )
    ]


def walked(builder: TaskGraphBuilder, order: Order, proposals: int, *, in_full: bool) -> tuple[Record, Chain]:
    graph, count = builder.graph, len(builder.topology.devices)
    options = SearchOptions(proposals=proposals, chains=1, order=order, beta=100.0)
    rng = np.random.default_rng(7)
    chain = start_chain(builder, 0, "start", data_parallel(graph, count), rng, options, in_full=in_full)
    record, moves = Record(), Moves(graph, count)
    recorder = Recorder(record)
    while not chain.done:
        chain.step(moves, recorder.add)
    recorder.flush()
    return record, chain


def check_same_walk(
    graph: OperatorGraph, topology: Topology, order: Order, proposals: int, **calls: object
) -> None:
    def builder() -> TaskGraphBuilder:
        return TaskGraphBuilder(graph, topology, CostTable(MadeUpCosts()), TRAINING, **calls)  # type: ignore[arg-type]

    fast, fast_chain = walked(builder(), order, proposals, in_full=False)
    full, full_chain = walked(builder(), order, proposals, in_full=True)
    assert columns(fast) == columns(full)
    assert len(columns(fast)) == proposals
    assert fast_chain.best == full_chain.best
    assert fast_chain.evaluation.configurations == full_chain.evaluation.configurations
    stopped = fast.column("simulated_ns").count(STOPPED)
    assert 0 < stopped < proposals
    for known_ns, time_ns in zip(fast.column("simulated_ns"), full.column("simulated_ns"), strict=True):
        assert known_ns in (time_ns, STOPPED)


@pytest.mark.parametrize("order", ["program", "fifo", "priority"])
@pytest.mark.parametrize("name", ["branches", "statistics"])
def test_a_chain_makes_the_proposals_of_one_that_simulates_in_full(name: str, order: Order) -> None:
    proposals = 1500 if order == "program" else 400
    check_same_walk(GRAPHS[name], cluster(), order, proposals, local_calls=local_calls)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "nodes", "order", "proposals"),
    [
        ("alexnet", 2, "program", 40_000),
        ("nmt", 2, "program", 30_000),
        ("gpt2", 4, "program", 20_000),
        ("inception", 4, "program", 10_000),
        ("resnet101", 2, "fifo", 2_000),
        ("resnet101", 2, "priority", 2_000),
    ],
)
def test_a_long_chain_makes_the_proposals_of_one_that_simulates_in_full(
    name: str, nodes: int, order: Order, proposals: int
) -> None:
    check_same_walk(small_graph(name), load_topology("p100-cluster", nodes), order, proposals)


@pytest.mark.parametrize("name", ["bound", "optimistic_bound", "folding"])
@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_no_mechanism_changes_a_result(name: str, contention: float) -> None:
    """From data parallelism: there, most of what devices do they do alike, and folding has most to do."""
    graph = GRAPHS["statistics"]
    builder = builder_of(graph, devices(4, contention=contention))
    start = data_parallel(graph, 4)
    ways = [
        IncrementalEvaluation(builder.layout(start)),
        IncrementalEvaluation(builder.layout(start), Mechanisms(**{name: False})),
    ]
    assert (
        ways[0].current() == ways[1].current() == FullEvaluation(builder.layout(start), "program").current()
    )
    moves, rng = Moves(graph, 4, FAR), np.random.default_rng(3)
    for _ in range(150):
        changed = moves.propose(ways[0].configurations, rng).changed
        bound_ns = int(rng.choice([0.9, 1.0, 1.1, 2.0]) * ways[0].current().step_time_ns)
        expected, found = (one.propose(changed, bound_ns) for one in ways)
        assert found == expected
        for one in ways:
            if found is not None:
                one.commit()
            else:
                one.roll_back()


@pytest.mark.parametrize("order", ["program", *EVENT_DRIVEN])
def test_an_emptied_arena_changes_no_proposal(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    def proposals() -> list[tuple[object, ...]]:
        record, _ = walked(builder_of(GRAPHS["branches"], cluster()), order, 200, in_full=False)
        return columns(record)

    expected = proposals()
    monkeypatch.setattr("search.simulate.fragment_cache.ARENA_WORDS", 20_000)
    assert proposals() == expected


@pytest.mark.parametrize("order", ["program", *EVENT_DRIVEN])
def test_two_chains_of_one_builder_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch, order: Order
) -> None:
    graph = GRAPHS["branches"]
    monkeypatch.setattr("search.simulate.fragment_cache.ARENA_WORDS", 20_000)
    builder = builder_of(graph, cluster())
    rng = np.random.default_rng(1)
    pairs = [
        (
            evaluation(builder.layout(start), order),
            FullEvaluation(builder_of(graph, cluster()).layout(start), order),
        )
        for start in (random_mesh(graph, 8, rng), random_anywhere(graph, 8, rng))
    ]
    for (fast, full), _ in itertools.product(pairs * 20, range(3)):
        other = random_anywhere(graph, 8, rng).configurations
        changed: dict[int, Configuration] = {
            place: other[place] for place in rng.choice(len(other), 2).tolist()
        }
        assert fast.propose(changed, NEVER_NS) == full.propose(changed, NEVER_NS)
        for one in (fast, full):
            one.commit()
        assert fast.current() == full.current()


@pytest.mark.parametrize("order", EVENT_DRIVEN)
def test_steps_that_take_months_are_simulated_all_the_same(order: Order) -> None:
    graph = GRAPHS["branches"]
    slow_links = local_topology(4, device_kind(), 1e-4, 3e-6, 0.25)
    builder, rng = builder_of(graph, slow_links), np.random.default_rng(5)
    for _ in range(10):
        strategy = random_anywhere(graph, 4, rng)
        full = FullEvaluation(builder.layout(strategy), order).current()
        assert full.step_time_ns == reference_ns(builder.build(strategy), order)
        assert full.seconds > 1e6
