"""Baselines: what each rank holds under Megatron's, that all are legal, and what makes each of them that one."""

from __future__ import annotations

from math import prod

import pytest
import torch

from graph.axes import AxisKind
from graph.importer import import_module
from graph.intervals import shape
from graph.operators import OperatorGraph
from graph.plan import weight_placement
from graph.strategy import Configuration, Strategy
from graph.substitutions.rewriting import every_substitution, rewritten
from graph.substitutions.splitting import SPLITTING
from graph.zoo import zoo_names
from search.space.baselines import (
    all_baselines,
    global_map,
    hugectr,
    insightface,
    megatron,
    named_baselines,
    operator_placement,
    stanza,
    usual_baselines,
)
from tests.graphs import small_graph


def small(name: str) -> OperatorGraph:
    """Return the graph of a small network of the zoo with a batch of eight."""
    return small_graph(name, 8)


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
@pytest.mark.parametrize("name", ["mlp", "gpt2", "alexnet", "rnnlm", "dlrm", "xdl"])
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
        tables = {one for one in names if one.startswith("hugectr-")}
        assert tables == (
            {"hugectr-localized", "hugectr-distributed"}
            if name in ("dlrm", "xdl", "gpt2", "rnnlm")
            else set()
        )


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


def configurations_of(graph: OperatorGraph, strategy: Strategy, *names: str) -> list[Configuration]:
    """Return the configurations of all operators of some types."""
    return [
        configuration
        for operator, configuration in zip(graph.operators, strategy.configurations, strict=True)
        if operator.target.split(".")[1] in names
    ]


@pytest.mark.parametrize("name", ["dlrm", "xdl"])
def test_localized_tables_are_whole_on_a_device_each_and_the_rest_is_data_parallel(name: str) -> None:
    graph = small(name)
    strategy = hugectr(graph, 4, distributed=False)
    assert strategy is not None
    strategy.validate(graph, 4)
    tables = [weight.name for weight in graph.weights if weight.name.startswith("tables.")]
    assert [sorted(weight_placement(graph, strategy, table)) for table in tables] == [[0], [1], [2]]
    for weight in graph.weights:
        if weight.name not in tables:
            assert held_shapes(graph, strategy, weight.name) == [weight.spec.shape] * 4
    degrees = {one.degrees for one in configurations_of(graph, strategy, "linear", "stack", "cat", "bmm")}
    assert {one[0] for one in degrees} == {4}
    assert all(prod(one) == 4 for one in degrees)


@pytest.mark.parametrize("name", ["dlrm", "xdl"])
def test_distributed_tables_have_their_rows_on_all_devices(name: str) -> None:
    graph = small(name)
    strategy = hugectr(graph, 4, distributed=True)
    assert strategy is not None
    strategy.validate(graph, 4)
    for weight in graph.weights:
        rows, *others = weight.spec.shape
        held = (rows // 4, *others) if weight.name.startswith("tables.") else weight.spec.shape
        assert held_shapes(graph, strategy, weight.name) == [held] * 4


def import_tables(mode: str, rows: tuple[int, ...]) -> OperatorGraph:
    """Return the graph of bags that are looked up in tables of so many rows, and added up."""
    import torch
    from torch import Tensor, nn

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(size, 8, mode=mode) for size in rows)

        def forward(self, indices: Tensor) -> Tensor:
            # The first table is looked up twice.
            looked_up = [table(indices) for table in (*self.tables, self.tables[0])]
            return torch.stack(looked_up).sum()

    with torch.device("meta"):
        indices = torch.zeros((6, 2), dtype=torch.int64)
        return import_module(Tables(), (indices,), {}, name="tables")


def test_tables_are_spread_by_their_bytes_and_one_that_is_looked_up_twice_is_in_one_place() -> None:
    """Of two devices one gets the largest table, the other one the rest: 50 rows, and 30 + 10 + 10."""
    graph = import_tables("sum", (10, 50, 30, 10))
    strategy = hugectr(graph, 2, distributed=False)
    assert strategy is not None
    held = [sorted(weight_placement(graph, strategy, f"tables.{number}.weight")) for number in range(4)]
    assert held == [[1], [0], [1], [1]]


def test_columns_are_split_where_a_part_of_the_rows_cannot_be_looked_up() -> None:
    graph = import_tables("max", (10, 50))
    strategy = hugectr(graph, 4, distributed=True)
    assert strategy is not None
    assert held_shapes(graph, strategy, "tables.1.weight") == [(50, 2)] * 4


def test_networks_without_tables_of_their_own_and_single_devices_have_no_strategy_of_hugectr() -> None:
    for distributed in (False, True):
        assert hugectr(small("alexnet"), 4, distributed=distributed) is None
        assert hugectr(small("dlrm"), 1, distributed=distributed) is None


def test_a_classifier_is_split_by_classes_and_its_loss_by_samples() -> None:
    """Of ten classes; AlexNet's other fully connected layers are data parallel."""
    graph = small("alexnet")
    strategy = insightface(graph, 4)
    assert strategy is not None
    strategy.validate(graph, 4)
    assert held_shapes(graph, strategy, "linear3.weight") == [(3, 24), (3, 24), (2, 24), (2, 24)]
    for weight in graph.weights:
        if not weight.name.startswith("linear3."):
            assert held_shapes(graph, strategy, weight.name) == [weight.spec.shape] * 4
    (loss,) = configurations_of(graph, strategy, "cross_entropy_sums")
    assert (loss.degrees[0], prod(loss.degrees)) == (4, 4)
    assert insightface(graph, 1) is None
    assert insightface(small("xdl"), 4) is None


def test_a_loss_in_two_operators_is_split_by_classes_with_its_classifier() -> None:
    """As Megatron splits it over a vocabulary, too: between devices go sums of exponentials, and no logits."""
    imported = small("alexnet")
    graph = rewritten(imported, every_substitution(imported, tuple(SPLITTING)))
    strategy = insightface(graph, 2)
    assert strategy is not None
    strategy.validate(graph, 2)
    assert held_shapes(graph, strategy, "linear3.weight") == [(5, 24)] * 2
    for target in ("exp_sums", "softmax_nll_sums"):
        (loss,) = configurations_of(graph, strategy, target)
        assert loss.degrees == (1, 2, 1)
    tensor_parallel = megatron(graph, 2)
    for target in ("exp_sums", "softmax_nll_sums"):
        (loss,) = configurations_of(graph, tensor_parallel, target)
        assert loss.degrees == (1, 2, 1)


def test_a_baseline_that_equals_another_one_has_its_name_all_the_same() -> None:
    """With its loss split by classes, a network of one layer is split as an expert's is."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU())

    class Classified(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.network(x), targets)

    imported = import_module(Classified(), (torch.randn(4, 4), torch.randint(6, (4,))), {}, name="classified")
    graph = rewritten(imported, every_substitution(imported, tuple(SPLITTING)))
    named = {one.name: one.strategy for one in named_baselines(graph, 2)}
    distinct = {one.name: one.strategy for one in all_baselines(graph, 2)}
    assert "insightface" in named.keys() - distinct.keys()
    assert set(named.values()) == set(distinct.values())
    assert distinct.items() <= named.items()


def test_a_margin_stays_with_its_classes() -> None:
    """Classes are rows of the weight, of length one; what turns their cosines into logits is split with them."""
    from tests.runtime.models import margins

    module, args, kwargs = margins()
    graph = import_module(module, args, kwargs, name="margins")
    strategy = insightface(graph, 2)
    assert strategy is not None
    strategy.validate(graph, 2)
    assert held_shapes(graph, strategy, "classes") == [(4, 5), (3, 5)]
    channels = 0
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        spec = graph.value_by_name[operator.outputs[0]].spec
        if spec.shape == (6, 7):
            sample, classes = (next(iter(operator.space.outputs[0][dim])).axis for dim in range(2))
            assert sample is not None
            assert classes is not None
            assert (configuration.degrees[sample], configuration.degrees[classes]) == (1, 2), operator.name
            channels += 1
    assert channels >= 4


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
