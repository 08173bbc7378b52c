"""Measure forward and backward of one local call, or one optimizer update, in this process on its device.

Forward is timed with the autograd graph recorded, as in training; backward by `torch.autograd.grad` with respect to
the inputs that need gradients, from random gradients of the outputs. Calls too short for the clock are executed several
times between two marks. A failure is an outcome with its reason, never a number.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np

from graph.calls import LocalCall
from profiler.devices import PhysicalDevice
from profiler.subjects import Pass, Subject, storage_sizes
from profiler.timers import Timer, synchronize, timer_for
from profiler.updates import is_update

if TYPE_CHECKING:
    import torch

Phase = Literal["forward", "backward", "update"]

LONGEST_BATCH = 64
# However long a call takes: a minimum needs something to be the minimum of.
FEWEST_SAMPLES = 3
LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """When enough has been measured.

    After `warm_ups` executions at least `repetitions` samples are taken, and more until they add up to `budget_s` a
    phase or are `maximum_repetitions`. Past `maximum_s` seconds three samples are enough. Calls shorter than
    `batch_below_s` are timed in batches that last about as long. `seed` draws the inputs.
    """

    warm_ups: int = 2
    repetitions: int = 5
    budget_s: float = 0.05
    maximum_repetitions: int = 30
    maximum_s: float = 1.5
    batch_below_s: float = 50e-6
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of one phase of the call with this digest, in seconds of one execution.

    `samples_s` are the raw samples in the order taken; each is a mean over a batch where the call is short.
    `peak_bytes`: on CUDA, what the allocator held at most beyond other calls' tensors. On a CPU, the tensors alive in
    the phase: inputs, outputs, saved for backward, gradients; without the temporaries of a kernel.
    """

    digest: str
    phase: Phase
    minimum_s: float
    p10_s: float
    median_s: float
    samples_s: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class FailedMeasurement:
    """One phase of the call with this digest that could not be measured, and why."""

    digest: str
    phase: Phase
    reason: str


Outcome = Measurement | FailedMeasurement


def phases(call: LocalCall) -> tuple[Phase, ...]:
    """Return the phases that a call has."""
    if is_update(call):
        return ("update",)
    return ("forward", "backward") if call.has_backward else ("forward",)


def failed(call: LocalCall, reason: str) -> tuple[FailedMeasurement, ...]:
    """Return one failure for each phase of `call`."""
    return tuple(FailedMeasurement(call.digest, phase, reason) for phase in phases(call))


def summarize(digest: str, phase: Phase, samples_s: Sequence[float], peak_bytes: int) -> Measurement:
    """Return the measurement that rests on `samples_s` (at least one)."""
    tenth, median = np.percentile(np.asarray(samples_s), (10, 50))
    return Measurement(
        digest=digest,
        phase=phase,
        minimum_s=min(samples_s),
        p10_s=max(float(tenth), min(samples_s)),  # interpolation may round below the minimum
        median_s=float(median),
        samples_s=tuple(samples_s),
        peak_bytes=peak_bytes,
    )


def measure_call(
    call: LocalCall, device: PhysicalDevice, options: MeasureOptions | None = None
) -> tuple[Outcome, ...]:
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
    """Give a GPU's cached memory back, so that one large call does not make the next one fail."""
    if device.processor == "cuda":
        import torch

        with suppress(RuntimeError):  # a broken context: `is_usable` tells
            torch.cuda.empty_cache()


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
    """The measuring of one call."""

    def __init__(self, call: LocalCall, device: PhysicalDevice, options: MeasureOptions) -> None:
        self.call, self.device, self.options = call, device, options
        self.timer: Timer[object] = timer_for(device.torch_name)
        self.subject = Subject(call, device, options.seed)
        self.backward_failure: str | None = None

    def run(self) -> tuple[Outcome, ...]:
        names = phases(self.call)
        peaks = self._first_pass()
        self.subject.rotate()
        with _collector_paused():
            batch = self._warm_up()
            samples = self._sample(batch)
        outcomes: list[Outcome] = []
        for phase, taken, peak in zip(names, samples, peaks, strict=True):
            if phase == "backward" and self.backward_failure is not None:
                outcomes.append(FailedMeasurement(self.call.digest, phase, self.backward_failure))
            else:
                outcomes.append(summarize(self.call.digest, phase, taken, peak))
        return tuple(outcomes)

    @property
    def _differentiates(self) -> bool:
        return self.call.has_backward and self.backward_failure is None

    def _first_pass(self) -> list[int]:
        """Execute each phase once, which compiles and allocates; return the peak bytes of each."""
        account = _CudaAccount(self.device) if self.device.processor == "cuda" else _CpuAccount()
        with account.forward():
            done = self.subject.forward()
        peaks = [account.peak_bytes(done, [])]
        if self.call.has_backward:
            try:
                self.subject.draw_gradients(done)
                account.start()
                gradients = self.subject.backward(done)
                peaks.append(account.peak_bytes(done, gradients))
            except Exception as error:  # as in measure_call; the forward can still be measured
                self.backward_failure = describe_error(error)
                peaks.append(0)
        return peaks

    def _warm_up(self) -> int:
        """Execute until warm, the first pass counted; return how many executions make a batch."""
        shortest = 0.0
        for _ in range(max(1, self.options.warm_ups - 1)):
            shortest = min(self._timed_batch(1))
        if shortest >= self.options.batch_below_s:
            return 1
        return min(LONGEST_BATCH, ceil(self.options.batch_below_s / max(shortest, 1e-9)))

    def _timed_batch(self, batch: int) -> list[float]:
        """Return the seconds of one execution, for forward and (where there is one) backward."""
        synchronize(self.device.torch_name)
        start = self.timer.mark()
        passes = [self.subject.forward() for _ in range(batch)]
        taken = [self.timer.elapsed_s(start, self.timer.mark()) / batch]
        made: list[list[torch.Tensor | None]] = []
        if self._differentiates:
            synchronize(self.device.torch_name)
            start = self.timer.mark()
            made = [self.subject.backward(done) for done in passes]
            taken.append(self.timer.elapsed_s(start, self.timer.mark()) / batch)
        for done, gradients in zip(passes, made or [[]] * batch, strict=True):
            self.subject.hold([*done.outputs, *gradients])
        return taken

    def _sample(self, batch: int) -> list[list[float]]:
        """Return the samples of each phase of the call, as many as the options ask for."""
        options, names = self.options, phases(self.call)
        samples: list[list[float]] = [[] for _ in names]
        began = time.perf_counter()
        while True:
            for kept, taken in zip(samples, self._timed_batch(batch), strict=False):
                kept.append(taken)
            count, spent = len(samples[0]), time.perf_counter() - began
            if count >= options.maximum_repetitions:
                return samples
            if count >= options.repetitions and spent >= options.budget_s * len(names):
                return samples
            if count >= FEWEST_SAMPLES and spent >= options.maximum_s:
                return samples


class _CpuAccount:
    """Bytes of the tensors that are alive in a phase, each block of memory counted once."""

    def __init__(self) -> None:
        self._saved: dict[int, int] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note what autograd saves meanwhile."""
        import torch

        def note(value: torch.Tensor) -> torch.Tensor:
            self._saved.update(storage_sizes([value]))
            return value

        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            yield

    def start(self) -> None:
        """Nothing: blocks are counted afterwards."""

    def peak_bytes(self, done: Pass, gradients: Sequence[torch.Tensor | None]) -> int:
        """Return the bytes of inputs, outputs, saved tensors and gradients."""
        made = [value for value in gradients if value is not None]
        blocks = storage_sizes([*done.inputs, *done.outputs, *done.gradients, *made])
        return sum((self._saved | blocks).values())


class _CudaAccount:
    """What torch's caching allocator held at most in a phase, beyond what other calls hold."""

    def __init__(self, device: PhysicalDevice) -> None:
        self._device = device.torch_name

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count from now on."""
        self.start()
        yield

    def start(self) -> None:
        """Count from now on: what is alive stays counted."""
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self, done: Pass, gradients: Sequence[torch.Tensor | None]) -> int:  # noqa: ARG002
        """Return the peak since `start`."""
        import torch

        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))
