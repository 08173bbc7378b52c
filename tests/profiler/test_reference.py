"""The reference kernel: when samples are taken, and which of them count."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import pytest

from profiler.reference import LEAST_INTERVAL_S, RECENT_S, ReferenceKernel


@dataclass
class Clock:
    """The time that samples are taken at: it stands still until it is told."""

    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


def test_a_kernel_without_samples_says_nothing(clock: Clock) -> None:
    kernel = ReferenceKernel()
    assert kernel.recent_s() is None
    kernel.sample()
    sampled_s = kernel.recent_s()
    assert sampled_s is not None
    assert 0 < sampled_s < math.inf


def test_samples_that_follow_each_other_closely_are_one(clock: Clock) -> None:
    kernel = ReferenceKernel()
    kernel.sample()
    first_s = kernel.recent_s()
    clock.now_s += LEAST_INTERVAL_S / 2
    kernel.sample()
    assert kernel.recent_s() == first_s
    clock.now_s += LEAST_INTERVAL_S / 2
    kernel.sample()
    assert kernel.recent_s() != first_s


def test_the_mean_is_that_of_the_last_seconds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ReferenceKernel()
    for sample_s in (1.0, 2.0, 4.0):
        monkeypatch.setattr(kernel, "_time", lambda sample_s=sample_s: sample_s)
        kernel.sample()
        clock.now_s += RECENT_S * 0.6
    # Taken 36, 24 and 12 s ago.
    assert kernel.recent_s() == 4.0
    assert kernel.recent_s(RECENT_S * 1.3) == 3.0
    assert kernel.recent_s(math.inf) == pytest.approx(7 / 3)
    clock.now_s += 2 * RECENT_S
    assert kernel.recent_s() is None
