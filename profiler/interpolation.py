"""Interpolation between scattered measurements: a Gaussian process with a Matern covariance of smoothness 3/2.

Each feature has a length scale of its own (automatic relevance determination):
the time of a matrix product changes with its rows otherwise than with its columns. Lengths are those under which the
values are likeliest, looked for one feature at a time from the best common length.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (MIT Press, 2006): prediction and marginal
likelihood (algorithm 2.1), covariance (equation 4.17), lengths of features (equation 5.1), residuals of leaving one out
(equation 5.12).

Letters of shapes: N points, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, Self

import numpy as np

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Common lengths and shares of noise to choose from, by their likelihood; with fewer points, the middle ones.
LENGTHS = (4.0, 8.0, 16.0, 32.0, 64.0)
NOISES = (0.001, 0.003, 0.01, 0.03, 0.1)
FEWEST_TO_CHOOSE = 8
# From so many points on, each feature gets a length; a length is tried shorter and longer, in so many rounds.
FEWEST_TO_TELL_APART = 20
FACTORS = (0.25, 0.5, 2.0, 4.0)
ROUNDS = 2
# A gain of likelihood that is worth a change.
GAIN = 0.05
# Work grows with the third power of the points: of more, so many count, evenly taken; of these, fewer choose.
MOST_POINTS, MOST_TO_CHOOSE = 1000, 150


@dataclass(frozen=True, eq=False)
class Interpolation:
    """Values at scattered points, and between and around them; far away, their median. Never beyond all of them.

    points_NF, in units of the features' lengths: distances between them are Euclidean. values_N. per_length_F: one over
    the length of each feature, 0 for one that says nothing beside the others. noise: variance of a value around its
    own truth, relative to that of truths.
    """

    points_NF: Array
    values_N: Array
    per_length_F: Array
    noise: float

    @classmethod
    def fit(cls, points: Sequence[Sequence[float]], values: Sequence[float]) -> Self:
        """Return the interpolation of `values` (at least one) under the likeliest lengths and noise."""
        points_NF, values_N = _evenly(np.array(points, np.float64), np.array(values, np.float64), MOST_POINTS)
        distinct_F = _distinct(points_NF)
        per_length_F, noise = distinct_F / LENGTHS[len(LENGTHS) // 2], NOISES[len(NOISES) // 2]
        if len(values_N) >= FEWEST_TO_CHOOSE:
            few_NF, few_N = _evenly(points_NF, values_N, MOST_TO_CHOOSE)
            per_length_F, noise = _likeliest(few_NF, few_N - np.median(few_N), distinct_F)
        return cls(points_NF * per_length_F, values_N, per_length_F, noise)

    def at(self, point: Sequence[float]) -> float:
        """Return the expected value at a point of F features."""
        distances_1N = _distances(np.array([point], np.float64) * self.per_length_F, self.points_NF)
        expected = float(self._middle + (_covariance(distances_1N) @ self._weights)[0])
        # Between distant points it would overshoot the measured range.
        return min(max(expected, float(self.values_N.min())), float(self.values_N.max()))

    @cached_property
    def left_out(self) -> Array:
        """The expected value at each point without its own value (leave-one-out); none of a single point."""
        without_N: Array = self.values_N - self._weights / np.diag(self._inverse)
        return without_N

    @cached_property
    def left_out_deviations(self) -> Array:
        """The standard deviation of each value around `left_out`, in units of that far from all points."""
        deviations_N: Array = 1 / np.sqrt(np.diag(self._inverse))
        return deviations_N

    def deviation_at(self, point: Sequence[float]) -> float:
        """Return the standard deviation of another value around `at`, in the same units."""
        covariance_N = _covariance(
            _distances(np.array([point], np.float64) * self.per_length_F, self.points_NF)
        )[0]
        explained = float(covariance_N @ self._inverse @ covariance_N)
        # A value has its noise wherever it is: rounding must not make it more certain.
        return sqrt(max(1 + self.noise - explained, self.noise))

    @cached_property
    def _middle(self) -> float:
        return float(np.median(self.values_N))

    @cached_property
    def _noisy(self) -> Array:
        covariance_NN = _covariance(_distances(self.points_NF, self.points_NF))
        noisy_NN: Array = covariance_NN + self.noise * np.eye(len(self.values_N))
        return noisy_NN

    @cached_property
    def _inverse(self) -> Array:
        inverse_NN: Array = np.linalg.inv(self._noisy)
        return inverse_NN

    @cached_property
    def _weights(self) -> Array:
        weights_N: Array = np.linalg.solve(self._noisy, self.values_N - self._middle)
        return weights_N


def _likeliest(points_NF: Array, residuals_N: Array, distinct_F: Array) -> tuple[Array, float]:
    """Return one over the length of each feature, and the noise."""
    # Of each feature that counts: squares of differences, so that trying a length does not compute distances anew.
    squares_FNN = [
        (points_NF[:, feature, None] - points_NF[None, :, feature]) ** 2 for feature in range(len(distinct_F))
    ]
    total_NN: Array = sum((squares_FNN[feature] for feature in np.flatnonzero(distinct_F)), np.zeros((1, 1)))
    best, length, noise = max(
        (_likelihood(total_NN / length**2, residuals_N, noise), length, noise)
        for length in LENGTHS
        for noise in NOISES
    )
    per_length_F = distinct_F / length
    if len(residuals_N) < FEWEST_TO_TELL_APART:
        return per_length_F, noise
    total_NN = total_NN / length**2
    for _ in range(ROUNDS):
        before = best
        for feature in np.flatnonzero(distinct_F):
            others_NN = total_NN - squares_FNN[feature] * per_length_F[feature] ** 2
            best_here = per_length_F[feature]
            for factor in FACTORS:
                tried = per_length_F[feature] / factor
                likelihood = _likelihood(others_NN + squares_FNN[feature] * tried**2, residuals_N, noise)
                if likelihood > best + GAIN:
                    best, best_here = likelihood, tried
            per_length_F[feature] = best_here
            total_NN = others_NN + squares_FNN[feature] * best_here**2
        tried_noises = [(_likelihood(total_NN, residuals_N, share), share) for share in NOISES]
        best, noise = max((best, noise), *tried_noises)
        if best <= before + GAIN:
            break
    return per_length_F, noise


def _distinct(points_NF: Array) -> Array:
    """Return 1 for each feature that differs between points, and not as an earlier one does; 0 for the others."""
    centred_NF = points_NF - points_NF[0]
    distinct_F = np.zeros(points_NF.shape[1])
    seen: set[bytes] = set()
    for feature, values_N in enumerate(centred_NF.round(9).T + 0.0):
        if values_N.any() and values_N.tobytes() not in seen:
            distinct_F[feature] = 1.0
            seen.add(values_N.tobytes())
    return distinct_F


def _evenly(points_NF: Array, values_N: Array, most: int) -> tuple[Array, Array]:
    indexes = np.unique(np.linspace(0, len(values_N) - 1, min(most, len(values_N))).round().astype(np.int64))
    return points_NF[indexes], values_N[indexes]


def _distances(left_MF: Array, right_NF: Array) -> Array:
    squares_MN = (left_MF**2).sum(1)[:, None] + (right_NF**2).sum(1)[None, :] - 2 * left_MF @ right_NF.T
    distances_MN: Array = np.sqrt(np.maximum(squares_MN, 0.0))  # rounding makes some negative
    return distances_MN


def _covariance(distances: Array) -> Array:
    scaled = np.sqrt(3.0) * distances
    covariance: Array = (1 + scaled) * np.exp(-scaled)
    return covariance


def _likelihood(squares_NN: Array, residuals_N: Array, noise: float) -> float:
    """Return the logarithm of the marginal likelihood, but for a constant, under the likeliest scale of the values.

    squares_NN: squared distances, in units of lengths.
    """
    count = len(residuals_N)
    distances_NN = np.sqrt(np.maximum(squares_NN, 0.0))  # differences of sums may round below zero
    factor_NN = np.linalg.cholesky(_covariance(distances_NN) + noise * np.eye(count))
    whitened_N = np.linalg.solve(factor_NN, residuals_N)
    scale = max(float(whitened_N @ whitened_N) / count, 1e-12)
    return float(-0.5 * count * np.log(scale) - np.log(np.diag(factor_NN)).sum())
