"""Weights that their holders share train as those of the unpartitioned module, and take what the walk says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from graph.axes import AxisKind
from graph.operators import OperatorGraph
from graph.strategy import Sharding, Strategy, stays_whole
from runtime.pool import LocalPool
from search.baselines import shared
from tests.runtime.oracle import assert_equal, graph_of, make_job, reference, train_plain
from tests.runtime.strategies import by_kind, random_strategy, seeds
from tests.runtime.test_peaks import BATCHES, check_against_a_run

SHARED = (Sharding.OPTIMIZER, Sharding.PARAMETERS)
# What is kept in shares does all that a shared update does, and more.
MOSTLY = (pytest.param(Sharding.OPTIMIZER, marks=pytest.mark.slow), Sharding.PARAMETERS)


def randomly_shared(strategy: Strategy, graph: OperatorGraph, seed: int) -> Strategy:
    """Return the strategy with what is shared of each weight drawn at random."""
    generator, whole = random.Random(seed), stays_whole(graph)
    levels = [
        Sharding.OPTIMIZER if one.name in whole else generator.choice(list(Sharding)) for one in graph.weights
    ]
    return replace(strategy, sharding=tuple(levels))


def check(pool: LocalPool, name: str, strategy: Strategy, optimizer: str) -> None:
    """Run a strategy, and compare losses, gradients and weights after three steps with the plain module's."""
    graph, model = graph_of(name), reference(name)
    result = pool.run(make_job(graph, strategy, model, optimizer))
    assert result.verification is not None
    assert result.verification.ok, result.verification.worst
    if name == "dropped":
        # The module's own dropout draws otherwise.
        return
    assert_equal(result, train_plain(model, optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("level", SHARED)
def test_a_split_batch_trains_as_the_module(pool: LocalPool, level: Sharding, optimizer: str) -> None:
    graph = graph_of("perceptron")
    strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    check(pool, "perceptron", shared(graph, strategy, level), optimizer)


@pytest.mark.parametrize("name", sorted(BATCHES))
@pytest.mark.parametrize("level", MOSTLY)
def test_networks_train_as_their_modules(pool: LocalPool, name: str, level: Sharding) -> None:
    graph = graph_of(name)
    check(pool, name, shared(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), level), "momentum")


@pytest.mark.parametrize("name", sorted(BATCHES))
@pytest.mark.parametrize("seed", seeds(1, 12))
def test_any_strategy_may_share_any_weight(pool: LocalPool, name: str, seed: int) -> None:
    graph = graph_of(name)
    strategy = random_strategy(graph, 2 + 2 * (seed % 2), seed)
    check(pool, name, randomly_shared(strategy, graph, seed), "adam")


@pytest.mark.parametrize("name", sorted(BATCHES))
@pytest.mark.parametrize("level", MOSTLY)
def test_shared_weights_take_what_the_walk_says(pool: LocalPool, name: str, level: Sharding) -> None:
    graph = graph_of(name, batch_size=BATCHES[name])
    strategy = shared(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), level)
    check_against_a_run(pool, name, strategy, "adam")


@pytest.mark.parametrize("level", SHARED)
def test_a_recorded_step_says_when_weights_are_gathered(pool: LocalPool, level: Sharding) -> None:
    graph = graph_of("perceptron")
    strategy = shared(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), level)
    job = replace(make_job(graph, strategy, reference("perceptron")), recorded=1, verify=False)
    ((first, second),) = pool.run(job).recorded
    for spans in (first, second):
        names = {span.label.name for span in spans}
        assert "pack gradients to share" in names
        assert ("pack shares of weights" in names) == (level is Sharding.PARAMETERS)
        assert "wait for weights" in names
