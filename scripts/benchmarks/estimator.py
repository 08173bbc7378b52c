"""How good estimates of unmeasured operator costs are: measured costs are left out, a fifth at a time, and estimated.

A call's phases are left out together. The costs are those of the database that SOAPSTONE_DATABASE_URL names, of the
device kind and environment that it holds most of; without it, a few networks are profiled on this machine first.

And how many of them the others of their operators make unlikely (`profiler.plausibility`): as measured, and when a few
drawn at random take a half longer to three times as long, or as much shorter, as in a bad minute.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, Row, measurement, percentile, quantiles

if TYPE_CHECKING:
    from graph.topology import DeviceKind
    from profiler.estimate import Observation

NETWORKS = {"mlp": 64, "alexnet": 16, "inception": 4, "bert-large": 2}
FOLDS, SEED = 5, 0
# Matrix products of unseen sizes: the best published operator database's figures.
MEDIAN_PERCENT, P90_PERCENT = 3.6, 14.7
PRODUCTS = ("linear", "mm", "matmul", "addmm", "baddbmm", "bmm")
# Shares of the costs that are disturbed, drawn so often until there are enough of them.
DISTURBED_SHARES = (0.01, 0.05, 0.1)
FEWEST_DISTURBED, MOST_DRAWS = 500, 20
# A 90th percentile of fewer costs says little: operator types with fewer are one row together.
FEWEST_COSTS = 20


def run(*, quick: bool) -> BenchmarkResult:
    """Leave out and estimate; in quick mode after profiling one small network.

    Raises:
        SoapstoneError: a network cannot be profiled.
    """
    given = os.environ.get("SOAPSTONE_DATABASE_URL")
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        database = given or f"sqlite:///{folder}/x.sqlite"
        if not given:
            _profile(database, quick=quick)
        kind, observations = measured(database)
    errors = left_out_errors(kind, observations)
    doubts = doubted(kind, observations)
    return BenchmarkResult(
        benchmark="estimator",
        conditions={"device": kind.name, "costs": len(observations), "folds": FOLDS},
        measurements=[*_measurements(errors), *doubts],
        table=_table(errors),
        formats=dict.fromkeys(("median error %", "90th percentile %"), ".1f"),
    )


def _profile(database: str, *, quick: bool) -> None:
    from app.services.costs.profile import ProfileRequest, run_profile
    from app.services.progress import Progress

    for name, batch_size in {"mlp": 8}.items() if quick else NETWORKS.items():
        request = ProfileRequest(
            models=(name,), preset="small" if quick else "paper", batch_size=batch_size, gpus=None,
            processor="cpu", devices=2, optimizer="sgd", batch_norm="synchronized", precision="float32",
        )  # fmt: skip
        run_profile(request, database, Progress())


def measured(database: str) -> tuple[DeviceKind, list[Observation]]:
    """Return the costs of the device kind and environment that a database holds most of, by call and phase.

    Raises:
        CostError: it holds none.
    """
    from app.db.store import Store
    from app.services.costs.operator_costs import model_time_s
    from graph.calls import call_from_json
    from graph.errors import CostError
    from graph.topology import DeviceKind
    from profiler.estimate import Observation

    with Store.open(database) as store:
        chosen = max(store.cost_summaries(), key=lambda summary: summary.measured, default=None)
        if chosen is None:
            raise CostError(
                "estimator: the database holds no costs, must hold measured ones; run app profile first"
            )
        costs = store.op_costs(chosen.device_kind.id, chosen.environment.id)
    described = dict(chosen.device_kind.description)
    described["peak_flops"] = tuple(described["peak_flops"].items())
    observations = []
    for _, record in sorted(costs.items()):
        time_s = model_time_s(record)
        if time_s is not None:
            call = call_from_json(json.loads(record.cost_key.key))
            observations.append(Observation(call, record.phase, time_s))
    return DeviceKind(**described), observations


def left_out_errors(kind: DeviceKind, observations: Sequence[Observation]) -> dict[str, list[float]]:
    """Return, by operator type, the relative errors of all costs, each estimated without its fifth of the calls."""
    from profiler.estimate import Estimator

    calls = sorted({observation.call.digest for observation in observations})
    random.Random(SEED).shuffle(calls)
    fold_of = {digest: number % FOLDS for number, digest in enumerate(calls)}
    errors: dict[str, list[float]] = defaultdict(list)
    for fold in range(FOLDS):
        estimator = Estimator.fit(
            kind, (observation for observation in observations if fold_of[observation.call.digest] != fold)
        )
        for observation in observations:
            if fold_of[observation.call.digest] == fold:
                estimated_s = estimator.estimate(observation.call, observation.phase).time_s
                errors[observation.call.target].append(abs(estimated_s / observation.time_s - 1))
    return dict(errors)


def doubted(kind: DeviceKind, observations: Sequence[Observation]) -> list[MeasuredValue]:
    """Return the shares of costs that are unlikely, as measured and disturbed, and the seconds to tell."""
    from dataclasses import replace

    import numpy as np

    from profiler.plausibility import CostFamilies

    def unlikely(costs: Sequence[Observation]) -> set[int]:
        names = {cost.call.digest for cost in costs}
        found = {(cost.call.digest, cost.phase) for cost in CostFamilies(kind, costs).unlikely(names)}
        return {index for index, cost in enumerate(costs) if (cost.call.digest, cost.phase) in found}

    began = time.process_time()
    rows = [measurement("unlikely costs", 100 * len(unlikely(observations)) / len(observations), "%")]
    rows.append(measurement("    processor time to tell", time.process_time() - began, "s"))
    for share in DISTURBED_SHARES:
        rng = np.random.default_rng(SEED)
        disturbed_count, disturbed_found, others_count, others_found, draws = 0, 0, 0, 0, 0
        while disturbed_count < FEWEST_DISTURBED and draws < MOST_DRAWS:
            draws += 1
            is_disturbed = rng.random(len(observations)) < share
            changes = is_disturbed * rng.choice((-1, 1), len(observations))
            changes = changes * rng.uniform(math.log(1.5), math.log(3), len(observations))
            found = unlikely(
                [
                    replace(cost, time_s=cost.time_s * math.exp(change))
                    for cost, change in zip(observations, changes, strict=True)
                ]
            )
            disturbed = set(np.flatnonzero(is_disturbed).tolist())
            disturbed_count += len(disturbed)
            disturbed_found += len(disturbed & found)
            others_count += len(observations) - len(disturbed)
            others_found += len(found - disturbed)
        name = f"{100 * share:g} % disturbed ({disturbed_count} in {draws} draws): unlikely"
        rows.append(measurement(name, 100 * disturbed_found / max(1, disturbed_count), "%"))
        rows.append(measurement("    others unlikely", 100 * others_found / max(1, others_count), "%"))
    return rows


def _measurements(errors: dict[str, list[float]]) -> list[MeasuredValue]:
    every = [error for of_target in errors.values() for error in of_target]
    rows = quantiles(f"error of all {len(every)} costs", every, median=None, p90=None)
    products = [error for target in errors if _name(target) in PRODUCTS for error in errors[target]]
    if products:
        what = f"error of {len(products)} of matrix products"
        rows += quantiles(what, products, median=MEDIAN_PERCENT, p90=P90_PERCENT)
    return rows


def _name(target: str) -> str:
    return target.split(".")[1]


def _table(errors: dict[str, list[float]]) -> list[Row]:
    """Return a row for each operator type with costs enough, the most first, and one for all others."""
    shown = sorted(
        (target_type for target_type in errors if len(errors[target_type]) >= FEWEST_COSTS),
        key=lambda target_type: -len(errors[target_type]),
    )
    rows = [_row(target, errors[target]) for target in shown]
    others = [error for target in errors if target not in shown for error in errors[target]]
    if others:
        rows.append(_row(f"{len(errors) - len(shown)} others", others))
    return rows


def _row(target: str, errors: Sequence[float]) -> Row:
    return {
        "operator type": target,
        "costs": len(errors),
        "median error %": percentile(errors, 0.5),
        "90th percentile %": percentile(errors, 0.9),
    }
