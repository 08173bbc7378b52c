"""Measure forward and backward of one local call, or one optimizer update, in this process on its device.

Forward is timed with the autograd graph recorded, as in training; backward by `torch.autograd.grad` with respect to
the inputs that need gradients, from random gradients of the outputs. Calls too short for the clock are executed several
times between two marks. A failure is an outcome with its reason, never a number.

Samples are taken until the confidence interval of their median is narrow: half its width is 1.57 interquartile ranges /
sqrt(n) (McGill, Tukey, Larsen, Variations of Box Plots, 1978), or until a cap is reached.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import psutil

from graph.calls import CostPhase, LocalCall
from profiler.call_inputs import CallInputs, ForwardPass, cache_bytes, storage_sizes
from profiler.clocks import ClockWatch
from profiler.devices import PhysicalDevice
from profiler.pinning import return_freed_memory
from profiler.timers import Elapsed, Timer, synchronize, timer_for
from profiler.updates import is_update

if TYPE_CHECKING:
    import torch

LONGEST_BATCH = 64
# However long a call takes: a minimum needs something to be the minimum of.
FEWEST_SAMPLES = 3
LONGEST_REASON = 300
# An execution is warm when it takes no less than this share of the one before.
WARM_SHARE = 0.9
NOTCH = 1.57
# Samples are taken again, so often in all, where the device's clock differed by more between them.
STEADY_SHARE = 0.03
MOST_UNSTEADY = 3
# Before a GPU's samples, so many times its largest cache is written to.
EVICTED_CACHES = 2
# A process that holds more after a call gives freed memory back to the system.
LARGE_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """The stopping rule of a measurement.

    After `warm_ups` executions, or as many up to `maximum_warm_ups` as it takes until the time no longer falls, at
    least `repetitions` samples are taken, and more until they took `budget_s` a phase and the confidence interval of
    each phase's median is within `interval` of it to both sides. `maximum_repetitions` samples end it; past `maximum_s`
    seconds three are enough. Calls shorter than `batch_below_s` are timed in batches that last about as long. `seed`
    draws the inputs. `wall`: count on a CPU also the time that other processes take of its core.
    """

    warm_ups: int = 2
    maximum_warm_ups: int = 6
    repetitions: int = 5
    budget_s: float = 0.02
    interval: float = 0.02
    maximum_repetitions: int = 60
    maximum_s: float = 1.0
    batch_below_s: float = 50e-6
    seed: int = 0
    wall: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of one phase of the call with this digest, in seconds of one execution.

    `digest`: the call's cost key. `samples_s`: the raw samples in the order taken; each is a mean over a batch where
    the call is short. `executions`: of all samples together. `peak_bytes`: on CUDA, the peak of the allocator beyond
    other calls' tensors; on a CPU, the tensors alive in the phase (inputs, outputs, saved tensors, gradients) without
    the temporaries of a kernel. `launch_s`: the host's time to issue an execution (median) while it waits for nothing,
    where the device computes apart from it; else None. `warm_s`: on a GPU, the seconds of an execution (median) whose
    inputs are still in the caches, if they fit; the samples are of inputs that have left them. `clock_hz` and
    `throttle`: see `profiler.clocks`. `reference_s`: what the reference kernel took of late on the same core
    (`profiler.reference`); None on GPUs.
    """

    digest: str
    phase: CostPhase
    minimum_s: float
    p10_s: float
    median_s: float
    samples_s: tuple[float, ...]
    peak_bytes: int
    executions: int = 0
    launch_s: float | None = None
    warm_s: float | None = None
    clock_hz: float | None = None
    throttle: str | None = None
    reference_s: float | None = None


@dataclass(frozen=True, slots=True)
class FailedMeasurement:
    """One phase of the call with this digest that could not be measured, and why."""

    digest: str
    phase: CostPhase
    reason: str


PhaseOutcome = Measurement | FailedMeasurement


def phases(call: LocalCall) -> tuple[CostPhase, ...]:
    """Return the phases that a call has."""
    if is_update(call):
        return ("update",)
    return ("forward", "backward") if call.has_backward else ("forward",)


def failed(call: LocalCall, reason: str) -> tuple[FailedMeasurement, ...]:
    """Return one failure for each phase of `call`."""
    return tuple(FailedMeasurement(call.digest, phase, reason) for phase in phases(call))


def spread(samples_s: Sequence[float]) -> float:
    """Return the interquartile range of some samples as a share of their median."""
    low, middle, high = np.percentile(np.asarray(samples_s), (25, 50, 75))
    return float((high - low) / middle) if middle > 0 else inf


def interval(samples_s: Sequence[float]) -> float:
    """Return half the width of the confidence interval of the samples' median, as a share of it."""
    return NOTCH * spread(samples_s) / sqrt(len(samples_s))


def summarize(digest: str, phase: CostPhase, samples_s: Sequence[float], peak_bytes: int) -> Measurement:
    """Return the measurement that rests on `samples_s` (at least one)."""
    tenth, middle = np.percentile(np.asarray(samples_s), (10, 50))
    return Measurement(
        digest=digest,
        phase=phase,
        minimum_s=min(samples_s),
        p10_s=max(float(tenth), min(samples_s)),  # interpolation may round below the minimum
        median_s=float(middle),
        samples_s=tuple(samples_s),
        peak_bytes=peak_bytes,
    )


def measure_call(
    call: LocalCall, device: PhysicalDevice, options: MeasureOptions | None = None
) -> tuple[PhaseOutcome, ...]:
    """Measure every phase of `call` on `device`, which this process must occupy (`PhysicalDevice.occupy`).

    Returns one outcome a phase, in the order of `phases`. Whatever the operator raises becomes the reason of a
    `FailedMeasurement`; where only its backward fails, its forward is measured.
    """
    chosen = MeasureOptions() if options is None else options
    try:
        return _Session(call, device, chosen).run()
    except Exception as error:  # an operator may fail in any way that its implementation knows
        return failed(call, describe_error(error))
    finally:
        _release(device)


def describe_error(error: BaseException) -> str:
    """Return type and message of an error in one line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."


def _release(device: PhysicalDevice) -> None:
    """Give cached memory back where it is much, so that one large call does not make the next one fail."""
    if device.processor == "cuda":
        import torch

        with suppress(RuntimeError):  # a broken context: `is_usable` tells
            torch.cuda.empty_cache()
    elif psutil.Process().memory_info().rss > LARGE_BYTES:
        return_freed_memory()


def is_usable(device: PhysicalDevice) -> bool:
    """False where a failure has left the device's context in this process broken, as an illegal memory access does."""
    try:
        synchronize(device.torch_name)
    except RuntimeError:
        return False
    return True


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector out of the samples."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Session:
    """The measurement of one call."""

    def __init__(self, call: LocalCall, device: PhysicalDevice, options: MeasureOptions) -> None:
        self.call, self.device, self.options = call, device, options
        self.timer: Timer[object] = timer_for(device.torch_name, of_process=not options.wall)
        self.subject = CallInputs(call, device, options.seed)
        self.backward_failure: str | None = None
        # Executions between two marks.
        self.batch = 1
        # On a GPU, evicts the inputs from its caches.
        self._evict: Callable[[], object] | None = None

    def run(self) -> tuple[PhaseOutcome, ...]:
        peaks = self._first_pass()
        with _collector_paused():
            self._warm_up()
            samples, clock = self._steady_samples()
            warm = self._warm_samples()
        launches = self.device.processor != "cpu"
        outcomes: list[PhaseOutcome] = []
        for phase, taken, warm_s, peak in zip(phases(self.call), samples, warm, peaks, strict=True):
            if phase == "backward" and self.backward_failure is not None:
                outcomes.append(FailedMeasurement(self.call.digest, phase, self.backward_failure))
                continue
            measured = summarize(self.call.digest, phase, [elapsed.device_s for elapsed in taken], peak)
            outcomes.append(
                replace(
                    measured,
                    executions=self.batch * len(taken),
                    launch_s=median(elapsed.host_s for elapsed in taken) if launches else None,
                    warm_s=warm_s,
                    clock_hz=clock.clock_hz,
                    throttle=clock.throttle,
                )
            )
        return tuple(outcomes)

    @property
    def _differentiates(self) -> bool:
        return self.call.has_backward and self.backward_failure is None

    def _first_pass(self) -> list[int]:
        """Execute each phase once, which compiles and allocates; return the peak bytes of each.

        Then make the input sets, and touch the memory that results take until these come round: memory that the
        system has never given out costs more to touch for the first time than most operators take. A warm call has one
        input set.
        """
        account = _CudaAccount(self.device) if self.device.processor == "cuda" else _CpuAccount()
        with account.forward():
            done = self.subject.forward()
        peaks, gradients = [account.peak_bytes(done, [])], []
        if self.call.has_backward:
            try:
                self.subject.draw_gradients(done)
                account.start()
                gradients = [gradient for gradient in self.subject.backward(done) if gradient is not None]
                peaks.append(account.peak_bytes(done, gradients))
            except Exception as error:  # as in measure_call; the forward can still be measured
                self.backward_failure = describe_error(error)
                peaks.append(0)
        input_blocks = storage_sizes([*done.inputs, *done.gradients])
        result_blocks = storage_sizes([*done.outputs, *gradients])
        if not self.call.warm:
            self.subject.rotate([size for block, size in result_blocks.items() if block not in input_blocks])
        return peaks

    def _warm_up(self) -> None:
        """Execute until warm, the first pass counted; settle how many executions make a batch."""
        self.timer.warm_up()
        longest = LONGEST_BATCH
        if self.device.processor == "cuda" and not self.call.warm:
            self._evict = _eviction(self.device)
            # Inputs that come round within a batch would be in the caches again.
            longest = min(longest, self.subject.sets)
        fewest, most = max(1, self.options.warm_ups - 1), self.options.maximum_warm_ups - 1
        taken: list[float] = []
        while len(taken) < fewest or (taken[-1] < WARM_SHARE * taken[-2] and len(taken) < most):
            taken.append(sum(elapsed.device_s for elapsed in self._timed_batch()))
            fewest = max(fewest, 2)
        shortest = min(taken) / (2 if self._differentiates else 1)
        if shortest < self.options.batch_below_s:
            self.batch = min(longest, ceil(self.options.batch_below_s / max(shortest, 1e-9)))

    def _timed_batch(self, noted: Callable[[], None] = lambda: None) -> list[Elapsed]:
        """Return the seconds of one execution, for forward and (where there is one) backward.

        `noted` is called while the device is busy.
        """
        while (times := self._attempt(noted)) is None:
            if self.timer.waits and self.batch > 1:
                # Perhaps the device's queue is full.
                self.batch = self.batch // 2
                self.timer.restart()
        return [Elapsed(elapsed.device_s / self.batch, elapsed.host_s / self.batch) for elapsed in times]

    def _attempt(self, noted: Callable[[], None]) -> list[Elapsed] | None:
        """Execute a batch of each phase; return their times, if the timer has them (`Timer.time`)."""
        passes: list[ForwardPass] = []
        made: list[list[torch.Tensor | None]] = []

        def forward() -> None:
            passes.extend(self.subject.forward() for _ in range(self.batch))

        def backward() -> None:
            made.extend(self.subject.backward(done) for done in passes)

        works = (forward, backward) if self._differentiates else (forward,)
        if self._evict is None:
            times = self.timer.time(*works, noted=noted)
        else:
            times = self.timer.time(self._evict, *works, noted=noted)
            times = None if times is None else times[1:]
        for done, gradients in zip(passes, made or [[]] * self.batch, strict=True):
            self.subject.hold([*done.outputs, *gradients])
        return times

    def _steady_samples(self) -> tuple[list[list[Elapsed]], ClockWatch]:
        """Return samples of each phase during which the device's clock was steady, where it can be; and its clock."""
        for _ in range(MOST_UNSTEADY):
            with ClockWatch(self.device) as clock:
                samples = self._sample(clock.read)
            if clock.spread <= STEADY_SHARE:
                break
        return samples, clock

    def _warm_samples(self) -> list[float | None]:
        """Return, on a GPU, the median seconds of each phase with inputs in its caches, else None."""
        names = phases(self.call)
        if self._evict is None:
            return [None] * len(names)
        self._evict = None
        self.subject.stay()
        self._timed_batch()
        times = [self._timed_batch() for _ in range(FEWEST_SAMPLES)]
        medians = [median(elapsed.device_s for elapsed in of_phase) for of_phase in zip(*times, strict=True)]
        return [*medians, *[None] * (len(names) - len(medians))]

    def _sample(self, noted: Callable[[], None]) -> list[list[Elapsed]]:
        """Return the samples of each phase of the call, as many as the options ask for."""
        options, names = self.options, phases(self.call)
        samples: list[list[Elapsed]] = [[] for _ in names]
        began, look_at = time.perf_counter(), options.repetitions
        while True:
            for of_phase, taken in zip(samples, self._timed_batch(noted), strict=False):
                of_phase.append(taken)
            count, spent = len(samples[0]), time.perf_counter() - began
            if count >= options.maximum_repetitions:
                return samples
            if count >= FEWEST_SAMPLES and spent >= options.maximum_s:
                return samples
            if count >= look_at and spent >= options.budget_s * len(names):
                if all(
                    interval([elapsed.device_s for elapsed in of_phase]) <= options.interval
                    for of_phase in samples
                    if of_phase
                ):
                    return samples
                look_at = count + max(2, count // 4)  # looking is not free


def _eviction(device: PhysicalDevice) -> Callable[[], object]:
    """Return a write to memory that leaves nothing else in a GPU's caches."""
    import torch

    memory = torch.empty(EVICTED_CACHES * cache_bytes(device), dtype=torch.uint8, device=device.torch_name)
    return memory.zero_


class _CpuAccount:
    """The bytes of the tensors alive in a phase, each block of memory counted once."""

    def __init__(self) -> None:
        self._saved: dict[int, int] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record the tensors that autograd saves while the context lasts."""
        import torch

        def note(value: torch.Tensor) -> torch.Tensor:
            self._saved.update(storage_sizes([value]))
            return value

        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            yield

    def start(self) -> None:
        """Nothing: blocks are counted afterwards."""

    def peak_bytes(self, done: ForwardPass, gradients: Sequence[torch.Tensor | None]) -> int:
        """Return the bytes of inputs, outputs, saved tensors and gradients."""
        made = [value for value in gradients if value is not None]
        blocks = storage_sizes([*done.inputs, *done.outputs, *done.gradients, *made])
        return sum((self._saved | blocks).values())


class _CudaAccount:
    """The peak of torch's caching allocator in a phase."""

    def __init__(self, device: PhysicalDevice) -> None:
        self._device = device.torch_name

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count from now on."""
        self.start()
        yield

    def start(self) -> None:
        """Count from now on; tensors alive stay counted."""
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self, done: ForwardPass, gradients: Sequence[torch.Tensor | None]) -> int:  # noqa: ARG002
        """Return the peak since `start`."""
        import torch

        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))
