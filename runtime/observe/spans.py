"""What a recorded step consists of: spans of a rank's time, each for what the rank did in it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

# What several spans are about; predictions call it the same.
WEIGHTS = "weights"
WEIGHT_GRADIENTS = "all-reduces of weight gradients"
LATE_MESSAGES = "messages still under way"

KINDS = ("forward", "backward", "recompute", "update", "wait", "copy", "runtime")
"""Kinds of spans.

forward, backward: a task of an operator. recompute: its forward once more, in the backward. update: of weights.
wait: for something that comes from another rank. copy: packing what is sent, putting together what came, starting
messages. runtime: autograd's own work between operators, releases, bookkeeping, and the recording itself.
"""


@dataclass(frozen=True, slots=True)
class Label:
    """What a rank does: its kind, the operator or value that it is about, and a name for people."""

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
