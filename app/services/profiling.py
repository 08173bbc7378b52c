"""`app profile`: measure what a search over given models and devices needs, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from app.db.store import Store
from app.services.costs import cost_records
from app.services.machine import Machine, Processor, default_processor, describe, local_devices, local_links
from app.services.models import ImportedModel, ModelRequest, import_graph
from app.services.progress import Progress
from graph.calls import LocalCall
from graph.errors import UsageError
from graph.training import Training
from profiler.devices import PhysicalDevice, device_warnings, parse_device_list, select_devices

if TYPE_CHECKING:
    from profiler.workers import WorkerPool


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What a profile run did."""

    device_kind: str
    devices: int
    needed: int
    measured: int
    known: int
    failed: int
    failed_operators: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as a JSON document."""
        return {
            "device_kind": self.device_kind,
            "devices": self.devices,
            "needed": self.needed,
            "measured": self.measured,
            "known": self.known,
            "failed": self.failed,
            "failed_operators": list(self.failed_operators),
        }


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What `app profile` was asked for."""

    models: tuple[str, ...]
    preset: str
    batch_size: int | None
    gpus: str | None
    processor: Processor | None
    devices: int | None
    optimizer: str
    batch_norm: str


def run_profile(request: ProfileRequest, database: str | None, progress: Progress) -> ProfileReport:
    """Check the request, open the database and measure.

    Raises:
        UsageError: no model, or devices that are not there; nothing is written then.
    """
    if not request.models:
        raise UsageError("--model: is missing, must name a network; give --model NAME or --all")
    devices = _devices(request)
    for warning in device_warnings(devices):
        progress.warn(warning)
    # Models and training are checked before the database is touched: a mistake writes nothing.
    Training(1, optimizer=request.optimizer, batch_norm=request.batch_norm)
    models = []
    for name in request.models:
        progress.begin(f"importing {name}", None)
        wanted = ModelRequest(name, request.preset, request.batch_size, str(Path.cwd()))
        models.append(import_graph(wanted, batch_norm=request.batch_norm))
        progress.end()
    with Store.open(database) as store:
        machine = describe(store, devices)
        return profile(store, machine, models, [request.optimizer], progress)


def _devices(request: ProfileRequest) -> tuple[PhysicalDevice, ...]:
    if request.gpus is None:
        return local_devices(request.processor or default_processor(), request.devices)
    if request.processor == "cpu":
        raise UsageError("--gpus: was given with --device cpu, must stand alone; leave one of them out")
    if request.devices is not None:
        raise UsageError("--gpus: was given with --devices, must stand alone; leave one of them out")
    return select_devices("cuda", parse_device_list(request.gpus))


def profile(
    store: Store,
    machine: Machine,
    models: Sequence[ImportedModel],
    optimizers: Sequence[str],
    progress: Progress,
) -> ProfileReport:
    """Measure every operator cost and link that searches over the machine's devices need.

    A cost that the database holds for this kind and environment is not measured again. Each measurement is stored as
    soon as it is done, so that an interrupted run continues where it was.
    """
    local_links(store, machine, progress)
    calls = calls_of(models, optimizers, machine.count)
    missing = missing_calls(store, machine, calls)
    with Measurer(store, machine, progress) as measurer:
        failed = measurer.measure(missing)
    return ProfileReport(
        device_kind=machine.kind.name,
        devices=machine.count,
        needed=len(calls),
        measured=len(missing) - len(failed),
        known=len(calls) - len(missing),
        failed=len(failed),
        failed_operators=tuple(sorted({call.target for call in failed})),
    )


def calls_of(
    models: Sequence[ImportedModel], optimizers: Sequence[str], device_count: int
) -> list[LocalCall]:
    """Return the distinct local calls of some models on up to `device_count` devices, in a fixed order."""
    from profiler.updates import update_call
    from search.needed import needed_calls

    calls = {call.digest: call for model in models for call in needed_calls(model.graph, device_count)}
    for optimizer in optimizers:
        call = update_call(optimizer)
        calls[call.digest] = call
    return list(calls.values())


def missing_calls(store: Store, machine: Machine, calls: Sequence[LocalCall]) -> list[LocalCall]:
    """Return the calls whose cost (or failure) is not stored for this kind and environment."""
    from profiler.measure import phases

    stored = store.op_costs(machine.kind_id, machine.environment_id, [call.digest for call in calls])
    return [call for call in calls if any((call.digest, phase) not in stored for phase in phases(call))]


class Measurer:
    """Measures calls on a machine's devices and stores each result as it comes; a context manager.

    Its workers start with the first call and stay, since each takes seconds to start: a search meets calls one by one.
    """

    def __init__(self, store: Store, machine: Machine, progress: Progress) -> None:
        self._store = store
        self._machine = machine
        self._progress = progress
        self._pool: WorkerPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()

    def measure(self, calls: Sequence[LocalCall]) -> list[LocalCall]:
        """Measure and store calls; return those that failed."""
        from profiler.measure import FailedMeasurement
        from profiler.workers import WorkerPool

        failed: list[LocalCall] = []
        if not calls:
            return failed
        machine = self._machine
        if self._pool is None:
            self._pool = WorkerPool(machine.devices).__enter__()
        self._progress.begin(f"measuring on {machine.count} x {machine.kind.name}", len(calls))
        try:
            for result in self._pool.measure(calls):
                self._store.put_op_costs(machine.kind_id, machine.environment_id, cost_records(result))
                if any(isinstance(outcome, FailedMeasurement) for outcome in result.outcomes):
                    failed.append(result.call)
                self._progress.advance()
        finally:
            self._progress.end()
        return failed
