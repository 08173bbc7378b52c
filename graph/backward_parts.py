"""The two parts of a backward: the gradients of an operator's inputs, and those of its weights.

A stage before waits for the gradients of inputs, and nobody for those of weights until they are summed: the schedule
`zero-bubble` (`graph.schedule`) has them apart. An operator that reads weights and whose inputs have gradients is
divided; of one without weights the input part is all, of one whose inputs have no gradient the weight part. Each part
is a local call that differentiates fewer of its inputs, and so has a cost key of its own (`graph.calls`).

A weight counts where an operator reads it directly: an operator that reads a view of it is not divided. Neither is one
that computes both at once.

Source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from graph.calls import LocalCall
from graph.operators import Operator, OperatorGraph, ValueKind
from graph.rules.fused import FUSED

_AT_ONCE = frozenset({"soapstone.batch_norm", "soapstone.batch_norm_apply", FUSED})
"""Operators whose backward makes the gradients of inputs from those of weights, or is one compiled function.

In two parts it would take twice.
"""

Flags = tuple[bool, ...]


class BackwardParts(NamedTuple):
    """The input slots of an operator that each part of its backward differentiates."""

    inputs: Flags
    weights: Flags

    @property
    def has_weights(self) -> bool:
        """Whether there is a weight part."""
        return any(self.weights)

    @property
    def has_inputs(self) -> bool:
        """Whether there is an input part."""
        return any(self.inputs)


def backward_parts(graph: OperatorGraph, operator: Operator) -> BackwardParts:
    """Return the parts of an operator's backward."""
    wanted = graph.gradient_inputs(operator)
    if operator.target in _AT_ONCE or not graph.has_backward(operator):
        return BackwardParts(wanted, (False,) * len(wanted))
    weights = tuple(
        flag and graph.value_by_name[name].kind is ValueKind.WEIGHT
        for name, flag in zip(operator.inputs, wanted, strict=True)
    )
    return BackwardParts(
        tuple(flag and not weight for flag, weight in zip(wanted, weights, strict=True)), weights
    )


def parts_of_backward(graph: OperatorGraph, operator: Operator, call: LocalCall) -> tuple[LocalCall, ...]:
    """Return the calls of an operator's call that are asked for their costs beside it: parts that are not all of it."""
    parts = backward_parts(graph, operator)
    if not parts.has_weights:
        return ()
    calls = (part_of(call, slots) for slots in parts)
    return tuple(part for part in calls if part.has_backward and part.gradients != call.gradients)


def part_of(call: LocalCall, slots: Flags) -> LocalCall:
    """Return the call that differentiates those of a call's inputs alone that are in `slots`."""
    return replace(
        call,
        gradients=tuple(flag and chosen for flag, chosen in zip(call.gradients, slots, strict=True)),
    )
