"""A silent thread is noticed; one that gives signs of life, or waits for its peers, is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType

from runtime.ranks import watchdog

PATIENCE_S = 0.5


def reports_of(work: Callable[[], object]) -> list[str]:
    """Return what was reported while `work` ran."""
    found: list[str] = []
    with watchdog.under_watchdog(PATIENCE_S, found.append):
        work()
    return found


def test_a_silent_thread_is_reported_once_with_stage_and_place() -> None:
    reported = threading.Event()
    found: list[str] = []

    def report(reason: str) -> None:
        found.append(reason)
        reported.set()

    with watchdog.under_watchdog(PATIENCE_S, report):
        watchdog.heartbeat("building the module")
        assert reported.wait(60)
    (reason,) = found
    assert reason.startswith("has been building the module for more than 0.5 s (")
    assert "in wait), must go on within --timeout" in reason


def test_signs_of_life_keep_a_thread_from_being_reported() -> None:
    def work() -> None:
        end = time.monotonic() + 4 * PATIENCE_S
        while time.monotonic() < end:
            watchdog.heartbeat("in a step")

    assert reports_of(work) == []


def test_waiting_for_peers_does_not_count() -> None:
    """The innermost code that is not torch's own decides, whoever called it."""
    peers = ModuleType("runtime.communication")
    exec("import time\ndef wait(seconds):\n    time.sleep(seconds)", peers.__dict__)
    assert reports_of(lambda: peers.wait(4 * PATIENCE_S)) == []


def test_beats_outside_of_a_watch_are_ignored() -> None:
    watchdog.heartbeat("nobody looks")
    assert reports_of(lambda: None) == []
