"""A stored strategy simulated again: its model imported, its topology and training as stored, costs of the database.

Nothing is measured here and nothing is stored: what has no cost is estimated. Where the step differs from the newest
prediction that is stored, because costs have changed since, that is said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.db.failures import as_written
from app.db.records import ExecutionRecord, GraphRecord, SimulationRecord, StrategyRecord, TaskOrder
from app.db.references import Referred, required
from app.db.store import Store
from app.services.costs.environments import say_used
from app.services.costs.link_costs import links_between
from app.services.costs.machine import links_kind_name
from app.services.costs.operator_costs import CostsByKind, DatabaseCosts
from app.services.costs.topologies import LOCAL, measured_links
from app.services.models.models import import_graph, stored_request
from app.services.predict.compiled_stretches import compiled_stretches, with_compiled_costs
from app.services.predict.predict import Target
from app.services.progress import Progress
from app.services.stored import strategy_of, topology_of, training_of
from graph.errors import UsageError
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from graph.topology import Topology
from graph.training import Training
from search.cost.cost_table import CostTable

if TYPE_CHECKING:
    from search.cost.link_costs import LinkCosts
    from search.simulate.simulator import Simulation


NEWEST = 1000


@dataclass(frozen=True)
class SimulatedStep:
    """A strategy on a topology under a training, and its simulation.

    links: what is known about communication. kept: the simulation of the same strategy with all activations kept; None
    where none are made again. stored_s: the step's newest stored prediction; None where there is none.
    """

    record: StrategyRecord
    graph: OperatorGraph
    topology: Topology
    training: Training
    strategy: Strategy
    simulation: Simulation
    topology_id: int
    training_id: int
    links: LinkCosts
    kept: Simulation | None = None
    stored_s: float | None = None


def step_of_execution(store: Store, execution: ExecutionRecord, progress: Progress) -> SimulatedStep:
    """Return an execution's step, simulated with the costs of its environment."""
    return simulated_step(
        store,
        store.strategy(execution.strategy_id),
        execution.topology_id,
        execution.training_id,
        execution.environment_id,
        "program",
        progress=progress,
    )


def step_of_strategy(store: Store, reference: str, topology: str | None, progress: Progress) -> SimulatedStep:
    """Return the newest simulated step of a strategy: an id or digest, on the topology of that name.

    Raises:
        UsageError: there is no such strategy, or it was never simulated on that topology.
    """
    record = store.strategy(reference)
    simulations = store.simulations(strategy_id=record.id)
    names = Referred("topologies", ((topology.id, topology.name) for topology in store.topologies()))
    chosen = next(
        (simulation for simulation in simulations if topology in (None, names[simulation.topology_id])), None
    )
    if chosen is None:
        simulated_on = (
            ", ".join(sorted({names[simulation.topology_id] for simulation in simulations})) or "none"
        )
        raise UsageError(
            f"strategy {record.digest[:12]}: has no simulation on topology {topology or 'any'}, must have one; "
            f"it has on {simulated_on}"
        )
    return simulated_step(
        store,
        record,
        chosen.topology_id,
        chosen.training_id,
        environment_of(store, record.id, chosen.topology_id),
        chosen.task_order,
        progress=progress,
    )


def environment_of(store: Store, strategy_id: int, topology_id: int) -> int | None:
    """Return the environment that last ran a strategy on a topology, else anything there; None: nothing ever ran.

    Of None the newest costs of any environment are taken.
    """
    for of_strategy in (strategy_id, None):
        for run in store.executions(strategy_id=of_strategy, limit=NEWEST):
            if run.topology_id == topology_id:
                return run.environment_id
    return None


def imported_graph(record: GraphRecord) -> OperatorGraph:
    """Import a stored graph's model again.

    Raises:
        UsageError: the model is gone, has changed since, or may not be run (`app.services.models.trust`).
        ImportFailure: it cannot be imported any more.
    """
    with as_written(f"table graphs, row {record.id}, column model"):
        request = stored_request(record.model, f"graph {record.name}")
    graph = import_graph(request, batch_norm=json.loads(record.document)["batch_norm"]).graph
    if graph.digest != record.digest:
        raise UsageError(
            f"model {request.name}: its graph is {graph.digest[:12]} now, must be {record.digest[:12]}, as it was "
            "stored; search or run it anew"
        )
    return graph


def simulated_step(
    store: Store,
    record: StrategyRecord,
    topology_id: int,
    training_id: int,
    environment_id: int | None,
    order: TaskOrder,
    *,
    progress: Progress,
    graph: OperatorGraph | None = None,
) -> SimulatedStep:
    """Return a stored strategy simulated in a stored setting; `graph` where its model is imported already.

    progress: is told where no stored prediction has the same step.
    """
    from search.simulate.simulator import simulate, simulate_tasks
    from search.simulate.steady_state import in_steady_state
    from search.simulate.task_graph import TaskGraphBuilder

    graph_record = required(store.graph(record.graph_id), "graphs", record.graph_id)
    topology_record = required(store.topology(topology_id), "topologies", topology_id)
    training_record = required(store.training(training_id), "trainings", training_id)
    if graph is None:
        with progress.stage(f"importing {graph_record.name}"):
            graph = imported_graph(graph_record)
    topology = topology_of(topology_record)
    training = training_of(training_record)
    strategy = strategy_of(record, graph)
    target, source = stored_costs(store, topology, environment_id, training.precision)
    if environment_id is None:
        for kind in topology.kinds:
            say_used(store, kind.name, training.precision, progress)
    costs, links = CostTable(source), target.link_costs
    with progress.stage("simulating"):
        stretches = compiled_stretches(graph, strategy, topology)
        builder = TaskGraphBuilder(graph, topology, costs, training, links=links)
        tasks = with_compiled_costs(builder.build(strategy), stretches, costs)
        simulation = simulate_tasks(in_steady_state(tasks, strategy, builder), order)
        kept = None
        if strategy.recomputation:
            plain = replace(strategy, recomputation=())
            kept = simulate(graph, plain, topology, costs, training, links=links, order=order)
    newest = next(
        (
            row
            for row in store.simulations(strategy_id=record.id, limit=NEWEST)
            if (row.topology_id, row.training_id, row.task_order) == (topology_id, training_id, order)
        ),
        None,
    )
    if newest is None or round(newest.step_time_s * 1e9) != simulation.step_time_ns:
        progress.say(_anew(record, simulation.step_time_s, newest))
    return SimulatedStep(
        record, graph, topology, training, strategy, simulation, topology_id, training_id, links, kept,
        None if newest is None else newest.step_time_s,
    )  # fmt: skip


def _anew(record: StrategyRecord, step_s: float, newest: SimulationRecord | None) -> str:
    """Return in a line that a step is none that is stored."""
    stored = "no prediction of it is stored"
    if newest is not None:
        when = f"{newest.created_at:%Y-%m-%d %H:%M} UTC"
        stored = f"the prediction stored on {when} is {newest.step_time_s * 1e3:.3f} ms"
    return (
        f"strategy {record.digest[:12]} is predicted anew, with the costs that are stored now: {step_s * 1e3:.3f} ms; "
        f"{stored}, and the new one is not stored"
    )


def stored_costs(
    store: Store, topology: Topology, environment_id: int | None, precision: str
) -> tuple[Target, CostsByKind]:
    """Return a stored topology with its links, and the costs of its kinds, as an environment has them."""
    sources = {}
    for kind in topology.kinds:
        stored = store.device_kind(kind.name)
        kind_id = stored.id if stored is not None else None
        sources[kind.name] = DatabaseCosts(
            store, kind, kind_id, environment_id, "estimate", precision=precision
        )
    links = None
    if topology.name != LOCAL:
        links = measured_links(store, topology)
    elif environment_id is not None:
        stored = store.device_kind(links_kind_name([device.kind_name for device in topology.devices]))
        if stored is not None:
            links = links_between(store, stored.id, environment_id, range(len(topology.devices)))
    return Target(topology, None, links), CostsByKind(sources)
