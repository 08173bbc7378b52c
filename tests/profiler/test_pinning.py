"""Threads of a communication library give way to the one that computes; freed memory is kept."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from profiler.pinning import threads_that_yield

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has the policy")


def in_a_thread(work: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_threads_started_inside_yield_and_the_caller_does_not() -> None:
    started, release = threading.Event(), threading.Event()
    policies: list[int] = []

    def stay() -> None:
        started.set()
        release.wait()
        policies.append(os.sched_getscheduler(0))

    with threads_that_yield():
        thread = threading.Thread(target=stay)
        thread.start()
        started.wait()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert in_a_thread(lambda: os.sched_getscheduler(0)) == os.SCHED_OTHER
    release.set()
    thread.join()
    assert policies == [os.SCHED_BATCH]


def test_the_callers_policy_comes_back_where_starting_fails() -> None:
    with pytest.raises(RuntimeError, match="no group"), threads_that_yield():
        raise RuntimeError("no group")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_the_user_chose_stays() -> None:
    def within() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with threads_that_yield():
            return os.sched_getscheduler(0)

    assert in_a_thread(within) == os.SCHED_IDLE


FAULTS = """
import resource, torch
from profiler.pinning import keep_freed_memory, return_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(48 * 2**20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def held():
    import psutil
    return psutil.Process().memory_info().rss

print(min(faults() for _ in range(4)))
assert keep_freed_memory()
for _ in range(16):  # until the first tensors' margins are settled
    faults()
print(max(faults() for _ in range(4)))
before = held()
return_freed_memory()
print(before - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_kept_for_the_next_tensor_until_it_is_returned() -> None:
    told = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    given_back, kept, returned = (int(line) for line in told.split())
    pages = 48 * 2**20 // resource.getpagesize()
    assert kept < given_back // 50  # with huge pages, fewer faults than pages
    assert kept < pages // 100
    assert returned >= 48 * 2**20
