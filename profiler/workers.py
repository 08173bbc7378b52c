"""A pool of workers, one process a device, that measure calls and return each result as soon as it is complete.

A worker that dies, or exceeds the time limit of a call, costs that call alone: the call is reported as failed with its
reason, the worker is started again, and the other calls are measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self

from graph.calls import LocalCall
from graph.compiled_calls import COMPILED, parts_in
from graph.errors import RuntimeFailure, UsageError
from profiler.devices import PhysicalDevice
from profiler.exclusive import held
from profiler.measure import (
    FailedMeasurement,
    MeasureOptions,
    PhaseOutcome,
    failed,
    is_usable,
    measure_call,
)
from profiler.processes import KILL_WAIT_S, DeviceProcess
from profiler.processors import processor_facts
from profiler.reference import ReferenceKernel

CALL_LIMIT_S = 60.0
# More for each part of a compiled call, for its compilation: one of 43 operators took 36 s, one of 103 took 116 s.
PART_LIMIT_S = 3.0
START_LIMIT_S = 120.0
# A device whose worker does not come up so often in a row is not tried again.
MOST_FAILED_STARTS = 3
# Another run's call, or its probe of the links, may have the device first.
TURN_LIMIT_S = 300.0
READY, STARTED = "ready", "started"


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of measuring one call: one outcome a phase, the device, and the wall time in all."""

    call: LocalCall
    device: PhysicalDevice
    outcomes: tuple[PhaseOutcome, ...]
    wall_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """A worker's outcomes, and whether it is usable: some failures leave a GPU's context broken."""

    outcomes: tuple[PhaseOutcome, ...]
    usable: bool


def _serve(connection: Connection, device: PhysicalDevice, _nothing: None) -> None:
    """Measure the calls received until the parent is gone."""
    import profiler.operators  # noqa: F401  # loaded before the first call's time limit runs

    _be_first_out_of_memory()
    kernel = ReferenceKernel() if device.processor == "cpu" else None
    connection.send(READY)
    while True:
        call, options = connection.recv()
        with held([device]):
            connection.send(STARTED)
            reason = _larger_than_memory(call, device)
            outcomes = (
                failed(call, reason) if reason is not None else _measured(call, device, options, kernel)
            )
        connection.send(_Answer(outcomes, is_usable(device)))


def _measured(
    call: LocalCall, device: PhysicalDevice, options: MeasureOptions, kernel: ReferenceKernel | None
) -> tuple[PhaseOutcome, ...]:
    """Measure a call, with the reference kernel before and behind it."""
    if kernel is None:
        return measure_call(call, device, options)
    kernel.sample()
    outcomes = measure_call(call, device, options)
    kernel.sample()
    reference_s = kernel.recent_s()
    return tuple(
        outcome if isinstance(outcome, FailedMeasurement) else replace(outcome, reference_s=reference_s)
        for outcome in outcomes
    )


def _be_first_out_of_memory() -> None:
    """Let Linux end this process, which costs one call, before any other where the machine runs out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _larger_than_memory(call: LocalCall, device: PhysicalDevice) -> str | None:
    """Return the reason why a call is not executed, or None.

    Some systems promise any amount of memory, and end a process, perhaps another one, when it is written to.
    """
    needed = sum(spec.size_bytes for spec in (*call.inputs, *call.outputs))
    there = processor_facts().memory_bytes if device.processor == "cpu" else device.kind.memory_bytes
    if needed <= there:
        return None
    owner = "the machine" if device.processor == "cpu" else "the device"
    return f"inputs and outputs take {needed / 2**30:,.0f} GiB, {owner} has {there / 2**30:,.0f} GiB"


class _DeviceWorker:
    """A device, the process that occupies it (if any), and the call that it is measuring (if any)."""

    def __init__(self, device: PhysicalDevice) -> None:
        self.device = device
        self.process: DeviceProcess | None = None
        self.ready, self.started = False, False
        self.call: LocalCall | None = None
        self.since = 0.0
        self.failed_starts, self.start_failure = 0, ""

    def start(self) -> None:
        self.process = DeviceProcess(_serve, self.device, None)
        self.ready, self.since = False, time.monotonic()

    def give(self, call: LocalCall, options: MeasureOptions) -> bool:
        """Send a call to measure; False where the process is no longer there."""
        if self.process is None or self.process.death() is not None:
            return False
        try:
            self.process.connection.send((call, options))
        except (BrokenPipeError, ConnectionResetError):
            return False
        self.call, self.started, self.since = call, False, time.monotonic()
        return True

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.process, self.ready, self.call = None, False, None


def _usable(workers: Sequence[_DeviceWorker]) -> list[_DeviceWorker]:
    return [worker for worker in workers if worker.failed_starts < MOST_FAILED_STARTS]


def _require_usable(workers: Sequence[_DeviceWorker]) -> None:
    if not _usable(workers):
        worker = workers[0]
        raise RuntimeFailure(
            f"worker on {worker.device.label}: did not start {MOST_FAILED_STARTS} times ({worker.start_failure}), "
            "must start to measure anything; see its messages above"
        )


class WorkerPool:
    """Workers on `devices`; a context manager.

    `call_limit_s` bounds the measuring of one call, all phases together, of a compiled one with `PART_LIMIT_S` more for
    each of its parts; `start_limit_s` the start of a worker.

    Raises:
        UsageError: there is no device, or one is named twice.
    """

    def __init__(
        self,
        devices: Sequence[PhysicalDevice],
        options: MeasureOptions | None = None,
        *,
        call_limit_s: float = CALL_LIMIT_S,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        labels = [device.label for device in devices]
        if not labels or len(set(labels)) < len(labels):
            raise UsageError(
                f"workers: devices are [{', '.join(labels)}], must be at least one and all different; name each once"
            )
        self._options = MeasureOptions() if options is None else options
        self._workers = [_DeviceWorker(device) for device in devices]
        self._call_limit_s, self._start_limit_s = call_limit_s, start_limit_s

    def __enter__(self) -> Self:
        # All at once: each takes seconds to import torch.
        self._start_missing(self._workers)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.stop()

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        """The process ids of the workers, in the order of the devices; None where none is started."""
        return tuple(
            None if worker.process is None else worker.process.process.pid for worker in self._workers
        )

    @property
    def running(self) -> dict[str, LocalCall]:
        """The calls that are being measured at this moment, by the label of the device."""
        return {worker.device.label: worker.call for worker in self._workers if worker.call is not None}

    def wait_until_ready(self) -> None:
        """Wait until every worker has started, or is given up: starting disturbs the measurements of others."""
        while any(not worker.ready for worker in _usable(self._workers)):
            self._start_missing(self._workers)
            list(self._collect(self._workers))

    def measure(
        self,
        calls: Iterable[LocalCall],
        *,
        on: Collection[PhysicalDevice] | None = None,
        options: MeasureOptions | None = None,
        is_wanted: Callable[[LocalCall], bool] = lambda _: True,
    ) -> Iterator[CallResult]:
        """Measure `calls`, each on whichever device (of `on`) is free, and yield results as they come.

        `options` replaces those of the pool. A call that `is_wanted` refuses, when its turn comes, is left out. Store
        each result before asking for the next: what was yielded is then safe, whatever happens. Closing the iterator
        early ends the workers that are busy.

        Raises:
            RuntimeFailure: no worker can be started; the message holds the reason.
        """
        waiting = deque(calls)
        workers = [worker for worker in self._workers if on is None or worker.device in on]
        chosen = self._options if options is None else options
        try:
            while waiting or any(worker.call is not None for worker in workers):
                _require_usable(workers)
                self._start_missing(workers, len(waiting))
                self._hand_out(workers, waiting, chosen, is_wanted)
                yield from self._collect(workers)
        finally:
            for worker in workers:
                if worker.call is not None:
                    worker.stop()

    def _start_missing(self, workers: Sequence[_DeviceWorker], wanted: int | None = None) -> None:
        """Start workers that have no process, but no more than there are calls left for."""
        usable = _usable(workers)
        missing = [worker for worker in usable if worker.process is None]
        if wanted is not None:
            free = sum(worker.process is not None and worker.call is None for worker in usable)
            missing = missing[: max(0, wanted - free)]
        for worker in missing:
            worker.start()

    def _hand_out(
        self,
        workers: Sequence[_DeviceWorker],
        waiting: deque[LocalCall],
        options: MeasureOptions,
        is_wanted: Callable[[LocalCall], bool],
    ) -> None:
        for worker in workers:
            if not worker.ready or worker.call is not None:
                continue
            while waiting and not is_wanted(waiting[0]):
                waiting.popleft()
                # Another run that measured this call is likely at the next ones: continue elsewhere.
                waiting.rotate(-(len(waiting) // 2))
            if not waiting:
                return
            if worker.give(waiting[0], options):
                waiting.popleft()
            else:
                worker.stop()  # it died while idle, which costs no call

    def _collect(self, workers: Sequence[_DeviceWorker]) -> Iterator[CallResult]:
        """Wait for messages, ends or timeouts of workers and yield their results."""
        sources: dict[Connection, _DeviceWorker] = {}
        for worker in workers:
            if worker.process is not None and (worker.call is not None or not worker.ready):
                sources[worker.process.connection] = worker
        if not sources:
            return
        deadline = min(worker.since + self._limit_s(worker) for worker in sources.values())
        # A pipe breaks when its process dies, so that it becomes ready, too.
        happened = wait(list(sources), timeout=max(0.0, deadline - time.monotonic()))
        for source, worker in sources.items():
            overdue = time.monotonic() >= worker.since + self._limit_s(worker)
            # The second look: it may have answered while the caller stored the results before.
            if source in happened or (overdue and worker.process is not None and source.poll()):
                yield from self._receive(worker)
            elif overdue:
                limit = f"took longer than its limit of {self._limit_s(worker):g} s, so its worker was ended"
                yield from self._lose(worker, limit)

    def _limit_s(self, worker: _DeviceWorker) -> float:
        if not worker.ready:
            return self._start_limit_s
        if not worker.started or worker.call is None:
            return TURN_LIMIT_S
        parts = parts_in(worker.call.arguments) if worker.call.target == COMPILED else ()
        return self._call_limit_s + len(parts) * PART_LIMIT_S

    def _receive(self, worker: _DeviceWorker) -> Iterator[CallResult]:
        if worker.process is None:
            return  # the caller closed the pool meanwhile
        try:
            message = worker.process.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.process.join(KILL_WAIT_S)
            yield from self._lose(worker, worker.process.death() or "the worker closed its pipe")
            return
        if worker.call is None:
            worker.ready, worker.failed_starts = True, 0
            return
        if message == STARTED:
            worker.started, worker.since = True, time.monotonic()
            return
        call, spent = worker.call, time.monotonic() - worker.since
        worker.call = None
        if not message.usable:
            worker.stop()
        yield CallResult(call, worker.device, message.outcomes, spent)

    def _lose(self, worker: _DeviceWorker, reason: str) -> Iterator[CallResult]:
        """Give up a worker's process, and the call that it was measuring."""
        call, spent = worker.call, time.monotonic() - worker.since
        starting = not worker.ready
        worker.stop()
        if call is not None:
            yield CallResult(call, worker.device, failed(call, reason), spent)
        elif starting:
            worker.failed_starts, worker.start_failure = worker.failed_starts + 1, reason
