"""Spans of a recorded step: intervals of a rank's time with their labels, and its communications. No torch here."""

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
    """A stretch of a rank's step, in nanoseconds from the rank's start of the step.

    host_ns: nanoseconds in which the host of a GPU issued the work of the span, in steps recorded asleep; else 0.
    """

    label: Label
    start_ns: int
    end_ns: int
    host_ns: int = 0


MESSAGE = "message"
"""The operation of a `TimedCommunication` that is no collective."""


@dataclass(frozen=True, slots=True)
class TimedCommunication:
    """A message or collective, beside what the rank does meanwhile, in nanoseconds from the rank's start of the step.

    operation: `MESSAGE`, or the kind of a collective. ranks: sender and receiver, or the members in ascending order.
    start_ns: when this rank had it started. end_ns: when it was done here; a sender does not see the end of its
    message, and has its start there.
    """

    operation: str
    ranks: tuple[int, ...]
    subject: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One rank's step. Spans, in order, fill it without a gap; communications are in the order of their starts.

    is_ahead: whether the device, of a step recorded asleep, slept until the host had issued the whole step.
    """

    spans: tuple[Span, ...]
    communications: tuple[TimedCommunication, ...] = ()
    is_ahead: bool = True


# By recorded step and rank.
RecordedSteps = tuple[tuple[tuple[Span, ...], ...], ...]
Communications = tuple[tuple[tuple[TimedCommunication, ...], ...], ...]
