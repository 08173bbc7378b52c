"""The bound on work that nobody looked up: costs of rooflines and measurements, and operators cut at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from graph.calls import CostPhase, LocalCall
from graph.operators import OperatorGraph
from graph.rules import first_call, local_calls
from graph.rules.least import LeastWork, WorkPhase, least_work
from graph.strategy import Strategy
from graph.topology import DeviceKind
from graph.training import Training
from profiler.estimate import Estimator, Observation, roofline_s, work_of
from profiler.measure import phases
from profiler.updates import update_call, update_s_per_element
from search.algorithms.optcnn import Cheapest
from search.bounds import lower_bound
from search.cost.cost_table import CostTable, OperatorCost, Origin, UpdateCost
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from search.simulate.simulator import simulate
from search.space.baselines import data_parallel, expert, random_strategy, single_device
from search.space.enumerated_space import leading_space
from search.tables import Tables
from tests.graphs import small_graph
from tests.quick import seeds
from tests.search.builders import devices

# So slow that rounding to nanoseconds is nothing.
KIND = replace(devices(1).kinds[0], peak_flops=(("float32", 1e9),), memory_bandwidth_bytes_per_s=1e9)


class Estimated:
    """What was measured, else an estimate that rests on it."""

    def __init__(self, kind: DeviceKind, observations: Sequence[Observation]) -> None:
        self.measured = {(one.call.digest, one.phase): one.time_s for one in observations}
        self.estimator = Estimator.fit(kind, observations)

    def _time_s(self, call: LocalCall, phase: CostPhase) -> float:
        known = self.measured.get((call.digest, phase))
        return self.estimator.estimate(call, phase).time_s if known is None else known

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
        assert kind_name == self.estimator.kind.name
        return [
            OperatorCost(
                self._time_s(call, "forward"),
                self._time_s(call, "backward") if call.has_backward else 0.0,
                Origin.ESTIMATED,
            )
            for call in calls
        ]

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        assert kind_name == self.estimator.kind.name
        estimate = self.estimator.estimate(update_call(optimizer, dtype=dtype), "update")
        return UpdateCost(update_s_per_element(estimate.time_s), Origin.ESTIMATED)

    def least_s(self, call: LocalCall, phase: WorkPhase, work: LeastWork, kind_name: str) -> float:
        assert kind_name == self.estimator.kind.name
        return self.estimator.least_s(call, phase, work)


def measured(graph: OperatorGraph, count: int, rng: np.random.Generator) -> list[Observation]:
    """Return times of some calls of random configurations, between a third and three times their rooflines."""
    strategy = random_strategy(graph, count, rng)
    found = []
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        for call in dict.fromkeys(local_calls(graph, operator, configuration.degrees)):
            for phase in phases(call):
                if rng.random() < 0.3:
                    time_s = roofline_s(work_of(call, phase), KIND)
                    found.append(Observation(call, phase, time_s * float(np.exp(rng.uniform(-1.1, 1.1)))))
    return found


def problem(graph: OperatorGraph, count: int, observations: Sequence[Observation] = ()) -> Problem:
    costs = CostTable(Estimated(KIND, observations))
    topology = replace(devices(count), kinds=(KIND,))
    return Problem(graph, topology, costs, Training(8), LinkCosts(), local_calls, first_call, least_work)


def step_ns(one: Problem, strategy: Strategy) -> int:
    return simulate(one.graph, strategy, one.topology, one.costs, one.training, links=one.links).step_time_ns


def undivided(one: Problem, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bound where no cost is looked up."""
    monkeypatch.setattr(lower_bound, "MOST_TASKS", 0)
    return lower_bound.best_times_bound(one, most_calls=0).time_ns


@pytest.mark.parametrize("seed", seeds(2, 12))
@pytest.mark.parametrize("name", ["rnnlm", "bert-large", "densenet121"])
def test_no_strategy_does_less_work(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By data sheets alone (the first seed), and with measurements that say otherwise of some calls."""
    graph, rng = small_graph(name), np.random.default_rng(seed)
    count = 2 if seed % 2 else 4
    one = problem(graph, count, measured(graph, count, rng) if seed else ())
    whole_ns, least_ns = lower_bound.best_times_bound(one).time_ns, undivided(one, monkeypatch)
    assert least_ns > 0
    met = [data_parallel(graph, count), expert(graph, count), single_device(graph)]
    met += [random_strategy(graph, count, rng) for _ in range(6)]
    for strategy in met:
        assert max(whole_ns, least_ns) <= step_ns(one, strategy)


@pytest.mark.parametrize("name", ["rnnlm", "bert-large", "densenet121"])
def test_on_one_device_most_of_the_step_is_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By data sheets: what is missing are sums of gradients, and bytes that lookups read."""
    one = problem(small_graph(name), 1)
    step = step_ns(one, single_device(one.graph))
    assert 0.75 * step <= undivided(one, monkeypatch) <= step


@pytest.mark.parametrize("name", ["rnnlm", "bert-large", "densenet121"])
def test_what_is_known_of_least_work_changes_no_choice_of_optcnn(name: str) -> None:
    graph, rng = small_graph(name), np.random.default_rng(3)
    one = problem(graph, 8, measured(graph, 8, rng))
    every = Tables(one, leading_space(graph, 8))
    shares = 0
    for operator in range(len(graph.operators)):
        least_ns = every.least_ns(operator).tolist()
        assert least_ns == [
            min(bound_ns, every.longest_ns(operator, number)) for number, bound_ns in enumerate(least_ns)
        ]
        shares += max(least_ns) > 0
    assert shares
    unknown = replace(one, least_work=None)
    with Cheapest(Tables(one, every.space)) as bounded, Cheapest(Tables(unknown, every.space)) as others:
        for most in (2, 8, 32):
            assert bounded.space(most) == others.space(most)


def test_costs_of_a_source_that_knows_no_least_count_as_nothing() -> None:
    """As before: a source need not say how little its costs can be."""

    class Plain:
        def __init__(self, source: Estimated) -> None:
            self.resolve, self.update_cost = source.resolve, source.update_cost

    graph = small_graph("mlp")
    one = problem(graph, 4)
    call = first_call(graph, graph.operators[0], (1,) * len(graph.operators[0].space.axes))
    assert one.costs.least_s(call, "forward", LeastWork(1e9, 10**6), KIND.name) > 0
    assert (
        CostTable(Plain(Estimated(KIND, ()))).least_s(call, "forward", LeastWork(1e9, 10**6), KIND.name) == 0
    )
