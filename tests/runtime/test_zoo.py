"""Every network of the zoo, small preset, executed on two processes: loss and all gradients equal one device."""

from __future__ import annotations

import zlib
from functools import lru_cache

import pytest
import torch

from graph.axes import AxisKind
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.training import Training
from graph.zoo import zoo_names
from runtime.jobs import Job
from runtime.models import ModelReference
from runtime.pool import LocalPool
from tests.runtime.oracle import compare
from tests.runtime.strategies import by_kind, random_strategy, seeds

SEED = 5


def zoo_reference(name: str) -> ModelReference:
    return ModelReference("graph.zoo:build", {"name": name, "preset": "small"})


@lru_cache(maxsize=32)
def zoo_graph(name: str) -> OperatorGraph:
    module, args, kwargs = zoo_reference(name).build(SEED)
    return import_module(module, args, kwargs, name=name)


def draws(graph: OperatorGraph) -> bool:
    """True where the plain module draws dropout from torch's generator, which no graph can repeat."""
    return any(operator.target == "soapstone.dropout" for operator in graph.operators)


@lru_cache(maxsize=32)
def plain_gradients(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and every gradient of the plain module."""
    module, args, kwargs = zoo_reference(name).build(SEED)
    loss = module(*args, **kwargs)
    loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("choice", ["data parallel", *seeds(2, 20)])
@pytest.mark.parametrize("name", zoo_names())
def test_zoo_network(pool: LocalPool, name: str, choice: str | int) -> None:
    graph = zoo_graph(name)
    if choice == "data parallel":
        strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    else:
        strategy = random_strategy(graph, 2, zlib.crc32(f"{name} random {choice}".encode()))
    job = Job(
        graph=graph,
        strategy=strategy,
        node_of=(0, 0),
        training=Training(batch_size=4),
        model=zoo_reference(name),
        seed=SEED,
        iterations=1,
        warmup=0,
        verify=True,
        collect=True,
    )
    result = pool.run(job)
    assert result.verification is not None
    assert result.verification.ok, result.verification.worst
    trained = {weight.name for weight in graph.weights}
    assert {deviation.name for deviation in result.verification.deviations} == {
        "loss",
        "loss of the run",
        *trained,
    }
    assert result.gradients is not None
    if not draws(graph):
        loss, gradients = plain_gradients(name)
        assert result.losses[0] == pytest.approx(loss, rel=1e-4)
        compare(result.gradients, gradients, 1e-3, "gradient")
