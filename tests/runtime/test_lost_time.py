"""The step without what other processes took of the cores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

import pytest

from runtime.jobs.job import JobResult


def result(step_times_s: Sequence[float], lost_s: Sequence[tuple[float, ...]] | None) -> JobResult:
    """Return the result of a job of these steps, and of these losses by step and rank."""
    lost = None if lost_s is None else tuple(lost_s)
    return JobResult(tuple(step_times_s), (), (), None, lost_s=lost)


def test_what_the_slowest_rank_lost_is_taken_off_the_steps_that_lost_least() -> None:
    # The three steps of least loss lost 0.1, 0.2 and 0.3 s.
    steps = [1.1, 5.0, 1.3, 1.25, 3.0]
    lost = [(0.1, 0.0), (2.0, 4.0), (0.0, 0.3), (0.2, 0.2), (0.5, 1.5)]
    assert result(steps, lost).most_lost_s == (0.1, 4.0, 0.3, 0.2, 1.5)
    assert result(steps, lost).undisturbed_s == pytest.approx(median([1.1 - 0.1, 1.3 - 0.3, 1.25 - 0.2]))


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_takes_its_work_and_the_most_that_a_rank_lost_is_found_again(seed: int) -> None:
    rng = random.Random(seed)
    work_s = rng.uniform(0.01, 5.0)
    lost = [
        tuple(rng.uniform(0, work_s) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 12))
    ]
    steps = [work_s + max(of_step) for of_step in lost]
    assert result(steps, lost).undisturbed_s == pytest.approx(work_s)


def test_nothing_lost_changes_nothing_and_nothing_counted_says_nothing() -> None:
    steps = [2.0, 1.0, 4.0]
    assert result(steps, [(0.0,)] * 3).undisturbed_s == median(steps)
    assert result(steps, None).undisturbed_s is None
    assert result(steps, None).most_lost_s is None
