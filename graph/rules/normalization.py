"""Normalization over trailing dims, and over groups of channels."""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, Dim, IterationSpace, whole
from graph.calls import LocalCall
from graph.intervals import count
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    activation_dims,
    joined,
    local_call,
    slot_of,
    whole_operand,
    whole_space,
)


class LayerNormRule(BaseRule):
    """aten.layer_norm and aten.rms_norm: the normalized dims and the weights are whole, all others split."""

    inherits_names = True
    flops_per_input = 8.0
    backward_flops_per_input = 12.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a leading dim."""
        shape = signature.inputs[0].shape
        leading = len(shape) - len(signature.argument("normalized_shape"))
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape, frozenset(range(leading, len(shape))))
        weights = [whole_operand(spec) for spec in signature.inputs[1:]]
        return builder.space([tuple(dims), *weights], [tuple(dims)])


class GroupNormRule(BaseRule):
    """aten.group_norm(input [N, C, ...], num_groups, weight [C], bias [C]).

    Axes: sample, group (a parameter); channels are (group, channel of a group).
    """

    by_size = True
    flops_per_input = 8.0
    backward_flops_per_input = 12.0

    def space(self, signature: Signature) -> IterationSpace:
        shape = signature.inputs[0].shape
        groups = signature.argument("num_groups")
        builder = SpaceBuilder()
        sample: Dim = builder.add("sample", shape[0], AxisKind.SAMPLE)
        channels = joined(builder.add("group", groups, AxisKind.PARAMETER), whole(shape[1] // groups))
        image = (sample, channels, *(whole(size) for size in shape[2:]))
        return builder.space([image, *([(channels,)] * (len(signature.inputs) - 1))], [image])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call on the part's groups."""
        size = signature.inputs[0].shape[1] // signature.argument("num_groups")
        groups = count(part.inputs[0][1]) // size
        return local_call(signature, part, gradients, replace={"num_groups": groups})


class InstanceNormRule(GroupNormRule):
    """aten.instance_norm(input [N, C, ...], weight [C], bias [C], ...): samples and channels split.

    With running statistics, which it would update in place, it runs whole.
    """

    by_size = True

    def space(self, signature: Signature) -> IterationSpace:
        if self.unsplit_reason(signature) is not None:
            return whole_space(signature)
        shape = signature.inputs[0].shape
        builder = SpaceBuilder()
        sample: Dim = builder.add("sample", shape[0], AxisKind.SAMPLE)
        channel: Dim = builder.add("channel", shape[1], AxisKind.PARAMETER)
        image = (sample, channel, *(whole(size) for size in shape[2:]))
        return builder.space([image, *([(channel,)] * (len(signature.inputs) - 1))], [image])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call with unchanged arguments."""
        return local_call(signature, part, gradients)

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name running statistics."""
        if slot_of(signature, "running_mean") is not None:
            return "runs whole: it has running statistics"
        return None


RULES: Mapping[str, BaseRule] = {
    "aten.layer_norm.default": LayerNormRule(),
    "aten.rms_norm.default": LayerNormRule(),
    "aten.group_norm.default": GroupNormRule(),
    "aten.instance_norm.default": InstanceNormRule(),
}
