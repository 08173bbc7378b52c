"""The unpartitioned module, trained by torch.optim in one process: what an execution must reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from graph.training import Training
from graph.zoo import Built
from profiler.operators import ExecutionContext
from runtime.jobs.job import Job, JobResult
from runtime.jobs.models import ModelReference, split_batch, tensors_of
from runtime.jobs.verified_program import in_double, in_double_on
from runtime.jobs.verify import interpret
from tests.runtime.pool import LocalPool

SEED = 11
LEARNING_RATE = 0.05
STEPS = 3
# Sums in another order: float32 has 24 bits, and a hundred layers amplify.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Expected:
    """Losses of every step, gradients of the first one, weights and buffers after the last one."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


@lru_cache(maxsize=64)
def graph_of(name: str, **keywords: int | str) -> OperatorGraph:
    """Return the graph of a network of tests.runtime.models."""
    module, args, kwargs = reference(name, **keywords).build(SEED)
    return import_module(module, args, kwargs, name=name)


def reference(name: str, **keywords: int | str) -> ModelReference:
    """Return the reference of a network of tests.runtime.models."""
    return ModelReference(f"tests.runtime.models:{name}", keywords)


def make_job(
    graph: OperatorGraph, strategy: Strategy, model: ModelReference, optimizer: str = "momentum"
) -> Job:
    """Return a job of three collected training steps, none of which is timed."""
    return Job(
        graph=graph,
        strategy=strategy,
        node_of=(0,) * strategy.device_count,
        training=Training(batch_size=1, optimizer=optimizer),
        model=model,
        seed=SEED,
        iterations=0,
        warmup=STEPS,
        learning_rate=LEARNING_RATE,
        collect=True,
        verify=True,
    )


def make_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's own optimizer of that name."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=LEARNING_RATE)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9 if name == "momentum" else 0.0)


def loss_of(result: Any) -> Tensor:
    """Return the loss that a module's result is, or holds."""
    loss: Tensor = result if isinstance(result, Tensor) else result.loss
    return loss


def train_plain(
    model: ModelReference,
    optimizer: str = "momentum",
    seed: int = SEED,
    of_one: OperatorGraph | None = None,
    count: int = 1,
) -> Expected:
    """Train the plain module for three steps.

    Each is of `count` micro-batches, whose gradients add up; `of_one`: the graph of one of them.
    """
    built = model.build(seed)
    batches = [built] if of_one is None else split_batch(of_one, built, count)
    module = built[0]
    stepper = make_optimizer(optimizer, list(module.parameters()))
    losses = []
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        stepper.zero_grad()
        total = 0.0
        for _, args, kwargs in batches:
            loss = loss_of(module(*args, **kwargs)) / count
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        if step == 0:
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
        stepper.step()
    return Expected(
        tuple(losses),
        gradients,
        {name: parameter.detach() for name, parameter in module.named_parameters()},
        dict(module.named_buffers()),
    )


def assert_equal(result: JobResult, expected: Expected, tolerance: float = TOLERANCE) -> None:
    """Check losses, every gradient, weights and buffers against the plain module."""
    assert result.losses == tuple(_close(loss, tolerance) for loss in expected.losses)
    assert result.gradients is not None
    assert result.weights is not None
    assert result.buffers is not None
    assert sorted(result.gradients) == sorted(expected.gradients)
    compare(result.gradients, expected.gradients, tolerance, "gradient")
    compare(result.weights, expected.weights, 10 * tolerance, "weight")
    compare(result.buffers, expected.buffers, 10 * tolerance, "buffer")


def assert_same_step(graph: OperatorGraph, other: OperatorGraph, built: Built) -> None:
    """Check that a rewritten graph gives in float64 the loss, gradients and buffers of the imported graph."""
    context = ExecutionContext(seed=3)
    tensors = tensors_of(graph, built).map(in_double_on(context.device))
    expected, actual = (interpret(in_double(of), tensors, context) for of in (graph, other))

    assert actual.loss == pytest.approx(expected.loss, rel=1e-12)
    assert actual.gradients.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(actual.gradients[key], gradient, rtol=1e-8, atol=1e-10)
    for key, buffer in expected.buffers.items():
        torch.testing.assert_close(actual.buffers[key], buffer, rtol=1e-9, atol=1e-12)


def compare(
    found: Mapping[str, object],
    expected: Mapping[str, Tensor],
    tolerance: float,
    what: str,
    noise: float = 0.0,
) -> None:
    """Compare tensors by name, relative to each one's largest element (and a little to the largest of all).

    Differences up to `noise` are allowed in any case.
    """
    scale = max((float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()), default=0.0)
    for name, tensor in found.items():
        difference = (torch.as_tensor(tensor).double() - expected[name].double()).abs().max()
        allowed = tolerance * max(float(expected[name].abs().max()), 0.01 * scale) + noise
        assert float(difference) <= allowed, (
            f"{what} of {name} is off by {float(difference)}, allowed {allowed}"
        )


def _close(loss: float, tolerance: float) -> object:
    return pytest.approx(loss, rel=tolerance)


def check(pool: LocalPool, graph: OperatorGraph, strategy: Strategy, model: ModelReference) -> None:
    """Run a strategy and compare it with the plain module."""
    result = pool.run(make_job(graph, strategy, model))
    assert result.verification is not None
    assert result.verification.ok, result.verification.worst
    assert_equal(result, train_plain(model))
