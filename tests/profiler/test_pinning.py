"""Threads of a communication library give way to the one that computes."""

from __future__ import annotations

import os
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
