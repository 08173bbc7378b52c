"""The reference kernel: fixed work on a CPU's core that tells how fast the core is at present.

The host of a virtual machine may slow its cores by a third for seconds and count nothing of it as stolen; a hot
processor lowers its clock. Measured beside costs and between steps, the kernel tells how much of a difference between
them is the machine's. Half of it is bound by arithmetic, half by memory; what counts is the geometric mean of the two
halves' times, averaged over seconds: one sample says little. GPUs tell their clocks instead (`profiler.clocks`).
"""

from __future__ import annotations

import math
import time
from itertools import takewhile

import torch

SIDE = 768
PRODUCTS = 2
MEMORY_ELEMENTS = 4 * 2**20
PASSES = 2
LEAST_INTERVAL_S = 0.5
"""Between two samples beside other work: one takes 20 to 50 ms."""
RECENT_S = 20.0
"""What was measured in so many seconds is measured at one speed."""


class ReferenceKernel:
    """The kernel on the core of this thread, and its samples: seconds of the thread, not of others on the core."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._factors = [torch.randn(SIDE, SIDE, generator=generator) for _ in range(2)]
        self._product = torch.empty(SIDE, SIDE)
        self._source = torch.ones(MEMORY_ELEMENTS)
        self._target = torch.zeros(MEMORY_ELEMENTS)
        # When each sample was taken, and its seconds.
        self._samples: list[tuple[float, float]] = []
        # The first time its memory is given out, and its code is loaded.
        self._time()

    def sample(self) -> None:
        """Take a sample, unless the last one was within `LEAST_INTERVAL_S`."""
        if not self._samples or time.monotonic() - self._samples[-1][0] >= LEAST_INTERVAL_S:
            self._samples.append((time.monotonic(), self._time()))

    def recent_s(self, within_s: float = RECENT_S) -> float | None:
        """Return the mean of the samples of the last seconds; None without any."""
        since = time.monotonic() - within_s
        latest_first = takewhile(lambda sample: sample[0] >= since, reversed(self._samples))
        recent = [sample_s for _, sample_s in latest_first]
        return sum(recent) / len(recent) if recent else None

    def _time(self) -> float:
        begin = time.thread_time()
        for _ in range(PRODUCTS):
            torch.mm(*self._factors, out=self._product)
        between = time.thread_time()
        for _ in range(PASSES):
            self._target.copy_(self._source)
            self._target.add_(self._source)
        return math.sqrt((between - begin) * (time.thread_time() - between))
