"""What others take of a core is told from what this process and its children take."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from profiler.others import STATISTICS, OthersMeter
from profiler.pinning import usable_cores

pytestmark = pytest.mark.skipif(not STATISTICS.exists(), reason="needs the counters of Linux")

# Works for a second of its core's time, and never waits.
BUSY = "import os, time; os.sched_setaffinity(0, {%d})\nwhile time.process_time() < 1: pass"


def test_work_of_others_counts_and_that_of_children_does_not() -> None:
    core = usable_cores()[0]
    meter = OthersMeter([core])
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", BUSY % core])
    # A child counts as another process until it has ended and was waited for.
    while child.poll() is None:
        meanwhile = meter.share()
        time.sleep(0.05)
        if time.monotonic() - began > 0.5 and not isinstance(child.returncode, int):
            seen = meanwhile
    ended = meter.share()
    assert seen is not None
    assert ended is not None
    assert seen - ended > 0.25 / (time.monotonic() - began)


def test_own_work_is_not_that_of_others() -> None:
    def busy_s() -> float:
        every = [psutil.cpu_times(percpu=True)[core] for core in cores]
        return sum(t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in every)

    # On all cores: the system may move this thread.
    cores = usable_cores()
    meter, before_s, began = OthersMeter(cores), busy_s(), time.monotonic()
    own_before_s = time.process_time()
    while time.process_time() - own_before_s < 1:
        pass
    share, after_s, elapsed_s = meter.share(), busy_s(), time.monotonic() - began
    own_s = time.process_time() - own_before_s
    assert share is not None
    # The kernel counts in ticks of 10 ms, on each core.
    assert share * elapsed_s * len(cores) == pytest.approx(max(0.0, after_s - before_s - own_s), abs=0.2)


def test_no_cores_are_disturbed_by_nobody() -> None:
    assert OthersMeter([]).share() is None
