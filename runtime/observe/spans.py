"""Spans of a recorded step: intervals of a rank's time with their labels. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

# Subjects of spans, as predictions name them too.
WEIGHTS = "weights"
WEIGHT_GRADIENTS = "all-reduces of weight gradients"
LATE_MESSAGES = "messages still under way"

KINDS = ("forward", "backward", "recompute", "update", "wait", "copy", "runtime")
"""Kinds of spans.

forward, backward: a task of an operator. recompute: its forward once more, in the backward. update: of weights.
wait: for a message or collective. copy: packing sent tensors, assembling received ones, starting messages. runtime:
autograd's own work between operators, releases, bookkeeping, and the recording itself.
"""


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a span: its kind, its operator or value, and a name for people."""

    kind: str
    subject: str
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a rank's step, in nanoseconds from the rank's start of the step."""

    label: Label
    start_ns: int
    end_ns: int


# By recorded step and rank: the spans of the rank, in order; they fill the rank's step without a gap.
Recorded = tuple[tuple[tuple[Span, ...], ...], ...]
