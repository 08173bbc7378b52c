"""Plausibility of costs: order by brute force, synthetic families with planted outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from profiler.estimate import Observation
from profiler.plausibility import FEWEST_COSTS, REPEATABILITY, CostFamilies, out_of_order
from tests.profiler.examples import matrix_product, rectifier
from tests.profiler.test_estimate import KIND


def contradictions_by_hand(
    points: Sequence[Sequence[float]], times: Sequence[float], asked: Sequence[bool], true: Sequence[bool]
) -> set[tuple[int, int]]:
    """Return all pairs (large, small) of which the large one took clearly less."""
    count = len(points)
    return {
        (large, small)
        for large in range(count)
        for small in range(count)
        if (asked[large] or asked[small])
        and not (true[large] and true[small])
        and all(a >= b for a, b in zip(points[large], points[small], strict=True))
        and tuple(points[large]) != tuple(points[small])
        and times[small] - times[large] > REPEATABILITY
    }


@pytest.mark.parametrize("seed", range(20))
def test_calls_out_of_order_explain_every_contradiction_and_none_without_reason(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 15))
    points = rng.integers(0, 4, (count, 2)).astype(float)
    times = points.sum(1) * 0.2 + rng.normal(0, 0.15, count)
    asked, true = rng.random(count) < 0.7, rng.random(count) < 0.1 * (seed % 3)
    pairs = contradictions_by_hand(points.tolist(), times.tolist(), asked.tolist(), true.tolist())
    found = out_of_order(points, times, asked, true)
    assert not any(true[index] for index in found)
    for large, small in pairs:
        assert large in found or small in found
    for index, partners in found.items():
        assert partners
        assert all((index, partner) in pairs or (partner, index) in pairs for partner in partners)
    # Both of a pair that contradicts nobody else.
    for large, small in pairs:
        if sum({large, small} & {*pair} != set() for pair in pairs) == 1 and not (true[large] or true[small]):
            assert found[large] == [small]
            assert found[small] == [large]


def test_one_call_that_contradicts_many_is_out_of_order_alone() -> None:
    points = np.arange(10.0)[:, None]
    times = np.arange(10.0)
    times[8] = 2.5
    none = np.zeros(10, bool)
    assert out_of_order(points, times, ~none, none) == {8: [7, 6, 5, 4, 3]}
    # Unless it is true: then all of these are wrong.
    assert out_of_order(points, times, ~none, points[:, 0] == 8) == {index: [8] for index in range(3, 8)}
    asked = none.copy()
    asked[5] = True
    # Of the contradictions only one was asked about: nobody can tell which of both is wrong.
    assert out_of_order(points, times, asked, none) == {5: [8], 8: [5]}


def test_equal_sizes_have_no_order() -> None:
    assert out_of_order(np.ones((2, 3)), np.array([0.0, 5.0]), np.ones(2, bool), np.zeros(2, bool)) == {}


def synthetic(seed: int, count: int) -> list[Observation]:
    """Return the forwards of products of random sizes on a device that scatters by 3 %."""
    rng = np.random.default_rng(seed)
    observations = []
    for rows, inner, columns in (2 ** rng.uniform(4, 11, (count, 3))).astype(int).tolist():
        time_s = (1e-5 + 2 * rows * inner * columns / 6e11) * exp(rng.normal(0, 0.03))
        observations.append(Observation(matrix_product(rows, inner, columns), "forward", time_s))
    return observations


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [12, 40, 100, 450])
def test_a_cost_of_a_bad_minute_is_found_in_a_family_of_any_size(seed: int, count: int) -> None:
    observations = synthetic(seed, count)
    names = {entry.call.digest for entry in observations}
    assert len(CostFamilies(KIND, observations).unlikely(names)) <= 0.03 * count
    rng = np.random.default_rng(seed)
    place = int(rng.integers(count))
    entry, factor = observations[place], exp(rng.choice([-1, 1]) * rng.uniform(log(2), log(3)))
    observations[place] = replace(entry, time_s=entry.time_s * factor)
    (found,) = (cost for cost in CostFamilies(KIND, observations).unlikely(names) if cost.call == entry.call)
    assert found.time_s == observations[place].time_s
    assert (found.factor > 1) == (factor > 1)
    assert set(found.others) == names - {entry.call.digest}


def test_what_is_unlikely_depends_on_no_order_and_a_later_cost_replaces_an_earlier() -> None:
    observations = synthetic(3, 90)
    wrong = [replace(observations[index], time_s=observations[index].time_s * 3) for index in (5, 50)]
    names = [entry.call.digest for entry in observations]
    families = CostFamilies(KIND, [*observations, *wrong])
    found = families.unlikely(names)
    assert {entry.call.digest for entry in wrong} <= {cost.call.digest for cost in found}
    assert CostFamilies(KIND, [*reversed(wrong), *reversed(observations)]).unlikely(names) != found
    rest = [entry for entry in observations if entry.call.digest not in {one.call.digest for one in wrong}]
    assert CostFamilies(KIND, [*wrong, *rest[::-1]]).unlikely(names) == found
    for index in (5, 50):
        families.put(observations[index])
    assert families.unlikely(names) == CostFamilies(KIND, observations).unlikely(names)
    assert families.call(names[5]) == observations[5].call


def test_only_calls_asked_about_and_what_contradicts_them_are_named() -> None:
    observations = [Observation(rectifier(2**size), "forward", 2.0**size * 1e-9) for size in range(10, 20)]
    names = [entry.call.digest for entry in observations]
    # Far too little for its size: below every smaller one.
    families = CostFamilies(KIND, [*observations, Observation(rectifier(2**20), "forward", 1e-9)])
    wrong = rectifier(2**20).digest
    assert [cost.call.digest for cost in families.unlikely([wrong])] == [wrong]
    assert {cost.call.digest for cost in families.unlikely([names[3]])} == {wrong, names[3]}
    assert families.unlikely([]) == []
    assert families.unlikely(["nothing that was measured"]) == []


def test_few_costs_without_order_and_costs_of_zero_seconds_say_nothing() -> None:
    few = synthetic(0, FEWEST_COSTS - 1)
    alone = CostFamilies(KIND, [few[0]])
    assert alone.unlikely([few[0].call.digest]) == []
    zero = replace(few[1], time_s=0.0)
    assert CostFamilies(KIND, [few[0], zero]).unlikely([zero.call.digest]) == []
