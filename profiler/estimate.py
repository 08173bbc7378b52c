"""Estimates for costs that nobody measured: a roofline over data-sheet values, corrected by what was measured.

A call takes as long as the slower of its arithmetic and its memory traffic, at the rates that libraries commonly reach
of the data sheet's peaks. Two origins, never mixed up: "datasheet" rests on no measurement at all; "estimated" is the
roofline times the median ratio that the measured calls of the same operator type and phase have on that device kind.

Source of the roofline: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Literal, Self

from graph.calls import LocalCall
from graph.errors import CostError
from graph.operators import FLOATING
from graph.topology import DeviceKind
from profiler.measure import Phase, phases
from profiler.updates import is_update, update_bytes, update_flops

Origin = Literal["estimated", "datasheet"]

# Shares of the data-sheet peaks that well-tuned libraries commonly reach. Assumptions: measuring replaces them.
ARITHMETIC_EFFICIENCY = 0.6
MEMORY_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True)
class Work:
    """What one phase of a call has to do: floating-point operations, bytes to move, and in which precision."""

    flops: float
    size_bytes: float
    precision: str = "float32"


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time of one phase of one call; which statistic it is, is the caller's choice."""

    call: LocalCall
    phase: Phase
    time_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated time, and on how many measurements its correction rests (0 from a data sheet)."""

    time_s: float
    origin: Origin
    observations: int


def roofline_s(
    work: Work,
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
def work_of(call: LocalCall, phase: Phase) -> Work:
    """Return the work of one phase of `call`.

    A backward reads what the forward reads and the gradients of its outputs, and writes the gradients of its inputs.

    Raises:
        CostError: the call has no such phase.
    """
    if phase not in phases(call):
        raise CostError(f"{call.target}: has no phase {phase}, must be one of {', '.join(phases(call))}")
    precision = next(
        (spec.dtype for spec in (*call.outputs, *call.inputs) if spec.dtype in FLOATING), "float32"
    )
    if is_update(call):
        return Work(update_flops(call), update_bytes(call), precision)
    from graph import rules

    if phase == "forward":
        return Work(rules.flops(call), rules.bytes_moved(call), precision)
    written = sum(spec.size_bytes for spec, wanted in zip(call.inputs, call.gradients, strict=True) if wanted)
    return Work(rules.backward_flops(call), rules.bytes_moved(call) + written, precision)


def estimate(call: LocalCall, kind: DeviceKind) -> tuple[float, float]:
    """Return the data-sheet estimates of a call's forward and backward, in seconds; origin "datasheet".

    A phase that the call does not have takes 0 s. An optimizer update stands as a forward.
    """
    times: dict[Phase, float] = {phase: roofline_s(work_of(call, phase), kind) for phase in phases(call)}
    return times.get("update", times.get("forward", 0.0)), times.get("backward", 0.0)


@dataclass(frozen=True)
class Estimator:
    """Estimates for one device kind, corrected by its measurements.

    `ratios`: by (operator type, phase), and by ("", phase) over all types, the median of measured over roofline time
    and the number of measurements behind it.
    """

    kind: DeviceKind
    ratios: dict[tuple[str, Phase], tuple[float, int]]

    @classmethod
    def fit(cls, kind: DeviceKind, observations: Iterable[Observation]) -> Self:
        """Return the estimator that rests on `observations`, whatever their order; without any, on the data sheet."""
        gathered: dict[tuple[str, Phase], list[float]] = {}
        for entry in observations:
            ratio = entry.time_s / roofline_s(work_of(entry.call, entry.phase), kind)
            gathered.setdefault((entry.call.target, entry.phase), []).append(ratio)
            if entry.phase != "update":
                gathered.setdefault(("", entry.phase), []).append(ratio)
        return cls(kind, {key: (median(gathered[key]), len(gathered[key])) for key in sorted(gathered)})

    def estimate(self, call: LocalCall, phase: Phase) -> Estimate:
        """Return the estimate for one phase of a call.

        From the measurements of its operator type; where there is none, from those of all types; else from the data
        sheet.

        Raises:
            CostError: the call has no such phase.
        """
        bound = roofline_s(work_of(call, phase), self.kind)
        ratio, count = self.ratios.get((call.target, phase)) or self.ratios.get(("", phase)) or (1.0, 0)
        return Estimate(bound * ratio, "estimated" if count else "datasheet", count)
