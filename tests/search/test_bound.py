"""The lower bound: never above the optimum, near it on small problems, and each of its steps by itself."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from graph.collectives import CollectiveKind
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Strategy
from graph.training import Training
from search.bounds.lower_bound import Bound, best_times_bound, lower_bound, path_bound_ns, sizes_degrees
from search.cost.cost_table import CostTable
from search.cost.link_costs import Curve, LinkCosts
from search.orders import Order
from search.problem import Problem
from search.simulate.simulator import simulate
from search.space.baselines import data_parallel, expert, random_strategy, single_device
from search.space.enumerated_space import all_degrees
from tests.quick import seeds
from tests.search.builders import (
    GraphBuilder,
    MadeUpCosts,
    all_reduces,
    branches,
    cluster,
    devices,
    local_calls,
    two_layers,
)
from tests.search.builders import (
    statistics as with_statistics,
)
from tests.search.small import brute_force, small_problem
from tests.search.test_exhaustive import LARGE, QUICK


def problem(graph: OperatorGraph, count: int, seconds_per_element: float = 1e-7) -> Problem:
    return Problem(
        graph,
        devices(count, contention=0.3),
        CostTable(MadeUpCosts(seconds_per_element)),
        Training(4),
        LinkCosts(),
        local_calls,
    )


def check(seed: int, most: int) -> None:
    one = small_problem(seed, most)
    optimum_ns = brute_force(one, "program").step_time_ns
    for bound_ns in (best_times_bound(one).time_ns, path_bound_ns(one), lower_bound(one).time_ns):
        assert 0 < bound_ns <= optimum_ns


@pytest.mark.parametrize("seed", range(24))
def test_the_bound_is_not_above_the_optimum(seed: int) -> None:
    check(seed, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_the_bound_is_not_above_the_optimum_in_larger_spaces(seed: int) -> None:
    check(seed, LARGE)


@pytest.mark.parametrize("order", ["fifo", "priority"])
@pytest.mark.parametrize("seed", seeds(2, 24))
def test_the_bound_is_not_above_the_optimum_where_resources_choose(seed: int, order: Order) -> None:
    one = small_problem(seed, QUICK)
    assert lower_bound(one).time_ns <= brute_force(one, order).step_time_ns


def test_the_bound_is_near_the_optimum() -> None:
    """Of the quick seeds: the median is at least 0.85 of the optimum, of the simpler of the two at least 0.75."""
    whole, best_times = [], []
    for seed in range(24):
        one = small_problem(seed, QUICK)
        optimum_ns = brute_force(one, "program").step_time_ns
        whole.append(lower_bound(one).time_ns / optimum_ns)
        best_times.append(best_times_bound(one).time_ns / optimum_ns)
    assert statistics.median(whole) >= 0.85
    assert statistics.median(best_times) >= 0.75


def plain_bound_ns(one: Problem) -> int:
    """max(critical path over each operator's best time, total work / devices), which the bound is to beat."""
    count = one.device_count
    kind = one.topology.kinds[0].name
    best: list[int] = []
    head: dict[int, int] = {}
    work = 0
    for index, operator in enumerate(one.graph.operators):
        rows = [
            one.costs.costs(one.local_calls(one.graph, operator, degrees), kind)
            for degrees in all_degrees(operator, count)
        ]
        best.append(min(max(cost.forward_ns for cost in row) for row in rows))
        work += min(sum(cost.forward_ns + cost.backward_ns for cost in row) for row in rows)
        makers = [one.graph.producer[name][0] for name in operator.inputs if name in one.graph.producer]
        head[index] = best[index] + max((head[maker] for maker in makers), default=0)
    return max(max(head.values()), work // count)


def test_it_is_tighter_than_path_and_work_alone() -> None:
    ratios = [
        lower_bound(one).time_ns / plain_bound_ns(one)
        for one in (small_problem(seed, QUICK) for seed in range(24))
    ]
    assert min(ratios) >= 1
    assert statistics.median(ratios) > 1.2


def graphs() -> list[OperatorGraph]:
    return [two_layers(), branches(), with_statistics()]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("count", [2, 4, 8])
def test_no_strategy_met_is_below_it(place: int, count: int) -> None:
    """Baselines and random strategies, whose operators follow their heads or do not."""
    graph = graphs()[place]
    one = problem(graph, count, 1e-6)
    if count == 8:
        links = all_reduces({2: (1e-6, 1e-10), 8: (0.0, 0.0)})
        # Two of the devices sum faster than any other two.
        links = replace(links, by_members={(CollectiveKind.ALL_REDUCE, (0, 1)): Curve.line(0.0, 1e-11)})
        one = replace(one, topology=cluster(), links=links)
    bound_ns = best_times_bound(one).time_ns
    rng = np.random.default_rng(count)
    met = [data_parallel(graph, count), expert(graph, count), single_device(graph)]
    met += [random_strategy(graph, count, rng) for _ in range(40)]
    for strategy in met:
        assert bound_ns <= step_ns(one, strategy)


def step_ns(one: Problem, strategy: Strategy) -> int:
    return simulate(
        one.graph,
        strategy,
        one.topology,
        one.costs,
        one.training,
        links=one.links,
        local_calls=local_calls,
    ).step_time_ns


def test_one_operator_on_one_device_is_met_exactly() -> None:
    """Nothing is left to choose: forward, backward and update one after the other."""
    one = problem(two_layers(), 1)
    found = lower_bound(one)
    assert found.time_ns == pytest.approx(step_ns(one, single_device(one.graph)), rel=2e-3)
    assert found.gap(found.seconds * 1.25) == pytest.approx(0.25)


def test_a_gap_is_never_negative_and_of_no_bound_infinite() -> None:
    assert Bound(1000, "any", whole=True).gap(0.5e-6) == 0.0
    assert Bound(0, "any", whole=False).gap(1.0) == float("inf")


def test_the_first_parts_of_few_degrees_are_those_of_all() -> None:
    builder = GraphBuilder()
    x = builder.value("input.0", (12, 7), ValueKind.INPUT)
    builder.loss(builder.linear("first", x, 5))
    operator = builder.finish().operators[0]

    def sizes(degrees: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            -(-axis.size // degree) for axis, degree in zip(operator.space.axes[:-1], degrees, strict=False)
        )

    few = sizes_degrees(operator, 12)
    every = [degrees for degrees in all_degrees(operator, 12) if degrees[-1] == 1]
    assert {sizes(degrees) for degrees in few} == {sizes(degrees) for degrees in every}
    assert len(few) == len({sizes(degrees) for degrees in few}) < len(every)


def test_costs_that_are_not_looked_up_count_as_nothing() -> None:
    one = problem(branches(), 4)
    whole, part = best_times_bound(one), best_times_bound(one, most_calls=12)
    assert whole.whole
    assert not part.whole
    assert part.time_ns < whole.time_ns
