"""Transposed convolutions of one to three spatial dims, grouped or not."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from graph import intervals
from graph.axes import AxisKind, Dim, DimFactor, IterationSpace, whole
from graph.calls import LocalCall
from graph.operators import Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    axis_of,
    joined,
    local_call,
    owns_additions,
    slot_of,
    whole_space,
)
from graph.rules.windows import SPATIAL_NAMES, Padding, repeat, window_reaches


class TransposedConvolutionRule(BaseRule):
    """aten.conv_transposeNd(input [N, C, ...], weight [C, O / groups, ...], bias [O]).

    Axes: sample, group, channel (outputs of one group), spatial blocks, in (inputs of one group, a reduction). A block
    is `stride` neighbouring output positions: input i adds to outputs i * stride - padding + k * dilation, so that
    blocks a..b need an interval of inputs whose ends move with a and b by one. A spatial part runs without padding,
    and is cut (or filled with the bias) to its positions. Over a split of `in` the part that starts at 0 adds the bias.
    """

    # Backward, the forward's operations once for the data and once for the weight gradient.
    factors = slice(0, 2)

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial

    def _geometry(self, signature: Signature) -> list[tuple[int, int, int]]:
        """Return stride, padding and reach of each spatial dim."""
        strides = repeat(signature.argument("stride"), self.spatial)
        paddings = repeat(signature.argument("padding"), self.spatial)
        reaches = window_reaches(signature.inputs[1].shape[2:], signature.argument("dilation"), self.spatial)
        return list(zip(strides, paddings, reaches, strict=True))

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes; a single image without batch dim runs whole."""
        image, weight = signature.inputs[0].shape, signature.inputs[1].shape
        result = signature.outputs[0].shape
        if len(image) != self.spatial + 2:
            return whole_space(signature)
        groups = signature.argument("groups")
        builder = SpaceBuilder()
        sample = builder.add("sample", image[0], AxisKind.SAMPLE)
        group = builder.add("group", groups, AxisKind.PARAMETER)
        channel = builder.add("channel", weight[1], AxisKind.PARAMETER)
        blocks = [
            _block_dims(builder, name, image[2 + index], result[2 + index], *geometry)
            for index, (name, geometry) in enumerate(
                zip(SPATIAL_NAMES[self.spatial], self._geometry(signature), strict=True)
            )
        ]
        reduction = builder.add("in", weight[0] // groups, AxisKind.REDUCTION)
        outputs, sources = joined(group, channel), joined(group, reduction)
        # The weight's first dim is (group, in) and its second is one group's outputs.
        inputs = [
            (sample, sources, *(read for read, _ in blocks)),
            (sources, channel, *(whole(size) for size in weight[2:])),
        ]
        if slot_of(signature, "bias") is not None:
            inputs.append((outputs,))
        return builder.space(inputs, [(sample, outputs, *(made for _, made in blocks))])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the plain call for whole spatial dims, else the custom one with the numbers to cut off at each end."""
        if len(part.inputs[0]) != self.spatial + 2:
            return local_call(signature, part, gradients)
        result = intervals.shape(part.outputs[0])
        weight = intervals.shape(part.inputs[1])
        replace: dict[str, Argument] = {"groups": result[1] // weight[1]}
        if not owns_additions(part):
            replace["bias"] = None
        if result[2:] == signature.outputs[0].shape[2:]:
            return local_call(signature, part, gradients, replace=replace)
        cuts = tuple(
            _cut(part.inputs[0][2 + index], part.outputs[0][2 + index], *geometry)
            for index, geometry in enumerate(self._geometry(signature))
        )
        replace |= {"padding": cuts, "output_padding": 0}
        target = f"soapstone.conv_transpose{self.spatial}d"
        return local_call(signature, part, gradients, target=target, replace=replace)

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each input element and each weight of its channel."""
        return 2.0 * call.inputs[0].elements * prod(call.inputs[1].shape[1:])


def _block_dims(
    builder: SpaceBuilder, name: str, size: int, positions: int, stride: int, padding: int, reach: int
) -> tuple[Dim, Dim]:
    """Add the axis of blocks of `stride` outputs; return the dim of inputs that they need, and that of outputs.

    Where so much is cut off that some inputs reach no output at all, the dim stays whole.
    """
    if padding >= reach:
        return whole(size), whole(positions)
    block = builder.add(name, ceil(positions / stride), AxisKind.ATTRIBUTE)
    axis = axis_of(block)
    if axis is None:
        return whole(size), whole(positions)
    # The first input that reaches a block's first output, and the last one that reaches its last.
    first = -((reach - 1 - padding) // stride)
    last = (stride - 1 + padding) // stride
    return (DimFactor(size, axis, first, 1, last - first + 1),), (
        DimFactor(positions, axis, 0, stride, stride),
    )


def _cut(
    read: intervals.IndexSet, made: intervals.IndexSet, stride: int, padding: int, reach: int
) -> Padding:
    """Return how many positions to add before and after an unpadded result; negative to cut off."""
    low, high = made[0][0], made[-1][1]
    if not read:
        return 0, high - low
    start = read[0][0] * stride - padding
    stop = (read[-1][1] - 1) * stride - padding + reach
    return start - low, high - stop


RULES: Mapping[str, BaseRule] = {
    target: TransposedConvolutionRule(spatial)
    for spatial, overload in ((1, "default"), (2, "input"), (3, "input"))
    for target in (f"aten.conv_transpose{spatial}d.{overload}", f"soapstone.conv_transpose{spatial}d")
}
