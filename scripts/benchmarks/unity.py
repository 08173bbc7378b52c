"""Substitutions and strategies searched together, each alone, and one after the other, on a model of Unity's cluster.

Summit as `graph/topologies/summit.yaml` has it, steps by data sheets, float32, SGD; nothing is measured. Strategies
alone, in turn and joint are one search (`search.algorithms.joint`, after the walk of `mcmc` on the graph that it begins
with) of as many proposals: without moves, on the graph as imported or on the one whose work is least on one device; and
with all moves. Seeded is the joint search that knows what the one in turn found, too.

Source: Unity (OSDI 2022) section 8: joint optimization against one after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number
from scripts.benchmarks.simulator import datasheet_problem
from scripts.benchmarks.zoo import zoo_graph

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.substitutions.substitution import Substitution
    from search.algorithms.joint import JointResult, JointStart
    from search.algorithms.rewritings import Rewriting
    from search.problem import Problem

# Samples of a device; of Unity's networks those that the zoo has.
NETWORKS = {
    "inception": 16, "resnext50": 16, "bert-large": 8, "dlrm": 64, "xdl": 64, "candle-uno": 64, "mlp": 64,
}  # fmt: skip
QUICK = {"bert-large": 1}
DEVICES = (6, 48, 192)
PROPOSALS = 1000
# Sets of moves that backtracking looks at where substitutions are searched alone.
MOST_SETS = 40
MOST_SECONDS = 60.0


def run(*, quick: bool) -> BenchmarkResult:
    """Search all networks on all sizes of the cluster; in quick mode one small network on one node."""
    from app.services.search.run_algorithms import worker_count

    rows = [
        _row(name, "small" if quick else "paper", devices, samples)
        for name, samples in (QUICK if quick else NETWORKS).items()
        for devices in (DEVICES[:1] if quick else DEVICES)
    ]
    worse = {
        column: sum(number(row, column) > 1.0001 * number(row, "in turn (ms)") for row in rows)
        for column in ("joint (ms)", "seeded (ms)")
    }
    return BenchmarkResult(
        benchmark="unity",
        conditions={
            "costs": "data sheets",
            "proposals": 10 if quick else PROPOSALS,
            "seed": 0,
            "workers": worker_count(None),
        },
        measurements=[
            measurement(
                "longest joint search", max(number(row, "seconds") for row in rows), "s", at_most=MOST_SECONDS
            ),
            measurement("joint searches worse than one after the other", worse["joint (ms)"], "", at_most=0),
            measurement(
                "joint searches worse than the one in turn that they know",
                worse["seeded (ms)"],
                "",
                at_most=0,
            ),
        ],
        table=rows,
        formats={column: ".2f" for column in rows[0] if column.endswith("(ms)")}
        | {"seconds": ".1f", "processor seconds": ".1f"},
    )


def _problem(graph: OperatorGraph, devices: int, batch_size: int) -> Problem:
    from graph.topology import load_topology
    from graph.training import Training

    return datasheet_problem(graph, load_topology("summit", devices // 6), Training(batch_size))


def _processor_s() -> float:
    """Return the processor time of this process and of those that have ended for it, in seconds."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _row(name: str, preset: str, devices: int, samples: int) -> Row:
    from app.services.search.run_algorithms import worker_count
    from app.services.search.substitution_moves import moves_of, rewritings_of
    from graph.substitutions.rewriting import rewritten
    from search.algorithms import registry
    from search.algorithms.algorithm import AlgorithmContext
    from search.algorithms.backtracking import backtrack
    from search.algorithms.chain import SearchOptions
    from search.algorithms.joint import JointStart, search_jointly
    from search.algorithms.moves import shares_for
    from search.space.baselines import data_parallel, single_device

    batch_size = samples * devices
    graph = zoo_graph(name, preset, batch_size)
    moves = moves_of(graph)
    options = SearchOptions(
        proposals=10 if preset == "small" else PROPOSALS, chains=2, shares=shares_for(devices)
    )
    rewritings = rewritings_of(_problem(graph, devices, batch_size), moves)

    def data_parallel_s(rewriting: Rewriting) -> float:
        of = rewritings.graph(rewriting)
        assert of is not None
        return of.outcome(data_parallel(of.graph, devices), options.order).seconds

    def alone_s(rewriting: Rewriting) -> float:
        of = rewritings.graph(rewriting)
        assert of is not None
        # One device's work decides, as in an optimizer that knows of no other; whether it fits there does not.
        return of.outcome(single_device(of.graph), options.order).step_time_ns / 1e9

    def searched(
        problem: Problem, moves: Sequence[tuple[Substitution, ...]], seeds: Sequence[JointStart] = ()
    ) -> tuple[float, JointResult]:
        workers = worker_count(None)
        results = registry.run(("mcmc",), problem, AlgorithmContext(options, workers=workers))
        best = registry.best_of(results)
        joint = search_jointly(
            rewritings_of(problem, moves),
            (JointStart("mcmc", (), best.strategy), *seeds),
            options,
            workers=workers,
        )
        return best.step_time_s, joint

    plain = data_parallel_s(())
    substituted = backtrack(len(moves), data_parallel_s, budget=MOST_SETS)[0].cost_s
    first = backtrack(len(moves), alone_s, budget=MOST_SETS)[0].moves
    substituted_graph = rewritten(graph, [each for move in first for each in moves[move]])
    in_turn = searched(_problem(substituted_graph, devices, batch_size), ())[1]
    alone = searched(_problem(graph, devices, batch_size), ())[1]
    # As `app search` has it, without what is known already.
    imported = _problem(graph, devices, batch_size)
    begun, worked = time.perf_counter(), _processor_s()
    mcmc_s, joint = searched(imported, moves)
    seconds, processor_seconds = time.perf_counter() - begun, _processor_s() - worked
    seeds = (JointStart("in turn", first, in_turn.strategy),)
    seeded = searched(_problem(graph, devices, batch_size), moves, seeds)[1]
    return {
        "network": name,
        "GPUs": devices,
        "operators": len(graph.operators),
        "moves": len(moves),
        "data parallel (ms)": 1e3 * plain,
        "substitutions alone (ms)": 1e3 * substituted,
        "mcmc (ms)": 1e3 * mcmc_s,
        "strategies alone (ms)": 1e3 * alone.step_time_s,
        "in turn (ms)": 1e3 * in_turn.step_time_s,
        "joint (ms)": 1e3 * joint.step_time_s,
        "seeded (ms)": 1e3 * seeded.step_time_s,
        "sets": len(joint.evaluated),
        "chosen": len(joint.rewriting),
        "seconds": seconds,
        "processor seconds": processor_seconds,
    }
