"""Dropout that draws the same bits on any split: soapstone.dropout(input; p).

An element's draw is a function of (seed, step, operator, global position), so a part needs to know where its elements
stand in the whole tensor: `bindings` carry its region and the whole shape. They change no cost.
"""

from __future__ import annotations

from graph.calls import LocalCall
from graph.rules.base import Part, Signature
from graph.rules.common import local_call
from graph.rules.generic import PointwiseRule


class DropoutRule(PointwiseRule):
    """soapstone.dropout(input; p): pointwise, with global positions bound."""

    def localize(self, signature: Signature, part: Part, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call with its region and the whole shape bound."""
        return local_call(
            signature,
            part,
            gradients,
            bindings=(("region", part.outputs[0]), ("shape", signature.outputs[0].shape)),
        )

    def flops(self, call: LocalCall) -> float:
        """Return the operations of the counter-based generator, about twenty an element."""
        return 20.0 * call.outputs[0].elements

    def backward_flops(self, call: LocalCall) -> float:
        """Return one operation an element."""
        return float(call.outputs[0].elements) * sum(call.gradients)
