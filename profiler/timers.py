"""The clocks of the profiler and the runtime.

On CUDA the clock is the device's: events in the current stream, so that the host's launch time counts only where the
device waits for it. On a CPU a step, or a message, takes what passes on the host's monotonic clock; an operator takes
the processor time of its process, which is the same on a core of its own, and on a core that others compute on as well
is what it would take alone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

Mark = TypeVar("Mark")


class Timer(Protocol[Mark]):
    """Marks moments in a device's work and tells the seconds between two of them."""

    def mark(self) -> Mark:
        """Return a mark behind all work issued so far, without waiting for it."""
        ...

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Return the seconds from `start` to `end`, once the device has reached `end`."""
        ...


class CpuTimer:
    """The host's monotonic clock. Marks are nanoseconds."""

    def mark(self) -> int:
        """Return the present moment."""
        return time.perf_counter_ns()

    def elapsed_s(self, start: int, end: int) -> float:
        """Return the seconds from `start` to `end`."""
        return (end - start) * 1e-9


class ProcessTimer:
    """The processor time of this process, of all its threads together. Marks are nanoseconds."""

    def mark(self) -> int:
        """Return what the process has computed so far."""
        return time.process_time_ns()

    def elapsed_s(self, start: int, end: int) -> float:
        """Return the seconds that the process computed from `start` to `end`."""
        return (end - start) * 1e-9


class CudaTimer:
    """Events in the current stream of one CUDA device. Resolution: about half a microsecond."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event in the device's current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds from `start` to `end`; waits for `end`."""
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def timer_for(device: torch.device | str, *, of_process: bool = False) -> Timer[object]:
    """Return the timer of a device: CUDA events on "cuda", else the host's clock, or that `of_process` alone."""
    import torch

    timer: CpuTimer | ProcessTimer | CudaTimer = ProcessTimer() if of_process else CpuTimer()
    chosen = torch.device(device)
    if chosen.type == "cuda":
        timer = CudaTimer(chosen)
    return timer  # type: ignore[return-value]  # a mark goes back only into the timer that made it


def synchronize(device: torch.device | str) -> None:
    """Wait until all work issued to `device` is done. A CPU has no queue: nothing to wait for."""
    import torch

    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.synchronize(chosen)
