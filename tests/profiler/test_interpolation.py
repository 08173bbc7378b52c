"""Interpolation against the textbook's formulas, point by point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from profiler.interpolation import (
    FEWEST_TO_TELL_APART,
    LENGTHS,
    MOST_POINTS,
    NOISES,
    Interpolation,
)


def scattered(seed: int, count: int) -> tuple[list[list[float]], list[float]]:
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 10, (count, 3)).tolist(), rng.normal(0, 1, count).tolist()


def covariance(one: Sequence[float], other: Sequence[float], per_length: Sequence[float]) -> float:
    distance = sum(((a - b) * c) ** 2 for a, b, c in zip(one, other, per_length, strict=True)) ** 0.5
    return float((1 + 3**0.5 * distance) * np.exp(-(3**0.5) * distance))


def likelihood(
    points: list[list[float]], values: list[float], per_length: Sequence[float], noise: float
) -> float:
    """Return the logarithm of the density of the values' residuals, but for a constant, by the textbook."""
    residuals = np.array(values) - np.median(values)
    among = np.array([[covariance(one, other, per_length) for other in points] for one in points])
    among += noise * np.eye(len(points))
    scale = float(residuals @ np.linalg.inv(among) @ residuals) / len(points)
    _, determinant = np.linalg.slogdet(scale * among)
    return float(-0.5 * determinant)


@pytest.mark.parametrize("seed", range(5))
def test_expected_values_are_those_of_the_joint_normal_distribution(seed: int) -> None:
    points, values = scattered(seed, FEWEST_TO_TELL_APART)
    found = Interpolation.fit(points, values)
    among = np.array(
        [[covariance(one, other, found.per_length_F.tolist()) for other in points] for one in points]
    )
    inverse = np.linalg.inv(among + found.noise * np.eye(len(points)))
    for query in scattered(seed + 100, 10)[0]:
        to = np.array([covariance(query, one, found.per_length_F.tolist()) for one in points])
        expected = np.median(values) + to @ inverse @ (np.array(values) - np.median(values))
        assert found.at(query) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_leaving_out_is_as_if_the_point_had_never_been(seed: int) -> None:
    points, values = scattered(seed, 15)
    whole = Interpolation.fit(points, values)
    for place in range(15):
        rest = [number for number in range(15) if number != place]
        # The prior's mean stays that of all points.
        shifted = [values[number] - float(np.median(values)) for number in rest]
        to = np.array(
            [covariance(points[place], points[number], whole.per_length_F.tolist()) for number in rest]
        )
        among = np.array(
            [[covariance(points[a], points[b], whole.per_length_F.tolist()) for b in rest] for a in rest]
        ) + whole.noise * np.eye(14)
        expected = float(np.median(values)) + float(to @ np.linalg.solve(among, np.array(shifted)))
        assert whole.left_out[place] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_deviations_are_those_of_the_joint_normal_distribution(seed: int) -> None:
    points, values = scattered(seed, FEWEST_TO_TELL_APART)
    found = Interpolation.fit(points, values)
    among = np.array(
        [[covariance(one, other, found.per_length_F.tolist()) for other in points] for one in points]
    ) + found.noise * np.eye(len(points))

    def deviation(to: list[float], among: np.ndarray[Any, Any]) -> float:
        return float((1 + found.noise - np.array(to) @ np.linalg.solve(among, np.array(to))) ** 0.5)

    for query in scattered(seed + 100, 10)[0]:
        to = [covariance(query, one, found.per_length_F.tolist()) for one in points]
        assert found.deviation_at(query) == pytest.approx(deviation(to, among))
    for place in range(len(points)):
        rest = [number for number in range(len(points)) if number != place]
        expected = deviation(among[place, rest].tolist(), among[np.ix_(rest, rest)])
        assert found.left_out_deviations[place] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_of_all_common_lengths_and_noises_is_chosen_of_few_points(seed: int) -> None:
    points, values = scattered(seed, 12)
    found = Interpolation.fit(points, values)
    best = max(likelihood(points, values, [1 / length] * 3, noise) for length in LENGTHS for noise in NOISES)
    assert len(set(found.per_length_F.tolist())) == 1
    assert likelihood(points, values, found.per_length_F.tolist(), found.noise) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_lengths_of_their_own_are_no_less_likely_than_a_common_one(seed: int) -> None:
    points, values = scattered(seed, 30)
    found = Interpolation.fit(points, values)
    best = max(likelihood(points, values, [1 / length] * 3, noise) for length in LENGTHS for noise in NOISES)
    assert likelihood(points, values, found.per_length_F.tolist(), found.noise) >= best - 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_a_feature_that_decides_nothing_gets_a_longer_length_than_the_one_that_does(seed: int) -> None:
    points, _ = scattered(seed, 60)
    found = Interpolation.fit(points, [float(np.sin(point[1])) for point in points])
    assert found.per_length_F[1] > 4 * max(found.per_length_F[0], found.per_length_F[2])
    for query in scattered(seed + 100, 10)[0]:
        assert found.at(query) == pytest.approx(np.sin(query[1]), abs=0.15)


@pytest.mark.parametrize("count", [10, 30])
def test_features_that_repeat_others_or_never_differ_change_nothing(count: int) -> None:
    points, values = scattered(6, count)
    found = Interpolation.fit(points, values)
    wider = Interpolation.fit([[*point, 7.0, point[0] + 3] for point in points], values)
    for query in scattered(106, 10)[0]:
        assert wider.at([*query, 7.0, query[0] + 3]) == pytest.approx(found.at(query))


def test_one_value_holds_everywhere_and_far_away_it_is_the_median() -> None:
    assert Interpolation.fit([[1.0, 2.0]], [5.0]).at([9.0, 9.0]) == 5.0
    points, values = scattered(3, 9)
    assert Interpolation.fit(points, values).at([1e6] * 3) == pytest.approx(float(np.median(values)))


def test_of_very_many_points_some_count() -> None:
    points, _ = scattered(4, 3 * MOST_POINTS)
    values = [sum(point) for point in points]
    found = Interpolation.fit(points, values)
    assert len(found.values_N) == MOST_POINTS
    assert found.at([5.0, 5.0, 5.0]) == pytest.approx(15.0, rel=0.02)
