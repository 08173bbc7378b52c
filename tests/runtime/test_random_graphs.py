"""Random networks under random legal strategies on real processes: losses, gradients and weights equal one device's."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from graph.aliasing import may_alias
from graph.calls import call_from_json
from graph.errors import RuntimeFailure
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.rules import backward_flops, bytes_moved, flops, local_calls
from graph.strategy import Strategy
from graph.training import OPTIMIZERS
from profiler.operators import ExecutionContext, compile_call, random_inputs
from runtime.jobs.job import Job, JobResult
from runtime.jobs.models import ModelReference
from runtime.jobs.verify import RUN_LOSS
from tests.quick import seeds
from tests.reference.interpreter import interpret
from tests.runtime import oracle
from tests.runtime.oracle import SEED, Expected, compare, train_plain
from tests.runtime.pool import LocalPool
from tests.runtime.random_graphs import RandomNetwork
from tests.runtime.strategies import random_strategy, randomly_shared

# float64: sums in another order, amplified by three steps.
TOLERANCE = 1e-8
# Gradients that are zero but for rounding.
NOISE = 1e-12
# A network whose loss grows so many times depends on every rounding: weights that differ by 1e-15 become others
# altogether in three steps. Its first step alone is compared.
DIVERGED = 1e6
PROCESSES = (2, 3, 4)


def reference(network: int, dtype: str = "float64") -> ModelReference:
    """Return the reference of a random network."""
    return ModelReference("tests.runtime.random_graphs:random_network", {"network": network, "dtype": dtype})


def make_job(graph: OperatorGraph, model: ModelReference, processes: int, network: int) -> Job:
    """Return a job of three steps under a random strategy, on one node or several, with any optimizer.

    Of every second network the weights are shared at random.
    """
    generator = random.Random(f"{network} {processes}")
    strategy = random_strategy(graph, processes, generator.randrange(1 << 30))
    if network % 2:
        strategy = randomly_shared(strategy, graph, network)
    nodes = tuple(sorted(generator.choices(range(2), k=processes)))
    return replace(oracle.make_job(graph, strategy, model, generator.choice(OPTIMIZERS)), node_of=nodes)


def report(module: RandomNetwork, graph: OperatorGraph, strategy: Strategy) -> str:
    """Return what was run; the seeds are in the test's name."""
    weights = [f"{name}: {tuple(weight.shape)}" for name, weight in module.named_parameters()]
    return "\n".join((module.source, *weights, json.dumps(strategy.to_json(graph)["operators"])))


def run(pool: LocalPool, module: RandomNetwork, job: Job) -> JobResult:
    """Run a job; check it against the graph on one device, as `app run --verify` does."""
    try:
        result = pool.run(job)
    except RuntimeFailure as error:
        raise AssertionError(f"{error}\n{report(module, job.graph, job.strategy)}") from None
    assert result.verification is not None
    # The run's own loss is compared in the run's own precision, relative to itself; it may be close to zero.
    compared = [item for item in result.verification.deviations if item.name != RUN_LOSS]
    wrong = [item for item in compared if not item.ok and not item.largest < NOISE]
    assert not wrong, f"{wrong}\n{report(module, job.graph, job.strategy)}"
    return result


def check_equal(result: JobResult, expected: Expected, about: str) -> None:
    """Compare losses of all steps, gradients of the first, weights and buffers after the last."""
    assert result.gradients is not None
    assert result.weights is not None
    assert result.buffers is not None
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE), about
    assert sorted(result.gradients) == sorted(expected.gradients), about
    try:
        compare(result.gradients, expected.gradients, TOLERANCE, "gradient", NOISE)
        compare(result.weights, expected.weights, 100 * TOLERANCE, "weight", NOISE)
        compare(result.buffers, expected.buffers, 100 * TOLERANCE, "buffer", NOISE)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{about}") from None


@pytest.mark.parametrize("network", seeds(2, 60))
def test_local_calls_of_random_networks_can_be_measured(network: int) -> None:
    """Each runs on random inputs, read back from its key, gives what it promises, and has costs."""
    module, inputs, _ = reference(2000 + network).build(SEED)
    graph = import_module(module, inputs, name=f"network{network}")
    strategy = random_strategy(graph, 4, network)
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        for call in dict.fromkeys(local_calls(graph, operator, configuration.degrees)):
            again = call_from_json(json.loads(call.key))
            inputs = random_inputs(again, "cpu")
            outputs = compile_call(again)(inputs, ExecutionContext())
            if not may_alias(operator.target):
                memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
                assert all(output.untyped_storage().data_ptr() not in memory for output in outputs), call
            assert tuple(tuple(output.shape) for output in outputs) == tuple(
                spec.shape for spec in call.outputs
            )
            assert min(flops(call), backward_flops(call), bytes_moved(call)) >= 0


@pytest.mark.parametrize("network", seeds(4, 300))
def test_random_networks(pool: LocalPool, network: int) -> None:
    """The plain module's losses, gradients, weights; the imported graph's first step where that draws or diverges."""
    model = reference(network)
    module, inputs, _ = model.build(SEED)
    assert isinstance(module, RandomNetwork)
    graph = import_module(module, inputs, name=f"network{network}")
    for processes in PROCESSES:
        job = make_job(graph, model, processes, network)
        result = run(pool, module, job)
        about = report(module, graph, job.strategy)
        if module.exact:
            expected = train_plain(model, job.training.optimizer)
            if max(map(abs, expected.losses)) < DIVERGED * max(1.0, abs(expected.losses[0])):
                check_equal(result, expected, about)
                continue
        first = interpret(
            graph,
            dict(module.named_parameters()),
            dict(module.named_buffers()),
            inputs,
            ExecutionContext(seed=SEED, step=0),
        )
        assert result.losses[0] == pytest.approx(float(first.loss), rel=TOLERANCE, abs=TOLERANCE), about
        assert result.gradients is not None
        compare(result.gradients, first.gradients, TOLERANCE, "gradient", NOISE)


@pytest.mark.parametrize("network", seeds(1, 60))
def test_random_networks_in_single_precision(pool: LocalPool, network: int) -> None:
    """As a user runs them: float32, with batch norm of each part's own statistics in every second network."""
    model = reference(1000 + network, "float32")
    module, inputs, _ = model.build(SEED)
    assert isinstance(module, RandomNetwork)
    mode = "local" if network % 2 else "synchronized"
    graph = import_module(module, inputs, name=f"network{network}", batch_norm=mode)
    job = make_job(graph, model, PROCESSES[network % 3], network)
    result = run(pool, module, job)
    assert all(torch.isfinite(torch.tensor(result.losses)))
