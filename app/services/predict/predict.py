"""The setting of a prediction (topology, costs, links), and predictions of single strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from app.db.records import (
    GraphRecord,
    SimulationRecord,
    StrategyRecord,
    StrategySource,
    TaskOrder,
    TrainingRecord,
)
from app.db.store import Store
from app.services.costs.environments import say_unused, say_used, used_environments
from app.services.costs.link_costs import LocalLinks, local_links, topology_of
from app.services.costs.machine import (
    DeviceGroup,
    LocalMachine,
    describe,
    local_devices,
)
from app.services.costs.operator_costs import CostsByKind, DatabaseCosts, OnMiss
from app.services.costs.precisions import check_topology, in_precision
from app.services.costs.profile import Measurer
from app.services.costs.topologies import LOCAL, named_topology, topology_record
from app.services.models.models import ImportedModel
from app.services.predict.compiled_stretches import compiled_stretches, with_compiled_costs
from app.services.predict.predicted_peaks import predicted_peaks
from app.services.progress import Progress
from graph.backward_parts import parts_of_backward
from graph.calls import LocalCall
from graph.canonical import canonical_json
from graph.errors import UsageError
from graph.schedule import GradientSums, Schedule
from graph.strategy import Strategy, strategy_text
from graph.synchronization import Synchronization
from graph.topology import Processor, Topology
from graph.training import Training
from search.cost.cost_table import CostTable, Origin
from search.cost.link_costs import LinkCosts

if TYPE_CHECKING:
    from profiler.devices import PhysicalDevice
    from search.simulate.simulator import Simulation
    from search.simulate.task_graph import TaskGraphBuilder

NEARLY_FULL = 0.4
SURELY_TOO_FULL = 1.5
"""The parts of a device's memory between which the search's sum alone does not decide whether a strategy fits.

Of what was measured, the sum was 0.49 to 1.11 times as much as the walk (docs/memory.md).
"""
MemoryWalk = Literal["always", "nearly full", "never"]


@dataclass(frozen=True)
class Target:
    """The devices that a strategy is to run on: a topology, and this machine where the topology is `local`."""

    topology: Topology
    machine: LocalMachine | None
    links: LocalLinks | None

    def group(self, kind_name: str) -> DeviceGroup | None:
        """Return this machine's devices of a kind, or None where the topology has none."""
        return None if self.machine is None else self.machine.group(kind_name)

    @property
    def link_costs(self) -> LinkCosts:
        """Costs of measured collectives, and the origin of the topology's links."""
        return LinkCosts(transfers=Origin.DATASHEET) if self.links is None else self.links.costs


def find_target(
    store: Store,
    name: str,
    progress: Progress,
    *,
    devices: int | None = None,
    nodes: int | None = None,
    processor: Processor | None = None,
    gpus: str | None = None,
    precision: str = "float32",
) -> Target:
    """Return the topology called `name`: `local`, a packaged one, a YAML file, or one that was measured under a name.

    Raises:
        TopologyError: there is no such topology, or it has fewer devices.
        UsageError: fewer devices are on this machine, or they do not compute in the precision.
    """
    if name != LOCAL:
        for option, value in (("--device", processor), ("--gpus", gpus)):
            if value is not None:
                raise UsageError(
                    f"{option}: is for topology local, must be left out for {name}; leave it out"
                )
        named = named_topology(store, name, devices=devices, nodes=nodes)
        check_topology(named.topology, precision)
        machine = None if named.links is None else _machine_like(store, named.topology, precision)
        return Target(named.topology, machine, named.links)
    if nodes is not None:
        raise UsageError("--nodes: is for packaged topologies, must be left out for local; leave it out")
    local = local_devices(processor, devices, gpus)
    return local_target(store, in_precision(local, precision), progress)


def _machine_like(store: Store, topology: Topology, precision: str) -> LocalMachine | None:
    """Return this machine's devices of a topology's kinds, on which its costs can be measured; None without any."""
    from profiler.devices import available_devices

    names = {kind.name for kind in topology.kinds}
    devices = in_precision(available_devices(topology.kinds[0].processor), precision)
    alike = [device for device in devices if device.kind.name in names]
    return describe(store, alike) if alike else None


def local_target(store: Store, devices: Sequence[PhysicalDevice], progress: Progress) -> Target:
    """Return the topology `local` of some devices of this machine; links that are not stored are measured.

    Whatever makes measurements on the devices less exact is warned of.
    """
    from profiler.devices import device_warnings

    for warning in device_warnings(devices):
        progress.warn(warning)
    machine = describe(store, devices)
    links = local_links(store, machine, progress)
    return Target(topology_of(machine, links), machine, links)


@dataclass(frozen=True)
class Setting:
    """The model, target and training that predictions share, with their costs and the ids of their rows.

    measurers: by device kind, of the kinds that this machine has.
    schedule, gradients: those asked for, of the model's micro-batches; None: any.
    on_miss: what becomes of calls without a cost.
    shares_weights: whether a search may share weights themselves.
    """

    model: ImportedModel
    target: Target
    training: Training
    graph_id: int
    topology_id: int
    training_id: int
    source: CostsByKind
    table: CostTable
    measurers: Mapping[str, Measurer] = field(default_factory=dict)
    schedule: Schedule | None = None
    gradients: GradientSums | None = None
    on_miss: OnMiss = "estimate"
    shares_weights: bool = False

    def in_micro_batches(self, strategy: Strategy) -> Strategy:
        """Return a strategy with the micro-batches of the model, as they are asked for."""
        return strategy.in_micro_batches(self.model.request.micro_batches, self.schedule, self.gradients)

    @property
    def topology(self) -> Topology:
        """The target's topology."""
        return self.target.topology

    @cached_property
    def builder(self) -> TaskGraphBuilder:
        """The builder of all task graphs of this setting: fragments that strategies share are derived once."""
        from search.simulate.task_graph import TaskGraphBuilder

        return TaskGraphBuilder(
            self.model.graph, self.topology, self.table, self.training, links=self.target.link_costs
        )


def with_costs_read_again(setting: Setting, calls: Mapping[str, Iterable[LocalCall]]) -> Setting:
    """Return the setting with the stored costs of some calls, by device kind, as they are now."""
    for kind_name, of_kind in calls.items():
        setting.source.read_again(kind_name, [call.digest for call in of_kind])
    return replace(setting, table=CostTable(setting.source))


def without_measuring(store: Store, setting: Setting) -> CostTable:
    """Return a cost table with the setting's costs, and with estimates for missing ones: it measures nothing."""
    sources = {
        kind.name: _kind_source(
            store, setting.target, kind.name, setting.training.precision, "estimate", None
        )
        for kind in setting.topology.kinds
    }
    return setting.table.with_source(CostsByKind(sources))


@contextmanager
def prepare(
    store: Store,
    model: ImportedModel,
    target: Target,
    training: Training,
    on_miss: OnMiss,
    progress: Progress,
) -> Iterator[Setting]:
    """Store graph, topology and training, and yield the setting, with a cost table over the database.

    Workers that measured missing costs end with the context.
    """
    with ExitStack() as stack:
        sources = {}
        measurers: dict[str, Measurer] = {}
        for kind in target.topology.kinds:
            # A cluster may have devices of other kinds than this machine.
            group = target.group(kind.name)
            if group is None:
                say_used(store, kind.name, training.precision, progress)
            else:
                say_unused(store, group, training.precision, progress)
                measurers[kind.name] = stack.enter_context(Measurer(store, group, progress))
            sources[kind.name] = _kind_source(
                store, target, kind.name, training.precision, on_miss, measurers.get(kind.name)
            )
        source = CostsByKind(sources)
        yield Setting(
            model=model,
            target=target,
            training=training,
            graph_id=store.put_graph(graph_record(model)),
            topology_id=store.put_topology(topology_record(target.topology)),
            training_id=store.put_training(
                TrainingRecord(training.digest, training.batch_size, canonical_json(training.to_json()))
            ),
            source=source,
            table=CostTable(source),
            measurers=measurers,
            on_miss=on_miss,
        )


def _kind_source(
    store: Store,
    target: Target,
    kind_name: str,
    precision: str,
    on_miss: OnMiss,
    measurer: Measurer | None,
) -> DatabaseCosts:
    kind = target.topology.kind(kind_name)
    group = target.group(kind_name)
    if group is None:
        # Another machine's devices: nothing can be measured here; any environment's costs of that kind count.
        stored = store.device_kind(kind_name)
        if on_miss == "measure" and target.machine is not None:
            on_miss = "estimate"
        if on_miss == "measure":
            raise UsageError(
                f"--on-miss measure: {kind_name} is not on this machine, must be; choose estimate or fail"
            )
        return DatabaseCosts(store, kind, stored.id if stored else None, None, on_miss, precision=precision)
    measure = None if measurer is None else lambda calls: measurer.measure(calls).replaced
    return DatabaseCosts(store, kind, group.kind_id, group.environment_id, on_miss, measure, precision)


def cost_environments(store: Store, setting: Setting) -> tuple[dict[str, Any], ...]:
    """Return, for each device kind, the environments that its stored costs are of, with how many; as JSON documents."""
    environments: list[dict[str, Any]] = []
    for kind in setting.topology.kinds:
        group = setting.target.group(kind.name)
        current = None if group is None else group.environment_id
        environments += [
            {
                "device_kind": kind.name,
                "environment": environment.fingerprint,
                "torch": environment.facts.get("torch"),
                "costs": count,
                "current": group is not None,
            }
            for environment, count in used_environments(store, kind.name, current, setting.training.precision)
        ]
    return tuple(environments)


def resolve_costs(setting: Setting, calls: Mapping[str, Sequence[LocalCall]]) -> None:
    """Resolve the costs of many calls, by device kind, at once: missing costs are then measured in one go."""
    for kind_name, wanted in calls.items():
        setting.table.costs(wanted, kind_name)


def synchronized(strategy: Strategy, synchronization: Synchronization, progress: Progress) -> Strategy:
    """Return a strategy with the policy that a user asked for; say so where it changes nothing."""
    changed = strategy.with_synchronization(synchronization)
    policy = changed.synchronization.policy
    if policy is not synchronization.policy:
        progress.say(
            f"--policy {synchronization.policy}: orders gathers of weights whose update is shared, and none is; the "
            f"step is that of {policy}"
        )
    return changed


def executions_by_kind(setting: Setting, strategy: Strategy) -> dict[str, dict[LocalCall, int]]:
    """Return, for each device kind, the distinct calls of a strategy, and how often its devices execute each."""
    from graph.rules import cost_class, local_calls

    graph = setting.model.graph
    kinds = [device.kind_name for device in setting.topology.devices]
    # Equal layers have calls of equal cost.
    layers = Counter(
        (cost_class(graph, operator), configuration)
        for operator, configuration in zip(graph.operators, strategy.configurations, strict=True)
    )
    calls_of: dict[str, dict[str, LocalCall]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        count = layers.pop((cost_class(graph, operator), configuration), 0)
        if not count:
            continue
        calls = local_calls(graph, operator, configuration.degrees)
        # Equal calls are one object, as a rule.
        tasks = Counter(
            (kinds[device], id(call)) for call, device in zip(calls, configuration.devices, strict=True)
        )
        by_id = {id(call): call for call in calls}
        for (kind_name, identity), number in tasks.items():
            whole = replace(by_id[identity], bindings=())
            parts = (
                parts_of_backward(graph, operator, whole) if strategy.micro_batches.splits_backward else ()
            )
            for call in (whole, *parts):
                calls_of.setdefault(kind_name, {}).setdefault(call.digest, call)
                counts[kind_name, call.digest] += count * number
    return {
        kind_name: {call: counts[kind_name, name] for name, call in of_kind.items()}
        for kind_name, of_kind in calls_of.items()
    }


def calls_by_kind(setting: Setting, strategy: Strategy) -> dict[str, list[LocalCall]]:
    """Return the distinct calls of a strategy for each device kind that executes them."""
    return {kind_name: list(calls) for kind_name, calls in executions_by_kind(setting, strategy).items()}


def graph_record(model: ImportedModel) -> GraphRecord:
    """Return the row of a model's graph."""
    from graph.rules import flops, local_calls

    graph = model.graph
    total = sum(
        flops(local_calls(graph, operator, (1,) * len(operator.space.axes))[0])
        for operator in graph.operators
    )
    return GraphRecord(
        digest=graph.digest,
        name=graph.name,
        model=model.request.to_json(),
        operator_count=len(graph.operators),
        parameter_count=sum(weight.spec.elements for weight in graph.weights),
        flops=int(total),
        document=canonical_json(graph.to_json()),
    )


def predict(
    store: Store,
    setting: Setting,
    strategy: Strategy,
    source: StrategySource,
    *,
    order: TaskOrder = "program",
    search_id: int | None = None,
    walk: MemoryWalk = "nearly full",
) -> tuple[int, Simulation]:
    """Simulate a strategy and store it with its prediction; return the strategy's id and the simulation.

    With `walk` "always", or where the search's sum says that a device may be nearly full, peak memory is that of the
    devices' programs (`app.services.predict.predicted_peaks`); with "never" it is the sum alone, without torch.
    """
    from search.simulate.simulator import simulate_tasks
    from search.simulate.steady_state import in_steady_state

    strategy.validate(setting.model.graph, len(setting.topology.devices))
    calls = calls_by_kind(setting, strategy)
    resolve_costs(setting, calls)
    stretches = compiled_stretches(setting.model.graph, strategy, setting.topology)
    tasks = with_compiled_costs(setting.builder.build(strategy), stretches, setting.table)
    simulation = simulate_tasks(in_steady_state(tasks, strategy, setting.builder), order)
    if walk == "always" or (walk == "nearly full" and NEARLY_FULL < simulation.fullness < SURELY_TOO_FULL):
        peaks = predicted_peaks(setting.model.graph, strategy, setting.topology, setting.training)
        if peaks is not None:
            simulation = simulation.with_peaks([peak.peak_bytes for peak in peaks])
    strategy_id = store.put_strategy(
        StrategyRecord(
            digest=strategy.digest,
            graph_id=setting.graph_id,
            device_count=len(setting.topology.devices),
            document=strategy_text(strategy, setting.model.graph),
            source=source,
        )
    )
    store.put_simulation(
        SimulationRecord(
            strategy_id=strategy_id,
            topology_id=setting.topology_id,
            training_id=setting.training_id,
            task_order=order,
            cost_digest=setting.source.cost_digest(
                call.digest
                for call in (
                    *(call for of_kind in calls.values() for call in of_kind),
                    *(of.call for of in stretches),
                )
            ),
            step_time_s=simulation.step_time_s,
            measured_share=simulation.shares[Origin.MEASURED],
            estimated_share=simulation.shares[Origin.ESTIMATED],
            datasheet_share=simulation.shares[Origin.DATASHEET],
            compute_s=sum(simulation.compute_s),
            communication_bytes=simulation.bytes_moved,
            peak_bytes=simulation.peak_memory_bytes,
            feasible=simulation.feasible,
            search_id=search_id,
            scheduling_efficiency=simulation.scheduling.efficiency,
            speedup_potential=simulation.scheduling.speedup_potential,
        )
    )
    return strategy_id, simulation
