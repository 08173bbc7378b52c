"""Hugging Face networks: published sizes, imports without memory, and rules for all that they consist of."""

from __future__ import annotations

import importlib
import random
from functools import cache, lru_cache
from typing import Any

import pytest
import torch

from graph.axes import AxisKind
from graph.errors import UsageError
from graph.importer import import_module
from graph.operators import OperatorGraph, ValueKind
from graph.rules import flops, whole_call
from graph.rules.registry import is_known
from graph.zoo import build, hugging_face_names, zoo_entry, zoo_names
from profiler.operators import ExecutionContext
from tests.quick import few
from tests.reference.interpreter import interpret
from tests.reference.rules import random_degrees

pytest.importorskip("transformers", reason="the extra hf is not installed")

# Parameters of the networks as published or as their own model cards count them, in millions.
PARAMETERS = {
    "hf-bert": 109.51,
    "hf-gpt2": 124.44,
    "hf-llama": 8_030.26,
    "hf-t5": 222.90,
    "hf-vit": 86.57,
    "hf-resnet": 25.56,
    "hf-convnext": 28.59,
    "hf-mixtral": 46_702.79,
}


@cache
def published(name: str) -> OperatorGraph:
    with torch.device("meta"):
        module, args, kwargs = build(name, "paper")
    return import_module(module, args, kwargs, name=name)


NETWORKS = few(("hf-bert", "hf-resnet"), hugging_face_names())


@pytest.mark.parametrize("name", NETWORKS)
def test_published_network_is_imported_and_can_be_split(name: str) -> None:
    graph = published(name)
    parameters = sum(weight.spec.elements for weight in graph.weights)
    assert round(parameters / 1e6, 2) == PARAMETERS[name]
    total = split = 0.0
    for operator in graph:
        amount = flops(whole_call(graph, operator))
        total += amount
        if any(axis.kind is not AxisKind.REPLICA for axis in operator.space.axes):
            split += amount
    assert split / total >= 0.99
    assert all(is_known(operator.target) for operator in graph)
    assert graph.unsplit == ()


@pytest.mark.parametrize("name", NETWORKS)
def test_costly_operators_split_along_samples_and_another_axis(name: str) -> None:
    graph = published(name)
    amounts = {operator.name: flops(whole_call(graph, operator)) for operator in graph}
    total = sum(amounts.values())
    costly = [operator for operator in graph if amounts[operator.name] > total * 1e-4]
    assert costly
    for operator in costly:
        kinds = {axis.kind for axis in operator.space.axes}
        assert AxisKind.SAMPLE in kinds, operator.name
        assert kinds & {AxisKind.ATTRIBUTE, AxisKind.PARAMETER, AxisKind.REDUCTION}, operator.name


def test_grouped_heads_are_split_together_with_what_they_are_repeated_from() -> None:
    with torch.device("meta"):
        module, args, kwargs = build("hf-llama", "small")
    graph = import_module(module, args, kwargs, name="llama")
    for operator in graph:
        if "scaled_dot_product_attention" in operator.target:
            query, key, value = operator.space.inputs[:3]
            shared = [factor.axis for factor in key[1]]
            assert [factor.size for factor in query[1]] == [2, 3]
            assert [factor.axis for factor in query[1]] == shared == [factor.axis for factor in value[1]]


@lru_cache(maxsize=1)
def small(name: str) -> tuple[Any, dict[str, torch.Tensor], OperatorGraph]:
    torch.manual_seed(3)
    module, args, kwargs = build(name, "small")
    module = module.double()
    tensors = {key: x.double() if x.is_floating_point() else x for key, x in kwargs.items()}
    return module, tensors, import_module(module, args, tensors, name=name)


@pytest.mark.parametrize("name", few(("hf-bert", "hf-llama", "hf-vit"), hugging_face_names()))
def test_network_in_random_parts_is_itself_whole(name: str) -> None:
    module, tensors, graph = small(name)
    weights, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    generator = random.Random(7)
    degrees = {operator.name: random_degrees(operator.space, generator) for operator in graph}
    inputs = list(tensors.values())
    context = ExecutionContext(seed=11, step=4)
    whole = interpret(graph, weights, buffers, inputs, context)
    split = interpret(graph, weights, buffers, inputs, context, degrees)
    # Some convert to float32 on their way.
    tolerance = 1e-4 if _converts(graph) else 1e-8
    torch.testing.assert_close(split.loss, whole.loss, rtol=tolerance, atol=tolerance)
    for weight in graph.weights:
        torch.testing.assert_close(
            split.gradients[weight.name], whole.gradients[weight.name], rtol=tolerance, atol=tolerance
        )


def _converts(graph: OperatorGraph) -> bool:
    return any(value.kind is ValueKind.OPERATOR and value.spec.dtype == "float32" for value in graph.values)


def test_small_presets_keep_what_makes_the_networks_special() -> None:
    for name in hugging_face_names():
        sizes = zoo_entry(name).presets["small"]
        assert sizes["batch_size"] == 4
        if "key_value_heads" in sizes:
            assert 1 < sizes["key_value_heads"] < sizes["heads"]
    assert zoo_entry("hf-mixtral").presets["small"]["experts"] > 2


def test_hugging_face_networks_are_no_part_of_our_own_zoo() -> None:
    assert set(zoo_names()).isdisjoint(hugging_face_names())
    assert {zoo_entry(name).extra for name in hugging_face_names()} == {"hf"}
    assert {zoo_entry(name).extra for name in zoo_names()} == {""}


def test_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UsageError, match=r"transformers is not installed, must be; .*soapstone\[hf\]"):
        build("hf-gpt2", "small")
