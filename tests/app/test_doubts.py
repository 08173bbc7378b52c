"""Costs that others of their operators make unlikely: which of measured ones, and that they are measured again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

from app.db.records import OpCostRecord, utc_now
from app.db.store import Store
from app.services.costs.doubts import Doubts
from app.services.costs.machine import DeviceGroup, describe
from app.services.costs.operator_costs import DatabaseCosts, cost_key_record
from app.services.costs.packs import read_pack, shipped_packs
from app.services.costs.profile import Measurer
from app.services.progress import Progress
from graph.calls import CostPhase, LocalCall, call_from_json
from profiler.devices import cpu_devices
from profiler.estimate import Observation
from profiler.measure import phases
from profiler.plausibility import CostFamilies
from tests.app.conftest import Command
from tests.profiler.examples import rectifier
from tests.profiler.test_estimate import KIND

# ---- which: on the costs of the zoo's networks, each measured once on a virtual machine


@pytest.fixture(scope="module")
def shipped() -> list[Observation]:
    """Return the shipped costs of convolutions and products, most of those that take long."""
    return [
        Observation(call_from_json(json.loads(record.cost_key.key)), record.phase, record.median_s)
        for path in shipped_packs()
        for group in read_pack(path)
        for record in group.op_costs
        if record.median_s is not None
        and record.cost_key.target in ("aten.conv2d.default", "aten.linear.default", "soapstone.conv2d")
    ]


def test_of_undisturbed_costs_few_are_unlikely(shipped: list[Observation]) -> None:
    found = CostFamilies(KIND, shipped).unlikely({entry.call.digest for entry in shipped})
    assert len(shipped) > 2000
    assert len(found) <= 0.04 * len(shipped)


@pytest.mark.parametrize("seed", range(2))
def test_of_disturbed_costs_nearly_all_are_unlikely(shipped: list[Observation], seed: int) -> None:
    rng = np.random.default_rng(seed)
    factors = np.where(
        rng.random(len(shipped)) < 0.02, np.exp(rng.uniform(log(1.5), log(3), len(shipped))), 1
    )
    factors **= rng.choice([-1, 1], len(shipped))
    disturbed = [
        Observation(entry.call, entry.phase, entry.time_s * factor)
        for entry, factor in zip(shipped, factors.tolist(), strict=True)
    ]
    found = CostFamilies(KIND, disturbed).unlikely({entry.call.digest for entry in shipped})
    named = {(cost.call.digest, cost.phase) for cost in found}
    planted = {
        (entry.call.digest, entry.phase)
        for entry, factor in zip(shipped, factors.tolist(), strict=True)
        if factor != 1
    }
    assert len(planted) > 20
    assert len(planted & named) >= 0.95 * len(planted)
    assert len(named - planted) <= 0.05 * len(shipped)


# ---- measured again


class Told(Progress):
    """A progress that keeps warnings and stages; a stage whose text begins with `refused` ends the run."""

    def __init__(self, refused: str | None = None) -> None:
        self.warnings: list[str] = []
        self.stages: list[tuple[str, int | None]] = []
        self._refused = refused

    def warn(self, text: str) -> None:
        """Keep a warning."""
        self.warnings.append(text)

    def begin(self, text: str, total: int | None) -> None:
        """Keep a stage."""
        if self._refused is not None and text.startswith(self._refused):
            raise KeyboardInterrupt
        self.stages.append((text, total))


def plant(store: Store, group: DeviceGroup, call: LocalCall, time_s: float) -> None:
    """Store a cost as if it had been measured."""
    records = [
        OpCostRecord(cost_key_record(call), phase, time_s, time_s, time_s, samples_s=(time_s,) * 5)
        for phase in phases(call)
    ]
    store.put_op_costs(group.kind_id, group.environment_id, records)


def stored(store: Store, group: DeviceGroup, call: LocalCall) -> dict[CostPhase, float | None]:
    """Return the stored seconds of a call's phases."""
    medians = store.op_cost_medians(group.kind_id, group.environment_id, [call.digest])
    return {phase: time_s for (_, phase), time_s in medians.items()}


CALLS = [rectifier(2**size) for size in range(12, 22)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "costs.sqlite")


@pytest.fixture
def group(store: Store) -> DeviceGroup:
    (only,) = describe(store, cpu_devices(1)).groups
    return only


def test_a_cost_of_a_bad_minute_is_measured_again_before_anything_uses_it(
    store: Store, group: DeviceGroup
) -> None:
    wrong = CALLS[6]
    with store:
        with Measurer(store, group, Progress()) as measurer:
            first = measurer.measure(CALLS)
        assert first.succeeded == len(CALLS)
        before = {call.digest: stored(store, group, call) for call in CALLS}
        # So much that no disturbance of this test makes it likely.
        plant(store, group, wrong, 10.0)
        with Measurer(store, group, Progress()) as measurer:
            second = measurer.measure([], checked=CALLS)
        assert wrong.digest in second.replaced
        assert all(time_s is not None and time_s < 1.0 for time_s in stored(store, group, wrong).values())
        for call in CALLS:
            if call.digest not in second.replaced:
                assert stored(store, group, call) == before[call.digest]
        # It was settled: later runs leave it alone.
        with Measurer(store, group, Progress()) as measurer:
            assert wrong.digest not in measurer.measure([], checked=CALLS).replaced


def test_costs_that_an_ended_run_left_unlikely_are_measured_again_by_the_next(
    store: Store, group: DeviceGroup
) -> None:
    known, new = CALLS[:-1], CALLS[-1]
    with store:
        for call in known:
            plant(store, group, call, call.inputs[0].elements * 1.0)
        # What is measured takes much less than these.
        told = Told("measuring again")
        with pytest.raises(KeyboardInterrupt), Measurer(store, group, told) as measurer:
            measurer.measure([new], checked=CALLS)
        assert told.stages
        left = stored(store, group, new)
        assert set(left) == {"forward", "backward"}
        with Measurer(store, group, Progress()) as measurer:
            assert new.digest in measurer.measure([], checked=CALLS).replaced
        assert stored(store, group, new) != left


def test_costs_of_which_one_is_true_are_all_measured_again_and_those_that_stay_unlikely_are_said(
    store: Store, group: DeviceGroup
) -> None:
    known, new = CALLS[:-1], CALLS[-1]
    with store:
        for call in known:
            plant(store, group, call, call.inputs[0].elements * 1.0)
        told = Told()
        with Measurer(store, group, told) as measurer:
            measured = measurer.measure([new])
            unlikely = measurer.unlikely()
            assert told.warnings == []
        assert new.digest in measured.replaced
        again = [total for text, total in told.stages if text.startswith("measuring again")]
        assert again[0] == 2  # with the one next to it
        changed = [call for call in known if stored(store, group, call)["forward"] != call.inputs[0].elements]
        assert {call.digest for call in changed} == measured.replaced - {new.digest}
        if unlikely:
            (line,) = told.warnings
            assert line.startswith(
                "costs stay unlikely beside others of their operators, though measured again: "
            )
            assert "aten.relu.default [" in line


def test_a_search_takes_the_new_cost_of_a_call_but_where_it_has_given_out_the_old(
    store: Store, group: DeviceGroup
) -> None:
    given, other, new = CALLS[0], CALLS[1], CALLS[2]
    with store:
        for call in (given, other):
            plant(store, group, call, 1e3)

        def measure(calls: Sequence[LocalCall]) -> set[str]:
            for call in (*calls, given, other):
                plant(store, group, call, 1e-3)
            return {given.digest, other.digest}

        source = DatabaseCosts(store, group.kind, group.kind_id, group.environment_id, "measure", measure)
        kind = group.kind.name
        (before,) = source.resolve([given], kind)
        source.resolve([new], kind)
        after, fresh = source.resolve([given, other], kind)
        assert before.forward_s == after.forward_s == 1e3
        assert fresh.forward_s == 1e-3


def test_a_cost_is_measured_again_twice_at_most_and_by_no_later_run(store: Store, group: DeviceGroup) -> None:
    with store:
        for call, factor in zip(CALLS, (1.0, 9.0, 1.0, 1.0, 0.1, 1.0, 7.0, 1.0, 1.0, 0.2), strict=True):
            plant(store, group, call, call.inputs[0].elements * factor)
        doubts = Doubts(store, group)
        measured: list[str] = []

        def measure_again(calls: Sequence[LocalCall]) -> None:
            """Store the same costs again: all that is out of order stays so."""
            moment = utc_now()
            digests = [call.digest for call in calls]
            records = store.op_costs(group.kind_id, group.environment_id, digests).values()
            store.put_op_costs(
                group.kind_id,
                group.environment_id,
                [replace(record, measured_at=moment) for record in records],
            )
            doubts.read(digests)
            measured.extend(digests)

        assert doubts.settle(CALLS, measure_again) == set(measured)
        assert max(measured.count(digest) for digest in measured) == 2
        assert doubts.stays()
        assert doubts.settle(CALLS, measure_again) == set()
        # Nor by later runs.
        assert Doubts(store, group).settle(CALLS, measure_again) == set()


def test_a_second_profile_run_measures_nothing(command: Command, database: Path) -> None:
    arguments = ["profile", "--model", "mlp", "--preset", "small"]
    arguments += ["--device", "cpu", "--devices", "1", "--json"]
    first = command(*arguments)
    (kind,) = first.document["kinds"]
    assert 0 <= kind["unlikely"] <= kind["needed"]
    assert first.document["again"] == kind["again"]
    second = command(*arguments)
    assert (second.document["measured"], second.document["again"]) == (0, 0)
    assert second.document["unlikely"] == first.document["unlikely"]
