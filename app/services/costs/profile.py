"""`app profile`: measure the costs that a search over given models and devices needs, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from app.db.engine import check_writable
from app.db.records import OpCostRecord, utc_now
from app.db.store import Store
from app.services.costs.doubts import Doubts, describe_unlikely
from app.services.costs.environments import say_unused
from app.services.costs.link_costs import local_links
from app.services.costs.machine import (
    DeviceGroup,
    LocalMachine,
    describe,
    links_kind_name,
    local_devices,
)
from app.services.costs.operator_costs import cost_records
from app.services.costs.precisions import check_topology, in_precision
from app.services.costs.topologies import find_topology
from app.services.models.models import ImportedModel, import_graph, requested_model
from app.services.progress import Progress
from graph.calls import LocalCall
from graph.errors import UsageError
from graph.topology import Processor, Topology
from graph.training import Training
from profiler.devices import PhysicalDevice, device_warnings
from profiler.processes import start_server
from profiler.products import products_between

if TYPE_CHECKING:
    from profiler.device_consistency import DeviceConsistency
    from profiler.plausibility import UnlikelyCost
    from profiler.workers import WorkerPool


# A search that lacks so many costs compares the devices before it measures them, as every profile run does.
WORTH_COMPARING = 200
# The seed of products of other sizes: always the same ones, so that stored measurements serve.
PRODUCTS_SEED = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of measuring some calls: the number that have costs now, and operator and reason of each failure.

    `agreement`: how devices of one kind compare, where they were compared. `replaced`: digests of the calls whose
    stored costs were replaced; not all are among those asked for.
    """

    succeeded: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    agreement: tuple[DeviceConsistency, ...] = ()
    replaced: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KindReport:
    """The result of a profile run on the devices of one kind: numbers of calls, and how the devices compare.

    `again`: calls that were measured again, since costs of other calls made theirs unlikely; `unlikely`: calls needed
    of which they still do.
    """

    device_kind: str
    devices: tuple[str, ...]
    needed: int
    measured: int
    known: int
    failures: tuple[tuple[str, str], ...]
    agreement: tuple[DeviceConsistency, ...]
    again: int = 0
    unlikely: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON document."""
        return {
            "device_kind": self.device_kind,
            "devices": list(self.devices),
            "needed": self.needed,
            "measured": self.measured,
            "known": self.known,
            "again": self.again,
            "unlikely": self.unlikely,
            "failures": [{"operator": name, "reason": reason} for name, reason in self.failures],
            "agreement": [agreement_json(device) for device in self.agreement],
        }


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """The result of a profile run; the numbers are sums over its kinds of devices."""

    device_kind: str
    kinds: tuple[KindReport, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON document."""
        failed_operators = [name for kind in self.kinds for name, _ in kind.failures]
        counted = ("needed", "measured", "known", "again", "unlikely")
        return {
            "device_kind": self.device_kind,
            "devices": sum(len(kind.devices) for kind in self.kinds),
            **{name: sum(getattr(kind, name) for kind in self.kinds) for name in counted},
            "failed": len(failed_operators),
            "failed_operators": sorted(set(failed_operators)),
            "kinds": [kind.to_json() for kind in self.kinds],
        }


def agreement_json(agreement: DeviceConsistency) -> dict[str, object]:
    """Return the comparison of a device with its kind as a JSON document."""
    return {
        "device": agreement.device.label,
        "excess": {bound: agreement.excess(bound) for bound in agreement.excesses},
        "rounds": {bound: list(shares) for bound, shares in agreement.excesses.items()},
        "slow": bool(agreement.slow_in),
        "failure": agreement.failure,
    }


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The options of `app profile`.

    `topology`: for searches over which one; None: over this machine's devices. `products`: so many matrix products of
    sizes between those of the models are measured too. `micro_batches`: in how many parts steps go through a batch.
    """

    models: tuple[str, ...]
    preset: str
    batch_size: int | None
    precision: str
    gpus: str | None
    processor: Processor | None
    devices: int | None
    optimizer: str
    batch_norm: str
    retry_failed: bool = False
    topology: str | None = None
    nodes: int | None = None
    products: int = 0
    micro_batches: int = 1


def run_profile(request: ProfileRequest, database: str | None, progress: Progress) -> ProfileReport:
    """Check the request, open the database and measure.

    Raises:
        UsageError: no model, or devices that are not there, or none that the topology has; nothing is written then.
        TopologyError: there is no such topology.
    """
    if not request.models:
        raise UsageError("--model: is missing, must name a network; give --model NAME or --all")
    check_writable(database)
    topology = _topology(request, database)
    devices = in_precision(_devices(request, topology), request.precision)
    if topology is not None:
        devices = _devices_of(topology, devices, progress)
    for warning in device_warnings(devices):
        progress.warn(warning)
    # Models and training are checked before the database is touched: a mistake writes nothing.
    Training(1, request.precision, request.optimizer, request.batch_norm)
    models = []
    start_server()  # it imports what workers take while the models are imported
    for name in request.models:
        wanted = requested_model(
            name, request.preset, request.batch_size, request.precision, request.micro_batches
        )
        with progress.stage(f"importing {name}"):
            models.append(import_graph(wanted, batch_norm=request.batch_norm))
    with Store.open(database) as store:
        machine = describe(store, devices)
        return profile(
            store,
            machine,
            models,
            [request.optimizer],
            progress,
            retry_failed=request.retry_failed,
            topology=topology,
            products=request.products,
        )


def run_check(request: ProfileRequest, progress: Progress) -> ProfileReport:
    """Compare the devices of each kind, without measuring anything else: no model is needed, no database.

    Raises:
        UsageError: there are not two devices of any kind.
    """
    from profiler.workers import WorkerPool

    devices = in_precision(_devices(request), request.precision)
    for warning in device_warnings(devices):
        progress.warn(warning)
    kinds: dict[str, list[PhysicalDevice]] = {}
    for device in devices:
        kinds.setdefault(device.kind.name, []).append(device)
    if max(map(len, kinds.values())) < 2:
        shown = ", ".join(f"{device.label} ({device.kind.name})" for device in devices)
        raise UsageError(
            f"--check: devices are {shown}, must be two of a kind to be compared; name more of them"
        )
    reports = []
    for name, alike in kinds.items():
        agreement: tuple[DeviceConsistency, ...] = ()
        if len(alike) > 1:
            with WorkerPool(alike) as pool:
                agreement = _compare(pool, alike, progress)
        reports.append(KindReport(name, tuple(device.label for device in alike), 0, 0, 0, (), agreement))
    return ProfileReport(links_kind_name([device.kind.name for device in devices]), tuple(reports))


def _compare(
    pool: WorkerPool, devices: Sequence[PhysicalDevice], progress: Progress
) -> tuple[DeviceConsistency, ...]:
    """Compare devices of one kind, and warn of devices that differ from the others."""
    from profiler.device_consistency import compare

    with progress.stage(f"comparing {len(devices)} x {devices[0].kind.name}"):
        agreement = compare(pool, devices)
    for device in agreement:
        if not device.is_sound:
            progress.warn(f"{device.describe()}; see what else runs there, its cooling and its power limit")
    return agreement


def _topology(request: ProfileRequest, database: str | None) -> Topology | None:
    if request.topology is None:
        if request.nodes is not None:
            raise UsageError("--nodes: is for packaged topologies, must be left out for local; leave it out")
        return None
    topology = find_topology(request.topology, database, nodes=request.nodes).topology
    check_topology(topology, request.precision)
    return topology


def _devices(request: ProfileRequest, topology: Topology | None = None) -> tuple[PhysicalDevice, ...]:
    """Return the devices asked for; by default those with the processor of the topology's devices."""
    processor = request.processor
    if topology is not None and request.gpus is None:
        is_of_cpus = all(kind.processor == "cpu" for kind in topology.kinds)
        processor = processor or ("cpu" if is_of_cpus else None)
    return local_devices(processor, request.devices, request.gpus)


def _devices_of(
    topology: Topology, devices: Sequence[PhysicalDevice], progress: Progress
) -> tuple[PhysicalDevice, ...]:
    """Return this machine's devices of the topology's kinds; say which of these kinds are not here.

    Raises:
        UsageError: there are none of any.
    """
    local_names = dict.fromkeys(device.kind.name for device in devices)
    wanted = dict.fromkeys(kind.name for kind in topology.kinds)
    elsewhere = [name for name in wanted if name not in local_names]
    if len(elsewhere) == len(wanted):
        raise UsageError(
            f"--topology {topology.name}: its devices are {' and '.join(wanted)}, must include those measured on, "
            f"which are {' and '.join(local_names)}; profile on a machine that has such devices, or name another "
            "topology"
        )
    if elsewhere:
        progress.say(f"{topology.name} has {' and '.join(elsewhere)} too: profile on a machine that has them")
    return tuple(device for device in devices if device.kind.name in wanted)


def profile(
    store: Store,
    machine: LocalMachine,
    models: Sequence[ImportedModel],
    optimizers: Sequence[str],
    progress: Progress,
    *,
    retry_failed: bool = False,
    topology: Topology | None = None,
    products: int = 0,
) -> ProfileReport:
    """Measure every operator cost and link that searches over the machine's devices need.

    With a `topology`, the operator costs that searches over its devices need, on the machine's devices, which are of
    its kinds. The links between the machine's devices are not the topology's, which has the times of its own. With
    `products`, as many matrix products of other sizes, which make estimates better (`profiler.products`).

    A cost that the database holds for this kind and environment is not measured again, nor, but with `retry_failed`,
    one that could not be measured. Each measurement is stored as soon as it is done, so that an interrupted run
    continues where it was, and runs at the same time share the work. Costs that others of their operators make unlikely
    are measured again, also those of earlier runs that were ended before they came to that.
    """
    precision = "tf32" if machine.devices[0].tf32 else "float32"
    for group in machine.groups:
        say_unused(store, group, precision, progress)
    if topology is None:
        local_links(store, machine, progress, complete=True)
    device_count = machine.count if topology is None else len(topology.devices)
    # Of a large network on many devices that takes minutes.
    with progress.stage(f"listing the local calls on up to {device_count} devices"):
        calls = calls_of(models, optimizers, device_count)
        calls += products_between(calls, products, PRODUCTS_SEED)
    reports = []
    for group in machine.groups:
        missing = missing_calls(store, group, calls, retry_failed=retry_failed)
        with Measurer(store, group, progress, compare_from=1, retry_failed=retry_failed) as measurer:
            measured = measurer.measure(missing, checked=calls)
            unlikely = {cost.call.digest for cost in measurer.unlikely()}
        reports.append(
            KindReport(
                device_kind=group.kind.name,
                devices=tuple(device.label for device in group.devices),
                needed=len(calls),
                measured=measured.succeeded,
                known=len(calls) - measured.succeeded - len(measured.failures),
                failures=measured.failures,
                agreement=measured.agreement,
                again=len(measured.replaced),
                unlikely=len(unlikely),
            )
        )
    return ProfileReport(links_kind_name([device.kind.name for device in machine.devices]), tuple(reports))


def calls_of(
    models: Sequence[ImportedModel], optimizers: Sequence[str], device_count: int
) -> list[LocalCall]:
    """Return the distinct local calls of some models on up to `device_count` devices, in a fixed order."""
    from profiler.updates import update_call
    from search.cost.calls_to_profile import calls_to_profile

    calls = {call.digest: call for model in models for call in calls_to_profile(model.graph, device_count)}
    for dtype in dict.fromkeys(model.graph.weight_dtype for model in models):
        # Sums of gradients take as long as updates by plain SGD.
        for optimizer in dict.fromkeys([*optimizers, "sgd"]):
            call = update_call(optimizer, dtype=dtype)
            calls[call.digest] = call
    return list(calls.values())


def missing_calls(
    store: Store, group: DeviceGroup, calls: Sequence[LocalCall], *, retry_failed: bool = False
) -> list[LocalCall]:
    """Return the calls without a stored cost for this kind and environment; a failure counts as a cost, or not."""
    from profiler.measure import phases

    stored = store.op_cost_medians(group.kind_id, group.environment_id, [call.digest for call in calls])
    stored_phases = {key for key, time_s in stored.items() if time_s is not None or not retry_failed}
    return [
        call for call in calls if any((call.digest, phase) not in stored_phases for phase in phases(call))
    ]


class Measurer:
    """Measures calls on a machine's devices of one kind and stores each result as it comes; a context manager.

    On leaving, it warns of costs that stayed unlikely when they had been measured again.

    Its workers start with the first call and stay, since each takes seconds to start: a search meets calls one by one.
    Where at least `compare_from` calls are to be measured, the devices are compared first, and one that is not as the
    others is left out: it would give the kind its own times. `call_limit_s` bounds the measuring of one call.
    """

    def __init__(
        self,
        store: Store,
        group: DeviceGroup,
        progress: Progress,
        *,
        compare_from: int = WORTH_COMPARING,
        retry_failed: bool = False,
        call_limit_s: float | None = None,
    ) -> None:
        self._store = store
        self._group = group
        self._progress = progress
        self._compare_from = compare_from
        self._retry_failed = retry_failed
        self._call_limit_s = call_limit_s
        self._pool: WorkerPool | None = None
        self._agreement: tuple[DeviceConsistency, ...] = ()
        self._met_another = False
        self._doubts: Doubts | None = None
        self._usual_reference_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()
        # Once for all that was measured: a search measures calls one by one.
        if error is None and (stays := self.unlikely()):
            self._progress.warn(describe_unlikely(stays))

    def measure(self, calls: Sequence[LocalCall], *, checked: Sequence[LocalCall] = ()) -> Measured:
        """Measure and store calls, except those that another run stores meanwhile; return the result.

        Then measure again which of their costs others of their operators make unlikely, those of these calls and of
        `checked` ones, and stored costs that contradict them (`app.services.costs.doubts`).

        Raises:
            RuntimeFailure: no worker can be started.
            DatabaseError: a result cannot be stored.
        """
        measured = self._measure(calls, again=False)
        if not calls and not checked:
            return measured
        if self._doubts is None:
            self._doubts = Doubts(self._store, self._group)
        renewed = self._doubts.settle([*calls, *checked], self.measure_again)
        return replace(measured, replaced=frozenset(renewed))

    def unlikely(self) -> list[UnlikelyCost]:
        """Return the costs of all calls that were measured or checked that others of their operators make unlikely."""
        return [] if self._doubts is None else self._doubts.stays()

    def measure_again(self, calls: Sequence[LocalCall]) -> Measured:
        """Measure calls, long and short, in several rounds, each in another order, and replace what is stored of them.

        Replaced, not pooled with: it may be what they were chosen by. A phase that fails keeps what is stored of it.
        All are stored at the end, with one moment, so that no interruption leaves new costs beside old ones.

        Raises:
            RuntimeFailure: no worker can be started.
            DatabaseError: a result cannot be stored.
        """
        measured = self._measure(calls, again=True)
        if self._doubts is not None:
            self._doubts.read({call.digest for call in calls})
        return measured

    def _measure(self, calls: Sequence[LocalCall], *, again: bool) -> Measured:
        from profiler.measure import FailedMeasurement
        from profiler.repeated_sampling import ROUNDS, measure_repeatedly

        if not calls:
            return Measured()
        group, pool = self._group, self._workers()
        self._compare(pool, len(calls))
        unsound = {compared.device for compared in self._agreement if not compared.is_sound}
        sound = [device for device in group.devices if device not in unsound] or list(group.devices)
        succeeded, failures = 0, []
        where = f"{len(sound)} x {group.kind.name}"

        def begin(visit: int, count: int) -> None:
            if visit > 1:
                self._progress.end()
            if again:
                text = f"measuring again on {where} ({visit} of {ROUNDS})"
            else:
                later = "" if visit == 1 else f", short calls again ({visit} of {ROUNDS})"
                text = f"measuring on {where}{later}"
            self._progress.begin(text, count)

        visits = (
            measure_repeatedly(pool, calls, on=sound, long_ones=True, begin=begin)
            if again
            else measure_repeatedly(pool, calls, on=sound, is_wanted=self._is_wanted, begin=begin)
        )
        latest: dict[str, list[OpCostRecord]] = {}
        try:
            for visit in visits:
                records = self._at_usual_speed(cost_records(visit.result))
                if again:
                    latest[visit.result.call.digest] = records
                else:
                    self._store.put_op_costs(group.kind_id, group.environment_id, records)
                self._progress.advance()
                if visit.number > 1:
                    continue
                outcomes = visit.result.outcomes
                reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, FailedMeasurement)]
                if reasons:
                    failures.append((visit.result.call.target, reasons[0]))
                else:
                    succeeded += 1
        finally:
            self._progress.end()
        moment = utc_now()
        replacing = [
            replace(record, measured_at=moment)
            for of_call in latest.values()
            for record in of_call
            if record.failure is None
        ]
        self._store.put_op_costs(group.kind_id, group.environment_id, replacing)
        return Measured(succeeded, tuple(failures), self._agreement)

    def _at_usual_speed(self, records: Sequence[OpCostRecord]) -> list[OpCostRecord]:
        """Return costs with the speed that they were measured at, by that of the first of their kind."""
        group = self._group
        if self._usual_reference_s is None and any(record.reference_s is not None for record in records):
            self._usual_reference_s = self._store.usual_reference_s(group.kind_id, group.environment_id)
        placed = []
        for record in records:
            if self._usual_reference_s is None:
                self._usual_reference_s = record.reference_s
            if record.reference_s is not None and self._usual_reference_s is not None:
                record = replace(record, speed=self._usual_reference_s / record.reference_s)
            placed.append(record)
        return placed

    def measured_together(self, calls: Sequence[LocalCall]) -> bool:
        """Return whether the stored costs of these calls, two or more, are all of one `measure_again`."""
        from profiler.measure import phases

        stored = self._store.op_costs(
            self._group.kind_id, self._group.environment_id, [call.digest for call in calls]
        )
        costs = [stored.get((call.digest, phase)) for call in calls for phase in phases(call)]
        moments = {None if cost is None else cost.measured_at for cost in costs}
        return len(calls) > 1 and len(moments) == 1 and None not in moments

    def _workers(self) -> WorkerPool:
        from profiler.workers import CALL_LIMIT_S, WorkerPool

        if self._pool is None:
            limit_s = CALL_LIMIT_S if self._call_limit_s is None else self._call_limit_s
            self._pool = WorkerPool(self._group.devices, call_limit_s=limit_s).__enter__()
        return self._pool

    def _compare(self, pool: WorkerPool, calls: int) -> None:
        """Compare the devices, once, where there are several and enough is to be measured."""
        if not self._agreement and len(self._group.devices) > 1 and calls >= self._compare_from:
            self._agreement = _compare(pool, self._group.devices, self._progress)
            for compared in self._agreement:
                if not compared.is_sound:
                    self._progress.warn(
                        f"{compared.device.label}: is left out of measuring; predictions take all devices of its kind "
                        "for alike"
                    )

    def _is_wanted(self, call: LocalCall) -> bool:
        """False where another run has stored the call's cost meanwhile."""
        if missing_calls(self._store, self._group, [call], retry_failed=self._retry_failed):
            return True
        if not self._met_another:
            self._met_another = True
            self._progress.warn(
                f"another run measures costs of {self._group.kind.name} at the same time: they share the work, but on "
                "the same devices they disturb each other's times"
            )
        self._progress.advance()
        return False
