"""Interpolation between scattered measurements: a Gaussian process with a Matern covariance of smoothness 3/2.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (MIT Press, 2006): prediction and marginal
likelihood (algorithm 2.1), covariance (equation 4.17), residuals of leaving one out (equation 5.12).

Letters of shapes: N points, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# What length scales and shares of noise are chosen from, by their likelihood; with fewer points, the middle ones.
LENGTHS = (4.0, 8.0, 16.0, 32.0, 64.0)
NOISES = (0.001, 0.003, 0.01, 0.03, 0.1)
FEWEST_TO_CHOOSE = 8
# Work grows with the third power of the points: of more, so many count, evenly taken; of these, fewer choose.
MOST_POINTS, MOST_TO_CHOOSE = 1000, 250


@dataclass(frozen=True, eq=False)
class Interpolation:
    """Values at scattered points, and between and around them; far away, their median.

    points_NF: distances between them are Euclidean. values_N. length: distance over which values have to do with each
    other; noise: variance of a value around its own truth, relative to that of truths.
    """

    points_NF: Array
    values_N: Array
    length: float
    noise: float

    @classmethod
    def fit(cls, points: Sequence[Sequence[float]], values: Sequence[float]) -> Self:
        """Return the interpolation of `values` (at least one) under the likeliest length and noise."""
        points_NF, values_N = _evenly(np.array(points, np.float64), np.array(values, np.float64), MOST_POINTS)
        length, noise = LENGTHS[len(LENGTHS) // 2], NOISES[len(NOISES) // 2]
        if len(values_N) >= FEWEST_TO_CHOOSE:
            few_NF, few_N = _evenly(points_NF, values_N, MOST_TO_CHOOSE)
            distances_NN = _distances(few_NF, few_NF)
            residuals_N = few_N - np.median(few_N)
            _, length, noise = max(
                (_likelihood(distances_NN, residuals_N, length, noise), length, noise)
                for length in LENGTHS
                for noise in NOISES
            )
        return cls(points_NF, values_N, length, noise)

    def at(self, point: Sequence[float]) -> float:
        """Return the expected value at a point of F features."""
        distances_1N = _distances(np.array([point], np.float64), self.points_NF)
        return float(self._middle + (_covariance(distances_1N, self.length) @ self._weights)[0])

    @cached_property
    def left_out(self) -> Array:
        """What is expected at each point without its own value; of a single point, nothing is."""
        inverse_NN = np.linalg.inv(self._noisy)
        without_N: Array = self.values_N - self._weights / np.diag(inverse_NN)
        return without_N

    @cached_property
    def _middle(self) -> float:
        return float(np.median(self.values_N))

    @cached_property
    def _noisy(self) -> Array:
        covariance_NN = _covariance(_distances(self.points_NF, self.points_NF), self.length)
        noisy_NN: Array = covariance_NN + self.noise * np.eye(len(self.values_N))
        return noisy_NN

    @cached_property
    def _weights(self) -> Array:
        weights_N: Array = np.linalg.solve(self._noisy, self.values_N - self._middle)
        return weights_N


def _evenly(points_NF: Array, values_N: Array, most: int) -> tuple[Array, Array]:
    places = np.unique(np.linspace(0, len(values_N) - 1, min(most, len(values_N))).round().astype(np.int64))
    return points_NF[places], values_N[places]


def _distances(left_MF: Array, right_NF: Array) -> Array:
    squares_MN = (left_MF**2).sum(1)[:, None] + (right_NF**2).sum(1)[None, :] - 2 * left_MF @ right_NF.T
    distances_MN: Array = np.sqrt(np.maximum(squares_MN, 0.0))  # rounding makes some negative
    return distances_MN


def _covariance(distances: Array, length: float) -> Array:
    scaled = np.sqrt(3.0) * distances / length
    covariance: Array = (1 + scaled) * np.exp(-scaled)
    return covariance


def _likelihood(distances_NN: Array, residuals_N: Array, length: float, noise: float) -> float:
    """Return the logarithm of the marginal likelihood, but for a constant, under the likeliest scale of the values."""
    count = len(residuals_N)
    factor_NN = np.linalg.cholesky(_covariance(distances_NN, length) + noise * np.eye(count))
    whitened_N = np.linalg.solve(factor_NN, residuals_N)
    scale = max(float(whitened_N @ whitened_N) / count, 1e-12)
    return float(-0.5 * count * np.log(scale) - np.log(np.diag(factor_NN)).sum())
