"""Estimates of unmeasured costs: a roofline over data-sheet values, corrected by measurements.

A call takes as long as the slower of its arithmetic and its memory traffic, at the rates that libraries commonly reach
of the data sheet's peaks. Two origins, never mixed up: "datasheet" rests on no measurement at all; "estimated" is the
roofline times a ratio of measured to roofline time, interpolated between the measured calls of its family on that
device kind, or where the family has none, that of its operator type, or of all types. A family is an operator type, a
phase and all of its operands but their sizes (matrix products are one family whatever their dims); distances between
calls are differences of work and sizes, on a scale of doublings.

Source of the roofline: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log, log2
from statistics import median
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from graph import rules
from graph.calls import CostPhase, LocalCall
from graph.compiled_calls import COMPILED
from graph.errors import CostError
from graph.operators import FLOATING
from graph.topology import DeviceKind
from profiler.interpolation import Interpolation
from profiler.measure import phases
from profiler.products import PRODUCTS, matrices
from profiler.updates import is_update, update_bytes, update_flops

if TYPE_CHECKING:
    from graph.rules.least import LeastWork, WorkPhase

EstimateOrigin = Literal["estimated", "datasheet"]

# Shares of the data-sheet peaks that well-tuned libraries commonly reach. Assumptions: measuring replaces them.
ARITHMETIC_EFFICIENCY = 0.6
MEMORY_EFFICIENCY = 0.8

CallFamily = tuple[object, ...]
# log2 of work and sizes, and the logarithm of measured over roofline time.
Point = tuple[tuple[float, ...], float]


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """The work of one phase of a call: floating-point operations, bytes to move, and the precision."""

    flops: float
    size_bytes: float
    precision: str = "float32"


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time of one phase of one call, by a statistic of the caller's choice."""

    call: LocalCall
    phase: CostPhase
    time_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated time, and on how many measurements its correction rests (0 from a data sheet).

    `error`: the median relative error of estimates of the same family, each measurement left out; None where unknown.
    """

    time_s: float
    origin: EstimateOrigin
    observations: int
    error: float | None = None


def roofline_s(
    work: PhaseWork,
    kind: DeviceKind,
    *,
    arithmetic_efficiency: float = ARITHMETIC_EFFICIENCY,
    memory_efficiency: float = MEMORY_EFFICIENCY,
) -> float:
    """Return max(flops / peak, bytes / bandwidth) + launch latency, both peaks lowered by their efficiency.

    A precision that the kind has no peak for runs at the kind's float32 rate, else at its first one.
    """
    peaks = dict(kind.peak_flops)
    peak = peaks.get(work.precision) or peaks.get("float32") or kind.peak_flops[0][1]
    arithmetic_s = work.flops / (arithmetic_efficiency * peak)
    memory_s = work.size_bytes / (memory_efficiency * kind.memory_bandwidth_bytes_per_s)
    return max(arithmetic_s, memory_s) + kind.launch_latency_s


@lru_cache(maxsize=65536)
def work_of(call: LocalCall, phase: CostPhase) -> PhaseWork:
    """Return the work of one phase of `call`.

    A backward reads the operands of the forward and the gradients of its outputs, and writes the gradients of its
    inputs.

    Raises:
        CostError: the call has no such phase.
    """
    if phase not in phases(call):
        raise CostError(f"{call.target}: has no phase {phase}, must be one of {', '.join(phases(call))}")
    precision = next(
        (spec.dtype for spec in (*call.outputs, *call.inputs) if spec.dtype in FLOATING), "float32"
    )
    if is_update(call):
        return PhaseWork(update_flops(call), update_bytes(call), precision)
    if phase == "forward":
        return PhaseWork(rules.flops(call), rules.bytes_moved(call), precision)
    written = sum(spec.size_bytes for spec, wanted in zip(call.inputs, call.gradients, strict=True) if wanted)
    return PhaseWork(rules.backward_flops(call), work_of(call, "forward").size_bytes + written, precision)


def estimate(call: LocalCall, kind: DeviceKind) -> tuple[float, float]:
    """Return the data-sheet estimates of a call's forward and backward, in seconds; origin "datasheet".

    A phase that the call does not have takes 0 s. An optimizer update stands as a forward.
    """
    times_s = [roofline_s(work_of(call, phase), kind) for phase in phases(call)]
    return times_s[0], times_s[1] if len(times_s) > 1 else 0.0


@dataclass(frozen=True)
class Estimator:
    """Estimates for one device kind, corrected by its measurements.

    `families`: the measured calls of each. `ratios`: by (operator type, phase), and by ("", phase) over all types, the
    logarithms of measured over roofline time, ascending.
    """

    kind: DeviceKind
    families: dict[CallFamily, tuple[Point, ...]]
    ratios: dict[tuple[str, CostPhase], tuple[float, ...]]
    _interpolations: dict[CallFamily, Interpolation] = field(default_factory=dict, compare=False, repr=False)
    _errors: dict[CallFamily, float | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def fit(cls, kind: DeviceKind, observations: Iterable[Observation]) -> Self:
        """Return the estimator that rests on `observations`, whatever their order; without any, on the data sheet."""
        families: dict[CallFamily, list[Point]] = {}
        ratios: dict[tuple[str, CostPhase], list[float]] = {}
        for entry in observations:
            # A compiled call is none that others may be taken for: of any two the parts are different ones.
            if entry.time_s <= 0 or entry.call.target == COMPILED:
                continue
            ratio = log(entry.time_s / roofline_s(work_of(entry.call, entry.phase), kind))
            point = (sizes_of(entry.call, entry.phase), ratio)
            families.setdefault(family_of(entry.call, entry.phase), []).append(point)
            ratios.setdefault((entry.call.target, entry.phase), []).append(ratio)
            if entry.phase != "update":
                ratios.setdefault(("", entry.phase), []).append(ratio)
        return cls(
            kind,
            {family: tuple(sorted(points)) for family, points in families.items()},
            {key: tuple(sorted(values)) for key, values in ratios.items()},
        )

    def estimate(self, call: LocalCall, phase: CostPhase) -> Estimate:
        """Return the estimate for one phase of a call.

        From the measurements of its family; where there is none, from the median of its operator type, then of
        all types; else from the data sheet.

        Raises:
            CostError: the call has no such phase.
        """
        bound = roofline_s(work_of(call, phase), self.kind)
        family = family_of(call, phase)
        if family in self.families:
            ratio = self._between(family).at(sizes_of(call, phase))
            return Estimate(
                bound * exp(ratio), "estimated", len(self.families[family]), self.error_of(family)
            )
        of_type = self.ratios.get((call.target, phase)) or self.ratios.get(("", phase))
        if of_type is None:
            return Estimate(bound, "datasheet", 0)
        middle = median(of_type)
        error = (
            median(abs(exp(middle - ratio_of_type) - 1) for ratio_of_type in of_type)
            if len(of_type) > 1
            else None
        )
        return Estimate(bound * exp(middle), "estimated", len(of_type), error)

    def least_s(self, call: LocalCall, phase: WorkPhase, work: LeastWork) -> float:
        """Return seconds that no calls into which `call` may be cut take together in one phase.

        Cut, an operator's calls are of its own type (whatever the overload; a product may become another), or of
        Soapstone's own. Each takes its roofline times a ratio that is at least the least one measured of these types,
        or a median over all types where one of them was never measured. Rooflines add up to at least that of their
        work together, with one launch.

        Args:
            call: the whole operator's.
            phase: that is asked for.
            work: the least work of all of them together.
        """
        of_types = [
            ratios
            for (target, of_phase), ratios in self.ratios.items()
            if of_phase == phase and may_become(call.target, target)
        ]
        medians = [median(of_all)] if (of_all := self.ratios.get(("", phase))) else [0.0]
        ratio = min([*(ratios[0] for ratios in of_types), *medians])
        precision = work_of(call, phase).precision
        return roofline_s(PhaseWork(work.flops, work.size_bytes, precision), self.kind) * exp(ratio)

    def error_of(self, family: CallFamily) -> float | None:
        """Return the median relative error of a family's estimates, each measurement left out; None of a single one."""
        if family not in self._errors:
            between = self._between(family)
            errors = np.abs(np.exp(between.left_out - between.values_N) - 1)
            self._errors[family] = float(np.median(errors)) if len(errors) > 1 else None
        return self._errors[family]

    def _between(self, family: CallFamily) -> Interpolation:
        interpolation = self._interpolations.get(family)
        if interpolation is None:
            points = self.families[family]
            interpolation = Interpolation.fit([sizes for sizes, _ in points], [ratio for _, ratio in points])
            self._interpolations[family] = interpolation
        return interpolation


# One part of a split product adds the summand, the others are plain products.
_WITHOUT_SUMMAND = {"aten.addmm": "aten.mm", "aten.baddbmm": "aten.bmm"}


def may_become(target: str, other: str) -> bool:
    """Return whether a part of an operator of one type may be a call of another."""
    if other.startswith("soapstone."):
        return True
    own_type, other_type = (".".join(name.split(".")[:2]) for name in (target, other))
    return other_type in (own_type, _WITHOUT_SUMMAND.get(own_type))


def family_of(call: LocalCall, phase: CostPhase) -> CallFamily:
    """Return the family of a call: the measurements of one family are interpolated over sizes."""
    if call.target in PRODUCTS:
        return (call.target, phase, call.warm, call.inputs[0].dtype)
    operands = tuple((spec.dtype, len(spec.shape)) for spec in (*call.inputs, *call.outputs))
    gradients = call.gradients if phase == "backward" else ()
    return (call.target, phase, call.warm, len(call.inputs), operands, gradients)


def sizes_of(call: LocalCall, phase: CostPhase) -> tuple[float, ...]:
    """Return, in doublings, a call's work, the elements of its operands, and their dims.

    Of a matrix product the matrices' sizes, however many leading dims make up the rows; and how many operands and
    gradients it has, a few doublings' worth of difference at most.
    """
    work = work_of(call, phase)
    if call.target in PRODUCTS:
        counts = (float(len(call.inputs)), float(sum(call.gradients)) if phase == "backward" else 0.0)
        return (*(log2(max(1.0, size)) for size in (work.flops, work.size_bytes, *matrices(call))), *counts)
    operands = (*call.inputs, *call.outputs)
    return tuple(
        log2(max(1.0, size))
        for size in (
            work.flops,
            work.size_bytes,
            *(spec.elements for spec in operands),
            *(size for spec in operands for size in spec.shape),
        )
    )
