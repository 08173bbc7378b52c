"""Plausibility of measured costs: which of them the others of their family make unlikely.

Calls of one operator are a family (`profiler.estimate.family_of`) and were measured minutes apart, on a machine that
may have been busy in some of these. A cost is unlikely where it is

- far from what the other calls of its family say, interpolated without it: by more than two measurements of one call
  differ, and by more than this family's other costs are far from theirs (modified z-score above 3.5);
- out of order: a call that is nowhere smaller, neither in work nor in any dim of its operands, took less time by more
  than two measurements of one call differ. Who contradicts several calls is the one that is wrong; of two that
  contradict each other alone, both are unlikely.

Source of the score: Iglewicz and Hoaglin, How to Detect and Handle Outliers (ASQC, 1993). Residuals are divided by the
standard deviations that the interpolation gives them, since calls far from all others are known less; of few costs, one
that is wrong changes lengths and scatter itself, so that it is left out of both (externally studentized).

Letters of shapes: N calls of a family, F sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

import numpy as np

from graph.calls import CostPhase, LocalCall
from graph.compiled_calls import COMPILED
from graph.topology import DeviceKind
from profiler.estimate import CallFamily, Observation, family_of, roofline_s, sizes_of, work_of
from profiler.interpolation import Interpolation

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

# Of two measurements of one call, the later takes less than so much more or less than the first in 99 cases of 100
# (docs/profiler.md, How well it repeats).
REPEATABILITY = log(1.16)
MODIFIED_Z = 3.5
# The median of absolute values, in standard deviations of a normal distribution.
MEDIAN_DEVIATION = 0.6745
# Fewer costs than these have no scatter to compare with.
FEWEST_COSTS = 4
# One cost of so many changes lengths and scatter hardly, and is left out of its own prediction only.
MANY_COSTS = 60
# Work grows with the third power of the calls: more are taken in several parts, each spread over the whole family.
MOST_COSTS = 400


@dataclass(frozen=True, slots=True)
class UnlikelyCost:
    """A measured time that others of its family make unlikely, the time that they say, and the calls most like it.

    `others`: digests of all other calls of the family, the nearest in work and sizes first.
    """

    call: LocalCall
    phase: CostPhase
    time_s: float
    expected_s: float
    others: tuple[str, ...]

    @property
    def factor(self) -> float:
        """The time as a multiple of the expected one."""
        return self.time_s / self.expected_s


@dataclass(slots=True)
class Interpolated:
    """What was computed from a family's costs, which is asked for again until one of them changes.

    whole: the interpolation of each part. without: of each index of each part what `_without` returned.
    """

    whole: dict[int, Interpolation] = field(default_factory=dict)
    without: dict[tuple[int, int], tuple[float, float, float]] = field(default_factory=dict)


class CostFamilies:
    """The measured costs of one device kind by family; a later cost of the same call and phase replaces the earlier."""

    def __init__(self, kind: DeviceKind, observations: Iterable[Observation] = ()) -> None:
        self._kind = kind
        self._families: dict[CallFamily, dict[str, Observation]] = {}
        self._interpolated: dict[CallFamily, Interpolated] = {}
        for observation in observations:
            self.put(observation)

    def put(self, observation: Observation) -> None:
        """Add a cost, or replace it. One of zero seconds says nothing, and one of a compiled call nothing of others."""
        if observation.time_s > 0 and observation.call.target != COMPILED:
            name = family_of(observation.call, observation.phase)
            family = self._families.setdefault(name, {})
            if family.get(observation.call.digest) != observation:
                family[observation.call.digest] = observation
                self._interpolated.pop(name, None)

    def call(self, digest: str) -> LocalCall:
        """Return the call with this digest; raises KeyError where it is not among them."""
        for family in self._families.values():
            if digest in family:
                return family[digest].call
        raise KeyError(digest)

    def unlikely(self, among: Collection[str], trusted: Collection[str] = ()) -> list[UnlikelyCost]:
        """Return the unlikely costs of the calls with these digests, and of those that contradict them in order.

        By family in the order of their first costs, then by digest; a call may be named once a phase. Costs of
        `trusted` calls are not unlikely: where one is out of order, the others are wrong.
        """
        asked, true = frozenset(among), frozenset(trusted)
        unlikely: list[UnlikelyCost] = []
        for name, family in self._families.items():
            if not asked.isdisjoint(family):
                interpolated = self._interpolated.setdefault(name, Interpolated())
                unlikely += self._unlikely_of(family, asked, true, interpolated)
        return unlikely

    def _unlikely_of(
        self,
        family: dict[str, Observation],
        asked: frozenset[str],
        true: frozenset[str],
        interpolated: Interpolated,
    ) -> list[UnlikelyCost]:
        # Sorted by sizes, so that parts are spread, and nothing depends on the order of measuring.
        sizes = {name: sizes_of(entry.call, entry.phase) for name, entry in family.items()}
        names = sorted(family, key=lambda name: (sizes[name], name))
        costs = [family[name] for name in names]
        points_NF = np.array([sizes[name] for name in names])
        times_N = np.log([entry.time_s for entry in costs])
        bounds_N = np.log([roofline_s(work_of(entry.call, entry.phase), self._kind) for entry in costs])
        is_asked_N: Mask = np.array([name in asked for name in names])
        is_true_N: Mask = np.array([name in true for name in names])
        contradicted = out_of_order(points_NF, times_N, is_asked_N, is_true_N)
        far = far_from_family(points_NF, times_N - bounds_N, is_asked_N & ~is_true_N, interpolated)
        unlikely = []
        for index in sorted({*contradicted, *far}, key=names.__getitem__):
            if index in far:
                expected = far[index] + float(bounds_N[index])
            else:
                # They bound its time: what most of them say.
                expected = float(np.median(times_N[contradicted[index]]))
            distances_N = np.abs(points_NF - points_NF[index]).sum(1)
            others = tuple(names[other] for other in distances_N.argsort(kind="stable") if other != index)
            entry = costs[index]
            unlikely.append(UnlikelyCost(entry.call, entry.phase, entry.time_s, exp(expected), others))
        return unlikely


def out_of_order(points_NF: Array, times_N: Array, is_asked_N: Mask, is_true_N: Mask) -> dict[int, list[int]]:
    """Return the indexes of calls that are out of order, and of those that each contradicts, largest excess first.

    Two calls contradict each other where one is at least as large in every feature, and larger in one, and its
    logarithm of seconds is less by more than `REPEATABILITY`. Only pairs with a call that was asked for count, and not
    those of two true ones.
    """
    contradictions: dict[int, dict[int, float]] = {}
    for index in np.flatnonzero(is_asked_N).tolist():
        excess_N = times_N - times_N[index]
        for sign in (1, -1):
            # Those that took clearly longer and are no larger; then the other way round.
            others = np.flatnonzero(sign * excess_N > REPEATABILITY)
            larger_by = sign * (points_NF[index] - points_NF[others])
            for other in others[(larger_by >= 0).all(1) & (larger_by > 0).any(1)].tolist():
                excess = abs(float(excess_N[other]))
                if not (is_true_N[index] and is_true_N[other]):
                    contradictions.setdefault(index, {})[other] = excess
                    contradictions.setdefault(other, {})[index] = excess
    return _explained(contradictions, set(np.flatnonzero(is_true_N).tolist()))


def _explained(contradictions: dict[int, dict[int, float]], true: set[int]) -> dict[int, list[int]]:
    """Return calls that explain all contradictions: those that contradict a true one, then the one in most of the rest,
    without these the next, and so on. Of a pair that is left alone, both.
    """
    wrong: dict[int, list[int]] = {}
    while contradictions:
        worst = max(
            contradictions.keys() - true,
            key=lambda index: (
                not true.isdisjoint(contradictions[index]),
                len(contradictions[index]),
                sum(contradictions[index].values()),
                -index,
            ),
        )
        excesses = contradictions.pop(worst)
        partners = sorted(excesses, key=lambda index: (-excesses[index], index))
        wrong[worst] = partners
        if len(partners) == 1 and partners[0] not in true:
            wrong[partners[0]] = [worst]
        for partner in partners:
            del contradictions[partner][worst]
            if not contradictions[partner]:
                del contradictions[partner]
    return wrong


def far_from_family(
    points_NF: Array, values_N: Array, is_asked_N: Mask, interpolated: Interpolated | None = None
) -> dict[int, float]:
    """Return the indexes of asked values that are far from those expected by the others, with the expected values.

    `interpolated` has what an earlier call computed from the same points and values, and gets the rest.
    """
    known = Interpolated() if interpolated is None else interpolated
    parts = -(-len(values_N) // MOST_COSTS)
    expected_values: dict[int, float] = {}
    for part in range(parts):
        indexes = np.arange(part, len(values_N), parts)
        if len(indexes) < FEWEST_COSTS or not is_asked_N[indexes].any():
            continue
        points, values = points_NF[indexes], values_N[indexes]
        if part not in known.whole:
            known.whole[part] = Interpolation.fit(points.tolist(), values.tolist())
        interpolation = known.whole[part]
        is_suspect = is_asked_N[indexes] & np.asarray(np.abs(values - interpolation.left_out) > REPEATABILITY)
        scores = (values - interpolation.left_out) / interpolation.left_out_deviations
        scatter = float(np.median(np.abs(scores)))
        for index in np.flatnonzero(is_suspect).tolist():
            expected = float(interpolation.left_out[index])
            score, of_others = float(scores[index]), scatter
            if len(values) < MANY_COSTS:
                if (part, index) not in known.without:
                    known.without[part, index] = _without(index, points, values)
                expected, score, of_others = known.without[part, index]
            is_far = abs(values[index] - expected) > REPEATABILITY
            if is_far and MEDIAN_DEVIATION * abs(score) > MODIFIED_Z * of_others:
                expected_values[int(indexes[index])] = expected
    return expected_values


def _without(index: int, points: Array, values: Array) -> tuple[float, float, float]:
    """Return the others' prediction at a point, the score of its value, and the others' median score."""
    others, others_values = np.delete(points, index, 0), np.delete(values, index)
    interpolation = Interpolation.fit(others.tolist(), others_values.tolist())
    expected = interpolation.at(points[index].tolist())
    score = (float(values[index]) - expected) / interpolation.deviation_at(points[index].tolist())
    scores = (others_values - interpolation.left_out) / interpolation.left_out_deviations
    return expected, score, float(np.median(np.abs(scores)))
