"""Interpolation against the textbook's formulas, point by point."""

from __future__ import annotations

import numpy as np
import pytest

from profiler.interpolation import LENGTHS, MOST_POINTS, NOISES, Interpolation


def scattered(seed: int, count: int) -> tuple[list[list[float]], list[float]]:
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 10, (count, 3)).tolist(), rng.normal(0, 1, count).tolist()


def covariance(one: list[float], other: list[float], length: float) -> float:
    scaled = 3**0.5 * sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 / length
    return float((1 + scaled) * np.exp(-scaled))


@pytest.mark.parametrize("seed", range(5))
def test_expected_values_are_those_of_the_joint_normal_distribution(seed: int) -> None:
    points, values = scattered(seed, 20)
    found = Interpolation.fit(points, values)
    among = np.array([[covariance(one, other, found.length) for other in points] for one in points])
    inverse = np.linalg.inv(among + found.noise * np.eye(20))
    for query in scattered(seed + 100, 10)[0]:
        to = np.array([covariance(query, one, found.length) for one in points])
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
        to = np.array([covariance(points[place], points[number], whole.length) for number in rest])
        among = np.array(
            [[covariance(points[a], points[b], whole.length) for b in rest] for a in rest]
        ) + whole.noise * np.eye(14)
        expected = float(np.median(values)) + float(to @ np.linalg.solve(among, np.array(shifted)))
        assert whole.left_out[place] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_of_all_lengths_and_noises_is_chosen(seed: int) -> None:
    points, values = scattered(seed, 12)
    found = Interpolation.fit(points, values)
    residuals = np.array(values) - np.median(values)

    def likelihood(length: float, noise: float) -> float:
        among = np.array([[covariance(one, other, length) for other in points] for one in points])
        among += noise * np.eye(12)
        scale = float(residuals @ np.linalg.inv(among) @ residuals) / 12
        _, determinant = np.linalg.slogdet(scale * among)
        return float(-0.5 * determinant)

    best = max(likelihood(length, noise) for length in LENGTHS for noise in NOISES)
    assert likelihood(found.length, found.noise) == pytest.approx(best)


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
