"""Megatron's, HugeCTR's and InsightFace's strategies on our runtime give the module's own result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from runtime.jobs.models import ModelReference
from search.space.baselines import hugectr, insightface, megatron
from tests.runtime.oracle import SEED, check, graph_of, reference
from tests.runtime.pool import LocalPool

Baseline = Callable[[OperatorGraph, int], Strategy | None]


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (2, 2)])
def test_a_transformer_without_dropout_equals_the_module(pool: LocalPool, tensor: int, data: int) -> None:
    """Megatron's grid of ranks: GPT-2, whose fused projection is split by heads inside of a dim."""
    keywords = {"name": "gpt2", "preset": "small", "batch_size": 5, "layers": 1, "dropout": 0.0}
    model = ModelReference("graph.zoo:build", keywords)
    module, args, kwargs = model.build(SEED)
    graph = import_module(module, args, kwargs, name="gpt2")
    check(pool, graph, megatron(graph, tensor, data), model)


@pytest.mark.parametrize("slot", ["localized", "distributed"])
@pytest.mark.parametrize("name", ["dlrm", "xdl"])
def test_embedding_tables_on_devices_of_their_own_equal_the_module(
    pool: LocalPool, name: str, slot: str
) -> None:
    """Three tables on two devices; bags of two rows with XDL."""
    _check_zoo(
        pool, partial(hugectr, distributed=slot == "distributed"), name=name, preset="small", batch_size=6
    )


def test_a_classifier_split_by_classes_equals_the_module(pool: LocalPool) -> None:
    """Ten classes, and samples that two devices do not divide."""
    _check_zoo(pool, insightface, name="alexnet", preset="small", batch_size=5, dropout=0.0)


def test_a_margin_split_by_classes_equals_the_module(pool: LocalPool) -> None:
    graph = graph_of("margins")
    strategy = insightface(graph, 2)
    assert strategy is not None
    check(pool, graph, strategy, reference("margins"))


def _check_zoo(pool: LocalPool, baseline: Baseline, **keywords: str | float) -> None:
    """Run a baseline of a network of the zoo on two devices, and compare it with the module."""
    model = ModelReference("graph.zoo:build", keywords)
    module, args, kwargs = model.build(SEED)
    graph = import_module(module, args, kwargs, name=str(keywords["name"]))
    strategy = baseline(graph, 2)
    assert strategy is not None
    check(pool, graph, strategy, model)
