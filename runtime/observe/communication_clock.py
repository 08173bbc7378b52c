"""When messages and collectives of a rank are done, beside what the rank computes meanwhile.

The rank looks at a message when it needs it, perhaps long after it came. So somebody else waits for it, too: between
CPUs a thread for each peer and each group, in the order of their starts; between GPUs a stream of its own for each.
A message of gloo can be waited for once: who comes second, the thread or the rank, waits for the first. That makes a
rank's wait for a message longer by the time in which a thread wakes another.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from profiler.timers import Timer, timer_for
from runtime.observe.spans import MESSAGE, TimedCommunication


@dataclass(eq=False, slots=True)
class TimedWork:
    """A work of which the end is marked, whoever waits for it; only the first to come does.

    A second wait returns once the first is over, and fails as it did.
    """

    work: Any
    timer: Timer[Any]
    end: Any = None
    _claim: threading.Lock = field(default_factory=threading.Lock)
    _done: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: a peer is gone or silent.
        """
        self.look()
        self._done.wait()
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure

    def look(self) -> None:
        """Wait for the work and mark its end, if nobody else does."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self.work.wait()
            self.work = None  # with its tensors
        except BaseException as error:  # raised where the rank waits
            self._failure = error
        self.end = self.timer.mark()
        self._done.set()


@dataclass(eq=False, slots=True)
class _Started:
    operation: str
    ranks: tuple[int, ...]
    subject: str
    start: Any
    work: TimedWork | None = None
    # On a GPU: a mark that its own stream reaches once it is done.
    end: Any = None


class CommunicationClock:
    """Takes down the communications of a rank's steps. `close` it when all are over, or one has failed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timer = timer_for(device)
        self._started: list[_Started] = []
        self._watches: dict[object, queue.SimpleQueue[TimedWork | None]] = {}

    def mark(self) -> Any:
        """Return a mark of the present moment, to begin a communication with."""
        return self._timer.mark()

    def send(self, ranks: tuple[int, int], subject: str, start: Any) -> None:
        """Take down a message that this rank sends."""
        self._started.append(_Started(MESSAGE, ranks, subject, start))

    def watch(self, work: Any, operation: str, ranks: tuple[int, ...], subject: str, start: Any) -> Any:
        """Take down a message to this rank, or a collective; return what the rank is to wait for in place of `work`."""
        started = _Started(operation, ranks, subject, start)
        self._started.append(started)
        if self._device.type == "cuda":
            # The rank's own stream is not to wait yet, so another one does.
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                work.wait()
                started.end = self._timer.mark()
            return work
        started.work = TimedWork(work, self._timer)
        self._works_of((operation, ranks)).put(started.work)
        return started.work

    def _works_of(self, channel: object) -> queue.SimpleQueue[TimedWork | None]:
        if channel not in self._watches:
            works: queue.SimpleQueue[TimedWork | None] = queue.SimpleQueue()
            # A rank that fails does not wait for its threads.
            threading.Thread(target=_look, args=(works,), name="communication clock", daemon=True).start()
            self._watches[channel] = works
        return self._watches[channel]

    def close(self) -> None:
        """Let the threads end once they have looked at what was started."""
        for works in self._watches.values():
            works.put(None)
        self._watches.clear()

    def since(self, origin: Any) -> tuple[TimedCommunication, ...]:
        """Return the communications of a step, with times from the mark `origin` on, and forget them.

        Waits for those that nobody has waited for.
        """
        of_step, self._started = self._started, []
        for started in of_step:
            if started.work is not None:
                started.work.wait()
                started.end = started.work.end
        return tuple(
            TimedCommunication(
                started.operation,
                started.ranks,
                started.subject,
                self._after_ns(origin, started.start),
                self._after_ns(origin, started.start if started.end is None else started.end),
            )
            for started in of_step
        )

    def _after_ns(self, origin: Any, mark: Any) -> int:
        return round(self._timer.elapsed_s(origin, mark) * 1e9)


def _look(works: queue.SimpleQueue[TimedWork | None]) -> None:
    while (work := works.get()) is not None:
        work.look()
        del work
