"""The clocks of the profiler and the runtime.

On CUDA the clock is the device's: events in the current stream. Work that is timed by itself is issued while the device
sleeps: issued to an idle device it would take the host's time to issue it, which is mostly longer. On a CPU a step, or
a message, takes what passes on the host's monotonic clock; an operator takes the processor time of its process, which
is the same on a core of its own, and on a core that others compute on as well is what it would take alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

Mark = TypeVar("Mark")
Work = Callable[[], object]


# Cycles of a device's sleep: about a millisecond at first, and at most so many; a device that was idle is kept busy for
# so many before it is measured (about 50 ms), since its clock rises under load alone.
FIRST_SLEEP_CYCLES = 2_000_000
MOST_SLEEP_CYCLES = 200_000_000
WARM_UP_CYCLES = 100_000_000
# A sleep lasts so many times as long as the host needed to issue the work behind it.
SLEEP_SHARE = 1.5
# Attempts after which the host is known to wait for the device, however long that sleeps.
MOST_OVERTAKEN = 3


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Seconds of one stretch of work: of the device, and of the host to issue it."""

    device_s: float
    host_s: float


def _nothing() -> None:
    """Take no notes."""


class Timer(Protocol[Mark]):
    """Marks moments in a device's work and tells the seconds between two of them."""

    def mark(self) -> Mark:
        """Return a mark behind all work issued so far, without waiting for it."""
        ...

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Return the seconds from `start` to `end`, once the device has reached `end`."""
        ...

    def warm_up(self) -> None:
        """Bring the device's clock to what it is under load."""
        ...

    def time(self, *stretches: Work, noted: Work = _nothing) -> list[Elapsed] | None:
        """Do some stretches of work, one after the other, and return the time of each.

        None where the device overtook the host, so that its time is not its own: do it again, the next attempt is
        prepared for that. `waits` says that no attempt will be better. `noted` is called while the device works on it.
        """
        ...

    def restart(self) -> None:
        """Forget what `time` has learned of the work: that of other work is wanted next."""
        ...

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device within the work that was timed last."""
        ...


class _HostTimer:
    """A clock of a processor, which computes what it issues. Marks are nanoseconds."""

    waits = False

    def mark(self) -> int:
        """Return the present moment."""
        raise NotImplementedError

    def elapsed_s(self, start: int, end: int) -> float:
        """Return the seconds from `start` to `end`."""
        return (end - start) * 1e-9

    def warm_up(self) -> None:
        """Nothing: executions warm a core up."""

    def time(self, *stretches: Work, noted: Work = _nothing) -> list[Elapsed]:  # noqa: ARG002
        """Do some stretches of work and return the time of each; a core that works has no time to take notes."""
        marks = [self.mark()]
        for work in stretches:
            work()
            marks.append(self.mark())
        times = [self.elapsed_s(start, end) for start, end in pairwise(marks)]
        return [Elapsed(seconds, seconds) for seconds in times]

    def restart(self) -> None:
        """Nothing: nothing is learned."""


class CpuTimer(_HostTimer):
    """The host's monotonic clock."""

    def mark(self) -> int:
        """Return the present moment."""
        return time.perf_counter_ns()


class ProcessTimer(_HostTimer):
    """The processor time of this process, of all its threads together."""

    def mark(self) -> int:
        """Return the processor time of the process so far."""
        return time.process_time_ns()


class CudaTimer:
    """Events in the current stream of one CUDA device. Resolution: about half a microsecond."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cycles = FIRST_SLEEP_CYCLES
        self._overtaken = 0

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

    def warm_up(self) -> None:
        """Keep the device busy for a while."""
        import torch

        torch.cuda._sleep(WARM_UP_CYCLES)

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device within the work: its time counts then, as in a step."""
        return self._overtaken >= MOST_OVERTAKEN

    def time(self, *stretches: Work, noted: Work = _nothing) -> list[Elapsed] | None:
        """Issue some stretches of work while the device sleeps, and return the time of each.

        None where the device awoke before all was issued. The next sleep is longer; where that does not help, it is the
        host that waits: the queue is full, or an operator reads a result. Then there is no sleep any more.
        """
        import torch

        synchronize(self.device)
        asleep = self.mark()
        if not self.waits:
            torch.cuda._sleep(self._cycles)
        marks, begun_s, hosts_s = [self.mark()], time.perf_counter(), []
        for work in stretches:
            issuing_s = time.perf_counter()
            work()
            # Before the mark: recording it takes the host time that a step does not take.
            hosts_s.append(time.perf_counter() - issuing_s)
            marks.append(self.mark())
        issued_s = time.perf_counter() - begun_s
        overtaken = not self.waits and marks[0].query()
        noted()
        marks[-1].synchronize()
        if not self.waits:
            slept_s = self.elapsed_s(asleep, marks[0])
            wanted = self._cycles * SLEEP_SHARE * issued_s / max(slept_s, 1e-9)
            self._overtaken = self._overtaken + 1 if overtaken else 0
            self._cycles = min(MOST_SLEEP_CYCLES, max(FIRST_SLEEP_CYCLES // 10, ceil(wanted)))
        if overtaken:
            return None
        return [
            Elapsed(self.elapsed_s(start, end), host_s)
            for (start, end), host_s in zip(pairwise(marks), hosts_s, strict=True)
        ]

    def restart(self) -> None:
        """Let the device sleep again: other work is timed next."""
        self._cycles, self._overtaken = FIRST_SLEEP_CYCLES, 0


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
