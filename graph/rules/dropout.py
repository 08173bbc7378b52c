"""Random draws that are the same on any split: soapstone.dropout(input; p), soapstone.random(distribution, size).

An element's draw is a function of (seed, step, operator, global position), so a part needs to know where its elements
stand in the whole tensor: `bindings` carry its region and the whole shape. They change no cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph import intervals
from graph.calls import LocalCall
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, local_call
from graph.rules.generic import FactoryRule, PointwiseRule


class DropoutRule(PointwiseRule):
    """soapstone.dropout(input; p): pointwise, with global positions bound."""

    # Of the counter-based generator, about.
    flops_per_output = 20.0
    backward_flops_per_output = 1.0

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call with its region and the whole shape bound."""
        return local_call(signature, part, gradients, bindings=_positions(signature, part))


class RandomRule(FactoryRule):
    """soapstone.random(distribution, size, dtype): a factory, with global positions bound."""

    computes_nothing = False
    # Of the generator and of a distribution, about.
    flops_per_output = 40.0

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call with the local size, its region and the whole shape bound."""
        return local_call(
            signature,
            part,
            gradients,
            replace={"size": intervals.shape(part.outputs[0])},
            bindings=_positions(signature, part),
        )


def _positions(signature: Signature, part: TaskPart) -> tuple[tuple[str, Any], ...]:
    return ("region", part.outputs[0]), ("shape", signature.outputs[0].shape)


RULES: Mapping[str, BaseRule] = {"soapstone.dropout": DropoutRule(), "soapstone.random": RandomRule()}
