"""`app strategy show`, `diff` and `import`: stored strategies with the costs of their operators, and strategy files.

An operator's cost is of the simulated step: its tasks on the device that they keep longest, and the messages that carry
its outputs and their gradients, added up; other work may hide both. A strategy that was never simulated itself is
simulated as the newest prediction for its graph was.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from app.db.failures import as_written
from app.db.records import GraphRecord, SimulationRecord, StrategyRecord
from app.db.references import Referred, required
from app.db.store import Store
from app.services.models.models import ModelRequest, import_graph, stored_request
from app.services.predict.all_reduces import ShownAllReduce, all_reduce_choices, shown_all_reduces
from app.services.predict.micro_batch_report import micro_batch_report
from app.services.predict.recomputation_report import RecomputationReport, recomputation_report
from app.services.progress import Progress
from app.services.stored import strategy_of
from app.services.timeline.simulated_step import (
    NEWEST,
    SimulatedStep,
    environment_of,
    imported_graph,
    simulated_step,
)
from graph.errors import StrategyError, UsageError
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration, Strategy, read_document, strategy_from_json, strategy_text
from graph.texts import counted
from runtime.observe.spans import WEIGHT_GRADIENTS, WEIGHTS
from search.simulate.scheduling import Scheduling

MOST_DEVICES = 2**16
"""More than any topology has; a file that names a higher one is refused before anything is made of it."""


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """Seconds of the simulated step: of computing on the busiest device, and of all messages."""

    compute_s: float
    communication_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True)
class SimulationSetting:
    """The stored rows of a simulation (topology, training, the simulation itself), and their names."""

    topology_id: int
    training_id: int
    topology: str
    batch_size: int
    simulation: SimulationRecord


@dataclass(frozen=True, slots=True)
class ShownOperator:
    """An operator's configuration and cost; degrees of one are left out."""

    name: str
    target: str
    degrees: Mapping[str, int]
    devices: tuple[int, ...]
    cost: SimulatedCost | None


@dataclass(frozen=True, slots=True)
class ShownStrategy:
    """A stored strategy. `step_s`, `scheduling` and costs are None where nothing of its graph was ever simulated.

    shared: costs that belong to no one operator. sharding: of weights that their holders share, what.
    recomputation: what is made again in the backward; None where nothing is, or nothing was ever simulated.
    compiled: the first and the last operator of each stretch that is compiled. all_reduces: the algorithms of those
    that are not the library's alone; None where nothing was ever simulated. synchronization: how gradients are summed,
    where not as by default. micro_batches: of `micro_batch_report`, where there are several.
    """

    record: StrategyRecord
    model: str
    setting: SimulationSetting | None
    step_s: float | None
    measured_s: float | None
    operators: tuple[ShownOperator, ...]
    shared: Mapping[str, SimulatedCost]
    sharding: Mapping[str, str] = field(default_factory=dict)
    recomputation: RecomputationReport | None = None
    compiled: Sequence[Sequence[str]] = ()
    all_reduces: tuple[ShownAllReduce, ...] | None = None
    synchronization: Mapping[str, Any] = field(default_factory=dict)
    scheduling: Scheduling | None = None
    micro_batches: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the strategy as a JSON document."""
        return {
            "id": self.record.id,
            "digest": self.record.digest,
            "model": self.model,
            "devices": self.record.device_count,
            "source": self.record.source,
            "created_at": self.record.created_at.isoformat(),
            "topology": None if self.setting is None else self.setting.topology,
            "batch_size": None if self.setting is None else self.setting.batch_size,
            "simulated_step_time_s": self.step_s,
            "measured_median_s": self.measured_s,
            "scheduling_efficiency": None if self.scheduling is None else self.scheduling.efficiency,
            "speedup_potential": None if self.scheduling is None else self.scheduling.speedup_potential,
            "operators": [asdict(operator) for operator in self.operators],
            "shared": {name: asdict(cost) for name, cost in self.shared.items()},
            "sharding": dict(self.sharding),
            "recomputation": None if self.recomputation is None else asdict(self.recomputation),
            "compiled": [list(pair) for pair in self.compiled],
            "all_reduces": None
            if self.all_reduces is None
            else [asdict(entry) for entry in self.all_reduces],
            "synchronization": dict(self.synchronization),
            "micro_batches": dict(self.micro_batches),
        }


@dataclass(frozen=True, slots=True)
class StrategyDifference:
    """Two strategies for one graph, and the operators that they configure differently, the dearest change first."""

    first: ShownStrategy
    second: ShownStrategy
    operators: tuple[tuple[ShownOperator, ShownOperator], ...]

    def to_json(self) -> dict[str, Any]:
        """Return both strategies and their differing operators as a JSON document."""
        sides = [shown.to_json() for shown in (self.first, self.second)]
        by_name = [{operator["name"]: operator for operator in side.pop("operators")} for side in sides]
        return {
            "strategies": sides,
            "operators": [
                {"name": operator.name, "strategies": [side[operator.name] for side in by_name]}
                for operator, _ in self.operators
            ],
        }


def show_strategy(
    database: str | None, reference: str, topology: str | None, progress: Progress
) -> ShownStrategy:
    """Return a stored strategy with its operators' costs, on the topology of that name (None: the newest).

    Raises:
        UsageError: there is no such strategy, or nothing of its graph was simulated on that topology.
        ImportFailure: its model cannot be imported any more.
    """
    with Store.open(database, to_read=True) as store:
        record = store.strategy(reference)
        return _shown(store, record, _setting(store, [record], topology), None, progress)[0]


def diff_strategies(
    database: str | None, references: tuple[str, str], topology: str | None, progress: Progress
) -> StrategyDifference:
    """Return the operators that two strategies for one graph configure differently, with their costs.

    Raises:
        UsageError: there is no such strategy, they are for different graphs, or as `show_strategy`.
        ImportFailure: their model cannot be imported any more.
    """
    with Store.open(database, to_read=True) as store:
        records = [store.strategy(reference) for reference in references]
        if records[0].graph_id != records[1].graph_id:
            first_name, second_name = (
                _distinguished(required(store.graph(record.graph_id), "graphs", record.graph_id))
                for record in records
            )
            raise UsageError(
                f"strategy {references[1]}: is for {second_name}, must be for {first_name} as strategy "
                f"{references[0]} is; choose two for one graph"
            )
        setting = _setting(store, records, topology)
        first, graph = _shown(store, records[0], setting, None, progress)
        second, _ = _shown(store, records[1], setting, graph, progress)
    pairs = [
        pair
        for pair in zip(first.operators, second.operators, strict=True)
        if (pair[0].degrees, pair[0].devices) != (pair[1].degrees, pair[1].devices)
    ]
    pairs.sort(key=lambda pair: -abs(_total_s(pair[1]) - _total_s(pair[0])))
    return StrategyDifference(first, second, tuple(pairs))


def _distinguished(graph: GraphRecord) -> str:
    """Return the name of a stored graph, with its digest and the options by which graphs of a network differ."""
    with as_written(f"table graphs, row {graph.id}, column model"):
        model = graph.model
        details = [graph.digest[:12]]
        if model.get("batch_size") is not None:
            details.append(f"batch size {model['batch_size']}")
        if "precision" in model:
            details.append(str(model["precision"]))
        if "micro_batches" in model:
            details.append(f"{model['micro_batches']} micro-batches")
        if "substitutions" in model:
            details.append(counted(len(model["substitutions"]), "substitution"))
    return f"{graph.name} ({', '.join(details)})"


@dataclass(frozen=True, slots=True)
class ImportedStrategy:
    """A file's strategy as it is stored; `known` tells whether it was stored before."""

    record: StrategyRecord
    model: str
    known: bool


def import_strategy(
    database: str | None,
    file: Path,
    model: ModelRequest | None,
    batch_norm: str,
    devices: int | None,
    progress: Progress,
    *,
    micro_batches: int | None = None,
) -> ImportedStrategy:
    """Check a strategy file against its graph and store it. Nothing in a file is ever executed.

    Args:
        database: where to store it; None: the default.
        file: as `app strategy export` wrote it.
        model: which network it is for; None: the stored graph that the file names.
        batch_norm: of that network.
        devices: how many it is made for; None: one more than the highest that it names.
        micro_batches: in how many parts the batch of `model` is gone through; None: as the file says.

    Raises:
        UsageError: the file's graph is not stored, and no model is given.
        StrategyError: the file cannot be read, or does not fit the graph or the devices.
        ImportFailure: the model cannot be imported.
    """
    from app.services.models.micro_batches import model_for
    from app.services.predict.predict import graph_record

    document = read_document(file)
    if model is not None:
        model = model_for(model, document, asked=micro_batches, where=f"file {file}")
    with Store.open(database) as store:
        with progress.stage("importing the model"):
            if model is None:
                known_graph = _named_graph(store, document, file)
                graph, name, graph_id = imported_graph(known_graph), known_graph.name, known_graph.id
            else:
                imported = import_graph(model, batch_norm=batch_norm)
                graph, name, graph_id = imported.graph, imported.graph.name, None
        try:
            strategy = strategy_from_json(document, graph, MOST_DEVICES if devices is None else devices)
            strategy = strategy.with_synchronization(strategy.synchronization)
        except RecursionError:
            raise StrategyError(
                f"strategy file {file}: is nested too deeply, must be as exported; export it again"
            ) from None
        if model is not None:
            # Only now: a file that does not fit leaves nothing behind.
            graph_id = store.put_graph(graph_record(imported))
        assert graph_id is not None
        was_stored = _is_stored(store, strategy.digest)
        number = store.put_strategy(
            StrategyRecord(
                digest=strategy.digest,
                graph_id=graph_id,
                device_count=devices or strategy.device_count,
                document=strategy_text(strategy, graph),
                source="import",
            )
        )
        return ImportedStrategy(store.strategy(number), name, was_stored)


def _is_stored(store: Store, digest: str) -> bool:
    try:
        return store.strategy(digest).digest == digest
    except UsageError:
        return False


def _named_graph(store: Store, document: Any, file: Path) -> GraphRecord:
    digest = document.get("graph") if isinstance(document, dict) else None
    record = store.graph_by_digest(digest) if isinstance(digest, str) else None
    if record is None:
        shown = digest[:12] if isinstance(digest, str) else digest
        raise UsageError(
            f"strategy file {file}: is for graph {shown}, which is not stored; name its network by --model, and its "
            "sizes by --preset and --batch-size"
        )
    return record


def _setting(store: Store, records: list[StrategyRecord], topology: str | None) -> SimulationSetting | None:
    """Return the setting to simulate in: of the newest prediction of one of the records, else of their graph.

    Raises:
        UsageError: there is none on the topology that was asked for.
    """
    names = Referred("topologies", ((topology.id, topology.name) for topology in store.topologies()))
    counts = {topology.id: topology.device_count for topology in store.topologies()}
    needed = max(_devices_used(record) for record in records)
    seen: set[str] = set()
    own = [record.id for record in records]
    others = [strategy.id for strategy in store.strategies(graph_id=records[0].graph_id, limit=NEWEST)]
    for strategy_id in (*own, *(other for other in others if other not in own)):
        for simulation in store.simulations(strategy_id=strategy_id):
            seen.add(names[simulation.topology_id])
            if topology in (None, names[simulation.topology_id]) and counts[simulation.topology_id] >= needed:
                training = required(
                    store.training(simulation.training_id), "trainings", simulation.training_id
                )
                return SimulationSetting(
                    simulation.topology_id,
                    simulation.training_id,
                    names[simulation.topology_id],
                    training.batch_size,
                    simulation,
                )
    if topology is not None:
        raise UsageError(
            f"--topology: is {topology}, must be one of {needed} devices or more that this network was simulated on: "
            f"{', '.join(sorted(seen)) or 'none'}; search or run it there first"
        )
    return None


def _devices_used(record: StrategyRecord) -> int:
    """Return one more than the highest device that a stored strategy uses."""
    operators = json.loads(record.document)["operators"].values()
    return 1 + max(int(device) for entry in operators for device in entry["devices"])


def _shown(
    store: Store,
    record: StrategyRecord,
    setting: SimulationSetting | None,
    graph: OperatorGraph | None,
    progress: Progress,
) -> tuple[ShownStrategy, OperatorGraph]:
    graph_record = required(store.graph(record.graph_id), "graphs", record.graph_id)
    runs = [
        run
        for run in store.executions(strategy_id=record.id, limit=NEWEST)
        if run.status == "finished"
        and setting is not None
        and (run.topology_id, run.training_id) == (setting.topology_id, setting.training_id)
    ]
    costs: Mapping[str, SimulatedCost] = {}
    shared: Mapping[str, SimulatedCost] = {}
    step_s = None
    scheduling = None
    recomputation = None
    all_reduces = None
    if setting is None:
        graph = graph or imported_graph(graph_record)
        strategy = strategy_of(record, graph)
    else:
        step = simulated_step(
            store,
            record,
            setting.topology_id,
            setting.training_id,
            environment_of(store, record.id, setting.topology_id),
            setting.simulation.task_order,
            progress=progress,
            graph=graph,
        )
        graph, strategy, step_s = step.graph, step.strategy, step.simulation.step_time_s
        scheduling = step.simulation.scheduling
        costs, shared = operator_costs(step)
        all_reduces = shown_all_reduces(all_reduce_choices(graph, strategy, step.topology, step.links))
        if step.kept is not None:
            recomputation = recomputation_report(graph, strategy, step.simulation, step.kept)
    document = json.loads(record.document)
    micro_batch_size = _micro_batch_size(graph_record, setting, strategy)
    if setting is not None and micro_batch_size is not None:
        # Strategies of one graph that are compared may have different numbers of micro-batches.
        setting = replace(setting, batch_size=micro_batch_size * strategy.micro_batches.count)
    return (
        ShownStrategy(
            record,
            graph_record.name,
            setting,
            step_s,
            runs[0].median_s if runs else None,
            tuple(
                _operator(operator, configuration, costs.get(operator.name))
                for operator, configuration in zip(graph.operators, strategy.configurations, strict=True)
            ),
            shared,
            document.get("sharding", {}),
            recomputation,
            document.get("compiled", ()),
            all_reduces,
            document.get("synchronization", {}),
            scheduling,
            micro_batch_report(graph, strategy, micro_batch_size),
        ),
        graph,
    )


def _micro_batch_size(
    graph_record: GraphRecord, setting: SimulationSetting | None, strategy: Strategy
) -> int | None:
    """Return the samples that a strategy's graph is of, as its model says, else as the setting does."""
    with as_written(f"table graphs, row {graph_record.id}, column model"):
        size = stored_request(graph_record.model, f"graph {graph_record.name}").micro_batch_size
    if size is None and setting is not None:
        size = setting.batch_size // strategy.micro_batches.count
    return size


def _operator(operator: Operator, configuration: Configuration, cost: SimulatedCost | None) -> ShownOperator:
    degrees = {
        axis.name: degree
        for axis, degree in zip(operator.space.axes, configuration.degrees, strict=True)
        if degree != 1
    }
    return ShownOperator(operator.name, operator.target, degrees, configuration.devices, cost)


def operator_costs(step: SimulatedStep) -> tuple[dict[str, SimulatedCost], dict[str, SimulatedCost]]:
    """Return the costs of the operators, and of weights' updates and gradients and of buffers, which they share."""
    from app.services.timeline.timeline import Subjects

    simulation, graph = step.simulation, step.graph
    tasks, subjects = simulation.tasks, Subjects(simulation)
    computing: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    moving: dict[str, int] = defaultdict(int)
    for task in range(tasks.task_count):
        kind, subject = subjects.kind_and_subject(task)
        duration_ns = int(simulation.end_ns[task]) - int(simulation.start_ns[task])
        if kind in ("forward", "backward", "recompute", "update"):
            computing[subject][int(tasks.resources(task)[0])] += duration_ns
            continue
        value = subject.removeprefix("gradient of ")
        producer = graph.producer.get(value)
        moving["buffers" if subject.startswith("new ") else subject if producer is None
               else graph.operators[producer[0]].name] += duration_ns  # fmt: skip

    def cost(name: str) -> SimulatedCost:
        return SimulatedCost(max(computing[name].values(), default=0) / 1e9, moving[name] / 1e9)

    names = [operator.name for operator in graph.operators]
    shared = [name for name in (WEIGHTS, WEIGHT_GRADIENTS, "buffers") if computing[name] or moving[name]]
    return {name: cost(name) for name in names}, {name: cost(name) for name in shared}


def _total_s(operator: ShownOperator) -> float:
    return 0.0 if operator.cost is None else operator.cost.total_s
