"""Strategies carried over to rewritten graphs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.substitutions.rewriting import matches, rewritten
from graph.zoo import build
from search.space.baselines import data_parallel, single_device
from search.space.carried import carried
from tests.runtime.strategies import random_strategy, seeds


@cache
def imported(name: str) -> OperatorGraph:
    with torch.device("meta"):
        return import_module(*build(name, "small"), name=name)


@pytest.mark.parametrize("name", ["inception", "bert-large"])
def test_data_parallelism_stays_data_parallelism_and_one_device_one(name: str) -> None:
    graph = imported(name)
    other = rewritten(graph, matches(graph))
    assert (
        carried(data_parallel(graph, 4), graph, other).configurations
        == data_parallel(other, 4).configurations
    )
    assert carried(single_device(graph), graph, other) == single_device(other)


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_any_strategy_carried_over_is_legal_and_keeps_what_stays(seed: int) -> None:
    graph = imported("inception")
    other = rewritten(graph, matches(graph))
    strategy = random_strategy(graph, 3, seed)
    result = carried(strategy, graph, other)
    result.validate(other, 3)
    for operator, configuration in zip(other.operators, result.configurations, strict=True):
        if operator.name in graph.index_by_name:
            assert configuration == strategy.configurations[graph.index_by_name[operator.name]]
