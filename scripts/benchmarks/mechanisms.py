"""The error of predicted steps with and without each mechanism of communication, over strategies that are executed.

Every execution is simulated again from what the database holds, each time with one mechanism switched off or on:
measured curves (off: the fitted lines), contention, and waiting. Waiting is no part of predictions: it is simulated
here with every call's time drawn from its own stored samples, many times; what the mean of these steps takes beyond the
step in which every call takes the mean of its draws is what members wait for the slowest of them. Executions of which
other processes took more than a tenth are left out. Beside it, what was measured of links predicted from the sizes next
to it. SOAPSTONE_DATABASE_URL keeps the database; else it is temporary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.prediction import DEVICES, NAMED, database, executed
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement, percentile

if TYPE_CHECKING:
    import numpy as np

    from app.db.records import ExecutionRecord, LinkCostRecord
    from app.db.store import Store
    from app.services.timeline.simulated_step import SimulatedStep
    from graph.operators import OperatorGraph
    from search.simulate.task_graph import TaskGraph

# Batch sizes for which a step takes 0.05 to 2 s on one core.
NETWORKS = {"mlp": 64, "alexnet": 16}
DRAWS = 100
AS_IT_IS, LINES, NO_CONTENTION, WAITING = "as it is", "lines, not curves", "no contention", "waiting added"


@dataclass(frozen=True, slots=True)
class Repeated:
    """An execution, and its step as each variant predicts it, in seconds."""

    network: str
    measured_s: float
    predicted_s: dict[str, float]

    def error(self, variant: str) -> float:
        """By what share a variant is above what was measured."""
        return self.predicted_s[variant] / self.measured_s - 1


def run(*, quick: bool) -> BenchmarkResult:
    """Execute the named strategies of some networks and predict each with and without the mechanisms.

    Raises:
        SoapstoneError: a run failed.
    """
    from app.db.records import is_restless
    from app.db.store import Store
    from app.services.models.models import requested_model

    with database():
        for name, batch_size in ({"mlp": 8} if quick else NETWORKS).items():
            model = requested_model(name, "small" if quick else "paper", batch_size)
            # Once more, backwards: a machine's speed drifts.
            for reference in (*NAMED, *reversed(NAMED)):
                executed(model, reference)
        with Store.open() as store:
            graphs: dict[int, OperatorGraph] = {}
            repeated = [
                predicted_again(store, execution, graphs)
                for execution in store.executions()
                if not is_restless(execution.median_s, execution.undisturbed_s)
            ]
            samples = link_samples(store)
    networks = [*dict.fromkeys(one.network for one in repeated)]
    rows = [row(network, [one for one in repeated if one.network == network]) for network in networks]
    return BenchmarkResult(
        benchmark="mechanisms",
        conditions={"devices": DEVICES[0], "executions": len(repeated), "draws": DRAWS},
        measurements=list(left_out_errors(samples)),
        table=[*rows, *([row("all", repeated)] if repeated else [])],
    )


def row(network: str, repeated: Sequence[Repeated]) -> dict[str, str]:
    """Return the mean error of each variant over some executions, and with its sign."""
    cells = {"network": network, "executions": str(len(repeated))}
    for variant in (AS_IT_IS, LINES, NO_CONTENTION, WAITING):
        errors = [one.error(variant) for one in repeated]
        mean = sum(map(abs, errors)) / len(errors)
        cells[variant] = f"{mean:.1%} ({sum(errors) / len(errors):+.1%})"
    return cells


# ---- the same execution, predicted with and without


def predicted_again(store: Store, execution: ExecutionRecord, graphs: dict[int, OperatorGraph]) -> Repeated:
    """Return an execution as each variant predicts it now; `graphs` keeps those imported, by their rows."""
    import numpy as np

    from app.services.costs.link_costs import links_of
    from app.services.progress import Progress
    from app.services.timeline.simulated_step import simulated_step, stored_costs
    from search.cost.cost_table import CostTable
    from search.simulate.simulator import simulate_tasks
    from search.simulate.task_graph import TaskGraphBuilder

    record = store.strategy(execution.strategy_id)
    step = simulated_step(
        store, record, execution.topology_id, execution.training_id, execution.environment_id, "program",
        progress=Progress(), graph=graphs.get(record.graph_id),
    )  # fmt: skip
    graphs[record.graph_id] = step.graph
    target, source = stored_costs(store, step.topology, execution.environment_id, step.training.precision)
    links, table = target.links, CostTable(source)
    lines = None if links is None else links_of(links.fits, (), range(links.count))
    uncontended = replace(step.topology, contention=())
    variants = {
        AS_IT_IS: (step.topology, target.link_costs),
        LINES: (step.topology, target.link_costs if lines is None else lines.costs),
        NO_CONTENTION: (uncontended, target.link_costs),
    }
    task_graphs = {
        variant: TaskGraphBuilder(step.graph, topology, table, step.training, links=costs).build(
            step.strategy
        )
        for variant, (topology, costs) in variants.items()
    }
    predicted_s = {variant: simulate_tasks(tasks).step_time_s for variant, tasks in task_graphs.items()}
    waits_s = waiting_s(
        task_graphs[AS_IT_IS], relative_samples(store, execution, step), np.random.default_rng(0)
    )
    predicted_s[WAITING] = predicted_s[AS_IT_IS] + waits_s
    measured_s = execution.undisturbed_s or execution.median_s
    graph = store.graph(record.graph_id)
    assert measured_s is not None
    assert graph is not None
    return Repeated(graph.name, measured_s, predicted_s)


def relative_samples(
    store: Store, execution: ExecutionRecord, step: SimulatedStep
) -> dict[tuple[str, str, tuple[int, ...], int], tuple[float, ...]]:
    """Return the stored samples over their median, by phase, operator and task."""
    from graph.rules import local_calls

    calls = {}
    for index, (operator, configuration) in enumerate(
        zip(step.graph.operators, step.strategy.configurations, strict=True)
    ):
        for part, call in enumerate(local_calls(step.graph, operator, configuration.degrees)):
            calls[index, part] = replace(call, bindings=()).digest
    kind = store.device_kind(step.topology.kinds[0].name)
    assert kind is not None
    stored = store.op_costs(kind.id, execution.environment_id, calls.values())
    found: dict[Any, tuple[float, ...]] = {}
    for (index, part), digest in calls.items():
        for phase in ("forward", "backward"):
            cost = stored.get((digest, phase))
            if cost is not None and cost.median_s:
                found[phase, index, part] = tuple(sample / cost.median_s for sample in cost.samples_s)
    return found


def waiting_s(tasks: TaskGraph, samples: dict[Any, tuple[float, ...]], rng: np.random.Generator) -> float:
    """Return the seconds by which steps of drawn times are longer in the mean than the step of mean times."""
    import numpy as np

    from search.simulate.simulator import simulate_tasks
    from search.simulate.task_graph import TaskKind

    phases = {TaskKind.FORWARD: "forward", TaskKind.RECOMPUTE: "forward", TaskKind.BACKWARD: "backward"}
    factors = np.ones((DRAWS, tasks.task_count))
    for task in range(tasks.task_count):
        phase = phases.get(TaskKind(int(tasks.kind_T[task])))
        known = samples.get((phase, int(tasks.subject_T[task]), int(tasks.part_T[task])))
        if known:
            factors[:, task] = rng.choice(known, DRAWS)

    def step_s(factor_T: np.ndarray[Any, Any]) -> float:
        run_ns_T = np.rint(tasks.run_ns_T * factor_T).astype(np.int64)
        return simulate_tasks(replace(tasks, run_ns_T=run_ns_T)).step_time_s

    return float(np.mean([step_s(drawn) for drawn in factors])) - step_s(factors.mean(axis=0))


# ---- what was measured of links, from the sizes next to it


def link_samples(store: Store) -> list[LinkCostRecord]:
    """Return all stored samples of links."""
    return [
        cost
        for kind in store.device_kinds()
        for environment in store.environments()
        for cost in store.link_costs(kind.id, environment.id)
    ]


def left_out_errors(samples: Sequence[LinkCostRecord]) -> Iterator[MeasuredValue]:
    """Yield the errors at each inner size of a pattern, of the fitted line and between its neighbours."""
    from profiler.fits import fit_link

    by_pattern: dict[tuple[int, int, str, int], dict[int, float]] = {}
    for cost in samples:
        key = (cost.device_kind_id, cost.environment_id, cost.pattern, cost.group_size)
        by_pattern.setdefault(key, {})[cost.size_bytes] = cost.median_s
    errors: dict[str, list[float]] = {"line": [], "straight in bytes": [], "straight in logarithms": []}
    for points in by_pattern.values():
        sizes = sorted(points)
        for before, size, after in zip(sizes, sizes[1:], sizes[2:], strict=False):
            others = [one for one in sizes if one != size]
            line_s = fit_link(others, [points[one] for one in others]).time_s(size)
            share, log_share = (size - before) / (after - before), log(size / before) / log(after / before)
            straight_s = points[before] + share * (points[after] - points[before])
            log_s = points[before] * (points[after] / points[before]) ** log_share
            for name, seconds in zip(errors, (line_s, straight_s, log_s), strict=True):
                errors[name].append(abs(seconds / points[size] - 1))
    for name, of_name in errors.items():
        yield measurement(f"a size left out, {name}: mean error", 100 * sum(of_name) / len(of_name), "%")
        yield measurement("    median", percentile(of_name, 0.5), "%")
