"""What other processes took of the cores during a measurement, which may be worth repeating then.

Counted by the operating system (Linux). `OthersMeter`, for each core: all the time that it worked, for whomever, and
that a virtual machine's host took away; what this process took is subtracted, and its children, once they have ended.
`LostTime`, for this thread: the time that it waited for its core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

STATISTICS = Path("/proc/stat")
# Columns of a core's line: user, nice, system, idle, waiting for input or output, interrupts (two), stolen by the host.
_COLUMNS, _IDLE = 8, (3, 4)


class OthersMeter:
    """Measures the share of other processes since its construction."""

    def __init__(self, cores: Collection[int]) -> None:
        self._cores = frozenset(cores)
        self._began = time.monotonic()
        self._busy_s, self._own_s = _busy_s(self._cores), _own_s()

    def share(self) -> float | None:
        """Return the share of the cores' time that others took, at least 0; None where it is not counted."""
        busy_s = _busy_s(self._cores)
        if busy_s is None or self._busy_s is None or not self._cores:
            return None
        elapsed_s = (time.monotonic() - self._began) * len(self._cores)
        others_s = busy_s - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s / elapsed_s) if elapsed_s > 0 else 0.0


class LostTime:
    """Measures, since its construction, for how long this thread was ready and another process had its core."""

    def __init__(self) -> None:
        self._counters = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._began = self._read()

    def seconds(self) -> float | None:
        """Return the seconds lost until now; None where the system does not count them.

        For as long as other threads of this process computed, it was they who had the core.
        """
        now = self._read()
        if now is None or self._began is None:
            return None
        waited_s, threads_s = (after - before for after, before in zip(now, self._began, strict=True))
        return max(0.0, waited_s - threads_s)

    def _read(self) -> tuple[float, float] | None:
        """Return the seconds that this thread has waited for a core, and that this process's other threads computed."""
        try:
            computed_ns, waited_ns, _ = (int(number) for number in self._counters.read_text().split())
        except (OSError, ValueError):
            return None
        return waited_ns * 1e-9, time.process_time() - computed_ns * 1e-9


def _busy_s(cores: Collection[int]) -> float | None:
    try:
        lines = STATISTICS.read_text().splitlines()
    except OSError:
        return None
    ticks = 0
    for line in lines:
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cores:
            columns = [int(number) for number in numbers[:_COLUMNS]]
            ticks += sum(columns) - sum(columns[idle] for idle in _IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
