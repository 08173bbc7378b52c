"""Repeated sampling: short calls are measured in several rounds, apart in time, whose samples are pooled.

A short call is over before anything else on the machine changes: its neighbours on other devices, the pages of its
tensors, the past of its process. Further samples within a round narrow the interval of that round's median only, so
short calls are measured again after all other calls, with new tensors and on whichever device is free then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from graph.calls import LocalCall
from profiler.devices import PhysicalDevice
from profiler.measure import Measurement, MeasureOptions, summarize
from profiler.workers import CallResult, WorkerPool

ROUNDS = 3
# A call is short where a phase takes less: longer ones repeat well (docs/profiler.md).
SHORT_S = 1e-3
# Options of later rounds, which add samples to those of the first.
LATER_ROUND = MeasureOptions(budget_s=0.01, maximum_repetitions=30)


@dataclass(frozen=True, slots=True)
class SampledCall:
    """The pooled result of all rounds of a call so far, and the number of the last round, from 1."""

    number: int
    result: CallResult


def measure_repeatedly(
    pool: WorkerPool,
    calls: Sequence[LocalCall],
    *,
    on: Collection[PhysicalDevice] | None = None,
    long_ones: bool = False,
    is_wanted: Callable[[LocalCall], bool] = lambda _: True,
    begin: Callable[[int, int], None] = lambda _number, _calls: None,
) -> Iterator[SampledCall]:
    """Measure `calls`, the short ones in `ROUNDS` rounds, and yield the pooled result of a call after each round.

    With `long_ones`, the long ones too; each round then has a (seeded) order of its own, else each but the first.
    `begin(number, calls)` is called before each round with its number, from 1, and its number of calls. For the
    rest see `WorkerPool.measure`; `is_wanted` is asked before the first round only.

    Raises:
        RuntimeFailure: no worker can be started.
    """
    results: dict[str, list[CallResult]] = {}
    due = list(calls)
    for number in range(1, ROUNDS + 1):
        if not due:
            return
        if number > 1 or long_ones:
            # In another order: beside another call on the next device, after another one on the same.
            random.Random(number).shuffle(due)
        begin(number, len(due))
        measuring = (
            pool.measure(due, on=on, is_wanted=is_wanted)
            if number == 1
            else pool.measure(due, on=on, options=LATER_ROUND)
        )
        for result in measuring:
            taken = results.setdefault(result.call.digest, [])
            # A failure after a success, of a worker that was ended for example, discards no samples.
            if not taken or _is_measured(result):
                taken.append(result)
            yield SampledCall(number, _pooled_results(taken))
        due = [
            taken[0].call
            for taken in results.values()
            if _is_short(taken[0]) or (long_ones and _is_measured(taken[0]))
        ]


def _pooled_results(results: Sequence[CallResult]) -> CallResult:
    if len(results) == 1:
        return results[0]
    # Of a call that is sampled again, every phase was measured in each round that counts.
    outcomes = tuple(
        pooled([outcome for outcome in phase if isinstance(outcome, Measurement)])
        for phase in zip(*(result.outcomes for result in results), strict=True)
    )
    return replace(results[-1], outcomes=outcomes, wall_s=sum(result.wall_s for result in results))


def pooled(rounds: Sequence[Measurement]) -> Measurement:
    """Return the measurement that rests on the samples of several rounds of one phase (at least one).

    Every round has the same weight: as many samples are taken of each as of the one with the fewest, evenly spaced.
    """
    fewest = min(len(measured.samples_s) for measured in rounds)
    samples_s = [sample for measured in rounds for sample in _thinned(measured.samples_s, fewest)]
    first = rounds[0]
    clocks = [measured.clock_hz for measured in rounds if measured.clock_hz is not None]
    launches = [measured.launch_s for measured in rounds if measured.launch_s is not None]
    references = [measured.reference_s for measured in rounds if measured.reference_s is not None]
    slowed = [measured.throttle for measured in rounds if measured.throttle is not None]
    return replace(
        summarize(first.digest, first.phase, samples_s, max(measured.peak_bytes for measured in rounds)),
        executions=sum(measured.executions for measured in rounds),
        launch_s=fmean(launches) if launches else None,
        clock_hz=fmean(clocks) if clocks else None,
        throttle=", ".join(sorted({reason for text in slowed for reason in text.split(", ") if reason}))
        if slowed
        else None,
        reference_s=fmean(references) if references else None,
    )


def _thinned(samples_s: Sequence[float], count: int) -> list[float]:
    indexes = np.linspace(0, len(samples_s) - 1, count).round().astype(int)
    return [samples_s[index] for index in indexes]


def _is_measured(result: CallResult) -> bool:
    return all(isinstance(outcome, Measurement) for outcome in result.outcomes)


def _is_short(result: CallResult) -> bool:
    return _is_measured(result) and any(
        outcome.median_s < SHORT_S for outcome in result.outcomes if isinstance(outcome, Measurement)
    )
