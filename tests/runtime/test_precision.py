"""Steps in bfloat16 and float16: of the strategy, of one device, and of the module itself."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from graph.axes import AxisKind
from graph.importer import import_module
from graph.importing.formats import converted
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from graph.training import Training
from graph.zoo import Built
from runtime.jobs.job import JobResult, run_job
from runtime.jobs.models import ModelReference
from runtime.jobs.verify import RUN_LOSS, deviations_in
from tests.runtime import models
from tests.runtime.oracle import SEED, loss_of, make_job
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, in_turn, random_strategy

FORMATS = ("bfloat16", "float16")
# Of a gradient in float64, by norm: roundings one after another, some of which move a maximum to another window.
TOLERANCE = {"bfloat16": 0.1, "float16": 0.03}


def build(name: str, precision: str) -> Built:
    """Return a network of tests.runtime.models in a precision."""
    module, args, kwargs = getattr(models, name)()
    return converted(module, args, kwargs, precision)


def exact(name: str, precision: str) -> Built:
    """Return the same network in float64, from the same rounded weights and inputs."""
    return converted(*build(name, precision), "float64")


def reference(name: str, precision: str) -> ModelReference:
    return ModelReference("tests.runtime.test_precision:build", {"name": name, "precision": precision})


@lru_cache(maxsize=8)
def graph_of(name: str, precision: str) -> OperatorGraph:
    return import_module(*reference(name, precision).build(SEED), name=name)


def run(pool: LocalPool | None, name: str, precision: str, strategy: Strategy) -> JobResult:
    """Execute a strategy and check the verification of its first step."""
    graph = graph_of(name, precision)
    job = make_job(graph, strategy, reference(name, precision), "sgd")
    job = replace(job, training=Training(1, precision, "sgd"))
    result = run_job(job) if pool is None else pool.run(job)
    assert result is not None
    assert result.verification is not None
    assert result.verification.ok, result.verification.worst
    compared = {(one.what, one.name) for one in result.verification.deviations}
    assert {(f"gradient in {precision}", weight.name) for weight in graph.weights} <= compared
    assert ("loss", RUN_LOSS) in compared
    return result


def check_gradients(result: JobResult, name: str, precision: str) -> None:
    """Compare loss and gradients with those of the module in float64, trained by plain autograd."""
    wide = ModelReference("tests.runtime.test_precision:exact", {"name": name, "precision": precision})
    module, args, kwargs = wide.build(SEED)
    loss = loss_of(module(*args, **kwargs))
    loss.backward()
    tolerance = TOLERANCE[precision]
    assert result.losses[0] == pytest.approx(float(loss.detach()), rel=tolerance)
    assert result.gradients is not None
    largest = max(float(weight.grad.norm()) for weight in module.parameters() if weight.grad is not None)
    for weight_name, weight in module.named_parameters():
        assert weight.grad is not None
        found = torch.as_tensor(result.gradients[weight_name]).double()
        allowed = tolerance * max(float(weight.grad.norm()), 0.01 * largest)
        assert float((found - weight.grad).norm()) <= allowed, weight_name


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_data_parallelism_in_a_half_format_equals_the_module(
    pool: LocalPool, name: str, precision: str
) -> None:
    graph = graph_of(name, precision)
    result = run(pool, name, precision, by_kind(graph, [AxisKind.SAMPLE], [0, 1]))
    check_gradients(result, name, precision)


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_a_random_strategy_in_a_half_format_equals_the_module(
    pool: LocalPool, name: str, precision: str
) -> None:
    result = run(pool, name, precision, random_strategy(graph_of(name, precision), 2, 3))
    check_gradients(result, name, precision)


@pytest.mark.parametrize("precision", FORMATS)
def test_everything_that_is_trained_has_the_format(precision: str) -> None:
    graph = graph_of("convolutions", precision)
    assert graph.weight_dtype == precision
    kept = [*graph.weights, *(graph.value_by_name[name] for name, _ in graph.buffer_updates)]
    assert {value.spec.dtype for value in kept} == {precision, "int64"}  # batches are counted
    assert graph.value_by_name[graph.loss].spec.dtype == precision
    result = run(None, "convolutions", precision, in_turn(graph, [0]))
    assert result.losses[-1] < result.losses[0]


def test_what_is_not_rounding_is_no_deviation_that_is_allowed() -> None:
    generator = torch.Generator().manual_seed(1)
    exact_of = {name: torch.randn(40, generator=generator).double() for name in "ab"}
    alone = {name: tensor.to(torch.bfloat16) for name, tensor in exact_of.items()}
    rounded = {name: (tensor * (1 + 2**-7)).to(torch.bfloat16) for name, tensor in exact_of.items()}
    assert all(one.ok for one in deviations_in("bfloat16", rounded, alone, exact_of))
    for wrong in ({"a": alone["a"]}, {**alone, "b": 2 * alone["b"]}, {**alone, "b": alone["a"]}):
        found = deviations_in("bfloat16", wrong, alone, exact_of)
        assert [one.ok for one in found] == [True, False], wrong
    lost = {**alone, "b": alone["b"].clone().fill_(float("nan"))}
    assert not deviations_in("bfloat16", lost, alone, exact_of)[1].ok


@pytest.mark.cuda
def test_tf32_is_verified_against_float64_and_is_what_the_run_computes_in() -> None:
    graph = graph_of("convolutions", "float32")
    job = make_job(graph, in_turn(graph, [0]), reference("convolutions", "float32"), "sgd")
    for precision in ("tf32", "float32"):
        result = run_job(replace(job, training=Training(1, precision, "sgd")), "cuda:0")
        assert result is not None
        assert result.verification is not None
        assert result.verification.ok, result.verification.worst
        assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
        assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
