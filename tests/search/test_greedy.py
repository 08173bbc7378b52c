"""Greedy and random search: within their budget, never worse than their starts, and as their names say."""

from __future__ import annotations

import pytest

from graph.errors import UsageError
from graph.operators import OperatorGraph
from graph.training import Training
from search.algorithms.best_tracker import simulated
from search.algorithms.greedy import greedy, random_search
from search.algorithms.optcnn import default_space
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from search.space.baselines import data_parallel, expert, single_device
from search.space.groups import find_groups, follow
from tests.search.builders import MadeUpCosts, branches, devices, local_calls, two_layers


def problem(graph: OperatorGraph, count: int = 3) -> Problem:
    topology = devices(count, contention=0.3)
    return Problem(graph, topology, CostTable(MadeUpCosts(1e-7)), Training(4), LinkCosts(), local_calls)


@pytest.mark.parametrize("graph", [two_layers(), branches()], ids=["two layers", "branches"])
def test_greedy_ends_where_no_change_of_one_group_is_better(graph: OperatorGraph) -> None:
    one = problem(graph)
    found = greedy(one, most=5000)
    assert found.simulated < 5000
    assert found.outcome == simulated(one, found.strategy, "program")
    space = default_space(one)
    for group, choices in zip(find_groups(graph), space.choices, strict=True):
        for choice in choices[::7]:
            changed = list(found.strategy.configurations)
            for index, configuration in follow(group, choice).items():
                changed[index] = configuration
            other = type(found.strategy)(graph.digest, tuple(changed))
            assert simulated(one, other, "program") >= found.outcome


def test_neither_is_worse_than_what_it_starts_from() -> None:
    one = problem(branches())
    starts = [data_parallel(one.graph, 3), expert(one.graph, 3), single_device(one.graph)]
    best = min(simulated(one, start, "program") for start in starts)
    assert greedy(one, most=3).outcome == best
    assert greedy(one, starts, most=40).outcome <= best
    assert random_search(one, starts, most=3, seed=1).outcome == best
    assert random_search(one, starts, most=40, seed=1).outcome <= best


def test_random_search_is_reproducible_and_better_with_more() -> None:
    one = problem(branches())
    few, many, again = (random_search(one, most=most, seed=4) for most in (20, 80, 80))
    assert many == again
    assert (few.simulated, many.simulated) == (20, 80)
    assert many.outcome <= few.outcome
    assert random_search(one, most=80, seed=5).strategy != many.strategy


@pytest.mark.parametrize("algorithm", ["greedy", "random"])
def test_a_budget_of_nothing_is_refused(algorithm: str) -> None:
    one = problem(two_layers())
    with pytest.raises(UsageError, match=f"{algorithm}: may simulate 0 strategies, must be at least 1"):
        greedy(one, most=0) if algorithm == "greedy" else random_search(one, most=0, seed=0)
