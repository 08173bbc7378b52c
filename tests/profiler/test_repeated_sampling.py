"""Repeated sampling of short calls: how many rounds each call has, and how the rounds are pooled."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from graph.calls import LocalCall
from profiler.devices import cpu_devices
from profiler.measure import FailedMeasurement, Measurement, MeasureOptions, summarize
from profiler.repeated_sampling import LATER_ROUND, ROUNDS, SHORT_S, measure_repeatedly, pooled
from profiler.updates import update_call
from profiler.workers import CallResult, WorkerPool
from tests.profiler.examples import impossible_matrix_product, matrix_product

ONCE = MeasureOptions(warm_ups=1, maximum_warm_ups=1, repetitions=3, budget_s=0.0, maximum_repetitions=3)


def _measurements(result: CallResult) -> list[Measurement]:
    return [one for one in result.outcomes if isinstance(one, Measurement)]


def _short_calls(count: int) -> list[LocalCall]:
    return [update_call("sgd", 100 + index) for index in range(count)]


def test_short_calls_are_visited_again_long_and_failed_ones_are_not() -> None:
    long, failing = matrix_product(1024, 1024, 1024), impossible_matrix_product()
    calls = [long, *_short_calls(3), failing]
    rounds: list[tuple[int, int]] = []
    with WorkerPool(cpu_devices(2), ONCE) as pool:
        visits = list(
            measure_repeatedly(pool, calls, begin=lambda number, count: rounds.append((number, count)))
        )
    first = {visit.result.call.digest: _measurements(visit.result) for visit in visits if visit.number == 1}
    short = {name for name, phases in first.items() if any(one.median_s < SHORT_S for one in phases)}
    assert len(first) == len(calls)
    assert short  # the updates of a hundred elements, or some of them on a machine that is busy
    assert long.digest not in short
    assert rounds == [(1, 5), *((number, len(short)) for number in range(2, ROUNDS + 1))]
    times = Counter(visit.result.call.digest for visit in visits)
    assert times == {call.digest: ROUNDS if call.digest in short else 1 for call in calls}
    for visit in visits:
        for one in _measurements(visit.result):
            assert len(one.samples_s) >= 3 * visit.number
        failures = [one for one in visit.result.outcomes if isinstance(one, FailedMeasurement)]
        assert bool(failures) == (visit.result.call == failing)


def test_long_calls_are_visited_as_often_as_short_ones_where_asked_for_and_failed_ones_are_not() -> None:
    long, failing = matrix_product(1024, 1024, 1024), impossible_matrix_product()
    calls = [long, *_short_calls(3), failing]
    rounds: list[tuple[int, int]] = []
    orders: dict[int, list[str]] = {}
    with WorkerPool(cpu_devices(1), ONCE) as pool:
        for visit in measure_repeatedly(
            pool, calls, long_ones=True, begin=lambda number, count: rounds.append((number, count))
        ):
            orders.setdefault(visit.number, []).append(visit.result.call.digest)
            for one in _measurements(visit.result):
                assert len(one.samples_s) >= 3 * visit.number
    assert rounds == [(1, 5), *((number, 4) for number in range(2, ROUNDS + 1))]
    assert all(set(order) == {call.digest for call in calls[:-1]} for order in list(orders.values())[1:])
    assert len({tuple(name for name in order if name != failing.digest) for order in orders.values()}) > 1


def test_worker_killed_in_a_later_visit_takes_nothing_from_the_first() -> None:
    calls, again = _short_calls(4), threading.Event()
    with WorkerPool(cpu_devices(1), ONCE) as pool:

        def kill_the_first_busy_worker() -> None:
            again.wait()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                process_id = pool.process_ids[0]
                if pool.running and process_id is not None:
                    os.kill(process_id, signal.SIGKILL)
                    return

        killer = threading.Thread(target=kill_the_first_busy_worker)
        killer.start()
        known = {}
        for visit in measure_repeatedly(
            pool, calls, begin=lambda number, _: again.set() if number == 2 else None
        ):
            known[visit.result.call.digest] = visit.result
        killer.join()
    assert known.keys() == {call.digest for call in calls}
    assert all(_measurements(result) for result in known.values())


def test_unwanted_calls_are_not_visited_at_all() -> None:
    first, second = _short_calls(2)
    with WorkerPool(cpu_devices(1), ONCE) as pool:
        visits = list(measure_repeatedly(pool, [first, second], is_wanted=lambda call: call != first))
    assert {visit.result.call for visit in visits} == {second}


@pytest.mark.parametrize("seed", range(5))
def test_every_visit_weighs_the_same_however_many_samples_it_took(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(5, 61, size=int(rng.integers(2, 5)))
    visits = [
        replace(
            summarize("x", "forward", rng.uniform(place + 1, place + 1.5, count).tolist(), 10 * place),
            executions=int(count),
        )
        for place, count in enumerate(counts)
    ]
    one = pooled(visits)
    fewest = min(counts)
    # Visit k's samples lie in [k + 1, k + 1.5): they can be told apart.
    assert Counter(int(sample) - 1 for sample in one.samples_s) == dict.fromkeys(range(len(counts)), fewest)
    for place, visit in enumerate(visits):
        mine = [sample for sample in one.samples_s if int(sample) - 1 == place]
        taken = iter(visit.samples_s)
        assert all(sample in taken for sample in mine)  # in the order taken, none twice
        assert (mine[0], mine[-1]) == (visit.samples_s[0], visit.samples_s[-1])
    assert one.median_s == pytest.approx(median(one.samples_s))
    assert (one.executions, one.peak_bytes) == (sum(counts), 10 * (len(counts) - 1))


def test_clock_launch_and_throttling_of_visits_are_joined() -> None:
    base = summarize("x", "forward", [1.0, 2.0, 3.0], 0)
    silent = pooled([base, base])
    assert (silent.launch_s, silent.clock_hz, silent.throttle, silent.reference_s) == (None, None, None, None)
    told = pooled(
        [
            replace(base, launch_s=1e-6, clock_hz=1e9, throttle="power limit", reference_s=0.01),
            replace(
                base, launch_s=3e-6, clock_hz=2e9, throttle="power limit, thermal limit", reference_s=0.03
            ),
            base,
        ]
    )
    assert told.launch_s == pytest.approx(2e-6)
    assert told.clock_hz == pytest.approx(1.5e9)
    assert told.reference_s == pytest.approx(0.02)
    assert told.throttle == "power limit, thermal limit"
    assert pooled([replace(base, throttle="")] * 2).throttle == ""


def test_later_visits_add_no_more_samples_than_a_first_one() -> None:
    assert LATER_ROUND.maximum_repetitions * (ROUNDS - 1) <= MeasureOptions().maximum_repetitions
