"""Baselines: what each rank holds under Megatron's, that all are legal, and what makes each of them that one."""

from __future__ import annotations

from math import prod

import pytest

from graph.axes import AxisKind
from graph.importer import import_module
from graph.intervals import shape
from graph.operators import OperatorGraph
from graph.plan import weight_placement
from graph.strategy import Strategy
from graph.zoo import build, zoo_names
from search.space.baselines import (
    all_baselines,
    global_map,
    megatron,
    operator_placement,
    stanza,
    usual_baselines,
)

_graphs: dict[str, OperatorGraph] = {}


def small(name: str) -> OperatorGraph:
    """Return the graph of a small network of the zoo with a batch of eight; imported once."""
    if name not in _graphs:
        import torch

        with torch.device("meta"):
            module, args, kwargs = build(name, "small", 8)
        _graphs[name] = import_module(module, args, kwargs, name=name)
    return _graphs[name]


def held_shapes(graph: OperatorGraph, strategy: Strategy, weight: str) -> list[tuple[int, ...]]:
    """Return the shape of what each device holds of a weight."""
    held = weight_placement(graph, strategy, weight)
    return [shape(held[device]) for device in sorted(held)]


def test_heads_columns_rows_and_vocabulary_of_gpt2_are_split() -> None:
    """Hidden size 16, 4 heads, vocabulary 50; the fused projection gives each rank its heads of q, k and v."""
    graph = small("gpt2")
    strategy = megatron(graph, 2)
    expected = {
        "token_embedding.weight": (25, 16),
        "layers.0.attention.projection.weight": (24, 16),
        "layers.0.attention.output.weight": (16, 8),
        "layers.0.up.weight": (32, 16),
        "layers.0.down.weight": (16, 32),
        "layers.0.down.bias": (16,),
        "layers.0.norm1.weight": (16,),
    }
    for name, held in expected.items():
        assert held_shapes(graph, strategy, name) == [held, held], name
    projection = weight_placement(graph, strategy, "layers.0.attention.projection.weight")
    assert projection[0][0] == ((0, 8), (16, 24), (32, 40))


def test_grouped_heads_and_the_halves_that_positions_turn_stay_split() -> None:
    """Of Llama no attention reads whole keys, values or queries, and nothing before it is gathered."""
    graph = small("hf-llama")
    strategy = megatron(graph, 2)
    turned = [
        index for index, operator in enumerate(graph.operators) if operator.target == "aten.cat.default"
    ]
    attentions = [index for index, operator in enumerate(graph.operators) if "attention" in operator.target]
    assert attentions
    for index in attentions:
        configuration = strategy.configurations[index]
        axes = graph.operators[index].space.axes
        assert [
            axis.name for axis, degree in zip(axes, configuration.degrees, strict=True) if degree > 1
        ] == ["heads.0"]
    split = [index for index in turned if prod(strategy.configurations[index].degrees[:-1]) == 2]
    assert len(split) == 2 * len(attentions)


def test_ranks_of_one_tensor_parallel_group_stand_side_by_side() -> None:
    graph = small("mlp")
    strategy = megatron(graph, 2, 3)
    first = strategy.configurations[0]
    assert first.degrees == (3, 2, 1, 1)
    assert first.devices == (0, 1, 2, 3, 4, 5)
    held = weight_placement(graph, strategy, "layers.0.weight")
    assert [held[device] for device in range(6)] == [held[device % 2] for device in range(6)]


def test_what_the_degree_does_not_divide_is_computed_by_every_rank() -> None:
    """Ten classes on four ranks."""
    graph = small("mlp")
    strategy = megatron(graph, 4)
    assert held_shapes(graph, strategy, "layers.2.weight") == [(10, 24)] * 4
    assert held_shapes(graph, strategy, "layers.1.weight") == [(24, 6)] * 4


@pytest.mark.parametrize("degrees", [(2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "bert-large", "alexnet", "rnnlm", "dlrm"])
def test_it_is_legal(name: str, degrees: tuple[int, int]) -> None:
    assert name in zoo_names()
    graph = small(name)
    tensor, data = degrees
    megatron(graph, tensor, data).validate(graph, tensor * data)


@pytest.mark.parametrize("devices", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "alexnet", "rnnlm", "dlrm"])
def test_every_baseline_is_legal_and_has_a_name_of_its_own(name: str, devices: int) -> None:
    graph = small(name)
    found = all_baselines(graph, devices)
    for one in found:
        one.strategy.validate(graph, devices)
    assert len({one.name for one in found}) == len({one.strategy for one in found}) == len(found)
    names = {one.name for one in found}
    assert {one.name for one in usual_baselines(graph, devices)} & names
    if devices == 4:
        assert {"operator-placement", "megatron-2", "megatron-4", "mesh-2x2-parameter"} <= names


def test_operators_are_placed_in_order_on_all_devices_and_split_by_none() -> None:
    graph = small("mlp")
    strategy = operator_placement(graph, 3)
    devices = [configuration.devices for configuration in strategy.configurations]
    assert all(len(one) == 1 for one in devices)
    assert {one[0] for one in devices} == {0, 1, 2}
    assert [one[0] for one in devices] == sorted(one[0] for one in devices)


def test_stanza_keeps_fully_connected_layers_away_from_the_rest() -> None:
    graph = small("alexnet")
    strategy = stanza(graph, 9)
    assert strategy is not None
    used: dict[str, set[int]] = {"conv2d": set(), "linear": set()}
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        for kind, devices in used.items():
            if operator.target == f"aten.{kind}.default":
                devices.update(configuration.devices)
    # The batch has eight samples.
    assert used == {"conv2d": set(range(8)), "linear": {8}}
    assert stanza(graph, 1) is None
    assert stanza(small("mlp"), 4) is None


@pytest.mark.parametrize("kind", [AxisKind.PARAMETER, AxisKind.ATTRIBUTE, AxisKind.REDUCTION])
def test_one_map_for_all_operators_splits_samples_over_rows_and_one_kind_over_columns(kind: AxisKind) -> None:
    graph = small("alexnet")
    strategy = global_map(graph, kind, 2, 4)
    split = 0
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        axes = operator.space.axes
        for axis, degree in zip(axes[:-1], configuration.degrees, strict=False):
            if degree > 1:
                assert (axis.kind, degree) in {(AxisKind.SAMPLE, 4), (kind, 2)}
                split += axis.kind is kind
        # What is not split is computed by all.
        assert len(configuration.devices) == 8
    assert split > 0
