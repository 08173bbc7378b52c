"""The share of the cores' time that other processes took during a measurement, which may be worth repeating then.

Counted by the operating system (Linux), for each core: all the time that it worked, for whomever, and that a virtual
machine's host took away. What this process took is subtracted, and its children, once they have ended.
"""

from __future__ import annotations

import os
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
