"""What policies of synchronization are predicted to be worth on 64 and 1,024 GPUs, for the networks of the zoo.

Models of FlexFlow's P100 cluster and of HGX H100, steps by data sheets, float32; nothing is measured. Of data
parallelism: the all-reduce of two levels (BlueConnect), against the cheaper of one ring and halving over all devices;
P3, against buckets. Of data parallelism with shared updates (ZeRO-2): late gathers in the order of TIC, and P3, against
gathers before the next step. Memory is not limited. It takes an hour.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement
from scripts.benchmarks.simulator import Datasheet
from scripts.benchmarks.zoo import QUICK, zoo_graph

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from graph.topology import Topology

# Packaged topologies and numbers of nodes: 4 GPUs a node of the first, 8 of the second.
TOPOLOGIES = (("p100-cluster", 16), ("hgx-h100", 8), ("p100-cluster", 256), ("hgx-h100", 128))
# Samples of a GPU: the published batch sizes, or what the networks' papers give a GPU.
NETWORKS = {
    "mlp": 64, "alexnet": 64, "vgg16": 32, "inception": 64, "resnet101": 64, "densenet121": 32, "rnntc": 64,
    "rnnlm": 64, "nmt": 64, "bert-large": 4, "gpt2": 4, "dlrm": 256, "candle-uno": 64,
}  # fmt: skip
# The paper's slices, and larger ones.
SLICES = (200_000, 12_800_000)


def run(*, quick: bool) -> BenchmarkResult:
    """Simulate; in quick mode a small network on 8 GPUs."""
    from graph.topology import load_topology

    networks, preset = (QUICK, "small") if quick else (NETWORKS, "paper")
    rows: list[dict[str, str]] = []
    gains: dict[str, list[float]] = {}
    for topology_name, nodes in (("p100-cluster", 2),) if quick else TOPOLOGIES:
        topology = load_topology(topology_name, nodes)
        for name, samples in networks.items():
            began = time.perf_counter()
            graph = zoo_graph(name, preset, samples * len(topology.devices))
            row = _row(graph, topology, samples * len(topology.devices), gains)
            seconds = f"{time.perf_counter() - began:.0f}"
            gpus = f"{len(topology.devices)} {topology_name}"
            rows.append({"network": name, "GPUs": gpus, **row, "seconds": seconds})
    return BenchmarkResult(
        benchmark="policies_at_scale",
        conditions={"costs": "data sheets", "precision": "float32"},
        measurements=[_mean(name, of) for name, of in gains.items()],
        table=rows,
    )


def _mean(name: str, gains: list[float]) -> MeasuredValue:
    return measurement(f"{name}: mean gain", 100 * sum(gains) / len(gains), "%")


def _row(
    graph: OperatorGraph, topology: Topology, batch_size: int, gains: dict[str, list[float]]
) -> dict[str, str]:
    """Return a network's steps and gains, and add each gain to those of its policy."""
    from graph.collective_algorithms import blueconnect
    from graph.strategy import Sharding
    from graph.synchronization import Policy, Synchronization, p3
    from graph.training import Training
    from search.cost.cost_table import CostTable
    from search.simulate.simulator import simulate_tasks
    from search.simulate.steady_state import in_steady_state
    from search.simulate.task_graph import TaskGraphBuilder
    from search.space.baselines import data_parallel, shared

    count = len(topology.devices)
    inside = count // topology.node_count
    plain = data_parallel(graph, count)
    levels = ((tuple(range(count)), blueconnect((inside, count // inside))),)
    by_levels = replace(plain, collective_algorithms=levels)
    sharing = shared(graph, plain, Sharding.OPTIMIZER)
    late = replace(sharing, synchronization=Synchronization(Policy.TIC))

    costs = CostTable(Datasheet(topology.kinds))
    builder = TaskGraphBuilder(graph, topology, costs, Training(batch_size))

    def step_s(strategy: Strategy) -> float:
        return simulate_tasks(in_steady_state(builder.build(strategy), strategy, builder)).step_time_s

    fifo, two_levels, shared_s, late_s = map(step_s, (plain, by_levels, sharing, late))
    sliced = {size: step_s(replace(plain, synchronization=p3(size))) for size in SLICES}
    best = min(sliced, key=sliced.__getitem__)
    pulled = min(step_s(replace(sharing, synchronization=p3(size))) for size in SLICES)
    row = {"data parallel": f"{1e3 * fifo:.2f}"}
    for policy, before_s, after_s in (
        ("BlueConnect", fifo, two_levels),
        ("P3, the paper's slices", fifo, sliced[SLICES[0]]),
        ("P3, the best slices", fifo, sliced[best]),
        ("TIC of shared updates", shared_s, late_s),
        ("P3 of shared updates, the best slices", shared_s, pulled),
    ):
        gain = 1 - after_s / before_s
        gains.setdefault(policy, []).append(gain)
        row[policy] = f"{gain:+.1%}"
    return {**row, "slices": f"{best:,}", "shared updates": f"{1e3 * shared_s:.2f}"}
