"""What the `pipeline` algorithm finds on 16 GPUs, against the best 3-D parallelism, by the number of micro-batches.

A model of FlexFlow's P100 cluster, steps by data sheets, float32, Adam; nothing is measured. Every number of
micro-batches has the same global batch. Memory is limited to that of the GPUs; where no baseline fits it, the one that
exceeds it least is shown, with a mark. A step is simulated in program order, as the runtime executes it.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, Row, measurement
from scripts.benchmarks.simulator import datasheet_problem
from scripts.benchmarks.zoo import zoo_graph

if TYPE_CHECKING:
    from graph.strategy import Strategy
    from search.problem import Problem

MICRO_BATCHES = (1, 4, 8, 16)
# Global batches: 8 samples a GPU, of VGG 16.
NETWORKS = {"bert-large": 128, "gpt2": 128, "vgg16": 256}
QUICK = {"gpt2": 16}
NODES = 4
MOST_SECONDS = 60.0


def run(*, quick: bool) -> BenchmarkResult:
    """Search; in quick mode a small network, in two numbers of micro-batches."""
    networks, preset = (QUICK, "small") if quick else (NETWORKS, "paper")
    rows: list[Row] = []
    slowest_s, gains = 0.0, []
    for name, batch_size in networks.items():
        for micro_batches in MICRO_BATCHES[:2] if quick else MICRO_BATCHES:
            row, gain, seconds = _row(name, preset, batch_size, micro_batches)
            rows.append(row)
            gains.append(gain)
            slowest_s = max(slowest_s, seconds)
    return BenchmarkResult(
        benchmark="pipelines",
        conditions={"costs": "data sheets", "GPUs": f"{4 * NODES} p100-cluster", "optimizer": "adam"},
        measurements=[
            measurement("longest search", slowest_s, "s", at_most=MOST_SECONDS),
            measurement("mean gain over the best 3-D parallelism", 100 * sum(gains) / len(gains), "%"),
        ],
        table=rows,
        formats={"best 3-D (ms)": ".1f", "pipeline (ms)": ".1f", "gain (%)": ".1f", "seconds": ".1f"},
    )


def _problem(name: str, preset: str, batch_size: int, micro_batches: int) -> Problem:
    from graph.topology import load_topology
    from graph.training import Training

    graph = zoo_graph(name, preset, batch_size // micro_batches)
    topology, training = load_topology("p100-cluster", NODES), Training(batch_size, optimizer="adam")
    return datasheet_problem(graph, topology, training, micro_batches)


def _row(name: str, preset: str, batch_size: int, micro_batches: int) -> tuple[Row, float, float]:
    """Return a row of the table, the gain as a share, and the seconds of the search."""
    from search.algorithms.best_tracker import simulated
    from search.algorithms.pipeline import pipeline
    from search.algorithms.staging import pipeline_baselines

    problem = _problem(name, preset, batch_size, micro_batches)
    outcomes = {
        baseline.name: simulated(problem, baseline.strategy, "program")
        for baseline in pipeline_baselines(problem)
    }
    best = min(outcomes, key=outcomes.__getitem__)
    began = time.perf_counter()
    result = pipeline(problem, most=1 << 16, seed=0)
    seconds = time.perf_counter() - began
    fits = outcomes[best].excess_bytes == 0
    baseline_ns, found_ns = outcomes[best].step_time_ns, result.outcome.step_time_ns
    gain = 1 - found_ns / baseline_ns if fits else 0.0
    row: Row = {
        "network": name,
        "micro-batches": micro_batches,
        "best 3-D": best if fits else f"{best} (exceeds memory)",
        "best 3-D (ms)": baseline_ns / 1e6,
        "pipeline (ms)": found_ns / 1e6 if result.outcome.excess_bytes == 0 else None,
        "gain (%)": 100 * gain if fits else None,
        "seconds": seconds,
        "simulated": result.simulated,
        "chosen": chosen_text(problem, result.strategy),
    }
    return row, gain, seconds


def chosen_text(problem: Problem, strategy: Strategy) -> str:
    """Return a strategy's schedule, and of each stage the share of operators and devices; and what saves memory."""
    from graph.schedule import stages_of

    graph, schedule = problem.graph, strategy.micro_batches.schedule
    stages = stages_of(graph, strategy.configurations, schedule)
    firsts = [*(stage.first for stage in stages), len(graph.operators)]
    shares = [
        f"{100 * (after - before) / len(graph.operators):.0f}%x{len(stage.devices)}"
        for stage, (before, after) in zip(stages, pairwise(firsts), strict=True)
    ]
    parts = [schedule.value if strategy.micro_batches.count > 1 else "one batch", " ".join(shares)]
    if strategy.sharding:
        parts.append("ZeRO-2")
    if strategy.recomputation:
        parts.append(f"{len(strategy.recomputation)} groups made again")
    return ", ".join(parts)
