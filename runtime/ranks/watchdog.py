"""The watchdog of a rank: it reports a rank that hangs in its own code, which its peers only see as silence.

Time counts from the rank's last heartbeat or its last wait for a peer; time inside the modules that communicate does
not count.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Calls of torch from these modules are waits for peers.
WAITING_MODULES = frozenset(
    {
        "profiler.link_patterns",
        "profiler.link_worker",
        "profiler.contention",
        "profiler.process_groups",
        "profiler.rank_clock",
        "runtime.communication",
        "runtime.launch.processes",
        "runtime.ranks.ranks",
        "runtime.launch.rank_leader",
    }
)
LONGEST_TICK_S = 0.5


class Watchdog:
    """Watches one thread; after `patience_s` without a heartbeat, `report` gets the reason, once."""

    def __init__(self, patience_s: float, report: Callable[[str], None]) -> None:
        self._patience_s = patience_s
        self._report = report
        self._thread = threading.get_ident()
        self._stage = "starting"
        self._since = time.monotonic()
        self._over = threading.Event()

    def heartbeat(self, stage: str) -> None:
        """Note that the watched thread begins another stage."""
        self._stage = stage
        self._since = time.monotonic()

    def run(self) -> None:
        """Watchdog until `stop`."""
        while not self._over.wait(min(LONGEST_TICK_S, self._patience_s / 10)):
            reason = self._silence()
            if reason is not None:
                self._report(reason)
                return

    def _silence(self) -> str | None:
        """Return the report of a thread that is silent for too long, else None.

        No frame may be kept until the next check: it would keep the tensors of its function in memory.
        """
        frame = sys._current_frames().get(self._thread)
        if frame is None or _waits(frame):
            self._since = time.monotonic()
        elif time.monotonic() - self._since > self._patience_s:
            return (
                f"has been {self._stage} for more than {self._patience_s:g} s ({_location(frame)}), must go on within "
                "--timeout; see what it waits for"
            )
        return None

    def stop(self) -> None:
        """End the watching."""
        self._over.set()


def _waits(frame: FrameType | None) -> bool:
    """Return whether the innermost frame outside of torch is of a module that waits for peers."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] != "torch":
            return module in WAITING_MODULES
        frame = frame.f_back
    return False


def _location(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


_current: Watchdog | None = None


def heartbeat(stage: str) -> None:
    """Note that this process begins another stage, where it is under a watchdog."""
    if _current is not None:
        _current.heartbeat(stage)


@contextmanager
def under_watchdog(patience_s: float, report: Callable[[str], None]) -> Iterator[None]:
    """Watchdog the calling thread while the context lasts.

    Args:
        patience_s: the longest time between heartbeats.
        report: gets one line, from another thread, where it takes longer.
    """
    global _current
    watchdog = Watchdog(patience_s, report)
    thread = threading.Thread(target=watchdog.run, name="watch", daemon=True)
    before, _current = _current, watchdog
    thread.start()
    try:
        yield
    finally:
        _current = before
        watchdog.stop()
        thread.join()
