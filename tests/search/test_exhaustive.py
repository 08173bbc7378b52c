"""Branch and bound: it finds what brute force finds, prunes what is no better, and says where it gives up."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graph.errors import UsageError
from graph.strategy import Configuration, Strategy
from graph.topology import load_topology
from graph.training import Training
from search.algorithms.exhaustive import all_alike, default_space, exhaustive
from search.bounds.critical_path import CriticalPaths
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts
from search.orders import Order
from search.problem import Problem
from search.simulate.task_graph import TaskGraphBuilder
from search.space.enumerated_space import contiguous_space, count_whole, whole_space
from search.tables import Tables
from tests.quick import seeds
from tests.search.builders import (
    MadeUpCosts,
    branches,
    devices,
    local_calls,
    random_anywhere,
    random_mesh,
    two_layers,
)
from tests.search.small import brute_force, small_problem, space_size, strategies

QUICK, LARGE = 2_000, 40_000


def problem(graph_and_count: int = 2, seconds_per_element: float = 1e-7) -> Problem:
    return Problem(
        branches(),
        devices(graph_and_count, contention=0.3),
        CostTable(MadeUpCosts(seconds_per_element)),
        Training(4),
        LinkCosts(),
        local_calls,
    )


@pytest.mark.parametrize("seed", range(24))
def test_it_finds_what_brute_force_finds(seed: int) -> None:
    one = small_problem(seed, QUICK)
    space = whole_space(one.graph, one.device_count)
    assert space.size == space_size(one.graph, one.device_count)
    assert exhaustive(one, space).outcome == brute_force(one, "program")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_it_finds_what_brute_force_finds_in_larger_spaces(seed: int) -> None:
    one = small_problem(seed, LARGE)
    assert exhaustive(one, whole_space(one.graph, one.device_count)).outcome == brute_force(one, "program")


@pytest.mark.parametrize("order", ["fifo", "priority"])
@pytest.mark.parametrize("seed", seeds(4, 24))
def test_it_finds_what_brute_force_finds_where_resources_choose(seed: int, order: Order) -> None:
    one = small_problem(seed, QUICK)
    assert exhaustive(one, whole_space(one.graph, one.device_count), order=order).outcome == brute_force(
        one, order
    )


@pytest.mark.parametrize("seed", seeds(3, 24))
def test_the_spaces_list_what_plain_loops_list(seed: int) -> None:
    one = small_problem(seed, QUICK)
    space = whole_space(one.graph, one.device_count)
    listed = {
        space.strategy(chosen) for chosen in itertools.product(*(range(len(some)) for some in space.choices))
    }
    assert listed == set(strategies(one.graph, one.device_count))
    compact = contiguous_space(one.graph, one.device_count)
    for few, all_of in zip(compact.choices, space.choices, strict=True):
        assert set(few) <= set(all_of)


@pytest.mark.parametrize("seed", seeds(3, 24))
def test_no_path_is_longer_than_the_step_of_any_strategy_that_makes_its_choice(seed: int) -> None:
    """Of every operator, under every configuration; not only the least of them."""
    one = small_problem(seed, 400)
    space = whole_space(one.graph, one.device_count)
    paths = CriticalPaths(Tables(one, space))
    builder = TaskGraphBuilder(one.graph, one.topology, one.costs, one.training, local_calls=local_calls)
    layout = builder.layout(space.strategy([0] * len(space.groups)))
    for chosen in itertools.product(*(range(len(some)) for some in space.choices)):
        layout.change(dict(enumerate(space.strategy(chosen).configurations)))
        makespan_ns, _ = layout.run("program")
        for index, place in space.group_of.items():
            longest = (paths.inner[index] + paths.outer[index])[chosen[place]].max()
            assert longest <= makespan_ns


def test_most_of_a_large_space_is_never_simulated() -> None:
    one = problem()
    space = whole_space(one.graph, 2)
    found = exhaustive(one, space)
    assert space.size == 800_000
    assert found.simulated < 2000
    assert found.bound_ns == found.outcome.step_time_ns


def test_a_start_that_is_better_than_the_space_is_kept() -> None:
    """Operators that do not follow their heads are outside."""
    one = problem()
    space = whole_space(one.graph, 2)
    inside = exhaustive(one, space)
    rng = np.random.default_rng(3)
    starts = [random_anywhere(one.graph, 2, rng) for _ in range(3)]
    assert exhaustive(one, space, starts).outcome <= inside.outcome
    assert exhaustive(one, space, [inside.strategy]).strategy == inside.strategy


def test_renaming_devices_that_are_alike_in_a_circle_changes_no_step_time() -> None:
    one = problem(4)
    assert all_alike(one.topology)
    builder = TaskGraphBuilder(one.graph, one.topology, one.costs, one.training, local_calls=local_calls)
    rng = np.random.default_rng(5)
    for round_number in range(60):
        draw = random_mesh if round_number % 2 else random_anywhere
        strategy = draw(one.graph, 4, rng)
        turn = int(rng.integers(1, 4))
        renamed = [(device + turn) % 4 for device in range(4)]
        other = Strategy(
            strategy.graph_digest,
            tuple(
                Configuration(c.degrees, tuple(renamed[device] for device in c.devices))
                for c in strategy.configurations
            ),
        )
        assert builder.layout(strategy).run("program")[0] == builder.layout(other).run("program")[0]


def test_nodes_make_devices_different() -> None:
    assert not all_alike(load_topology("p100-cluster", nodes=2))
    assert all_alike(load_topology("p100-cluster", nodes=1))


def test_too_many_configurations_and_too_long_a_search_are_refused() -> None:
    one = problem(4)
    with pytest.raises(
        UsageError, match=r"a group has \d+ configurations on 4 devices, must have at most 160"
    ):
        exhaustive(one, whole_space(one.graph, 4))
    with pytest.raises(UsageError, match="2 partial strategies were followed up, must be at most 1"):
        exhaustive(problem(), whole_space(branches(), 2), most_visited=1)


def test_the_default_space_is_whole_where_that_is_small() -> None:
    assert default_space(problem()).whole
    assert not default_space(problem(4)).whole
    assert count_whole(two_layers().operators[0], 3) == 3 + 4 * 6 + 4 * 6
