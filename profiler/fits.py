"""Fit the time of a message: latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite

from graph.errors import CostError

# Times that do not grow with the size fit any bandwidth; a finite one is stored and simulated without special cases.
LARGEST_BANDWIDTH_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Time = `latency_s` + bytes / `bandwidth_bytes_per_s`; `residual` is the mean absolute relative error."""

    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float

    def time_s(self, size_bytes: int) -> float:
        """Return the seconds that a message of `size_bytes` takes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


def fit_link(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> LinkFit:
    """Return the line of least absolute relative error with latency >= 0 and a positive, finite bandwidth.

    Relative, because times span four orders of magnitude and the small ones count as much; absolute, because one
    disturbed sample must not move the line. Such a line exists through two of the points, or through one of them at a
    bound (no latency, or `LARGEST_BANDWIDTH`), so all of these are tried: exact.

    Raises:
        CostError: sizes and times differ in number, there is none, or one is not a positive number.
    """
    points = _points(sizes_bytes, times_s)
    best = LinkFit(0.0, 1.0, inf)
    for latency, inverse in _candidates(points):
        residual = sum(abs(latency + size * inverse - time) / time for size, time in points) / len(points)
        if residual < best.residual:
            best = LinkFit(latency, 1 / inverse, residual)
    return best


def _candidates(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, float]]:
    """Yield (latency, seconds per byte) of the lines through the origin and a point, or through two points."""
    flattest = 1 / LARGEST_BANDWIDTH_BYTES_PER_S
    for size, time in points:
        yield 0.0, max(time / size, flattest)
        yield max(0.0, time - size * flattest), flattest
    for (size_1, time_1), (size_2, time_2) in combinations(points, 2):
        if size_1 != size_2:
            inverse = (time_2 - time_1) / (size_2 - size_1)
            latency = time_1 - size_1 * inverse
            if inverse >= flattest and latency >= 0:
                yield latency, inverse


def _points(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> list[tuple[int, float]]:
    if len(sizes_bytes) != len(times_s) or not times_s:
        raise CostError(
            f"link fit: {len(sizes_bytes)} sizes and {len(times_s)} times, must be equally many and at least one"
        )
    if not all(isfinite(value) and value > 0 for value in (*sizes_bytes, *times_s)):
        raise CostError("link fit: a size or time is not a positive number, must be; measure again")
    return list(zip(sizes_bytes, times_s, strict=True))
