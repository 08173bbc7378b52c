"""What others take of a core is told from what this process and its children take."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from profiler.others import STATISTICS, LostTime, OthersMeter
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


def compute(seconds: float) -> None:
    """Compute on this thread's core for some seconds of its own."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_thread_loses_what_others_take_of_its_core_and_not_what_it_sleeps() -> None:
    core = usable_cores()[0]
    lost: list[float | None] = []

    def measure() -> None:
        os.sched_setaffinity(0, {core})
        sleeping = LostTime()
        time.sleep(0.3)
        lost.append(sleeping.seconds())
        with subprocess.Popen([sys.executable, "-c", BUSY % core]):
            time.sleep(0.2)  # it has begun
            sharing = LostTime()
            began = time.monotonic()
            compute(0.3)
            lost.append(sharing.seconds())
            lost.append(time.monotonic() - began)

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    asleep, shared, passed = lost
    assert asleep is not None
    assert shared is not None
    assert passed is not None
    assert asleep < 0.15
    # Computing took what it computed and what it waited for its core.
    assert shared == pytest.approx(passed - 0.3, abs=0.05)
    assert shared > 0.05


def test_own_threads_are_no_others() -> None:
    core = usable_cores()[0]
    lost: list[float | None] = []

    def measure() -> None:
        os.sched_setaffinity(0, {core})  # and so is the thread that it starts
        meter, began = LostTime(), time.monotonic()
        beside = threading.Thread(target=compute, args=(0.5,))
        beside.start()
        compute(0.3)
        lost.append(time.monotonic() - began - 0.3)
        lost.append(meter.seconds())
        beside.join()

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    waited, taken = lost
    assert waited is not None
    assert taken is not None
    assert taken < waited


def test_no_cores_are_disturbed_by_nobody() -> None:
    assert OthersMeter([]).share() is None
