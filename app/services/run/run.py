"""`app run`: execute a strategy on this machine's devices, and store prediction and measurement side by side."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from app.db.engine import check_writable
from app.db.records import ExecutionRecord, RunSpeed
from app.db.store import Store
from app.services.costs.machine import LocalMachine
from app.services.costs.operator_costs import OnMiss
from app.services.costs.precisions import in_precision
from app.services.costs.topologies import LOCAL
from app.services.models.micro_batches import check_graph
from app.services.models.models import (
    ImportedModel,
    ModelRequest,
    import_graph,
    with_all_substitutions,
)
from app.services.predict.all_reduces import all_reduce_choices, shown_all_reduces
from app.services.predict.compiled_stretches import check_compiler, with_all_stretches
from app.services.predict.micro_batch_report import micro_batch_report
from app.services.predict.named_strategies import check_name, follows_graph, named_strategy
from app.services.predict.predict import Setting, Target, find_target, predict, prepare, synchronized
from app.services.predict.recomputation_report import check_choice, with_choice
from app.services.progress import Progress
from app.services.run.micro_batches import divided, with_micro_batches
from app.services.run.report import DeviceMemory, RunReport
from app.services.timeline.recorded_scheduling import recorded_scheduling
from app.services.timeline.store import read_recording, write_recording
from graph.errors import RuntimeFailure, SoapstoneError, UsageError
from graph.schedule import GradientSums, Schedule
from graph.strategy import Strategy
from graph.substitutions.rewriting import needs_compiler
from graph.synchronization import Policy, Synchronization, synchronization_to_json
from graph.texts import counted
from graph.topology import Processor
from graph.training import Training
from profiler.processes import start_server
from runtime.ranks.ranks import is_rank

if TYPE_CHECKING:
    from profiler.devices import PhysicalDevice
    from runtime.jobs.job import Job, JobResult
    from runtime.launch.rank_leader import LaunchedRanks
    from search.simulate.simulator import Simulation

    # Executes a job on this machine's devices, or on all ranks: (job, machine, timeout in seconds).
    Start = Callable[[Job, LocalMachine, float], JobResult | None]
    # Why a signal came, where that was not to interrupt the run.
    Cause = Callable[[], RuntimeFailure | None]

LONGEST_TIMEOUT_S = 1e8
"""About three years; torch's own timeouts overflow not far beyond."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The options of `app run`. `recompute`: one of `recomputation_report.CHOICES`; None: as the strategy says.

    compile_stretches: compile whatever is between one communication and the next; else what the strategy says.
    synchronization: in which pieces and in which order gradients are summed; None: as the strategy says.
    micro_batches, schedule: the parts that the batch is gone through in, and their order; None: as the strategy says.
    gradients, credits: when gradients are summed over replicas, and the credits of each stage of schedule actors; None
    and empty: likewise.
    substitute, fuse: apply every substitution that there is, without and with a compiler; of a strategy that follows
    the graph.
    """

    model: ModelRequest
    strategy: str
    devices: int | None
    processor: Processor | None
    optimizer: str
    batch_norm: str
    iterations: int
    warmup: int
    seed: int
    verify: bool
    on_miss: OnMiss
    timeout_s: float
    limit_s: float | None = None
    topology: str = LOCAL
    recorded: int = 0
    recompute: str | None = None
    gpus: str | None = None
    compile_stretches: bool = False
    synchronization: Synchronization | None = None
    micro_batches: int | None = None
    schedule: Schedule | None = None
    substitute: bool = False
    gradients: GradientSums | None = None
    credits: tuple[int, ...] = ()
    fuse: bool = False


def run_strategy(request: RunRequest, database: str | None, progress: Progress) -> RunReport | None:
    """Import the model, predict and execute the strategy, and store both; None on all ranks but the first.

    Under torchrun this process is one rank, perhaps of several hosts: rank 0 alone reads the model and the database
    and writes what comes of the run; the others do what it orders.

    Raises:
        SoapstoneError: a model, strategy or option that cannot be used.
        RuntimeFailure: a rank failed, or the run took too long; it is stored as failed, with the reason.
    """
    _check(request)
    with _limited(request.limit_s):
        if is_rank():
            return _run_as_rank(request, database, progress)
        check_writable(database)
        request = with_micro_batches(request, database)
        if request.topology != LOCAL:
            raise UsageError(
                f"--topology: is {request.topology}, must be left out without torchrun; start one process a device: "
                "torchrun --nnodes N --nproc-per-node M -m app run ..."
            )
        model, training = _import(request, progress)
        with Store.open(database) as store:
            target = find_target(
                store,
                LOCAL,
                progress,
                devices=request.devices,
                processor=request.processor,
                gpus=request.gpus,
                precision=request.model.precision,
            )
            return run_on(store, request, model, training, target, progress)


def _check(request: RunRequest) -> None:
    if request.iterations < 1:
        raise UsageError(f"--iterations: is {request.iterations}, must be at least 1; ask for one or more")
    if not 0 < request.timeout_s < LONGEST_TIMEOUT_S:
        raise UsageError(
            f"--timeout: is {request.timeout_s}, must be above 0 and below {LONGEST_TIMEOUT_S:.0f}; choose another"
        )
    check_choice(request.recompute)
    check_name(request.strategy)
    if request.compile_stretches:
        check_compiler()  # before the import
    for option, asked in (("--substitute", request.substitute), ("--fuse", request.fuse)):
        if asked and not follows_graph(request.strategy):
            raise UsageError(
                f"{option}: is for a baseline, must be left out with strategy {request.strategy}, whose operators are "
                "what they are; leave it out"
            )
    if request.fuse:
        check_compiler("--fuse")
    if request.limit_s is not None and not 0 < request.limit_s < LONGEST_TIMEOUT_S:
        raise UsageError(
            f"--limit: is {request.limit_s}, must be above 0 and below {LONGEST_TIMEOUT_S:.0f}; choose another"
        )
    if request.seed >= 2**63:
        raise UsageError(f"--seed: is {request.seed}, must be below 2 to the 63; choose another")


class _OverLimit(BaseException):
    """The run's limit is over: no error that anything on the way may take for its own."""


@contextmanager
def _limited(limit_s: float | None) -> Iterator[None]:
    """End the body after `limit_s` seconds; in the main thread alone, as signals are.

    Raises:
        RuntimeFailure: it took longer.
    """
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _OverLimit(
            f"run: took longer than {limit_s:g} s, must end within --limit; allow more or ask for fewer iterations"
        )

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # the least there is may be over at once
        yield
    except _OverLimit as error:
        raise RuntimeFailure(str(error)) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _import(request: RunRequest, progress: Progress) -> tuple[ImportedModel, Training]:
    with progress.stage(f"importing {request.model.name}"):
        model = import_graph(request.model, batch_norm=request.batch_norm)
    model = with_all_substitutions(model, substitute=request.substitute, fuse=request.fuse)
    if needs_compiler(model.graph.substitutions):
        check_compiler(f"strategy {request.strategy}")
    check_graph(model, progress)
    return model, Training(model.batch_size, request.model.precision, request.optimizer, request.batch_norm)


def _run_as_rank(request: RunRequest, database: str | None, progress: Progress) -> RunReport | None:
    """Run as one of the processes that torchrun started."""
    from app.services.run.cluster import as_rank, own_devices

    devices = own_devices(request.processor, request.gpus)

    def lead(launched: LaunchedRanks) -> RunReport | None:
        return _lead(launched, devices, request, database, progress)

    return as_rank(devices, request.timeout_s, lead)


def _lead(
    launched: LaunchedRanks,
    of_host: Sequence[PhysicalDevice],
    request: RunRequest,
    database: str | None,
    progress: Progress,
) -> RunReport | None:
    from app.services.run import cluster

    check_writable(database)
    request = with_micro_batches(request, database)
    devices = in_precision(of_host, request.model.precision)
    device = cluster.own_device(devices)
    ranks = launched.execute(lambda: cluster.members(device))
    model, training = _import(request, progress)

    def start(job: Job, _machine: LocalMachine, timeout_s: float) -> JobResult | None:
        return cluster.lead(launched, job, device, timeout_s)

    with Store.open(database) as store:
        target = cluster.cluster_target(
            store, launched, ranks, devices, request.topology, request.devices, progress
        )
        return run_on(
            store, request, model, training, target, progress, start=start, cause=launched.cause_of_signal
        )


def run_on(
    store: Store,
    request: RunRequest,
    model: ImportedModel,
    training: Training,
    target: Target,
    progress: Progress,
    *,
    start: Start | None = None,
    cause: Cause = lambda: None,
) -> RunReport | None:
    """Predict the strategy, execute it by `start` (default: a process a device of this machine), and store both."""
    machine = target.machine
    if machine is None:
        raise UsageError("app run: the topology has no device of this machine, must have; choose another")
    if start is None:
        start_server()  # it imports what the processes take while the step is predicted
    # Workers that measure missing costs end here: the run needs their cores.
    with prepare(store, model, target, training, request.on_miss, progress) as setting:
        strategy, source = named_strategy(store, setting, request.strategy)
        strategy = divided(strategy, request)
        strategy = with_choice(model.graph, strategy, request.recompute)
        if request.synchronization is not None:
            strategy = synchronized(strategy, request.synchronization, progress)
        if request.compile_stretches:
            strategy = with_all_stretches(model.graph, strategy, target.topology)
        if strategy.compiled:
            check_compiler()
        if strategy.compiled or needs_compiler(model.graph.substitutions):
            # The first step compiles.
            request = replace(request, warmup=max(1, request.warmup))
        strategy_id, simulation = predict(store, setting, strategy, source, walk="always")
    execution_id = store.start_execution(
        ExecutionRecord(
            strategy_id,
            setting.topology_id,
            setting.training_id,
            machine.environment_id,
            request.iterations,
        )
    )
    with _stored_failure(store, execution_id, cause):
        with progress.stage(
            f"running {model.graph.name} on {counted(len(setting.topology.devices), 'device')}"
        ):
            job = _job(request, setting, strategy, simulation)
            result = (start or _launch)(job, machine, request.timeout_s)
        if result is None:
            return None
        return _finish(store, setting, execution_id, strategy_id, job, simulation, result)


@contextmanager
def _stored_failure(store: Store, execution_id: int, cause: Cause) -> Iterator[None]:
    """Store the reason of the body's failure, in the words of its message."""
    try:
        yield
    except SoapstoneError as error:
        store.fail_execution(execution_id, str(error))
        raise
    except (KeyboardInterrupt, SystemExit):
        failure = cause()
        store.fail_execution(execution_id, None if failure is None else str(failure))
        if failure is not None:
            raise failure from None
        raise
    except BaseException as error:
        # The limit, or a bug: the row must not stay "running" either.
        reason = str(error) if isinstance(error, _OverLimit) else f"{type(error).__name__}: {error}"
        store.fail_execution(execution_id, reason)
        raise


def _job(request: RunRequest, setting: Setting, strategy: Strategy, simulation: Simulation) -> Job:
    from runtime.jobs.job import Job
    from runtime.jobs.models import ModelReference
    from search.simulate.steady_state import gather_order, pulls, slice_order

    synchronization = strategy.synchronization
    return Job(
        graph=setting.model.graph,
        strategy=strategy,
        node_of=tuple(device.node for device in setting.topology.devices),
        training=setting.training,
        model=ModelReference("app.services.models.models:build_model", request.model.factory_keywords),
        seed=request.seed,
        iterations=request.iterations,
        warmup=request.warmup,
        verify=request.verify,
        recorded=request.recorded,
        communications=True,
        peak=True,
        all_reduces=all_reduce_choices(
            setting.model.graph, strategy, setting.topology, setting.target.link_costs
        ),
        slice_order=slice_order(simulation.tasks) if synchronization.policy is Policy.P3 else (),
        pulls=pulls(simulation.tasks) if synchronization.policy is Policy.P3 else (),
        gather_order=gather_order(simulation.tasks) if synchronization.orders_gathers else (),
    )


def _launch(job: Job, machine: LocalMachine, timeout_s: float) -> JobResult | None:
    """Start a process for each of this machine's devices."""
    from runtime.launch.torchrun import launch

    cores_or_gpus = [device.core if device.core is not None else device.index for device in machine.devices]
    return launch(job, cores_or_gpus, machine.processor, timeout_s=timeout_s)


def _speed(
    store: Store, setting: Setting, simulation: Simulation, reference_s: float | None
) -> RunSpeed | None:
    """Return the speed of the devices' cores, where 1 is the speed that costs are given at; None where not known."""
    machine = setting.target.machine
    if reference_s is None or machine is None or len(machine.groups) != 1:
        return None
    usual_s = store.usual_reference_s(machine.groups[0].kind_id, machine.environment_id)
    if usual_s is None or not simulation.step_time_ns:
        return None
    speed = usual_s / reference_s
    return RunSpeed(speed, simulation.at_speed(speed).step_time_ns / simulation.step_time_ns)


def _finish(
    store: Store,
    setting: Setting,
    execution_id: int,
    strategy_id: int,
    job: Job,
    simulation: Simulation,
    result: JobResult,
) -> RunReport:
    deviations = None
    failure = None
    strategy = job.strategy
    names = [operator.name for operator in setting.model.graph.operators]
    if result.verification is not None:
        from runtime.jobs.verify import by_severity

        deviations = tuple(by_severity(result.verification.deviations))
        failure = result.verification.failure
    speed = _speed(store, setting, simulation, result.reference_s)
    record = store.finish_execution(
        execution_id,
        result.step_times_s,
        largest_deviation=None if not deviations else deviations[0].relative,
        peak_bytes=[peak.tensor_bytes for peak in result.peaks] or None,
        process_bytes=[peak.process_bytes for peak in result.peaks] or None,
        lost_s=result.most_lost_s,
        undisturbed_s=result.undisturbed_s,
        speed=speed,
    )
    recorded = None
    if result.recorded:
        write_recording(store, record, result.recorded, result.communications, setting.topology)
        recorded = recorded_scheduling(read_recording(store, record), setting.topology)
    if failure is not None:
        # Its times stay: it did run.
        store.fail_execution(execution_id, failure)
    return RunReport(
        execution_id=execution_id,
        strategy_id=strategy_id,
        strategy_digest=strategy.digest,
        model=setting.model.graph.name,
        devices=len(setting.topology.devices),
        batch_size=setting.training.batch_size,
        result=result,
        throughput=record.throughput_samples_per_s or setting.training.batch_size / result.median_s,
        speed=speed,
        predicted_s=simulation.step_time_s,
        scheduling=simulation.scheduling,
        deviations=deviations,
        failure=failure,
        # A strategy may leave the last devices out.
        memory=tuple(
            DeviceMemory(predicted, peak.tensor_bytes, peak.process_bytes)
            for predicted, peak in zip(simulation.peak_memory_bytes, result.peaks, strict=False)
        ),
        memory_account=simulation.account,
        recomputed=tuple((names[group.first], names[group.last]) for group in strategy.recomputation),
        compiled=tuple((names[stretch.first], names[stretch.last]) for stretch in strategy.compiled),
        all_reduces=shown_all_reduces(job.all_reduces),
        synchronization=synchronization_to_json(strategy.synchronization),
        micro_batches=micro_batch_report(setting.model.graph, strategy, setting.model.micro_batch_size),
        recorded_scheduling=recorded,
    )
