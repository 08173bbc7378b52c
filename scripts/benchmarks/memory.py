"""Predicted against measured peak memory of training steps, executed for real on two CPU devices of this machine.

Of every network: data parallelism, the expert's or Megatron's strategy, what a search finds, and data parallelism with
a fifth of its groups of operators configured at random. Predicted is what the devices' programs take
(`runtime.observe.memory_trace`), and beside it the sum that the search keeps in its loop
(`search.simulate.simulator.Simulation`); measured are the tensors alive at most in one step
(`runtime.observe.measured_peak`). Of a strategy's devices, the fullest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number

if TYPE_CHECKING:
    from app.services.models.models import ModelRequest
    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from graph.topology import Topology
    from graph.training import Training

DEVICES = 2
ERROR = 0.10
PROPOSALS = 300
# Batch sizes for which a step takes a few seconds at most, with an optimizer each.
NETWORKS = {
    "mlp": (64, "sgd"), "alexnet": (16, "momentum"), "inception": (4, "sgd"), "rnnlm": (8, "sgd"),
    "bert-large": (2, "sgd"),
}  # fmt: skip
QUICK = {"mlp": (8, "adam")}
RANDOM_SHARE = 0.2


FORMATS = {
    **dict.fromkeys(("error", "its error"), "+.1%"),
    **dict.fromkeys(("predicted MiB", "measured MiB", "search's sum MiB", "process MiB"), ",.1f"),
}


def run(*, quick: bool) -> BenchmarkResult:
    """Predict and execute; in quick mode one small network.

    Raises:
        SoapstoneError: a run failed.
    """
    preset = "small" if quick else "paper"
    rows = [
        row
        for name, (batch_size, optimizer) in (QUICK if quick else NETWORKS).items()
        for row in measured(name, preset, batch_size, optimizer)
    ]
    errors, errors_of_sum = ([abs(number(row, column)) for row in rows] for column in ("error", "its error"))
    return BenchmarkResult(
        benchmark="memory",
        conditions={"devices": DEVICES, "strategies": len(rows)},
        measurements=[
            measurement("largest error", max(errors) * 100, "%", at_most=ERROR * 100),
            measurement("mean error", sum(errors) / len(errors) * 100, "%"),
            measurement("largest error of the search's sum", max(errors_of_sum) * 100, "%"),
        ],
        table=rows,
        formats=FORMATS,
    )


def measured(name: str, preset: str, batch_size: int, optimizer: str) -> list[Row]:
    """Predict and execute all strategies of a network."""
    from app.services.models.models import import_graph, requested_model
    from graph.topology import load_topology
    from graph.training import Training

    request = requested_model(name, preset, batch_size)
    graph = import_graph(request, batch_norm="synchronized").graph
    topology, training = load_topology("xeon", None), Training(batch_size, optimizer=optimizer)
    return [
        _row(request, graph, topology, training, label, strategy)
        for label, strategy in strategies(graph, topology, training)
    ]


def strategies(
    graph: OperatorGraph, topology: Topology, training: Training
) -> Iterator[tuple[str, Strategy]]:
    """Yield data parallelism, an expert's strategy, the best of a search, and a partly random one."""
    import numpy as np

    from scripts.benchmarks.prediction import partly_random
    from scripts.benchmarks.simulator import Datasheet
    from search.algorithms.chain import SearchOptions
    from search.algorithms.mcmc import search
    from search.cost.cost_table import CostTable
    from search.problem import Problem
    from search.space.baselines import data_parallel, expert, megatron

    yield "data parallel", data_parallel(graph, DEVICES)
    if "bert" in graph.name:
        yield "Megatron", megatron(graph, DEVICES)
    else:
        yield "expert", expert(graph, DEVICES)
    outcome = search(
        Problem(graph, topology, CostTable(Datasheet(topology.kinds)), training),
        SearchOptions(proposals=PROPOSALS, chains=2, seed=0),
    )
    yield "found", outcome.strategy
    yield "partly random", partly_random(graph, DEVICES, RANDOM_SHARE, np.random.default_rng(0))


def _row(
    request: ModelRequest,
    graph: OperatorGraph,
    topology: Topology,
    training: Training,
    label: str,
    strategy: Strategy,
) -> Row:
    from graph.plan import build_plan
    from profiler.pinning import usable_cores
    from runtime.jobs.job import Job
    from runtime.jobs.models import ModelReference
    from runtime.launch.torchrun import launch
    from runtime.observe.memory_trace import trace_memory
    from scripts.benchmarks.simulator import Datasheet
    from search.cost.cost_table import CostTable
    from search.simulate.simulator import simulate

    nodes = tuple(device.node for device in topology.devices)
    plan = build_plan(graph, strategy, nodes)
    walked = [trace_memory(plan, training, device).peak_bytes for device in range(strategy.device_count)]
    summed = simulate(
        graph, strategy, topology, CostTable(Datasheet(topology.kinds)), training
    ).peak_memory_bytes
    result = launch(
        Job(
            graph=graph,
            strategy=strategy,
            node_of=nodes,
            training=training,
            model=ModelReference("app.services.models.models:build_model", request.factory_keywords),
            iterations=1,
            warmup=0,
            peak=True,
        ),
        (*usable_cores(), *(None for _ in range(DEVICES)))[:DEVICES],
    )
    if result is None:
        raise RuntimeError("memory: must run alone, not under torchrun")
    fullest = max(range(len(result.peaks)), key=lambda device: result.peaks[device].tensor_bytes)
    peak = result.peaks[fullest]
    return {
        "network": graph.name,
        "optimizer": training.optimizer,
        "strategy": label,
        "predicted MiB": walked[fullest] / 2**20,
        "measured MiB": peak.tensor_bytes / 2**20,
        "error": walked[fullest] / peak.tensor_bytes - 1,
        "search's sum MiB": summed[fullest] / 2**20,
        "its error": summed[fullest] / peak.tensor_bytes - 1,
        "process MiB": peak.process_bytes / 2**20,
    }
