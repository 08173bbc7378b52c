"""What policies of synchronization are predicted to be worth on 64 and 1,024 GPUs, for the networks of the zoo.

Models of FlexFlow's P100 cluster with 16 and 256 nodes, steps by data sheets; nothing is measured. Of data parallelism:
the all-reduce of two levels and P3, against one ring or halving over all devices and buckets. Of data parallelism with
shared updates (ZeRO-2): late gathers in the order of TIC, against gathers before the next step. Memory is not limited.
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

TOPOLOGY, NODES = "p100-cluster", (16, 256)
# Samples of a GPU: the published batch sizes, or what the networks' papers give a GPU.
NETWORKS = {
    "mlp": 64, "alexnet": 64, "vgg16": 32, "inception": 64, "resnet101": 64, "densenet121": 32, "rnntc": 64,
    "rnnlm": 64, "nmt": 64, "bert-large": 4, "gpt2": 4, "dlrm": 256, "candle-uno": 64,
}  # fmt: skip
# The paper's slices, and larger ones.
SLICES = (200_000, 1_600_000, 12_800_000)


def run(*, quick: bool) -> BenchmarkResult:
    """Simulate; in quick mode a small network on 8 GPUs."""
    from graph.topology import load_topology

    networks, preset = (QUICK, "small") if quick else (NETWORKS, "paper")
    rows: list[dict[str, str]] = []
    gains: dict[str, list[float]] = {}
    for nodes in (2,) if quick else NODES:
        topology = load_topology(TOPOLOGY, nodes)
        for name, samples in networks.items():
            began = time.perf_counter()
            graph = zoo_graph(name, preset, samples * len(topology.devices))
            row = _row(graph, topology, samples * len(topology.devices), gains)
            seconds = f"{time.perf_counter() - began:.0f}"
            rows.append({"network": name, "GPUs": str(len(topology.devices)), **row, "seconds": seconds})
    return BenchmarkResult(
        benchmark="policies_at_scale",
        conditions={"topology": TOPOLOGY, "costs": "data sheets"},
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
    from search.space.baselines import data_parallel, shared

    count = len(topology.devices)
    inside = count // topology.node_count
    plain = data_parallel(graph, count)
    levels = ((tuple(range(count)), blueconnect((inside, count // inside))),)
    by_levels = replace(plain, collective_algorithms=levels)
    sharing = shared(graph, plain, Sharding.OPTIMIZER)
    late = replace(sharing, synchronization=Synchronization(Policy.TIC))

    def step_s(strategy: Strategy) -> float:
        return _step_s(graph, strategy, topology, batch_size)

    fifo, two_levels, shared_s, late_s = map(step_s, (plain, by_levels, sharing, late))
    sliced = {size: step_s(replace(by_levels, synchronization=p3(size))) for size in SLICES}
    best = min(sliced, key=sliced.__getitem__)
    row = {"data parallel": f"{1e3 * fifo:.2f}"}
    for policy, before_s, after_s in (
        ("BlueConnect", fifo, two_levels),
        ("P3, the paper's slices", two_levels, sliced[SLICES[0]]),
        ("P3, the best slices", two_levels, sliced[best]),
        ("TIC of shared updates", shared_s, late_s),
    ):
        gain = 1 - after_s / before_s
        gains.setdefault(policy, []).append(gain)
        row[policy] = f"{gain:+.1%}"
    return {**row, "slices": f"{best:,}", "shared updates": f"{1e3 * shared_s:.2f}"}


def _step_s(graph: OperatorGraph, strategy: Strategy, topology: Topology, batch_size: int) -> float:
    from graph.training import Training
    from search.cost.cost_table import CostTable
    from search.simulate.simulator import simulate

    costs = CostTable(Datasheet(topology.kinds))
    return simulate(graph, strategy, topology, costs, Training(batch_size)).step_time_s
