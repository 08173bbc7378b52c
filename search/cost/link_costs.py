"""Measured costs of communication: curves, seconds as a function of bytes. `search.cost.collective_cost` has prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import ceil, inf

from graph.collective_algorithms import AllReduceAlgorithm
from graph.collectives import CollectiveKind
from graph.strategy import Strategy
from graph.topology import Pair
from search.cost.cost_table import Origin

# A collective's code in the kernels is its place here.
COLLECTIVE_KINDS = tuple(CollectiveKind)
ROOTED = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
# An all-reduce is the two of them one after the other.
HALVES = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)

# Times that differ by this share or less are equal.
ROUNDING = 1e-9

# Bytes from which it counts, seconds there, seconds for each byte beyond.
CurveSegment = tuple[int, float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured seconds over bytes: line segments by the bytes from which each counts, ascending, the first from 0."""

    segments: tuple[CurveSegment, ...]

    @classmethod
    def line(cls, latency_s: float, s_per_byte: float) -> Curve:
        """Return a single line."""
        return cls(((0, latency_s, s_per_byte),))

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Curve:
        """Return the lines between the seconds measured of two sizes in bytes or more.

        A smaller size takes no more than a larger one: what disturbs a measurement only ever adds time. Below the
        smallest size all take as long as it does; beyond the largest the last line goes on.
        """
        sizes = sorted(points, reverse=True)
        times = accumulate((points[size] for size in sizes), min)
        measured = list(zip(sizes, times, strict=True))[::-1]
        segments: list[CurveSegment] = [(0, measured[0][1], 0.0)]
        for (size, time_s), (larger, longer_s) in pairwise(measured):
            segments.append((size, time_s, (longer_s - time_s) / (larger - size)))
        return cls(tuple(segments))

    def line_at(self, size_bytes: int) -> tuple[float, float]:
        """Return the seconds of `size_bytes`, and of each byte beyond in the same segment."""
        start, start_s, s_per_byte = next(
            segment for segment in reversed(self.segments) if size_bytes >= segment[0]
        )
        return start_s + (size_bytes - start) * s_per_byte, s_per_byte

    def seconds(self, size_bytes: int) -> float:
        """Return the seconds of `size_bytes`."""
        return self.line_at(size_bytes)[0]

    def scaled(self, share: float) -> Curve:
        """Return the curve with all times multiplied by `share`."""
        return Curve(tuple((start, share * time_s, share * slope) for start, time_s, slope in self.segments))

    def later(self, seconds: float) -> Curve:
        """Return the curve `seconds` higher."""
        return Curve(tuple((start, time_s + seconds, slope) for start, time_s, slope in self.segments))


def cheapest(curves: Sequence[Curve]) -> tuple[Curve, list[tuple[int, int]]]:
    """Return the curve of the least seconds of several, and which of them it is by the bytes from which it counts.

    The first counts unless another one takes less by more than rounding, at some size.
    """
    starts = sorted({start for curve in curves for start, _, _ in curve.segments})
    looked_at = sorted({*starts, *(2**power for power in range(41))})
    first_s = [curves[0].seconds(size) * (1 - ROUNDING) for size in looked_at]
    rivals = [
        (number, curve)
        for number, curve in enumerate(curves)
        if number == 0
        or any(curve.seconds(size) < least_s for size, least_s in zip(looked_at, first_s, strict=True))
    ]
    segments: list[CurveSegment] = []
    which: list[tuple[int, int]] = []
    for start, end in zip(starts, [*starts[1:], inf], strict=True):
        lines = [(number, *curve.line_at(start)) for number, curve in rivals]
        size = start
        while size < end:
            now_s, slope, number = min(
                (time_s + (size - start) * slope, slope, number) for number, time_s, slope in lines
            )
            segments.append((size, now_s, slope))
            if not which or which[-1][1] != number:
                which.append((size, number))
            # Where a line that rises less comes to be below.
            crossings = [
                (time_s + (size - start) * other - now_s) / (slope - other)
                for _, time_s, other in lines
                if other < slope
            ]
            step = min(crossings, default=inf)
            if step == inf:
                break
            size += max(1, ceil(step))
    return Curve(tuple(segments)), which


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What is known about communication beside the topology's links.

    by_size: collectives measured, by kind and number of devices; they take precedence over the formulas.
    by_members: collectives measured between just these devices, ascending; they take precedence over `by_size`.
    transfers: what the topology's links rest on (MEASURED where they were probed).
    messages: messages measured, by source and destination; they take precedence over the topology's links.
    algorithms: all-reduces measured between just these devices, ascending, by algorithms other than the library's.
    successive: one of several all-reduces between just these devices that follow each other, by algorithm.
    chosen: the algorithm of some groups' all-reduces, ascending; of others the cheapest counts.
    issue_s: seconds in which the host of each device that takes part issues a collective, or a message each way; 0 on
        CPUs, which do it themselves, and where it was not measured.
    """

    by_size: Mapping[tuple[CollectiveKind, int], Curve] = field(default_factory=dict)
    by_members: Mapping[tuple[CollectiveKind, tuple[int, ...]], Curve] = field(default_factory=dict)
    transfers: Origin = Origin.DATASHEET
    messages: Mapping[Pair, Curve] = field(default_factory=dict)
    algorithms: Mapping[tuple[int, ...], Mapping[AllReduceAlgorithm, Curve]] = field(default_factory=dict)
    successive: Mapping[tuple[int, ...], Mapping[AllReduceAlgorithm, Curve]] = field(default_factory=dict)
    chosen: Mapping[tuple[int, ...], AllReduceAlgorithm] = field(default_factory=dict)
    issue_s: float = 0.0

    def choosing(self, strategy: Strategy) -> LinkCosts:
        """Return the costs where a strategy's choice of algorithms counts."""
        return replace(self, chosen=dict(strategy.collective_algorithms))

    def measured(self, kind: CollectiveKind, members: Sequence[int]) -> Curve | None:
        """Return what was measured of a kind of collective between `members`, or between as many; else None."""
        exact = self.by_members.get((kind, tuple(sorted(members))))
        return exact if exact is not None else self.by_size.get((kind, len(members)))

    def measured_over(self, kind: CollectiveKind, size: int) -> list[Curve]:
        """Return all that was measured of a kind of collective between `size` devices, whichever they are."""
        times = [
            curve for (of, members), curve in self.by_members.items() if (of, len(members)) == (kind, size)
        ]
        if (kind, size) in self.by_size:
            times.append(self.by_size[kind, size])
        if kind is CollectiveKind.ALL_REDUCE:
            for members, by_algorithm in self.algorithms.items():
                times += by_algorithm.values() if len(members) == size else ()
        return times

    @property
    def formulas(self) -> Origin:
        """What a collective's formula over the topology's links rests on: never MEASURED, even where these are."""
        return Origin.ESTIMATED if self.transfers is Origin.MEASURED else self.transfers
