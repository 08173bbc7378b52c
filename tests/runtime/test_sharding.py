"""Weights that their holders share train as those of the unpartitioned module, and take what the walk says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph.axes import AxisKind
from graph.strategy import Sharding, Strategy
from search.space.baselines import fsdp, shared
from tests.quick import seeds
from tests.runtime.oracle import assert_equal, graph_of, make_job, reference, train_plain
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, random_groups, random_strategy, randomly_shared
from tests.runtime.test_peaks import BATCHES, SIZES, check_against_a_run
from tests.runtime.viewed import KINDS

SHARED = (Sharding.OPTIMIZER, Sharding.PARAMETERS)
# What is kept in shares does all that a shared update does, and more.
MOSTLY = (pytest.param(Sharding.OPTIMIZER, marks=pytest.mark.slow), Sharding.PARAMETERS)


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


@pytest.mark.parametrize("name", sorted(BATCHES.keys() - {"perceptron"}))
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_kept_while_views_of_it_are_read(pool: LocalPool, kind: str) -> None:
    model = reference("viewed", kind=kind)
    graph = graph_of("viewed", kind=kind)
    assert all(graph.weight_readers[weight.name] for weight in graph.weights)
    result = pool.run(make_job(graph, fsdp(graph, 2), model))
    assert result.verification is not None
    assert result.verification.ok, result.verification.worst
    assert_equal(result, train_plain(model))


@pytest.mark.parametrize("seed", seeds(1, 40))
def test_any_strategy_may_share_weights_that_are_seen_through_views(pool: LocalPool, seed: int) -> None:
    """On up to four devices, views and their readers on different ones; every second time, groups are made again."""
    graph = graph_of("viewed")
    strategy = fsdp(graph, 4) if seed == 0 else random_strategy(graph, 4 - seed % 3, seed)
    strategy = strategy if seed == 0 else randomly_shared(strategy, graph, seed)
    if seed % 2:
        strategy = replace(strategy, recomputation=random_groups(graph, seed))
    check(pool, "viewed", strategy, "adam")


@pytest.mark.parametrize("name", ["viewed", *sorted(BATCHES)])
@pytest.mark.parametrize("level", MOSTLY)
def test_shared_weights_take_what_the_walk_says(pool: LocalPool, name: str, level: Sharding) -> None:
    graph = graph_of(name, batch_size=SIZES[name])
    strategy = shared(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), level)
    check_against_a_run(pool, name, strategy, "adam")
