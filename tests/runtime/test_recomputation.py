"""Activations that are made again train as those that are kept, and draw the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graph.axes import AxisKind
from graph.zoo import zoo_names
from tests.quick import seeds
from tests.runtime.networks import DATA_PARALLEL, check_network
from tests.runtime.oracle import graph_of, make_job, reference
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, groups_of, random_groups, random_strategy, randomly_shared
from tests.runtime.test_sharding import check

NAMES = ("convolutions", "dropped", "perceptron", "recurrent")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", seeds(0, 12))
def test_any_strategy_may_make_any_group_again(pool: LocalPool, name: str, seed: int) -> None:
    graph = graph_of(name)
    strategy = random_strategy(graph, 2 + 2 * (seed % 2), seed)
    check(pool, name, replace(strategy, recomputation=random_groups(graph, seed)), "adam")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "recurrent"])
def test_what_is_made_again_is_the_same_to_the_bit(pool: LocalPool, name: str) -> None:
    """Dropout draws the same, statistics are renewed once: nothing tells the two ways apart.

    The recurrent network's weights are read in several groups, whose gradients are then added in another order.
    """
    graph, model = graph_of(name), reference(name)
    plain = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    kept = pool.run(make_job(graph, plain, model))
    again = pool.run(make_job(graph, replace(plain, recomputation=groups_of(graph, 3)), model))
    assert again.losses == kept.losses
    for one, other in (
        (again.gradients, kept.gradients),
        (again.weights, kept.weights),
        (again.buffers, kept.buffers),
    ):
        assert one is not None
        assert other is not None
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", seeds(1, 12))
def test_groups_may_be_made_again_from_weights_kept_in_shares(pool: LocalPool, name: str, seed: int) -> None:
    graph = graph_of(name)
    strategy = randomly_shared(random_strategy(graph, 2 + 2 * (seed % 2), seed), graph, seed)
    check(pool, name, replace(strategy, recomputation=random_groups(graph, 100 + seed)), "adam")


def test_a_recorded_step_says_what_is_made_again(pool: LocalPool) -> None:
    graph = graph_of("perceptron")
    plain = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    strategy = replace(plain, recomputation=groups_of(graph, 3)[:1])
    job = replace(make_job(graph, strategy, reference("perceptron")), recorded=1, verify=False)
    ((first, second),) = pool.run(job).recorded
    within = {operator.name for operator in graph.operators[:3] if graph.has_backward(operator)}
    for spans in (first, second):
        by_kind_of_span = {
            kind: {span.label.subject for span in spans if span.label.kind == kind}
            for kind in ("forward", "recompute", "backward")
        }
        assert by_kind_of_span["recompute"] == within
        assert within <= by_kind_of_span["forward"]
        assert within <= by_kind_of_span["backward"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [DATA_PARALLEL, 1, 2])
@pytest.mark.parametrize("name", zoo_names())
def test_networks_of_the_zoo_make_random_groups_again(pool: LocalPool, name: str, choice: str | int) -> None:
    check_network(pool, name, choice, makes_much_again=True)
