"""What is compiled between communications trains as what is not, and draws the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graph.axes import AxisKind
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.plan import build_plan
from graph.strategy import Strategy
from graph.stretches import stretches
from profiler.operators.counter_rng import keep_mask
from tests.quick import few, seeds
from tests.runtime.oracle import (
    SEED,
    TOLERANCE,
    assert_equal,
    compare,
    graph_of,
    make_job,
    reference,
    train_plain,
)
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, random_strategy


def check(pool: LocalPool, name: str, strategy: Strategy) -> None:
    """Train with all stretches compiled, and compare with the plain module."""
    graph, model = graph_of(name), reference(name)
    compiled = with_stretches(graph, strategy)
    # Verifying would compile all of it once more.
    assert_equal(pool.run(replace(make_job(graph, compiled, model), verify=False)), train_plain(model))


def with_stretches(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    plan = build_plan(graph, strategy, (0,) * strategy.device_count)
    return replace(strategy, compiled=stretches(plan))


@pytest.mark.parametrize("name", ["perceptron", pytest.param("convolutions", marks=pytest.mark.slow)])
def test_compiled_stretches_train_as_the_module(pool: LocalPool, name: str) -> None:
    strategy = by_kind(graph_of(name), [AxisKind.SAMPLE], [0, 1])
    assert with_stretches(graph_of(name), strategy).compiled
    check(pool, name, strategy)


@pytest.mark.parametrize("name", few(("perceptron",), ["convolutions", "perceptron", "recurrent"]))
@pytest.mark.parametrize("seed", seeds(1, 8))
def test_any_strategy_may_compile_its_stretches(pool: LocalPool, name: str, seed: int) -> None:
    check(pool, name, random_strategy(graph_of(name), 2, seed))


def test_compiled_dropout_draws_the_same_in_every_step(pool: LocalPool) -> None:
    graph, model = graph_of("dropped"), reference("dropped")
    plain = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    compiled = with_stretches(graph, plain)
    assert any(
        "dropout" in graph.operators[index].target
        for s in compiled.compiled
        for index in range(s.first, s.last)
    )
    apart = pool.run(make_job(graph, plain, model))
    together = pool.run(make_job(graph, compiled, model))
    # Another mask in any of the steps would change the loss by a tenth.
    assert together.losses == pytest.approx(apart.losses, rel=1e-6)
    assert together.weights is not None
    assert apart.weights is not None
    expected = {name: torch.as_tensor(weight) for name, weight in apart.weights.items()}
    compare(together.weights, expected, TOLERANCE, "weight")


def test_statistics_of_each_part_are_sent_behind_the_stretch_that_makes_them(pool: LocalPool) -> None:
    model = reference("convolutions")
    module, args, _ = model.build(SEED)
    graph = import_module(module, args, name="local", batch_norm="local")
    plain = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    compiled = with_stretches(graph, plain)
    (whole,) = compiled.compiled
    # The parts of the loss are joined before its last operator.
    assert (whole.first, whole.last) == (graph.order.of_loss[0], graph.order.of_loss[-2])
    # Verifying would compile all of it once more.
    apart, together = (
        pool.run(replace(make_job(graph, strategy, model), verify=False)) for strategy in (plain, compiled)
    )
    assert together.losses == pytest.approx(apart.losses, rel=1e-5)
    for name in ("gradients", "weights", "buffers"):
        made, expected = getattr(together, name), getattr(apart, name)
        assert made.keys() == expected.keys()
        compare(made, {key: torch.as_tensor(value) for key, value in expected.items()}, TOLERANCE, name)


def test_a_mask_of_a_step_in_a_tensor_is_that_of_the_step() -> None:
    region = (((0, 2), (3, 5)), ((1, 9),))
    for step in range(3):
        drawn = keep_mask(region, (6, 10), 0.3, (7, step, 2), torch.device("cpu"))
        traced = keep_mask(region, (6, 10), 0.3, (7, torch.tensor(step), 2), torch.device("cpu"))
        assert torch.equal(drawn, traced)
    assert not torch.equal(drawn, keep_mask(region, (6, 10), 0.3, (7, 0, 2), torch.device("cpu")))
