"""Groups, and how their members follow."""

import numpy as np

from graph.axes import operand_regions, tasks
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Configuration
from search.space.configurations import random_configuration
from search.space.groups import Group, carried, find_groups, follow
from tests.search.builders import GraphBuilder, branches, two_layers


def group_of(graph: OperatorGraph, name: str) -> Group:
    index = graph.index_by_name[name]
    return next(group for group in find_groups(graph) if index in group.operators)


def heads(graph: OperatorGraph) -> list[str]:
    return [graph.operators[group.head].name for group in find_groups(graph)]


def test_every_operator_is_in_one_group() -> None:
    graph = branches()
    found = sorted(index for group in find_groups(graph) for index in group.operators)
    assert found == list(range(len(graph.operators)))


def test_heavy_operators_and_pooling_are_heads() -> None:
    assert heads(branches()) == ["first", "window", "shared", "again", "wide", "last"]


def test_members_follow_the_head_axis_by_axis() -> None:
    graph = branches()
    configuration = Configuration((2, 2, 1, 1), (3, 1, 0, 2))
    found = follow(group_of(graph, "first"), configuration)
    by_name = {graph.operators[index].name: one for index, one in found.items()}
    assert by_name["relu"] == Configuration((2, 2, 1), (3, 1, 0, 2))
    assert by_name["norm.moments"] == Configuration((2, 2, 1), (3, 1, 0, 2))
    # The statistics have no samples: those parts become replicas, beside the tasks that they belong to.
    assert by_name["norm.statistics"] == Configuration((2, 2), (3, 0, 1, 2))


def test_partial_sums_are_reduced_in_place() -> None:
    graph = two_layers()
    found = follow(group_of(graph, "first"), Configuration((1, 1, 4, 1), (2, 0, 1, 3)))
    assert found[graph.index_by_name["relu"]] == Configuration((1, 1, 4), (2, 0, 1, 3))


def test_replicas_of_a_head_are_replicas_of_its_members() -> None:
    graph = two_layers()
    found = follow(group_of(graph, "first"), Configuration((2, 1, 1, 2), (0, 1, 2, 3)))
    assert found[graph.index_by_name["relu"]] == Configuration((2, 1, 2), (0, 1, 2, 3))


def test_an_operator_without_shared_axes_runs_whole() -> None:
    graph = two_layers()
    found = follow(group_of(graph, "loss"), Configuration((2, 2, 1, 1), (3, 1, 0, 2)))
    assert found[graph.index_by_name["loss"]] == Configuration((1,), (3,))


def test_a_sum_follows_the_branch_with_which_it_shares_most() -> None:
    builder = GraphBuilder()
    x = builder.value("input.0", (4, 6), ValueKind.INPUT)
    left, right = builder.linear("left", x, 6), builder.linear("right", x, 6)
    builder.loss(builder.pointwise("sum", left, right))
    graph = builder.finish()
    assert graph.operators[group_of(graph, "sum").head].name == "left"


def test_members_hold_exactly_their_part_of_the_heads_output() -> None:
    """Where nothing is replicated, a member reads on each device what the head's task there has written."""
    graph = two_layers()
    group = group_of(graph, "first")
    head = graph.operators[group.head]
    relu = graph.operators[graph.index_by_name["relu"]]
    rng = np.random.default_rng(5)
    for _ in range(50):
        configuration = random_configuration(head, 6, rng)
        if configuration.degrees[2] * configuration.degrees[3] > 1:
            continue
        member = follow(group, configuration)[graph.index_by_name["relu"]]
        written = operand_regions(head.space.axes, head.space.outputs[0], configuration.degrees)
        read = operand_regions(relu.space.axes, relu.space.inputs[0], member.degrees)
        assert dict(zip(configuration.devices, written, strict=True)) == dict(
            zip(member.devices, read, strict=True)
        )


def test_carried_places_every_task_of_the_head() -> None:
    degrees, sources = carried((2, -1, 0), (2, 3, 2, 1))
    assert degrees == (2, 1, 2, 3)
    assert tasks(degrees) == 12
    assert sorted(sources) == list(range(12))
    # Member task (1, 0, 0, 2) is the head's task (0, 2, 1, 0).
    assert sources[1 * 6 + 0 * 3 + 2] == 0 * 6 + 2 * 2 + 1


def test_what_no_heavy_operator_comes_before_follows_its_reader() -> None:
    builder = GraphBuilder()
    x = builder.value("input.0", (4, 6), ValueKind.INPUT)
    builder.pointwise("prepared", x)
    builder.pointwise("scaled", "prepared")
    builder.loss(builder.linear("layer", "scaled", 5))
    graph = builder.finish()
    assert heads(graph) == ["layer"]
    found = follow(group_of(graph, "layer"), Configuration((2, 1, 3, 1), (5, 4, 3, 2, 1, 0)))
    # Samples and inner features of the layer are the two dims of its input.
    assert found[graph.index_by_name["prepared"]] == Configuration((2, 3, 1), (5, 4, 3, 2, 1, 0))
    assert found[graph.index_by_name["scaled"]] == Configuration((2, 3, 1), (5, 4, 3, 2, 1, 0))


def test_a_graph_without_heavy_operators_has_one_group() -> None:
    builder = GraphBuilder()
    x = builder.value("weight", (4, 6), ValueKind.WEIGHT)
    builder.loss(builder.pointwise("relu", x))
    assert heads(builder.finish()) == ["relu"]
