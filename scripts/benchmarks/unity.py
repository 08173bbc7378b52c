"""Substitutions and strategies searched together, each alone, and one after the other, on a model of Unity's cluster.

Summit as `graph/topologies/summit.yaml` has it, steps by data sheets, float32, SGD; nothing is measured. Every search
has the same number of proposals for a graph.

Source: Unity (OSDI 2022) section 8: joint optimization against one after the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number
from scripts.benchmarks.simulator import datasheet_problem
from scripts.benchmarks.zoo import zoo_graph

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from search.problem import Problem

# Samples of a device; of Unity's networks those that the zoo has.
NETWORKS = {
    "inception": 16, "resnext50": 16, "bert-large": 8, "dlrm": 64, "xdl": 64, "candle-uno": 64, "mlp": 64,
}  # fmt: skip
QUICK = {"bert-large": 1}
DEVICES = (6, 48, 192)
PROPOSALS = 1000
BUDGET = 40
MOST_SECONDS = 60.0


def run(*, quick: bool) -> BenchmarkResult:
    """Search all networks on all sizes of the cluster; in quick mode one small network on one node."""
    rows = [
        _row(name, "small" if quick else "paper", devices, samples)
        for name, samples in (QUICK if quick else NETWORKS).items()
        for devices in (DEVICES[:1] if quick else DEVICES)
    ]
    worse = [row for row in rows if number(row, "joint (ms)") > 1.0001 * number(row, "in turn (ms)")]
    return BenchmarkResult(
        benchmark="unity",
        conditions={"costs": "data sheets", "proposals": 10 if quick else PROPOSALS, "seed": 0},
        measurements=[
            measurement(
                "longest joint search", max(number(row, "seconds") for row in rows), "s", at_most=MOST_SECONDS
            ),
            measurement("joint searches worse than one after the other", len(worse), "", at_most=0),
        ],
        table=rows,
        formats={column: ".2f" for column in rows[0] if column.endswith("(ms)")} | {"seconds": ".1f"},
    )


def _problem(graph: OperatorGraph, devices: int, batch_size: int) -> Problem:
    from graph.topology import load_topology
    from graph.training import Training

    return datasheet_problem(graph, load_topology("summit", devices // 6), Training(batch_size))


def _row(name: str, preset: str, devices: int, samples: int) -> Row:
    from app.services.search.substitution_searches import SetCosts, moves_of
    from graph.substitutions.rewriting import rewritten
    from search.algorithms import registry
    from search.algorithms.algorithm import AlgorithmContext
    from search.algorithms.backtracking import backtrack
    from search.algorithms.best_tracker import simulated
    from search.algorithms.mcmc import SearchOptions
    from search.space.baselines import data_parallel, single_device

    batch_size = samples * devices
    graph = zoo_graph(name, preset, batch_size)
    moves = moves_of(graph)
    options = SearchOptions(
        proposals=10 if preset == "small" else PROPOSALS,
        chains=2,
        seed=0,
        beta=300.0,
        order="program",
        time_limit_s=None,
    )

    def problem(chosen: tuple[int, ...]) -> Problem:
        substitutions = [each for move in chosen for each in moves[move]]
        return _problem(rewritten(graph, substitutions), devices, batch_size)

    found: dict[tuple[int, ...], float] = {}

    def searched(chosen: tuple[int, ...]) -> float:
        if chosen not in found:
            results = registry.run(("mcmc",), problem(chosen), AlgorithmContext(options))
            found[chosen] = registry.best_of(results).step_time_s
        return found[chosen]

    def data_parallel_s(chosen: tuple[int, ...]) -> float:
        of = problem(chosen)
        return simulated(of, data_parallel(of.graph, devices), options.order).seconds

    def alone_s(chosen: tuple[int, ...]) -> float:
        of = problem(chosen)
        # One device's work decides, as in an optimizer that knows of no other; whether it fits there does not.
        return simulated(of, single_device(of.graph), options.order).step_time_ns / 1e9

    plain = data_parallel_s(())
    substituted = backtrack(len(moves), data_parallel_s, budget=BUDGET)[0].cost_s
    parallelized = searched(())
    first = backtrack(len(moves), alone_s, budget=BUDGET)[0].moves
    in_turn = searched(first)
    begun = time.perf_counter()
    known = dict(found)
    found.clear()
    costs = SetCosts(problem(()), options.order)
    evaluated = backtrack(len(moves), lambda chosen: costs.seconds(problem(chosen)), budget=BUDGET)
    joint = min(
        searched(chosen) for chosen in dict.fromkeys(((), first, *(one.moves for one in evaluated[:2])))
    )
    seconds = time.perf_counter() - begun
    best = min(found, key=found.__getitem__)
    assert known.keys() <= found.keys()
    return {
        "network": name,
        "GPUs": devices,
        "operators": len(graph.operators),
        "moves": len(moves),
        "data parallel (ms)": 1e3 * plain,
        "substitutions alone (ms)": 1e3 * substituted,
        "strategies alone (ms)": 1e3 * parallelized,
        "in turn (ms)": 1e3 * in_turn,
        "joint (ms)": 1e3 * joint,
        "sets": len(evaluated),
        "chosen": len(best),
        "seconds": seconds,
    }
