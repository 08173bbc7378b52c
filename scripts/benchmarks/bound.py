"""How far the best baseline of each network of the zoo is above the proven lower bound, at 4, 16 and 64 devices.

Beside it the bound as it is without the work of operators that have too many configurations to look at all of them, and
how long each takes. Networks, batches and clusters are those of scripts/study's second table; costs are estimates from
data sheets.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, measurement

if TYPE_CHECKING:
    from scripts.studies.cells import StudyCell
    from search.problem import Problem


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A network on a cluster. looked_up_ns: the bound without work that nobody looked up."""

    cell: StudyCell
    bound_ns: int
    looked_up_ns: int
    seconds: float
    baseline: str
    baseline_ns: int

    @property
    def gap(self) -> float:
        """The share by which the best baseline is above the bound."""
        return self.baseline_ns / self.bound_ns - 1

    @property
    def looked_up_gap(self) -> float:
        """The share by which the best baseline is above the looked-up bound."""
        return self.baseline_ns / self.looked_up_ns - 1


def run(*, quick: bool) -> BenchmarkResult:
    """Measure every row; in quick mode those of one network in its small preset."""
    from scripts.studies.cells import Request, zoo_cells

    request = Request(tables=("zoo",), networks=("mlp",) if quick else None, quick=quick)
    rows = [_row(cell) for cell in zoo_cells(request)]
    gaps = [row.gap for row in rows]
    return BenchmarkResult(
        benchmark="bound",
        conditions={"costs": "data sheets"},
        measurements=[
            measurement("gap of the best baseline, median", 100 * statistics.median(gaps), "%"),
            measurement(
                "without work that nobody looked up",
                100 * statistics.median(row.looked_up_gap for row in rows),
                "%",
            ),
            measurement("time of a bound, most", max(row.seconds for row in rows), "s"),
        ],
        table=[
            {
                "network": row.cell.network,
                "cluster": row.cell.topology,
                "devices": str(row.cell.devices),
                "batch": str(row.cell.batch_size),
                "best baseline": row.baseline,
                "ms": f"{row.baseline_ns / 1e6:.2f}",
                "bound ms": f"{row.bound_ns / 1e6:.2f}",
                "gap %": f"{100 * row.gap:,.1f}",
                "looked up alone ms": f"{row.looked_up_ns / 1e6:.2f}",
                "its gap %": f"{100 * row.looked_up_gap:,.1f}",
                "s": f"{row.seconds:.1f}",
            }
            for row in rows
        ],
    )


def _row(cell: StudyCell) -> BoundRow:
    from search.bounds.lower_bound import lower_bound

    problem = _problem(cell)
    began = time.perf_counter()
    bound = lower_bound(problem)
    seconds = time.perf_counter() - began
    looked_up = lower_bound(replace(problem, least_work=None))
    baseline, baseline_ns = _best_baseline(problem)
    return BoundRow(cell, bound.time_ns, looked_up.time_ns, seconds, baseline, baseline_ns)


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
    from search.simulate.simulator import simulate
    from search.space.baselines import all_baselines

    candidates = []
    for baseline in all_baselines(problem.graph, problem.device_count):
        simulation = simulate(
            problem.graph,
            baseline.strategy,
            problem.topology,
            problem.costs,
            problem.training,
            links=problem.links,
        )
        candidates.append((not simulation.feasible, simulation.step_time_ns, baseline.name))
    _, step_time_ns, name = min(candidates)
    return name, step_time_ns
