"""`app run`: execute a strategy on this machine's devices, and keep prediction and measurement side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.db.records import ExecutionRecord
from app.db.store import Store
from app.services.costs import OnMiss
from app.services.machine import Machine, Processor
from app.services.models import ModelRequest, import_graph
from app.services.predicting import LOCAL, Setting, find_target, named_strategy, predict, prepare
from app.services.progress import Progress
from graph.errors import RuntimeFailure, UsageError
from graph.strategy import Strategy
from graph.training import Training

if TYPE_CHECKING:
    from runtime.jobs import JobResult


LONGEST_TIMEOUT_S = 1e8
"""About three years; torch's own timeouts overflow not far beyond."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What `app run` was asked for."""

    model: ModelRequest
    strategy: str
    devices: int | None
    processor: Processor | None
    precision: str
    optimizer: str
    batch_norm: str
    iterations: int
    warmup: int
    seed: int
    verify: bool
    on_miss: OnMiss
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one gradient (or the loss) is from the graph's on one device, relative to its largest value."""

    name: str
    relative: float
    allowed: float
    ok: bool


@dataclass(frozen=True, slots=True)
class RunReport:
    """A finished run. `deviations` is None where no verification was asked for; the worst comes first."""

    execution_id: int
    strategy_id: int
    strategy_digest: str
    model: str
    devices: int
    batch_size: int
    step_times_s: tuple[float, ...]
    minimum_s: float
    median_s: float
    throughput: float
    predicted_s: float
    first_loss: float
    last_loss: float
    deviations: tuple[Deviation, ...] | None

    @property
    def relative_error(self) -> float:
        """(predicted - measured median) / measured median."""
        return (self.predicted_s - self.median_s) / self.median_s

    @property
    def verified(self) -> bool:
        """True where every deviation is within what its dtype allows."""
        return self.deviations is not None and all(one.ok for one in self.deviations)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "execution": self.execution_id,
            "strategy": self.strategy_id,
            "digest": self.strategy_digest,
            "model": self.model,
            "devices": self.devices,
            "batch_size": self.batch_size,
            "step_times_s": list(self.step_times_s),
            "minimum_s": self.minimum_s,
            "median_s": self.median_s,
            "throughput_samples_per_s": self.throughput,
            "predicted_step_time_s": self.predicted_s,
            "relative_error": self.relative_error,
            "losses": [self.first_loss, self.last_loss],
            "deviations": None
            if self.deviations is None
            else [
                {"name": d.name, "relative": d.relative, "allowed": d.allowed, "ok": d.ok}
                for d in self.deviations
            ],
        }


def run_strategy(request: RunRequest, database: str | None, progress: Progress) -> RunReport | None:
    """Import the model, predict and execute the strategy, and store both; None on all ranks but the first.

    Raises:
        SoapstoneError: a model, strategy or option that cannot be used.
        RuntimeFailure: a rank failed; the run is stored as failed, with the reason.
    """
    if request.iterations < 1:
        raise UsageError(f"--iterations: is {request.iterations}, must be at least 1; ask for one or more")
    if not 0 < request.timeout_s < LONGEST_TIMEOUT_S:
        raise UsageError(
            f"--timeout: is {request.timeout_s}, must be above 0 and below {LONGEST_TIMEOUT_S:.0f}; choose another"
        )
    if request.seed >= 2**63:
        raise UsageError(f"--seed: is {request.seed}, must be below 2 to the 63; choose another")
    rank = int(os.environ.get("RANK", "0"))
    progress.begin(f"importing {request.model.name}", None)
    model = import_graph(request.model, batch_norm=request.batch_norm)
    progress.end()
    training = Training(model.batch_size, request.precision, request.optimizer, request.batch_norm)
    with Store.open(database) as store:
        target = find_target(store, LOCAL, progress, devices=request.devices, processor=request.processor)
        # Workers that measure what the prediction lacks end here: the run needs their cores.
        with prepare(store, model, target, training, request.on_miss, progress) as setting:
            strategy, source = named_strategy(store, setting, request.strategy)
            strategy_id, simulation = predict(store, setting, strategy, source)
        machine = setting.target.machine
        if machine is None:
            raise UsageError(
                "app run: the topology is not this machine's, must be local; run without --topology"
            )
        execution_id = 0
        if rank == 0:
            execution_id = store.start_execution(
                ExecutionRecord(
                    strategy_id,
                    setting.topology_id,
                    setting.training_id,
                    machine.environment_id,
                    request.iterations,
                )
            )
        progress.begin(f"running {model.graph.name} on {machine.count} devices", None)
        try:
            result = _launch(request, setting, machine, strategy)
        except RuntimeFailure as error:
            if rank == 0:
                store.fail_execution(execution_id, str(error))
            raise
        except BaseException as error:
            # A signal ends as one of these two; anything else is a bug, and the row must not stay "running" either.
            ended = isinstance(error, KeyboardInterrupt | SystemExit)
            if rank == 0:
                store.fail_execution(
                    execution_id, "interrupted" if ended else f"{type(error).__name__}: {error}"
                )
            raise
        finally:
            progress.end()
        if result is None:
            return None
        return _finish(store, setting, execution_id, strategy_id, strategy, simulation.step_time_s, result)


def _launch(request: RunRequest, setting: Setting, machine: Machine, strategy: Strategy) -> JobResult | None:
    from runtime.jobs import Job
    from runtime.launch import launch
    from runtime.models import ModelReference

    wanted = request.model
    job = Job(
        graph=setting.model.graph,
        strategy=strategy,
        node_of=tuple(device.node for device in setting.topology.devices),
        training=setting.training,
        model=ModelReference(
            "app.services.models:build_model",
            {
                "name": wanted.name,
                "preset": wanted.preset,
                "batch_size": wanted.batch_size,
                "folder": wanted.folder,
            },
        ),
        seed=request.seed,
        iterations=request.iterations,
        warmup=request.warmup,
        verify=request.verify,
    )
    places = [device.core if device.core is not None else device.index for device in machine.devices]
    return launch(job, places, machine.kind.processor, timeout_s=request.timeout_s)


def _finish(
    store: Store,
    setting: Setting,
    execution_id: int,
    strategy_id: int,
    strategy: Strategy,
    predicted_s: float,
    result: JobResult,
) -> RunReport:
    deviations = None
    if result.verification is not None:
        deviations = tuple(
            sorted(
                (Deviation(d.name, d.relative, d.allowed, d.ok) for d in result.verification.deviations),
                key=lambda d: (-d.relative, d.name),
            )
        )
    record = store.finish_execution(
        execution_id,
        result.step_times_s,
        largest_deviation=None if not deviations else deviations[0].relative,
    )
    return RunReport(
        execution_id=execution_id,
        strategy_id=strategy_id,
        strategy_digest=strategy.digest,
        model=setting.model.graph.name,
        devices=len(setting.topology.devices),
        batch_size=setting.training.batch_size,
        step_times_s=result.step_times_s,
        minimum_s=result.minimum_s,
        median_s=result.median_s,
        throughput=record.throughput_samples_per_s or setting.training.batch_size / result.median_s,
        predicted_s=predicted_s,
        first_loss=result.losses[0],
        last_loss=result.losses[-1],
        deviations=deviations,
    )
