"""Which strategies a device mesh expresses, and the one-line reason why it does not express the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from graph.axes import REPLICA_AXIS, Axis, AxisKind, DimFactor, IterationSpace
from graph.errors import StrategyError
from graph.intervals import Region
from graph.operators import Operator, OperatorGraph, TensorSpec, Value, ValueKind
from graph.strategy import Configuration, Strategy
from runtime.dtensor.mesh import (
    PARTIAL,
    REPLICATE,
    Inexpressible,
    MeshLayout,
    layout_on,
    mesh_layouts,
    shard,
    shard_region,
)
from search.space import baselines
from tests.runtime.dtensor_cases import (
    Network,
    by_operator,
    graph_of,
    grid,
    named,
    own,
    plan_of,
    sequence,
    zoo,
)

MLP = zoo("mlp")
Changes = Mapping[str, Configuration | int | None]


def changed(graph: OperatorGraph, changes: Changes, devices: int = 2) -> Strategy:
    """Return replicas of everything, but for named operators: a configuration, or the axis that they split."""
    configurations = []
    for operator in graph.operators:
        change = changes.get(operator.name)
        if not isinstance(change, Configuration):
            change = grid(operator, change, devices)
        configurations.append(change)
    return Strategy(graph.digest, tuple(configurations))


def test_placements_are_the_regions_of_the_tasks() -> None:
    """Columns then rows over a grid: what every device holds of a weight is what its placements say."""
    graph = graph_of(MLP)
    strategy = baselines.megatron(graph, 2, 2)
    layout = layout_on(graph, strategy, (2, 2))
    assert layout.held["layers.0.weight"] == (REPLICATE, shard(0))
    assert layout.held["layers.0.bias"] == (REPLICATE, shard(0))
    assert layout.held["layers.1.weight"] == (REPLICATE, shard(1))
    assert layout.held["layers.1.bias"] == (REPLICATE, REPLICATE)
    assert layout.outputs[graph.index_by_name["linear"]] == ((shard(0), shard(1)),)
    assert layout.outputs[graph.index_by_name["linear_1"]] == ((shard(0), PARTIAL),)
    assert layout.everywhere == {graph.index_by_name["cross_entropy_loss.ratio"]}


def test_one_dim_may_be_split_by_both_dims_of_a_mesh() -> None:
    graph = graph_of(MLP)
    layout = layout_on(graph, baselines.data_parallel(graph, 4), (2, 2))
    assert layout.inputs[0][0] == (shard(0), shard(0))
    parts: list[Region] = [
        shard_region((8, 3), (shard(0), shard(0)), (2, 2), (i, j)) for i in range(2) for j in range(2)
    ]
    assert [part[0] for part in parts] == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]


def test_the_order_of_replicas_makes_no_difference() -> None:
    graph = graph_of(MLP)
    operator = graph.operators[0]
    strategy = changed(graph, {operator.name: Configuration((1,) * 3 + (2,), (1, 0))})
    assert layout_on(graph, strategy, (2,)).held["layers.0.weight"] == (REPLICATE,)


def test_every_mesh_of_a_number_of_devices_is_tried() -> None:
    graph = graph_of(MLP)
    found = list(mesh_layouts(graph, baselines.megatron(graph, 2, 2)))
    assert [type(one) for one in found] == [Inexpressible, MeshLayout]
    assert isinstance(found[1], MeshLayout)
    assert found[1].sizes == (2, 2)
    assert list(mesh_layouts(graph, baselines.single_device(graph))) == []


def subset(graph: OperatorGraph) -> Strategy:
    return changed(graph, {"relu": baselines.whole(graph.operator_by_name["relu"])})


def two_tasks_a_device(graph: OperatorGraph) -> Strategy:
    return changed(graph, {"relu": Configuration((4, 1, 1), (0, 1, 0, 1))})


def reversed_devices(graph: OperatorGraph) -> Strategy:
    return changed(graph, {"relu": Configuration((2, 1, 1), (1, 0))})


def different_meshes(graph: OperatorGraph) -> Strategy:
    """One operator over the rows of a grid, the next over its columns."""
    rows, columns = (0, 1, 2, 3), (0, 2, 1, 3)
    return changed(
        graph, {"relu": Configuration((2, 2, 1), rows), "relu_1": Configuration((4, 1, 1), columns)}, 4
    )


def weight_in_two_ways(graph: OperatorGraph) -> Strategy:
    linear, linear_1 = (graph.operator_by_name[name] for name in ("linear", "linear_1"))
    return changed(graph, {"linear": named(linear, "channel"), "linear_1": named(linear_1, "in")})


def both_dims_split_weights(graph: OperatorGraph) -> Strategy:
    return changed(graph, {"linear_1": Configuration((1, 2, 2, 1), (0, 1, 2, 3))}, 4)


def functions_read_in_two_ways(graph: OperatorGraph) -> Strategy:
    return changed(graph, {"square": 0, "div": 1})


def function_moves(graph: OperatorGraph) -> Strategy:
    """Samples up to a sum of two functions, which is split by channels."""
    by_samples = ("conv2d", "relu", "linear", "tanh", "linear_1", "tanh_1", "relu_1", "sigmoid")
    return changed(graph, {**dict.fromkeys(by_samples, 0), "add": 1})


def module_called_in_two_ways(graph: OperatorGraph) -> Strategy:
    return changed(graph, {"relu": 0, "linear": 0, "tanh": 0, "linear_1": 1, "tanh_1": None})


REFUSALS: list[tuple[str, Network, Callable[[OperatorGraph], Strategy], str]] = [
    ("one device", MLP, baselines.single_device, "it runs on one device"),
    ("a subset of devices", MLP, subset, "operator relu uses 1 of 2 devices"),
    ("two tasks a device", MLP, two_tasks_a_device, "operator relu has 4 tasks on 2 devices"),
    (
        "another order",
        MLP,
        reversed_devices,
        "operator relu splits sample in another device order than a mesh of 2",
    ),
    (
        "different meshes",
        MLP,
        different_meshes,
        "operator relu_1 splits sample in another device order than a mesh of 2 x 2",
    ),
    (
        "uneven",
        zoo("mlp", batch_size=7),
        lambda graph: baselines.data_parallel(graph, 2),
        "operator linear splits dim 0 of input.0, 7 elements, unevenly in 2 parts",
    ),
    (
        "heads of a fused projection",
        zoo("gpt2"),
        lambda graph: baselines.megatron(graph, 2),
        "operator linear splits an inner factor of dim 0 of layers.0.attention.projection.weight",
    ),
    (
        "a halo",
        own("various"),
        lambda graph: changed(graph, {"conv2d": 2}),
        "operator conv2d splits dim 2 of input.0 in parts that overlap or leave gaps",
    ),
    (
        "batch normalization",
        Network("tests.runtime.models:convolutions", {"batch_size": 4}),
        lambda graph: baselines.data_parallel(graph, 2),
        "operator batch_norm.moments is a batch normalization in parts, whose statistics PyTorch's plans do not join",
    ),
    (
        "a weight in two ways",
        own("various"),
        weight_in_two_ways,
        "weight twice.weight is read as Shard(0) and, by operator linear_1, as Shard(1)",
    ),
    (
        "no data dim in two",
        MLP,
        both_dims_split_weights,
        "both dims of a mesh split more than samples: dim 0: weight layers.1.weight is split; "
        "dim 1: weight layers.1.weight is split",
    ),
    (
        "a function that moves",
        own("various"),
        function_moves,
        "operator add reads relu_1 as Shard(1), which arrives as Shard(0), and no module with weights stands between "
        "them",
    ),
    (
        "an output read in two ways",
        own("normalized"),
        functions_read_in_two_ways,
        "linear is read as Shard(0) and as Shard(1) by functions",
    ),
    (
        "a module called in two ways",
        own("various"),
        module_called_in_two_ways,
        "module twice is called with different layouts",
    ),
    (
        "channels of a convolution",
        own("various"),
        lambda graph: changed(graph, {"conv2d": 1}),
        "module convolution is a Conv2d with a split weight, must be a Linear or Embedding",
    ),
    (
        "a weight outside of modules",
        own("various"),
        lambda graph: changed(
            graph, {"linear_2": named(graph.operator_by_name["linear_2"], "channel"), "square": 3, "mean": 3}
        ),
        "operator linear_2 splits weight matrix outside of a Linear or Embedding module",
    ),
    (
        "inputs in a list",
        own("nested"),
        lambda graph: baselines.megatron(graph, 2),
        "the module takes tensors inside of other arguments",
    ),
    (
        "classes that weigh",
        own("weighed"),
        lambda graph: baselines.data_parallel(graph, 2),
        "operator cross_entropy_loss.sums is a mean that weighs samples by their class",
    ),
]


@pytest.mark.parametrize(
    ("network", "choose", "reason"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_what_no_mesh_expresses_is_refused_with_the_reason(
    network: Network, choose: Callable[[OperatorGraph], Strategy], reason: str
) -> None:
    graph = graph_of(network)
    with pytest.raises(
        StrategyError, match=re.escape(f"({reason}), must be one that a mesh expresses")
    ) as error:
        plan_of(network, graph, choose(graph))
    assert "\n" not in str(error.value)


def test_an_axis_along_two_dims_is_refused() -> None:
    """A diagonal: no rule has one, but nothing forbids it."""
    dim = (DimFactor(4, 0),)
    space = IterationSpace((Axis("point", 4, AxisKind.SAMPLE), REPLICA_AXIS), ((dim, dim),), ((dim,),))
    operator = Operator("diagonal", "test.diagonal", (), ("input.0",), ("diagonal",), space)
    spec = TensorSpec((4, 4), "float32")
    values = (
        Value("input.0", spec, ValueKind.INPUT, requires_gradient=False),
        Value("diagonal", TensorSpec((4,), "float32"), ValueKind.OPERATOR, requires_gradient=False),
    )
    graph = OperatorGraph("test", (operator,), values, ("input.0",), "diagonal")
    strategy = Strategy(graph.digest, (Configuration((2, 1), (0, 1)),))
    with pytest.raises(Inexpressible, match=r"operator diagonal splits point along two dims of input\.0"):
        layout_on(graph, strategy, (2,))


def test_columns_rows_and_the_sequence_become_styles() -> None:
    network = own("block")
    graph = graph_of(network)
    plan = plan_of(network, graph, by_operator(graph, sequence, 2, 2))
    assert plan.mesh == (("data", 2), ("tensor", 2))
    assert {path: style.name for path, style in plan.styles} == {
        "": "PrepareModuleInput",
        "norm": "SequenceParallel",
        "up": "ColwiseParallel",
        "down": "RowwiseParallel",
        "final": "SequenceParallel",
        "head": "PrepareModuleInput",
    }
    styles = dict(plan.styles)
    assert dict(styles["up"].arguments) == {
        "input_layouts": shard(1),
        "output_layouts": shard(-1),
        "use_local_output": False,
    }
    # Partial sums are scattered over the sequence, not summed up everywhere.
    assert dict(styles["down"].arguments)["output_layouts"] == shard(1)
    assert plan.data is not None
    assert plan.data.batch_dims == ((0, 0), (1, 0))
    assert plan.data.share.targets == (1, -100)


def test_samples_that_are_joined_need_no_data_dim() -> None:
    """Values of all samples, a scaled sum, and factors by a sample's place or the batch size become DTensors."""
    networks = [own("normalized"), own("summed", scale=0.5), own("placed"), own("placed", by="count")]
    for network in networks:
        graph = graph_of(network)
        assert plan_of(network, graph, baselines.data_parallel(graph, 2)).mesh == (("tensor", 2),)
    network = own("summed")
    graph = graph_of(network)
    plan = plan_of(network, graph, baselines.data_parallel(graph, 2))
    assert plan.mesh == (("data", 2),)
    assert plan.data is not None
    assert not plan.data.share.mean


def test_targets_that_cannot_be_counted_are_named_in_the_file() -> None:
    network = zoo("rnnlm")
    graph = graph_of(network)
    plan = plan_of(network, graph, baselines.data_parallel(graph, 2))
    assert plan.data is not None
    assert not plan.data.share.exact
    assert "every data rank ignores as many" in plan.notes[0]


def test_layers_are_gathered_one_by_one_where_they_stand_alone() -> None:
    """Of GPT-2 the decoder layers; the tied embedding belongs to the whole model."""
    network = zoo("gpt2")
    graph = graph_of(network)
    plan = plan_of(network, graph, baselines.data_parallel(graph, 2))
    assert plan.blocks == ("layers.0", "layers.1")
    assert plan.tied == (("output.weight", "token_embedding.weight"),)
    assert plan.draws
    # Containers have no forward for fully_shard to gather before: their own layers stand for them.
    network = own("contained")
    graph = graph_of(network)
    plan = plan_of(network, graph, baselines.data_parallel(graph, 2))
    assert plan.blocks == ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
