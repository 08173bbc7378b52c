"""What was measured is what is stored, field by field."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from app.db.records import OpCostRecord
from app.db.store import Store
from app.services.costs.machine import describe
from app.services.costs.operator_costs import DatabaseCosts, cost_records
from graph.errors import CostError
from profiler.devices import available_devices
from profiler.measure import FailedMeasurement, Measurement, MeasureOptions, measure_call
from profiler.workers import CallResult
from tests.profiler.examples import matrix_product

QUICK = MeasureOptions(repetitions=5, budget_s=0.001, maximum_repetitions=6)
# Of a measurement, those that a record has under other names, or, as counts and what predictions do not use, not at
# all: scripts/gpu-check alone reads the time with warm caches.
ELSEWHERE = {"digest", "executions", "warm_s"}


def made_up(phase: str, **values: object) -> Measurement:
    """Return a measurement that has all there is to have, of a call that nobody executed."""
    given = {
        "digest": matrix_product(4, 4, 4).digest, "phase": phase, "minimum_s": 1e-5, "p10_s": 2e-5, "median_s": 3e-5,
        "samples_s": (1e-5, 3e-5, 4e-5), "peak_bytes": 192, "executions": 30, "launch_s": 4e-6, "clock_hz": 1.98e9,
        "throttle": "power limit, thermal limit", "reference_s": 0.02,
    }  # fmt: skip
    return Measurement(**{**given, **values})  # type: ignore[arg-type]


def stored(database: Path, result: CallResult) -> dict[str, OpCostRecord]:
    """Store what was measured on this machine; return what the database then holds, by phase."""
    with Store.open(database) as store:
        machine = describe(store, [available_devices("cpu")[0]])
        kind_id, environment_id = machine.groups[0].kind_id, machine.environment_id
        store.put_op_costs(kind_id, environment_id, cost_records(result))
        found = store.op_costs(kind_id, environment_id, [result.call.digest])
    return {phase: record for (_, phase), record in found.items()}


def same(record: OpCostRecord, measured: Measurement) -> None:
    names = {field.name for field in fields(Measurement)} - ELSEWHERE
    assert {"launch_s", "clock_hz", "throttle", "reference_s"} < names
    assert {name: getattr(record, name) for name in names} == {
        name: getattr(measured, name) for name in names
    }


def test_all_of_a_measurement_but_its_warm_time_is_stored(database: Path) -> None:
    call, device = matrix_product(4, 4, 4), available_devices("cpu")[0]
    forward, backward = made_up("forward"), made_up("backward", clock_hz=1.2e9, throttle="", launch_s=0.0)
    found = stored(database, CallResult(call, device, (forward, backward), 0.1))
    assert found.keys() == {"forward", "backward"}
    same(found["forward"], forward)
    same(found["backward"], backward)
    assert found["forward"].launch_s == 4e-6
    # Nothing slowed it, which is not the same as nothing telling.
    assert found["backward"].throttle == ""


def test_what_nothing_tells_is_none(database: Path) -> None:
    call, device = matrix_product(4, 4, 4), available_devices("cpu")[0]
    silent = made_up("forward", launch_s=None, clock_hz=None, throttle=None)
    failed = FailedMeasurement(call.digest, "backward", "RuntimeError: out of memory")
    found = stored(database, CallResult(call, device, (silent, failed), 0.1))
    same(found["forward"], silent)
    assert (found["backward"].failure, found["backward"].median_s) == ("RuntimeError: out of memory", None)


def test_a_real_measurement_is_read_back_as_it_was_made(database: Path) -> None:
    call, device = matrix_product(16, 16, 16), available_devices("cpu")[0]
    outcomes = measure_call(call, device, QUICK)
    found = stored(database, CallResult(call, device, outcomes, 0.1))
    for outcome in outcomes:
        assert isinstance(outcome, Measurement)
        same(found[outcome.phase], outcome)
        assert outcome.launch_s is None  # a CPU computes while it issues


@pytest.mark.cuda
def test_a_gpus_launch_time_is_stored(database: Path) -> None:
    call, device = matrix_product(512, 512, 512), available_devices("cuda")[0]
    outcomes = measure_call(call, device, QUICK)
    found = stored(database, CallResult(call, device, outcomes, 0.1))
    for outcome in outcomes:
        assert isinstance(outcome, Measurement)
        same(found[outcome.phase], outcome)
        assert outcome.launch_s is not None
        assert 0 < outcome.launch_s < 1


@pytest.mark.parametrize(("count", "more"), [(1, ""), (3, r" \(and 2 more\)")])
def test_what_is_not_measured_is_refused_with_its_number(database: Path, count: int, more: str) -> None:
    with Store.open(database) as store:
        (group,) = describe(store, [available_devices("cpu")[0]]).groups
        source = DatabaseCosts(store, group.kind, group.kind_id, group.environment_id, "fail")
        with pytest.raises(CostError, match=f"not measured on .*, must be{more}; run app profile"):
            source.resolve([matrix_product(size, 8, 8) for size in range(1, count + 1)], group.kind.name)
