"""Strategies carried over to rewritten graphs, back, and from one to another."""

from __future__ import annotations

import random

import pytest

from graph.substitutions.merging import MERGING
from graph.substitutions.rewriting import every_substitution, rewritten
from search.space.baselines import data_parallel, single_device
from search.space.carried import carried
from tests.graphs import small_graph
from tests.quick import seeds
from tests.runtime.strategies import random_strategy


@pytest.mark.parametrize("name", ["inception", "bert-large"])
def test_data_parallelism_stays_data_parallelism_and_one_device_one(name: str) -> None:
    graph = small_graph(name)
    other = rewritten(graph, every_substitution(graph))
    assert (
        carried(data_parallel(graph, 4), graph, other).configurations
        == data_parallel(other, 4).configurations
    )
    assert carried(single_device(graph), graph, other) == single_device(other)


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_any_strategy_carried_over_is_legal_and_keeps_what_stays(seed: int) -> None:
    graph = small_graph("inception")
    other = rewritten(graph, every_substitution(graph))
    strategy = random_strategy(graph, 3, seed)
    result = carried(strategy, graph, other)
    result.validate(other, 3)
    for operator, configuration in zip(other.operators, result.configurations, strict=True):
        if operator.name in graph.index_by_name:
            assert configuration == strategy.configurations[graph.index_by_name[operator.name]]


@pytest.mark.parametrize("name", ["inception", "bert-large"])
@pytest.mark.parametrize("seed", seeds(2, 10))
def test_between_any_two_rewritten_graphs_and_back_it_is_legal_and_keeps_what_both_have(
    name: str, seed: int
) -> None:
    graph, draw = small_graph(name), random.Random(seed)
    every = every_substitution(graph)
    one, other = (rewritten(graph, draw.sample(every, draw.randint(0, len(every)))) for _ in range(2))
    for before, after in ((one, other), (other, one), (one, graph), (graph, other)):
        strategy = random_strategy(before, 3, seed)
        result = carried(strategy, before, after)
        result.validate(after, 3)
        for operator, configuration in zip(after.operators, result.configurations, strict=True):
            if operator.name in before.index_by_name:
                assert configuration == strategy.configurations[before.index_by_name[operator.name]]
    again = carried(carried(data_parallel(one, 4), one, other), other, one)
    assert again.configurations == data_parallel(one, 4).configurations


def test_parts_of_a_merged_operator_get_its_configuration_back() -> None:
    graph = small_graph("bert-large")
    other = rewritten(graph, every_substitution(graph))
    strategy = random_strategy(other, 3, 5)
    result = carried(strategy, other, graph)
    for substitution in other.substitutions:
        if substitution.rule not in MERGING:
            continue
        merged = other.operator_by_name["+".join(substitution.operators)]
        for name in substitution.operators:
            axes = graph.operator_by_name[name].space.axes
            own = result.configurations[graph.index_by_name[name]]
            given = strategy.configurations[other.index_by_name[merged.name]]
            assert own.devices == given.devices
            assert axes != merged.space.axes or own == given
