"""Megatron's strategy on our runtime: a grid of data and tensor parallel ranks gives the module's own result."""

from __future__ import annotations

import pytest

from graph.importer import import_module
from runtime.jobs.models import ModelReference
from search.space.baselines import megatron
from tests.runtime.oracle import SEED, check
from tests.runtime.pool import LocalPool


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (2, 2)])
def test_a_transformer_without_dropout_equals_the_module(pool: LocalPool, tensor: int, data: int) -> None:
    """GPT-2, whose fused projection is split by heads inside of a dim."""
    keywords = {"name": "gpt2", "preset": "small", "batch_size": 5, "layers": 1, "dropout": 0.0}
    model = ModelReference("graph.zoo:build", keywords)
    module, args, kwargs = model.build(SEED)
    graph = import_module(module, args, kwargs, name="gpt2")
    check(pool, graph, megatron(graph, tensor, data), model)
