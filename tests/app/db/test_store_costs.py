"""The contract of the store, over every backend: device kinds, environments, operator and link costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.db.records import LinkCostRecord, LinkFitRecord, OpCostRecord
from app.db.store import Store
from app.services.costs.operator_costs import model_time_s
from graph.calls import CostPhase
from graph.errors import DatabaseError
from tests.app.db import samples


def test_device_kind_is_one_row_and_its_facts_are_replaced(store: Store) -> None:
    first = store.put_device_kind(samples.device_kind())
    other = store.put_device_kind(samples.device_kind("gpu"))
    renewed = replace(samples.device_kind(), memory_bytes=7, description={})
    assert store.put_device_kind(renewed) == first != other
    assert store.device_kind("cpu") == replace(renewed, id=first)
    assert store.device_kind("tpu") is None


def test_environment_is_named_by_its_facts(store: Store) -> None:
    first = store.put_environment(samples.environment(1))
    reordered = replace(
        samples.environment(1),
        facts=dict(reversed(list(samples.environment(1).facts.items()))),
        created_at=samples.moment(9),
    )
    assert store.put_environment(reordered) == first != store.put_environment(samples.environment(2))
    assert store.environment(first) == replace(samples.environment(1), id=first)
    assert store.environment(10**6) is None


def test_op_costs_come_back_as_they_were_put(store: Store) -> None:
    kind, environment = (
        store.put_device_kind(samples.device_kind()),
        store.put_environment(samples.environment()),
    )
    failed = OpCostRecord(
        samples.cost_key(3),
        "update",
        None,
        None,
        None,
        failure="out of memory",
        measured_at=samples.moment(5),
    )
    costs = [samples.op_cost(1), samples.op_cost(1, phase="backward", time_s=0.1 + 0.2), failed]
    assert store.put_op_costs(kind, environment, costs) == 3
    digests = [samples.cost_key(number).digest for number in (1, 2, 3)]
    found = store.op_costs(kind, environment, digests)
    assert set(found) == {(cost.cost_key.digest, cost.phase) for cost in costs}
    for cost in costs:
        read = found[cost.cost_key.digest, cost.phase]
        assert (read.device_kind_id, read.environment_id) == (kind, environment)
        assert read == replace(
            cost,
            cost_key=replace(cost.cost_key, id=read.cost_key.id),
            device_kind_id=kind,
            environment_id=environment,
            id=read.id,
        )
    assert store.op_costs(kind, environment, []) == {}
    assert store.op_costs(kind + 1, None, digests) == {}


def test_op_costs_written_twice_are_one_row_each(store: Store) -> None:
    kind, environment = (
        store.put_device_kind(samples.device_kind()),
        store.put_environment(samples.environment()),
    )
    costs = [samples.op_cost(number) for number in range(1, 2501)]
    assert store.put_op_costs(kind, environment, costs) == 2500
    before = store.op_costs(kind, environment, [cost.cost_key.digest for cost in costs])
    assert store.put_op_costs(kind, environment, [*reversed(costs), *costs]) == 2500
    assert store.op_costs(kind, environment, [cost.cost_key.digest for cost in costs]) == before
    assert store.table_counts()["op_costs"] == store.table_counts()["op_signatures"] == 2500
    assert store.put_op_costs(kind, environment, []) == 0


def test_of_any_environment_the_newest_cost_is_returned(store: Store) -> None:
    kind = store.put_device_kind(samples.device_kind())
    first, second = (store.put_environment(samples.environment(number)) for number in (1, 2))
    store.put_op_costs(
        kind, first, [samples.op_cost(1, time_s=1.0, at=2), samples.op_cost(2, time_s=1.0, at=1)]
    )
    store.put_op_costs(
        kind, second, [samples.op_cost(1, time_s=2.0, at=1), samples.op_cost(2, time_s=2.0, at=2)]
    )
    one, two = samples.cost_key(1).digest, samples.cost_key(2).digest
    found = store.op_costs(kind, None, [one, two])
    assert (found[one, "forward"].minimum_s, found[two, "forward"].minimum_s) == (1.0, 2.0)
    assert store.op_costs(kind, first, [two])[two, "forward"].minimum_s == 1.0


def test_medians_are_those_of_the_costs(store: Store) -> None:
    kind = store.put_device_kind(samples.device_kind())
    first, second = (store.put_environment(samples.environment(number)) for number in (1, 2))
    failed = OpCostRecord(
        samples.cost_key(9), "forward", None, None, None, failure="x", measured_at=samples.moment(4)
    )
    many = [samples.op_cost(number, time_s=float(number), at=number % 7) for number in range(1, 1201)]
    store.put_op_costs(kind, first, many)
    store.put_op_costs(kind, second, [samples.op_cost(5, phase="backward"), samples.op_cost(5, at=9), failed])
    digests = [samples.cost_key(number).digest for number in range(1, 1150)]
    for environment in (None, first, second):
        for some in (None, digests, digests[:2], []):
            costs = store.op_costs(kind, environment, some)
            assert store.op_cost_medians(kind, environment, some) == {
                key: cost.median_s for key, cost in costs.items()
            }
    assert store.op_cost_medians(kind, None)[samples.cost_key(9).digest, "forward"] is None


def test_medians_are_at_the_speed_of_the_first_cost(store: Store) -> None:
    kind = store.put_device_kind(samples.device_kind())
    environment, other = (store.put_environment(samples.environment(number)) for number in (1, 2))
    assert store.usual_reference_s(kind, environment) is None
    plain, first, slow = (samples.op_cost(number, time_s=2.0) for number in (1, 2, 3))
    store.put_op_costs(kind, environment, [plain])
    assert store.usual_reference_s(kind, environment) is None
    store.put_op_costs(
        kind,
        environment,
        [replace(first, reference_s=0.02, speed=1.0), replace(slow, reference_s=0.04, speed=0.5)],
    )
    assert store.usual_reference_s(kind, environment) == 0.02
    assert store.usual_reference_s(kind, other) is None
    medians = store.op_cost_medians(kind, environment)
    assert [medians[one.cost_key.digest, "forward"] for one in (plain, first, slow)] == [3.0, 3.0, 1.5]
    # The first is measured again, where the core is slower: what all others are given at stays.
    again = replace(first, reference_s=0.08, speed=0.25, measured_at=samples.moment(9))
    store.put_op_costs(kind, environment, [again])
    assert store.usual_reference_s(kind, environment) == 0.02
    assert model_time_s(again) == store.op_cost_medians(kind, environment)[first.cost_key.digest, "forward"]


_PHASES: list[CostPhase] = ["forward", "backward", "update"]


# One store for all examples: each has an environment of its own.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    batches=st.lists(
        st.lists(
            st.tuples(st.integers(1, 4), st.sampled_from(_PHASES), st.integers(0, 5), st.floats(0.001, 10.0)),
            max_size=8,
        ),
        max_size=5,
    ),
    data=st.data(),
)
def test_the_newer_cost_stays_whatever_the_order(
    store: Store, batches: list[list[tuple[int, CostPhase, int, float]]], data: st.DataObject
) -> None:
    kind = store.put_device_kind(samples.device_kind())
    environment = store.put_environment(samples.environment(store.table_counts()["environments"]))
    expected: dict[tuple[str, CostPhase], tuple[int, float]] = {}
    for batch in batches:
        costs = [samples.op_cost(n, phase=phase, time_s=time_s, at=at) for n, phase, at, time_s in batch]
        store.put_op_costs(kind, environment, costs)
        for number, phase, at, time_s in batch:
            key = samples.cost_key(number).digest, phase
            if key not in expected or expected[key][0] <= at:
                expected[key] = at, time_s
    found = store.op_costs(kind, environment, [samples.cost_key(number).digest for number in range(1, 5)])
    assert {key: (cost.measured_at, cost.minimum_s) for key, cost in found.items()} == {
        key: (samples.moment(at), time_s) for key, (at, time_s) in expected.items()
    }


def test_a_cost_is_either_times_or_a_failure(store: Store) -> None:
    kind, environment = (
        store.put_device_kind(samples.device_kind()),
        store.put_environment(samples.environment()),
    )
    both = replace(samples.op_cost(1), failure="and yet it has times")
    with pytest.raises(DatabaseError, match="measured_or_failed"):
        store.put_op_costs(kind, environment, [samples.op_cost(2), both])
    assert store.table_counts()["op_signatures"] == 0, "a failed batch leaves nothing behind"


def test_a_cost_needs_its_device_kind(store: Store) -> None:
    environment = store.put_environment(samples.environment())
    with pytest.raises(DatabaseError, match=r"(?i)foreign key"):
        store.put_op_costs(99, environment, [samples.op_cost(1)])


def test_link_costs_and_fits_keep_the_newest(store: Store) -> None:
    kind, environment = (
        store.put_device_kind(samples.device_kind()),
        store.put_environment(samples.environment()),
    )
    costs = [
        LinkCostRecord("p2p", 2, size, size * 1e-9, size * 2e-9, (size * 1e-9,), samples.moment(1))
        for size in (1024, 2**33)
    ]
    older = replace(costs[0], minimum_s=9.0, measured_at=samples.moment(0))
    assert store.put_link_costs(kind, environment, [costs[1], costs[0]]) == 2
    assert store.put_link_costs(kind, environment, [older]) == 1
    found = store.link_costs(kind, environment)
    assert [(cost.size_bytes, cost.minimum_s, cost.samples_s) for cost in found] == [
        (cost.size_bytes, cost.minimum_s, cost.samples_s) for cost in costs
    ]
    fit = LinkFitRecord("p2p", 2, 9e-5, 3.2e9, None, samples.moment(1))
    store.put_link_fits(kind, environment, [fit])
    store.put_link_fits(
        kind, environment, [replace(fit, contention_factor=1.6, measured_at=samples.moment(2))]
    )
    (stored,) = store.link_fits(kind, environment)
    assert (stored.latency_s, stored.bandwidth_bytes_per_s, stored.contention_factor) == (9e-5, 3.2e9, 1.6)
    assert store.link_costs(kind, environment + 1) == []
    assert store.link_fits(kind + 1, environment) == []


def test_cost_summaries_count_by_kind_and_environment(store: Store) -> None:
    kind = store.put_device_kind(samples.device_kind())
    first, second = (store.put_environment(samples.environment(number)) for number in (1, 2))
    failed = OpCostRecord(
        samples.cost_key(9), "forward", None, None, None, failure="x", measured_at=samples.moment(4)
    )
    store.put_op_costs(kind, first, [samples.op_cost(1, at=1), samples.op_cost(2, at=3)])
    store.put_op_costs(kind, second, [samples.op_cost(1, at=2), failed])
    newest, oldest = store.cost_summaries()
    assert (newest.environment.id, newest.measured, newest.failed) == (second, 1, 1)
    assert (oldest.environment.id, oldest.measured, oldest.failed) == (first, 2, 0)
    assert (oldest.oldest, oldest.newest) == (samples.moment(1), samples.moment(3))
    assert oldest.device_kind.name == "cpu"
