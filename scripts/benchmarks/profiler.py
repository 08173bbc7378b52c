"""The repeatability and the cost of measuring: the zoo's keys, measured twice on CPU devices.

Each round has workers of its own and its own order of the keys, and stores what it measures, as `app profile` does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, Row, measurement, percentile, quantiles
from scripts.benchmarks.zoo import networks

if TYPE_CHECKING:
    from graph.calls import LocalCall

DEVICES = 2
ROUNDS = 2
MEDIAN_PERCENT, P90_PERCENT, TIMES_THE_KERNELS = 3.0, 10.0, 3.0
# Borders between rows of the table, in seconds.
BORDERS = (0.0, 20e-6, 100e-6, 1e-3, 10e-3, 1e9)


@dataclass(frozen=True, slots=True)
class Round:
    """The costs and the durations of a round of measuring, in seconds.

    costs_s: of the cost model, by (call digest, phase). wall_s: from the first call to the last one's row.
    kernels_s: of all executions that were timed.
    """

    costs_s: dict[tuple[str, str], float]
    wall_s: float
    kernels_s: float


def run(*, quick: bool) -> BenchmarkResult:
    """Measure the keys of all networks, or in quick mode of a small one, in two rounds.

    Raises:
        SoapstoneError: a network cannot be imported, or no device measures.
    """
    calls = _calls(quick=quick)
    rounds = [_round(calls, seed) for seed in range(ROUNDS)]
    first, second = (measured.costs_s for measured in rounds)
    differences = {
        key: 2 * abs(first[key] - second[key]) / (first[key] + second[key])
        for key in sorted(first.keys() & second)
    }
    wall_s = sum(measured.wall_s for measured in rounds)
    kernels_s = sum(measured.kernels_s for measured in rounds)
    return BenchmarkResult(
        benchmark="profiler",
        conditions={"keys": len(calls), "costs": len(differences), "devices": DEVICES},
        measurements=[
            *_measurements(list(differences.values())),
            measurement("seconds of a round", wall_s / ROUNDS, "s"),
            measurement(
                "device time beside that of the kernels measured",
                DEVICES * wall_s / kernels_s,
                "x",
                at_most=TIMES_THE_KERNELS,
            ),
        ],
        table=[
            _row(low, high, [share for key, share in differences.items() if low <= first[key] < high])
            for low, high in pairwise(BORDERS)
        ],
        formats=dict.fromkeys(("median %", "90th percentile %"), ".1f"),
    )


def _calls(*, quick: bool) -> list[LocalCall]:
    from app.services.costs.profile import calls_of
    from app.services.models.models import import_graph, requested_model

    chosen, preset = networks(quick=quick)
    models = [
        import_graph(requested_model(name, preset, batch_size), batch_norm="synchronized")
        for name, batch_size in chosen.items()
    ]
    return calls_of(models, ["sgd"], DEVICES)


def _round(calls: Sequence[LocalCall], seed: int) -> Round:
    from app.db.records import DeviceKindRecord, EnvironmentRecord
    from app.services.costs.operator_costs import cost_records, model_time_s
    from profiler.devices import cpu_devices
    from profiler.measure import Measurement
    from profiler.repeated_sampling import measure_repeatedly
    from profiler.workers import WorkerPool
    from scripts.benchmarks.database import temporary_store

    order = list(calls)
    random.Random(seed).shuffle(order)
    costs_s: dict[tuple[str, str], float] = {}
    kernels_s: dict[str, float] = {}
    with temporary_store() as store:
        kind = store.put_device_kind(DeviceKindRecord("cpu", "cpu", 1))
        environment = store.put_environment(EnvironmentRecord({}))
        with WorkerPool(cpu_devices(DEVICES)) as pool:
            began = time.perf_counter()
            for visit in measure_repeatedly(pool, order):
                result = visit.result
                records = cost_records(result)
                store.put_op_costs(kind, environment, records)
                for record in records:
                    time_s = model_time_s(record)
                    if time_s is not None:
                        costs_s[record.cost_key.digest, record.phase] = time_s
                kernels_s[result.call.digest] = sum(
                    fmean(outcome.samples_s) * outcome.executions
                    for outcome in result.outcomes
                    if isinstance(outcome, Measurement)
                )
            return Round(costs_s, time.perf_counter() - began, sum(kernels_s.values()))


def _measurements(differences: Sequence[float]) -> list[MeasuredValue]:
    return [
        *quantiles("difference of two rounds", differences, median=MEDIAN_PERCENT, p90=P90_PERCENT),
        measurement("    99th percentile", percentile(differences, 0.99), "%"),
    ]


def _row(low: float, high: float, differences: Sequence[float]) -> Row:
    return {
        "takes": f"{low * 1e3:g} ms and more" if high > 1 else f"{low * 1e3:g} to {high * 1e3:g} ms",
        "costs": len(differences),
        "median %": percentile(differences, 0.5) if differences else None,
        "90th percentile %": percentile(differences, 0.9) if differences else None,
    }
