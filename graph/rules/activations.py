"""Activations that are not quite pointwise: a trained slope a channel, and gates that pair two halves of a dim."""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import IterationSpace, whole
from graph.rules.base import Signature
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, positive


class SlopeRule(BaseRule):
    """aten.prelu(self [N, C, ...], weight [C] or [1])."""

    inherits_names = True
    backward_flops_per_output = 2.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a dim; slopes follow the channels."""
        shape, slopes = signature.inputs[0].shape, signature.inputs[1].shape
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape)
        weight = dims[1] if len(shape) > 1 and slopes == shape[1:2] else whole(slopes[0]) if slopes else None
        return builder.space([tuple(dims), () if weight is None else (weight,)], [tuple(dims)])


class GatedRule(BaseRule):
    """aten.glu(self, dim): the first half of a dim times the sigmoid of the second; the dim is (2, half)."""

    # An exponential and a few operations.
    flops_per_output = 10.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim."""
        result = signature.outputs[0].shape
        dim = positive(signature.argument("dim"), len(result))
        builder = SpaceBuilder()
        dims = activation_dims(builder, result)
        halves = (*whole(2), *dims[dim])
        return builder.space([(*dims[:dim], halves, *dims[dim + 1 :])], [tuple(dims)])


RULES: Mapping[str, BaseRule] = {"aten.prelu.default": SlopeRule(), "aten.glu.default": GatedRule()}
