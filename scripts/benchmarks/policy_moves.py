"""What it is worth that a walk knows of the policy of synchronization, which a search chooses after its walks.

On models of FlexFlow's P100 cluster, steps by data sheets. Four searches walk by default buckets, from four seeds; four
others walk by buckets of four sizes, from the first of these seeds. Each strategy found then takes the policy and size
that are predicted to be the fastest, as `app search --policy auto` does. What the best of the second four saves of the
best of the first four is the least that moves of the policy within a walk could bring.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement
from scripts.benchmarks.simulator import Datasheet
from scripts.benchmarks.zoo import QUICK, zoo_graph

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from search.simulate.task_graph import TaskGraphBuilder

TOPOLOGY, NODES = "p100-cluster", 4
# Samples of a GPU.
NETWORKS = {"alexnet": 16, "inception": 8, "resnet101": 8, "nmt": 16, "bert-large": 2, "dlrm": 64}
PROPOSALS, SEEDS = 4000, (0, 1, 2, 3)


def run(*, quick: bool) -> BenchmarkResult:
    """Search; in quick mode a small network on four GPUs."""
    measurements: list[MeasuredValue] = []
    rows: list[dict[str, str]] = []
    for name, samples in (QUICK if quick else NETWORKS).items():
        row, gain = _row(name, samples, quick=quick)
        rows.append({"network": name, **row})
        measurements.append(measurement(f"{name}: gain of walks of all sizes", 100 * gain, "%"))
    return BenchmarkResult(
        benchmark="policy_moves",
        conditions={"topology": TOPOLOGY, "nodes": NODES, "proposals a walk": 50 if quick else PROPOSALS},
        measurements=measurements,
        table=rows,
    )


def _row(name: str, samples: int, *, quick: bool) -> tuple[dict[str, str], float]:
    """Return a row of milliseconds, and the share that walks by several sizes save of those by default buckets."""
    from app.services.search.policies import BUCKETS
    from graph.synchronization import BUCKET_BYTES
    from graph.topology import load_topology
    from graph.training import Training
    from search.algorithms.chain import SearchOptions
    from search.algorithms.mcmc import search
    from search.algorithms.moves import shares_for
    from search.cost.cost_table import CostTable
    from search.problem import Problem
    from search.simulate.task_graph import TaskGraphBuilder

    topology = load_topology(TOPOLOGY, 1 if quick else NODES)
    count = len(topology.devices)
    graph = zoo_graph(name, "small" if quick else "paper", samples * count)
    costs, training = CostTable(Datasheet(topology.kinds)), Training(samples * count)
    steps_s: dict[tuple[int, int], float] = {}
    row: dict[str, str] = {}
    for size, seed in (
        (size, seed) for size in BUCKETS for seed in SEEDS if SEEDS[0] == seed or size == BUCKET_BYTES
    ):
        options = SearchOptions(proposals=50 if quick else PROPOSALS, shares=shares_for(count), seed=seed)
        builder = TaskGraphBuilder(graph, topology, costs, training, bucket_bytes=size)
        found = search(
            Problem(graph, topology, costs, training, builder=builder), options, workers=2
        ).strategy
        policy, steps_s[size, seed] = _fastest(
            graph, found, TaskGraphBuilder(graph, topology, costs, training)
        )
        walk = f"{size / 2**20:g} MiB" + (f", seed {seed}" if size == BUCKET_BYTES else "")
        row[walk] = f"{steps_s[size, seed] * 1e3:.2f} ({policy})"
    by_default = min(seconds for (size, _), seconds in steps_s.items() if size == BUCKET_BYTES)
    by_size = min(seconds for (_, seed), seconds in steps_s.items() if seed == SEEDS[0])
    return row, 1 - by_size / by_default


def _fastest(graph: OperatorGraph, strategy: Strategy, builder: TaskGraphBuilder) -> tuple[str, float]:
    """Return the policy of the shortest step of a strategy, and its seconds."""
    from app.services.search.policies import candidates
    from search.simulate.simulator import simulate_tasks
    from search.simulate.steady_state import in_steady_state

    steps = {}
    for synchronization in candidates("auto", frozenset(strategy.sharding)):
        changed = replace(strategy, synchronization=synchronization)
        changed.validate(graph, len(builder.topology.devices))
        tasks = in_steady_state(builder.build(changed), changed, builder)
        steps[f"{synchronization.policy} {synchronization.size_bytes / 1e6:.3g} MB"] = simulate_tasks(
            tasks
        ).step_time_s
    fastest = min(steps, key=steps.__getitem__)
    return fastest, steps[fastest]
