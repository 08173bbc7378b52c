"""Normalization over trailing dims, and over groups of channels."""

from __future__ import annotations

from graph.axes import AxisKind, Dim, IterationSpace, whole
from graph.calls import LocalCall
from graph.rules.base import Signature
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, whole_operand


class LayerNormRule(BaseRule):
    """aten.layer_norm and aten.rms_norm: the normalized dims and the weights are whole, all others split."""

    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a leading dim."""
        shape = signature.inputs[0].shape
        leading = len(shape) - len(signature.argument("normalized_shape"))
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape, frozenset(range(leading, len(shape))))
        weights = [whole_operand(spec) for spec in signature.inputs[1:]]
        return builder.space([tuple(dims), *weights], [tuple(dims)])

    def flops(self, call: LocalCall) -> float:
        """Return eight operations an element."""
        return 8.0 * call.inputs[0].elements

    def backward_flops(self, call: LocalCall) -> float:
        """Return twelve operations an element."""
        return 12.0 * call.inputs[0].elements if any(call.gradients) else 0.0


class GroupNormRule(BaseRule):
    """aten.group_norm(input [N, C, ...], num_groups, weight [C], bias [C]): samples split, all else is whole."""

    def space(self, signature: Signature) -> IterationSpace:
        """Return the sample axis."""
        shape = signature.inputs[0].shape
        builder = SpaceBuilder()
        sample: Dim = builder.add("sample", shape[0], AxisKind.SAMPLE)
        image = (sample, *(whole(size) for size in shape[1:]))
        return builder.space([image, *(whole_operand(spec) for spec in signature.inputs[1:])], [image])

    def flops(self, call: LocalCall) -> float:
        """Return eight operations an element."""
        return 8.0 * call.inputs[0].elements
