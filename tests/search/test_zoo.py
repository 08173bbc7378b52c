"""Networks of the zoo, as imported, with their rules: task graph = plan, legal strategies, calls that suffice."""

import numpy as np
import pytest

from graph.rules import local_calls
from graph.training import Training
from search.algorithms.chain import SearchOptions
from search.algorithms.mcmc import search
from search.cost.calls_to_profile import calls_to_profile
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import data_parallel, expert, random_strategy, single_device
from search.space.configurations import enumerate_degrees
from search.space.groups import carried, find_groups
from tests.graphs import small_graph
from tests.reference import taskgraph as reference
from tests.search.builders import MadeUpCosts, cluster, devices, random_anywhere
from tests.search.test_taskgraph import check_equal

QUICK = ("alexnet", "nmt", "gpt2", "dlrm")
SLOW = (
    "inception", "resnet101", "rnntc", "rnnlm", "vgg16", "densenet121", "bert-large", "candle-uno", "mlp", "resnext50",
    "xdl",
)  # fmt: skip
TRAINING = Training(4)
BUCKET_BYTES = 1 << 16


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_task_graph_is_the_plan(name: str) -> None:
    graph, topology = small_graph(name), cluster()
    rng = np.random.default_rng(0)
    for strategy in (
        data_parallel(graph, 8),
        single_device(graph, 3),
        expert(graph, 8),
        random_strategy(graph, 8, rng),
        random_anywhere(graph, 8, rng),
    ):
        strategy.validate(graph, 8)
        deriver = reference.Deriver(
            graph, strategy, topology, MadeUpCosts(), TRAINING, local_calls, BUCKET_BYTES, LinkCosts()
        )
        expected = deriver.derive()
        tasks = TaskGraphBuilder(
            graph, topology, CostTable(MadeUpCosts()), TRAINING, bucket_bytes=BUCKET_BYTES
        ).build(strategy)
        check_equal(tasks, expected)
        assert tasks.peak_memory_D.tolist() == deriver.peak_memory()


def test_a_grouped_convolution_is_split_by_group() -> None:
    graph = small_graph("resnext50")
    grouped = [
        operator
        for operator in graph.operators
        if operator.target == "aten.conv2d.default" and operator.argument("groups") > 1
    ]
    assert len(grouped) == 2  # of small blocks (1, 1)
    for operator in grouped:
        place = next(place for place, axis in enumerate(operator.space.axes) if axis.name == "group")
        degrees = tuple(4 if axis == place else 1 for axis in range(len(operator.space.axes)))
        whole, *parts = (
            call for one in ((1,) * len(degrees), degrees) for call in local_calls(graph, operator, one)
        )
        assert len(parts) == 4
        for part in parts:
            # A quarter of the input's and of the weight's channels, none of it twice.
            assert part.inputs[0].elements * 4 == whole.inputs[0].elements
            assert part.inputs[1].elements * 4 == whole.inputs[1].elements
            assert dict(part.arguments)["groups"] == 1


@pytest.mark.parametrize("name", QUICK)
def test_groups_cover_the_graph_and_are_fewer_than_its_operators(name: str) -> None:
    graph = small_graph(name)
    groups = find_groups(graph)
    assert sorted(index for group in groups for index in group.operators) == list(range(len(graph.operators)))
    assert 2 * len(groups) <= len(graph.operators) + 1


@pytest.mark.parametrize("name", ["nmt", "gpt2"])
def test_listing_equal_layers_once_loses_no_call(name: str) -> None:
    graph = small_graph(name)
    every = {
        call.digest: call
        for strategy in (single_device(graph), data_parallel(graph, 4), expert(graph, 4))
        for operator, configuration in zip(graph.operators, strategy.configurations, strict=True)
        for call in local_calls(graph, operator, configuration.degrees)
    }
    for group in find_groups(graph):
        for degrees in enumerate_degrees(graph.operators[group.head], 4):
            every |= {call.digest: call for call in local_calls(graph, graph.operators[group.head], degrees)}
            for member in group.members:
                calls = local_calls(graph, graph.operators[member.operator], carried(member.axes, degrees)[0])
                every |= {call.digest: call for call in calls}
    assert {call.digest for call in calls_to_profile(graph, 4)} == every.keys()


@pytest.mark.parametrize("name", QUICK)
def test_a_search_on_two_devices_needs_no_more_calls_than_were_named(name: str) -> None:
    """Every split over two devices splits one axis, so what is profiled is all that is asked for."""
    graph = small_graph(name)
    named = {call.digest for call in calls_to_profile(graph, 2)}
    source = MadeUpCosts(1e-9)
    result = search(
        Problem(graph, devices(2), CostTable(source), TRAINING), SearchOptions(proposals=300, seed=4)
    )
    assert {digest for digest, _ in source.asked} <= named
    assert result.step_time_s <= min(chain.initial_s for chain in result.chains)
