"""Measure short calls in several visits, apart in time, and pool what the visits gave.

A short call is over before anything else on the machine changes: what ran beside it, which pages its tensors have,
what its process did before. Further samples within a visit narrow the interval of that visit's median only, so short
calls are come back to, after the other calls, with new tensors and on whichever device is free then.
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

VISITS = 3
# A call is short where a phase takes less: longer ones repeat well (docs/profiler.md).
SHORT_S = 1e-3
# Of a later visit: it adds to the samples of the others.
LATER = MeasureOptions(budget_s=0.01, maximum_repetitions=30)


@dataclass(frozen=True, slots=True)
class Visited:
    """What all visits of a call so far gave, and the number of the last one, from 1."""

    number: int
    result: CallResult


def measure_in_visits(
    pool: WorkerPool,
    calls: Sequence[LocalCall],
    *,
    on: Collection[PhysicalDevice] | None = None,
    is_wanted: Callable[[LocalCall], bool] = lambda _: True,
    begin: Callable[[int, int], None] = lambda _number, _calls: None,
) -> Iterator[Visited]:
    """Measure `calls`, and those that are short again, and yield what is known of a call after each visit.

    `begin(visit, calls)` is called before each round of visits with its number, from 1, and its number of calls. For
    the rest see `WorkerPool.measure`; `is_wanted` is asked before the first visit only.

    Raises:
        RuntimeFailure: no worker can be started.
    """
    visits: dict[str, list[CallResult]] = {}
    due = list(calls)
    for number in range(1, VISITS + 1):
        if not due:
            return
        begin(number, len(due))
        measuring = (
            pool.measure(due, on=on, is_wanted=is_wanted)
            if number == 1
            else pool.measure(due, on=on, options=LATER)
        )
        for result in measuring:
            taken = visits.setdefault(result.call.digest, [])
            # A failure after a success, a worker that was ended for example, takes nothing from what is known.
            if not taken or _is_measured(result):
                taken.append(result)
            yield Visited(number, _pooled_results(taken))
        due = [taken[0].call for taken in visits.values() if _is_short(taken[0])]
        # In another order: beside another call on the next device, after another one on the same.
        random.Random(number).shuffle(due)


def _pooled_results(visits: Sequence[CallResult]) -> CallResult:
    if len(visits) == 1:
        return visits[0]
    # Of a call that is visited again, every phase was measured in each visit that counts.
    outcomes = tuple(
        pooled([one for one in phase if isinstance(one, Measurement)])
        for phase in zip(*(visit.outcomes for visit in visits), strict=True)
    )
    return replace(visits[-1], outcomes=outcomes, wall_s=sum(visit.wall_s for visit in visits))


def pooled(visits: Sequence[Measurement]) -> Measurement:
    """Return the measurement that rests on the samples of several visits of one phase (at least one).

    Every visit has the same weight: as many samples are taken of each as of the one with the fewest, evenly spaced.
    """
    fewest = min(len(one.samples_s) for one in visits)
    samples_s = [sample for one in visits for sample in _thinned(one.samples_s, fewest)]
    first = visits[0]
    clocks = [one.clock_hz for one in visits if one.clock_hz is not None]
    launches = [one.launch_s for one in visits if one.launch_s is not None]
    slowed = [one.throttle for one in visits if one.throttle is not None]
    return replace(
        summarize(first.digest, first.phase, samples_s, max(one.peak_bytes for one in visits)),
        executions=sum(one.executions for one in visits),
        launch_s=fmean(launches) if launches else None,
        clock_hz=fmean(clocks) if clocks else None,
        throttle=", ".join(sorted({reason for text in slowed for reason in text.split(", ") if reason}))
        if slowed
        else None,
    )


def _thinned(samples_s: Sequence[float], count: int) -> list[float]:
    places = np.linspace(0, len(samples_s) - 1, count).round().astype(int)
    return [samples_s[place] for place in places]


def _is_measured(result: CallResult) -> bool:
    return all(isinstance(one, Measurement) for one in result.outcomes)


def _is_short(result: CallResult) -> bool:
    return _is_measured(result) and any(
        one.median_s < SHORT_S for one in result.outcomes if isinstance(one, Measurement)
    )
