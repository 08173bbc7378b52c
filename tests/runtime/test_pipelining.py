"""Generated stages of torch.distributed.pipelining, run by ranks of gloo: loss and gradients equal the module's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graph.errors import StrategyError
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.schedule import MicroBatches, Schedule
from graph.strategy import Configuration, Strategy
from runtime.dtensor.writer import PlanOrigin
from runtime.launch.torchrun import call_on_ranks
from runtime.pipelining.plan import StagePlan, make_stage_plan
from runtime.pipelining.writer import source_text
from tests.quick import few
from tests.runtime.dtensor_cases import Network, graph_of, own, zoo
from tests.runtime.dtensor_runner import check_files

COUNT = 4
EXPORTED = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
NETWORKS = {
    "mlp": zoo("mlp"),
    "gpt2": zoo("gpt2"),
    "bert": zoo("bert-large"),
    "alexnet": zoo("alexnet"),
    "dlrm": zoo("dlrm"),
    "nmt": zoo("nmt"),
    # Cut inside of a batch norm.
    "resnet": zoo("resnet101"),
    # Ignored targets are in the first micro-batch alone.
    "uneven_targets": own("block", batch_size=8),
}


def graph_of_one(network: Network) -> OperatorGraph:
    """Return the graph of one of the micro-batches of eight samples."""
    keywords = {**network.keywords, "batch_size": 8 // COUNT}
    return import_module(*replace(network, keywords=keywords).build(), name="test")


def cut(graph: OperatorGraph, stages: int, schedule: Schedule, ranks: int = 2) -> Strategy:
    """Return a strategy of stages of about as many operators each, on the ranks in turn."""
    order = graph.order.of_loss
    configurations = [
        Configuration((1,) * len(operator.space.axes), ((stages - 1) % ranks,))
        for operator in graph.operators
    ]
    for place, index in enumerate(order):
        # The last two are one call of torch.export, a cross entropy.
        device = min(stages - 1, place * stages // (len(order) - 1)) % ranks
        configurations[index] = Configuration(configurations[index].degrees, (device,))
    return Strategy(graph.digest, tuple(configurations), micro_batches=MicroBatches(COUNT, schedule))


def plan_of(network: Network, strategy: Strategy, graph: OperatorGraph) -> StagePlan:
    strategy.validate(graph, strategy.device_count)
    return make_stage_plan(graph, strategy, network.build())


def write(network: Network, graph: OperatorGraph, strategy: Strategy, file: Path) -> Path:
    """Write the generated file of a strategy; return its path."""
    origin = PlanOrigin("test", strategy.digest, graph.digest, network.factory, network.keywords)
    file.write_text(source_text(plan_of(network, strategy, graph), origin))
    return file


@pytest.mark.parametrize(
    "name",
    few(("gpt2", "uneven_targets"), NETWORKS),
)
def test_every_schedule_equals_the_module(name: str, tmp_path: Path) -> None:
    """Tied weights in two stages, values handed through, ignored targets; two ranks, two or four stages."""
    network = NETWORKS[name]
    graph = graph_of_one(network)
    files = [
        write(network, graph, cut(graph, 4 if schedule is Schedule.INTERLEAVED else 2, schedule), file)
        for schedule in EXPORTED
        for file in [tmp_path / f"stages_{schedule.value}.py"]
    ]
    expected = dict.fromkeys((file.stem for file in files), True)
    assert call_on_ranks(2, check_files, (files,)) == [expected] * 2


def refusal(network: Network, strategy: Strategy, graph: OperatorGraph) -> str:
    with pytest.raises(StrategyError) as caught:
        plan_of(network, strategy, graph)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_pipeline_is_refused_with_its_reason() -> None:
    network = NETWORKS["mlp"]
    graph = graph_of_one(network)
    strategy = cut(graph, 2, Schedule.GPIPE)
    whole = graph_of(network)
    at_once = replace(cut(whole, 2, Schedule.GPIPE), micro_batches=MicroBatches())
    assert "at once, must go through it in micro-batches" in refusal(network, at_once, whole)
    one = cut(graph, 1, Schedule.GPIPE)
    assert "it has one stage, must have several" in refusal(network, one, graph)
    split = list(strategy.configurations)
    split[0] = Configuration((2, *split[0].degrees[1:]), (0, 1))
    assert f"operator {graph.operators[0].name} has 2 tasks" in refusal(
        network, replace(strategy, configurations=tuple(split)), graph
    )


@pytest.mark.parametrize("schedule", [schedule for schedule in Schedule if schedule not in EXPORTED])
def test_schedules_that_pytorch_lacks_are_refused(schedule: Schedule) -> None:
    network = NETWORKS["mlp"]
    graph = graph_of_one(network)
    line = refusal(network, cut(graph, 2, schedule), graph)
    assert f"its schedule is {schedule.value}, must be one of gpipe, 1f1b, interleaved" in line


def test_a_mean_that_weighs_targets_by_class_is_refused() -> None:
    network = own("weighed", batch_size=8)
    graph = graph_of_one(network)
    assert "weighs targets by their class" in refusal(network, cut(graph, 2, Schedule.GPIPE), graph)


def test_a_call_in_two_stages_is_all_in_the_later_one() -> None:
    """Of a cross entropy, the division of its sum is a stage of its own."""
    network = NETWORKS["mlp"]
    graph = graph_of_one(network)
    strategy = cut(graph, 1, Schedule.GPIPE)
    last = graph.order.of_loss[-1]
    configurations = list(strategy.configurations)
    configurations[last] = replace(configurations[last], devices=(1,))
    plan = plan_of(network, replace(strategy, configurations=tuple(configurations)), graph)
    assert plan.moved == plan.firsts[1:] == ("cross_entropy_loss",)


def test_more_stages_than_micro_batches_are_refused_under_1f1b() -> None:
    network = NETWORKS["mlp"]
    graph = graph_of_one(network)
    line = refusal(network, cut(graph, COUNT + 1, Schedule.ONE_F_ONE_B, ranks=COUNT + 1), graph)
    assert f"it has {COUNT} micro-batches, must have as many as its {COUNT + 1} stages under 1f1b" in line
