"""How far the best baseline of each network of the zoo is above the proven lower bound, at 4, 16 and 64 devices.

Beside it the bound as it is without the work of operators that have too many configurations to look at all of them, and
how long each takes. Networks, batches and clusters are those of scripts/study's second table; costs are estimates from
data sheets.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number

if TYPE_CHECKING:
    from scripts.studies.cells import StudyCell
    from search.problem import Problem


FORMATS = {
    **dict.fromkeys(("ms", "bound ms", "looked up alone ms"), ".2f"),
    **dict.fromkeys(("gap %", "its gap %"), ",.1f"),
    "s": ".1f",
}


def run(*, quick: bool) -> BenchmarkResult:
    """Measure every row; in quick mode those of one network in its small preset."""
    from scripts.studies.cells import Request, zoo_cells

    request = Request(tables=("zoo",), networks=("mlp",) if quick else None, quick=quick)
    rows = [_row(cell) for cell in zoo_cells(request)]
    gap, its_gap, seconds = ([number(row, column) for row in rows] for column in ("gap %", "its gap %", "s"))
    return BenchmarkResult(
        benchmark="bound",
        conditions={"costs": "data sheets"},
        measurements=[
            measurement("gap of the best baseline, median", statistics.median(gap), "%"),
            measurement("without work that nobody looked up", statistics.median(its_gap), "%"),
            measurement("time of a bound, most", max(seconds), "s"),
        ],
        table=rows,
        formats=FORMATS,
    )


def _row(cell: StudyCell) -> Row:
    from search.bounds.lower_bound import lower_bound

    problem = _problem(cell)
    began = time.perf_counter()
    bound_ns = lower_bound(problem).time_ns
    seconds = time.perf_counter() - began
    # Without work that nobody looked up.
    looked_up_ns = lower_bound(replace(problem, least_work=None)).time_ns
    baseline, baseline_ns = _best_baseline(problem)
    return {
        "network": cell.network,
        "cluster": cell.topology,
        "devices": cell.devices,
        "batch": cell.batch_size,
        "best baseline": baseline,
        "ms": baseline_ns / 1e6,
        "bound ms": bound_ns / 1e6,
        "gap %": 100 * (baseline_ns / bound_ns - 1),
        "looked up alone ms": looked_up_ns / 1e6,
        "its gap %": 100 * (baseline_ns / looked_up_ns - 1),
        "s": seconds,
    }


def _problem(cell: StudyCell) -> Problem:
    from app.services.models.models import ModelRequest, import_graph
    from graph.rules import first_call, local_calls
    from graph.rules.least import least_work
    from graph.topology import load_topology
    from graph.training import Training
    from scripts.benchmarks.simulator import Datasheet
    from search.cost.cost_table import CostTable
    from search.cost.link_costs import LinkCosts
    from search.problem import Problem

    model = import_graph(
        ModelRequest(name=cell.network, preset=cell.preset, batch_size=cell.batch_size),
        batch_norm="synchronized",
    )
    topology = load_topology(cell.topology).subset(cell.devices)
    return Problem(
        model.graph, topology, CostTable(Datasheet(topology.kinds)), Training(cell.batch_size), LinkCosts(),
        local_calls, first_call, least_work,
    )  # fmt: skip


def _best_baseline(problem: Problem) -> tuple[str, int]:
    """Return the fastest baseline that fits, else the fastest, and the nanoseconds of its step."""
    from search.algorithms.best_tracker import simulated
    from search.space.baselines import all_baselines

    candidates = []
    for baseline in all_baselines(problem.graph, problem.device_count):
        outcome = simulated(problem, baseline.strategy, "program")
        candidates.append((outcome.excess_bytes > 0, outcome.step_time_ns, baseline.name))
    _, step_time_ns, name = min(candidates)
    return name, step_time_ns
