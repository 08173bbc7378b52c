"""A strategy of one size, made to fit another: legal, and the same where nothing differs."""

from __future__ import annotations

import numpy as np
import pytest

from graph.axes import tasks
from graph.errors import StrategyError
from graph.strategy import Configuration, Strategy
from search.space.baselines import data_parallel, random_strategy
from search.space.strategy_transfer import adapt
from tests.search.builders import branches, two_layers


def test_on_the_same_graph_and_devices_nothing_changes() -> None:
    graph = branches()
    for seed in range(20):
        strategy = random_strategy(graph, 6, np.random.default_rng(seed))
        assert adapt(strategy.to_json(graph), 6, graph, 6).digest == strategy.digest


@pytest.mark.parametrize(("made_for", "count"), [(4, 8), (8, 4), (4, 6), (6, 4), (7, 3), (1, 8), (8, 1)])
def test_what_is_adapted_is_legal_and_on_distinct_devices(made_for: int, count: int) -> None:
    graph, smaller = two_layers(samples=64), two_layers(samples=2)
    for seed in range(20):
        document = random_strategy(graph, made_for, np.random.default_rng(seed)).to_json(graph)
        for target in (graph, smaller):
            adapted = adapt(document, made_for, target, count)
            adapted.validate(target, count)
            for one in adapted.configurations:
                assert len(set(one.devices)) == tasks(one.degrees) <= count


def test_data_parallelism_grows_and_shrinks_with_the_devices() -> None:
    graph = two_layers(samples=64)
    for made_for, count in ((2, 8), (8, 2), (4, 4)):
        found = adapt(data_parallel(graph, made_for).to_json(graph), made_for, graph, count)
        assert found.digest == data_parallel(graph, count).digest


def test_devices_keep_their_place_among_all() -> None:
    graph = two_layers(samples=64)
    last = tuple(Configuration((1,) * len(one.space.axes), (3,)) for one in graph.operators)
    found = adapt(Strategy(graph.digest, last).to_json(graph), 4, graph, 8)
    assert {one.devices for one in found.configurations} == {(6,)}


def test_another_networks_strategy_is_refused() -> None:
    document = data_parallel(branches(), 4).to_json(branches())
    with pytest.raises(StrategyError, match="its operators are not those of"):
        adapt(document, 4, two_layers(), 4)
    own = data_parallel(two_layers(), 4).to_json(two_layers())
    next(iter(own["operators"].values()))["degrees"] = {"nothing": 2}
    with pytest.raises(StrategyError, match="has no axis nothing"):
        adapt(own, 4, two_layers(), 4)
