"""Networks that come with Soapstone, small preset, executed by strategies and trained by their own module.

Every case compares in float64 with the graph, and the graph with the module itself, dropout included (`verify`). Data
parallelism runs in float32, as users run it, and compares loss and gradients with the plain module. Random strategies
run in float64, where rounding cannot hide a mistake nor a hundred layers amplify it, and compare three steps of
training by torch.optim: losses, the first gradients, and how far every weight and buffer has moved. There
dropout cannot be repeated by a plain module: every second random case goes without.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from graph.axes import AxisKind
from graph.importer import import_module
from graph.operators import FLOATING, OperatorGraph
from graph.zoo import Built, build, zoo_entry
from runtime.jobs.models import ModelReference
from runtime.jobs.verify import EAGER, EAGER_SECOND, RUN_LOSS
from tests.quick import seeds
from tests.runtime.oracle import compare, make_job, train_plain
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, random_groups, random_strategy

SEED = 5
DATA_PARALLEL = "data parallel"
# Sums in another order, by the dtype that a network computes in: some convert to float32 whatever they are given.
TOLERANCE = {"float32": 1e-3, "mixed": 1e-4, "float64": 1e-8}


def in_double(name: str, **sizes: Any) -> Built:
    """Return a network of the zoo, small preset, with weights, buffers and inputs in float64."""
    module, args, kwargs = build(name, "small", **sizes)
    inputs = tree_map(_double, (args, kwargs))
    return module.double(), *inputs


def _double(item: Any) -> Any:
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


@dataclass(frozen=True)
class Network:
    """A network of the zoo, small preset, in float32 or float64, with its preset's dropout or with none."""

    name: str
    dropout: bool = True
    double: bool = False

    @property
    def reference(self) -> ModelReference:
        """Return how processes build it."""
        sizes: dict[str, Any] = {"name": self.name} if self.dropout else {"name": self.name, "dropout": 0.0}
        if self.double:
            return ModelReference("tests.runtime.networks:in_double", sizes)
        return ModelReference("graph.zoo:build", {**sizes, "preset": "small"})

    @property
    def plain(self) -> ModelReference:
        """Return the same network with operators that torch itself has in its dtype: grouped products lack float64."""
        given = self.reference
        if self.name == "hf-mixtral" and self.double:
            return replace(given, keywords={**given.keywords, "implementation": "batched_mm"})
        return given


@lru_cache(maxsize=64)
def graph_of(network: Network) -> OperatorGraph:
    """Return the network's graph."""
    module, args, kwargs = network.reference.build(SEED)
    return import_module(module, args, kwargs, name=network.name)


def draws(graph: OperatorGraph) -> bool:
    """True where the plain module draws dropout from torch's generator, which no graph can repeat."""
    return any(operator.target == "soapstone.dropout" for operator in graph.operators)


def tolerance_of(graph: OperatorGraph) -> float:
    """Return how far results may be off: of the dtypes of a graph's floating-point values."""
    dtypes = {value.spec.dtype for value in graph.values if value.spec.dtype in FLOATING}
    # Sums of a batch norm are always in float64.
    single = "float32" in {value.spec.dtype for value in graph.weights}
    return TOLERANCE["float32" if single else "mixed" if len(dtypes) > 1 else "float64"]


def network_of(name: str, choice: str | int) -> Network:
    """Return the network for a case: in float64 and, every second time, without dropout, where it has any."""
    if choice == DATA_PARALLEL:
        return Network(name)
    has_dropout = "dropout" in inspect.signature(zoo_entry(name).load_factory()).parameters
    return Network(name, dropout=not (has_dropout and int(choice) % 2), double=True)


def cases(quick: int, full: int) -> list[Any]:
    """Return the cases of a network: random strategies; under --all more of them, and data parallelism."""
    return [*seeds(quick, full), pytest.param(DATA_PARALLEL, marks=pytest.mark.slow)]


def check_network(pool: LocalPool, name: str, choice: str | int, *, makes_much_again: bool = False) -> None:
    """Run three training steps of a network on two processes, and compare; perhaps with random groups made again."""
    network = network_of(name, choice)
    graph = graph_of(network)
    if choice == DATA_PARALLEL:
        strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    else:
        strategy = random_strategy(graph, 2, zlib.crc32(f"{name} random {choice}".encode()))
    if makes_much_again:
        groups = random_groups(graph, zlib.crc32(f"{name} groups {choice}".encode()))
        strategy = replace(strategy, recomputation=groups)
    job = replace(make_job(graph, strategy, network.reference, optimizer="sgd"), seed=SEED)
    result = pool.run(job)
    assert result.verification is not None
    assert result.verification.ok, result.verification.worst
    trained = {weight.name for weight in graph.weights}
    assert {(deviation.what, deviation.name) for deviation in result.verification.deviations} == {
        ("loss", "in float64"),
        ("loss", RUN_LOSS),
        *(("gradient", name) for name in trained),
        *(("weight", name) for name in trained),
        *(("buffer", name) for name, _ in graph.buffer_updates),
        ("loss", EAGER),
        ("loss", EAGER_SECOND),
        *(("eager gradient", name) for name in trained),
        *(("eager buffer", name) for name, _ in graph.buffer_updates),
    }
    if draws(graph):
        return
    tolerance = tolerance_of(graph)
    expected = train_plain(network.plain, "sgd", seed=SEED)
    assert result.gradients is not None
    assert set(result.gradients) == trained
    compare(result.gradients, {name: expected.gradients[name] for name in trained}, tolerance, "gradient")
    assert result.losses[0] == pytest.approx(expected.losses[0], rel=tolerance)
    if network.double:
        assert result.losses == tuple(pytest.approx(loss, rel=tolerance) for loss in expected.losses)
        module, _, _ = network.reference.build(SEED)
        _compare_moved(result.weights, dict(module.named_parameters()), expected.weights, tolerance)
        _compare_moved(result.buffers, dict(module.named_buffers()), expected.buffers, tolerance)


def _compare_moved(
    found: Mapping[str, Any] | None,
    initial: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float,
) -> None:
    """Compare how far tensors have moved in training, relative to the largest move of each."""
    assert found is not None
    moved = {
        name: torch.as_tensor(tensor).double() - initial[name].detach().double()
        for name, tensor in found.items()
    }
    wanted = {name: (expected[name] - initial[name].detach()).double() for name in found}
    compare(moved, wanted, tolerance, "move")
