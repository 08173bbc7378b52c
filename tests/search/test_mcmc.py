"""The walk: it finds optima, it is reproducible, and it accepts by the Metropolis rule."""

import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from graph.calls import LocalCall
from graph.errors import CostError, StrategyError, UsageError
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Configuration, Strategy
from graph.training import Training
from search.algorithms import proposal_log
from search.algorithms.chain import STOPPED, SearchOptions, accepts
from search.algorithms.mcmc import SearchResult, search
from search.algorithms.proposal_log import ProposalBatch
from search.cost.cost_table import CostTable, OperatorCost
from search.outcome import Outcome
from search.problem import Problem
from search.simulate.simulator import simulate
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import data_parallel
from search.space.groups import find_groups, follow
from search.space.placements import ProposalOrigin
from tests.search.builders import GraphBuilder, MadeUpCosts, branches, devices, local_calls, two_layers

TRAINING = Training(4)


def tiny() -> OperatorGraph:
    """Two layers and a loss on few samples."""
    builder = GraphBuilder()
    x = builder.value("input.0", (3, 4), ValueKind.INPUT)
    builder.loss(builder.linear("second", builder.linear("first", x, 2), 4))
    return builder.finish()


@dataclass
class Record:
    """An observer that keeps all."""

    batches: list[ProposalBatch] = field(default_factory=list)
    starts: list[tuple[int, str, Strategy, Mapping[int, ProposalOrigin] | None]] = field(default_factory=list)
    told: list[tuple[int, int, float]] = field(default_factory=list)

    def on_start(
        self, chain: int, name: str, strategy: Strategy, heads: Mapping[int, ProposalOrigin] | None
    ) -> None:
        self.starts.append((chain, name, strategy, heads))

    def on_proposals(self, batch: ProposalBatch) -> None:
        self.batches.append(batch)

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        self.told.append((proposals, accepted, best_s))

    def column(self, name: str) -> list[int]:
        return [item for batch in self.batches for item in np.asarray(getattr(batch, name)).tolist()]


def run(
    graph: OperatorGraph, count: int, options: SearchOptions, observer: Record | None = None
) -> SearchResult:
    return search(
        Problem(
            graph, devices(count, contention=0.3), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls
        ),
        options,
        observer=observer,
    )


def brute_force_ns(graph: OperatorGraph, count: int) -> int:
    """Return the least makespan over all configurations of all heads on distinct devices."""
    choices = []
    for group in find_groups(graph):
        axes = graph.operators[group.head].space.axes
        sizes = [range(1, min(axis.size, count) + 1) for axis in axes]
        choices.append(
            [
                follow(group, Configuration(degrees, placed))
                for degrees in itertools.product(*sizes)
                if np.prod(degrees) <= count
                for placed in itertools.permutations(range(count), int(np.prod(degrees)))
            ]
        )
    builder = TaskGraphBuilder(
        graph, devices(count, contention=0.3), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls
    )
    layout = builder.layout(data_parallel(graph, count))
    best = None
    for chosen in itertools.product(*choices):
        layout.change({index: one for part in chosen for index, one in part.items()})
        makespan_ns, _ = layout.run("program")
        best = makespan_ns if best is None else min(best, makespan_ns)
    assert best is not None
    return best


@pytest.mark.parametrize("count", [2, 3])
def test_the_optimum_of_a_tiny_graph_is_found(count: int) -> None:
    graph = tiny()
    optimum_ns = brute_force_ns(graph, count)
    for seed in range(4):
        result = run(graph, count, SearchOptions(proposals=1500, chains=3, seed=seed, beta=30))
        assert round(result.step_time_s * 1e9) == optimum_ns


def test_the_best_strategy_takes_the_time_that_is_reported() -> None:
    graph = branches()
    result = run(graph, 4, SearchOptions(proposals=300, seed=3))
    result.strategy.validate(graph, 4)
    again = simulate(
        graph,
        result.strategy,
        devices(4, contention=0.3),
        CostTable(MadeUpCosts()),
        TRAINING,
        local_calls=local_calls,
    )
    assert again.step_time_s == result.step_time_s
    assert result.step_time_s == min(chain.best_s for chain in result.chains)
    assert [chain.start for chain in result.chains] == ["data_parallel", "expert", "single_device", "random"]
    assert all(chain.best_s <= chain.initial_s for chain in result.chains)


def test_the_same_seed_gives_the_same_search() -> None:
    graph = branches()
    options = SearchOptions(proposals=400, chains=5, seed=9)
    records = [Record(), Record()]
    first, second = (run(graph, 4, options, record) for record in records)
    assert first.strategy == second.strategy
    assert first.chains == second.chains
    for name in ("chain", "step", "operator", "simulated_ns", "bound_ns", "accepted"):
        assert records[0].column(name) == records[1].column(name)
    other = run(graph, 4, SearchOptions(proposals=400, chains=5, seed=10))
    assert [chain.accepted for chain in other.chains] != [chain.accepted for chain in first.chains[:5]]


def test_replaying_the_accepted_proposals_gives_every_simulated_time() -> None:
    """Every proposal is recorded, with what it takes to simulate it again."""
    graph = branches()
    record = Record()
    run(graph, 4, SearchOptions(proposals=150, chains=1, seed=2, beta=50), record)
    configurations = [configuration for batch in record.batches for configuration in batch.configurations]
    groups = {group.head: group for group in find_groups(graph)}
    builder = TaskGraphBuilder(
        graph, devices(4, contention=0.3), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls
    )
    layout = builder.layout(data_parallel(graph, 4))
    assert len(configurations) == 150
    assert any(batch.others for batch in record.batches)
    names = ("simulated_ns", "bound_ns", "accepted")
    others = [batch.others.get(place, ()) for batch in record.batches for place in range(len(batch))]
    columns = (record.column("operator"), configurations, others, *(record.column(name) for name in names))
    for head, configuration, further, simulated_ns, bound_ns, accepted in zip(*columns, strict=True):
        changed = follow(groups[head], configuration)
        for part in further:
            for other in part.heads:
                changed |= follow(groups[other], part.configuration)
        undo = layout.change(changed)
        found_ns = layout.run("program")[0]
        assert found_ns > bound_ns if simulated_ns == STOPPED else found_ns == simulated_ns
        if not accepted:
            layout.undo(undo)


def test_acceptance_is_the_metropolis_rule() -> None:
    """Worse proposals are accepted as often as exp(beta * (current - proposed) / initial) says."""
    record = Record()
    beta = 40.0
    graph = branches()
    run(graph, 4, SearchOptions(proposals=3000, chains=1, seed=5, beta=beta), record)
    simulated, bound = record.column("simulated_ns"), record.column("bound_ns")
    accepted = record.column("accepted")
    within = [time_ns <= limit_ns for time_ns, limit_ns in zip(simulated, bound, strict=True)]
    assert [time_ns != STOPPED for time_ns in simulated] == accepted
    assert all(fits for fits, taken in zip(within, accepted, strict=True) if taken)
    initial_ns = simulate(
        graph,
        data_parallel(graph, 4),
        devices(4, contention=0.3),
        CostTable(MadeUpCosts()),
        TRAINING,
        local_calls=local_calls,
    ).step_time_ns
    current_ns = initial_ns
    numbers = []
    for time_ns, limit_ns, taken in zip(simulated, bound, accepted, strict=True):
        numbers.append(np.exp(-beta * (limit_ns - current_ns) / initial_ns))
        current_ns = time_ns if taken else current_ns
    # The numbers drawn are uniform: within five standard errors at every tenth.
    for tenth in np.arange(0.1, 1.0, 0.1):
        share = np.mean(np.array(numbers) <= tenth)
        assert share == pytest.approx(tenth, abs=5 * np.sqrt(tenth * (1 - tenth) / len(numbers)))


def test_memory_comes_before_time() -> None:
    fits, over, further = Outcome(0, 100), Outcome(5, 10), Outcome(9, 10)
    assert not accepts(fits, over, 1000)
    assert accepts(over, fits, 0)
    assert accepts(further, over, 0)
    assert not accepts(over, further, 1000)
    assert accepts(fits, Outcome(0, 120), 120)
    assert not accepts(fits, Outcome(0, 121), 120)


def searched_with_memory(memory_bytes: int) -> SearchResult:
    return search(
        Problem(
            two_layers(samples=64),
            devices(4, memory_bytes=memory_bytes),
            CostTable(MadeUpCosts()),
            TRAINING,
            local_calls=local_calls,
        ),
        SearchOptions(proposals=600, chains=2, seed=1),
        known=[Strategy(two_layers(samples=64).digest, single_device_configurations())],
    )


def single_device_configurations() -> tuple[Configuration, ...]:
    graph = two_layers(samples=64)
    return tuple(Configuration((1,) * len(operator.space.axes), (2,)) for operator in graph.operators)


def test_a_start_beyond_the_memory_is_left_behind() -> None:
    result = searched_with_memory(13_000)
    assert result.chains[2].start == "known 0"
    assert result.chains[2].initial_s == float("inf")
    assert result.chains[2].best_s < float("inf")


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(StrategyError, match="exceeds the devices' memories"):
        searched_with_memory(100)


def test_a_missing_cost_is_named() -> None:
    class Nothing(MadeUpCosts):
        def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
            return [None for _ in super().resolve(calls, kind_name)]

    with pytest.raises(CostError, match=r"aten\.linear\.default .* not measured on made-up"):
        search(Problem(two_layers(), devices(2), CostTable(Nothing()), TRAINING, local_calls=local_calls))


def test_an_illegal_start_is_refused() -> None:
    graph = two_layers()
    with pytest.raises(StrategyError, match="device 2 is not there"):
        search(
            Problem(graph, devices(2), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls),
            known=[data_parallel(graph, 4)],
        )


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="chains is 0, must be at least 1"):
        SearchOptions(chains=0)


def test_an_interrupt_keeps_the_best() -> None:
    class Impatient(Record):
        def progress(self, proposals: int, accepted: int, best_s: float) -> None:
            super().progress(proposals, accepted, best_s)
            if proposals >= 200:
                raise KeyboardInterrupt

    record = Impatient()
    result = run(branches(), 4, SearchOptions(proposals=100_000, seed=1), record)
    assert result.interrupted
    assert result.proposals == len(record.column("step")) < 1000
    assert result.step_time_s <= min(chain.initial_s for chain in result.chains)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_batch_is_handed_over_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    class Interrupted(Record):
        whole = 0

        def on_proposals(self, batch: ProposalBatch) -> None:
            if not self.batches:
                signal.raise_signal(number)
            super().on_proposals(batch)
            self.whole += 1

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proposal_log, "BATCH", 20)
    record = Interrupted()
    before = signal.signal(number, interrupt)
    try:
        result = run(branches(), 4, SearchOptions(proposals=200, seed=1), record)
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
    assert result.interrupted
    assert record.whole == len(record.batches) >= 1
    assert len(record.column("step")) == result.proposals < 200


def test_a_time_limit_of_nothing_gives_the_best_start() -> None:
    result = run(branches(), 4, SearchOptions(proposals=1000, seed=1, time_limit_s=0.0))
    assert result.proposals == 0
    assert result.step_time_s == min(chain.initial_s for chain in result.chains)
