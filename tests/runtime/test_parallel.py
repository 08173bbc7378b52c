"""Every kind of split, on real processes: losses, every gradient and three steps' weights equal the plain module's."""

from __future__ import annotations

import pytest
import torch

from graph.axes import AxisKind
from graph.importer import import_module
from graph.strategy import Configuration, Strategy
from profiler.operators import ExecutionContext
from runtime.jobs.job import run_job
from tests.quick import seeds
from tests.reference.interpreter import interpret
from tests.runtime.oracle import (
    SEED,
    TOLERANCE,
    assert_equal,
    check,
    compare,
    graph_of,
    make_job,
    reference,
    train_plain,
)
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, in_turn, random_strategy

PLAIN = ("perceptron", "convolutions", "recurrent", "branches")


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_one_device_equals_the_module(name: str, optimizer: str) -> None:
    graph = graph_of(name)
    model = reference(name)
    result = run_job(make_job(graph, in_turn(graph, [0]), model, optimizer))
    assert result is not None
    assert_equal(result, train_plain(model, optimizer))


@pytest.mark.parametrize("processes", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    "kind", [AxisKind.SAMPLE, AxisKind.PARAMETER, AxisKind.REDUCTION, AxisKind.ATTRIBUTE]
)
def test_one_kind_of_split(pool: LocalPool, name: str, kind: AxisKind, processes: int) -> None:
    """Batches and widths do not divide evenly; reductions give partial sums, heights halos."""
    graph = graph_of(name)
    strategy = by_kind(graph, [kind], list(range(processes)))
    check(pool, graph, strategy, reference(name))


@pytest.mark.parametrize("name", PLAIN)
def test_operators_on_disjoint_devices(pool: LocalPool, name: str) -> None:
    graph = graph_of(name)
    check(pool, graph, in_turn(graph, [2, 0, 1]), reference(name))


@pytest.mark.parametrize("name", PLAIN)
def test_replicas(pool: LocalPool, name: str) -> None:
    """Every operator computed twice; each replica's gradient counts its own readers."""
    graph = graph_of(name)
    configurations = tuple(
        Configuration((*(1 for _ in operator.space.axes[:-1]), 2), (index % 2, 1 - index % 2))
        for index, operator in enumerate(graph.operators)
    )
    check(pool, graph, Strategy(graph.digest, configurations), reference(name))


@pytest.mark.parametrize("name", PLAIN)
def test_several_tasks_on_one_device(pool: LocalPool, name: str) -> None:
    """Samples in three parts on two devices."""
    graph = graph_of(name)
    strategy = by_kind(graph, [AxisKind.SAMPLE, AxisKind.PARAMETER], [1, 0, 1])
    check(pool, graph, strategy, reference(name))


@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_random_legal_strategies(pool: LocalPool, name: str, processes: int, seed: int) -> None:
    graph = graph_of(name)
    check(pool, graph, random_strategy(graph, processes, seed), reference(name))


@pytest.mark.parametrize("seed", seeds(2, 20))
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_dropout_and_attention(pool: LocalPool, processes: int, seed: int) -> None:
    """Draws depend on (seed, step, operator, global index), not on the split; heads are inner factors of a dim."""
    graph = graph_of("dropped")
    model = reference("dropped")
    whole = run_job(make_job(graph, in_turn(graph, [0]), model))
    split = pool.run(make_job(graph, random_strategy(graph, processes, seed), model))
    assert whole is not None
    assert split.verification is not None
    assert split.verification.ok, split.verification.worst
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    module, args, _ = model.build(SEED)
    expected = interpret(
        graph, dict(module.named_parameters()), {}, args, ExecutionContext(seed=SEED, step=0)
    )
    assert split.gradients is not None
    compare(split.gradients, expected.gradients, TOLERANCE, "gradient")
    assert len(set(whole.losses)) == len(whole.losses)


def test_local_batch_norm_uses_each_parts_statistics(pool: LocalPool) -> None:
    """As DistributedDataParallel: samples 0-2 and 3-4 are normalized on their own; the loss is the mean of all."""
    model = reference("convolutions")
    module, (images, targets), _ = model.build(SEED)
    graph = import_module(module, (images, targets), name="local", batch_norm="local")
    strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    result = pool.run(make_job(graph, strategy, model))
    losses = [
        module(images[part], targets[part]) * count for part, count in ((slice(3), 3), (slice(3, 5), 2))
    ]
    loss = torch.stack(losses).sum() / 5
    loss.backward()
    assert result.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.gradients is not None
    expected = {
        name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
    }
    compare(result.gradients, expected, TOLERANCE, "gradient")
    assert result.verification is not None
    assert result.verification.ok
