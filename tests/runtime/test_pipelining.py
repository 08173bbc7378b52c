"""Generated stages of torch.distributed.pipelining, run by ranks of gloo: loss and gradients equal the module's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.schedule import MicroBatches, Schedule
from graph.strategy import Configuration, Strategy
from runtime.dtensor.writer import PlanOrigin
from runtime.pipelining.plan import StagePlan, make_stage_plan
from runtime.pipelining.writer import source_text
from tests.runtime.dtensor_cases import Network, own, zoo
from tests.runtime.dtensor_runner import check_files
from tests.runtime.spawned import run_ranks

COUNT = 4
EXPORTED = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
NETWORKS = {
    "mlp": zoo("mlp"),
    "gpt2": zoo("gpt2"),
    "bert": zoo("bert-large"),
    "alexnet": zoo("alexnet"),
    "dlrm": zoo("dlrm"),
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


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", NETWORKS)
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
    assert run_ranks(check_files, 2, tmp_path, files) == [expected] * 2
