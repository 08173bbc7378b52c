"""Convolutions of one to three spatial dims, grouped or not."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from graph import intervals
from graph.axes import AxisKind, Dim, IterationSpace, whole
from graph.calls import LocalCall
from graph.operators import Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    joined,
    local_call,
    owns_additions,
    slot_of,
    whole_space,
)
from graph.rules.windows import (
    SPATIAL_NAMES,
    Padding,
    local_padding,
    repeat,
    symmetric_padding,
    window_dim,
    window_reaches,
)


class ConvolutionRule(BaseRule):
    """aten.convNd(input [N, C, ...], weight [O, C / groups, ...], bias [O]).

    Axes: sample, group, channel (outputs of one group), spatial positions, in (inputs of one group, a reduction).
    A channel dim is (group, channel). Over a split of `in` the bias is added by the part that starts at 0; the
    others run without it, and their gradient of it is zero.
    """

    by_size = True
    # Backward, the forward's operations once for the data and once for the weight gradient.
    factors = slice(0, 2)

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial

    def _paddings(self, signature: Signature) -> tuple[Padding, ...]:
        padding = signature.argument("padding")
        if isinstance(padding, str):
            if padding == "valid":
                return ((0, 0),) * self.spatial
            totals = [reach - 1 for reach in self._reaches(signature)]
            return tuple((total // 2, total - total // 2) for total in totals)
        return tuple((size, size) for size in repeat(padding, self.spatial))

    def _reaches(self, signature: Signature) -> tuple[int, ...]:
        return window_reaches(signature.inputs[1].shape[2:], signature.argument("dilation"), self.spatial)

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes; a single image without batch dim runs whole."""
        image, weight = signature.inputs[0].shape, signature.inputs[1].shape
        if len(image) != self.spatial + 2:
            return whole_space(signature)
        groups = signature.argument("groups")
        builder = SpaceBuilder()
        sample = builder.add("sample", image[0], AxisKind.SAMPLE)
        group = builder.add("group", groups, AxisKind.PARAMETER)
        channel = builder.add("channel", weight[0] // groups, AxisKind.PARAMETER)
        windows: list[Dim] = []
        positions: list[Dim] = []
        strides = repeat(signature.argument("stride"), self.spatial)
        paddings, reaches = self._paddings(signature), self._reaches(signature)
        for index, name in enumerate(SPATIAL_NAMES[self.spatial]):
            window, position = window_dim(
                builder,
                name,
                image[2 + index],
                signature.outputs[0].shape[2 + index],
                before=paddings[index][0],
                after=paddings[index][1],
                stride=strides[index],
                reach=reaches[index],
            )
            windows.append(window)
            positions.append(position)
        reduction = builder.add("in", weight[1], AxisKind.REDUCTION)
        outputs = joined(group, channel)
        inputs = [
            (sample, joined(group, reduction), *windows),
            (outputs, reduction, *(whole(size) for size in weight[2:])),
        ]
        if slot_of(signature, "bias") is not None:
            inputs.append((outputs,))
        return builder.space(inputs, [(sample, outputs, *positions)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the plain convolution where symmetric padding does, else the custom one with a pair a dim."""
        if len(part.inputs[0]) != self.spatial + 2:
            return local_call(signature, part, gradients)
        image, weight = intervals.shape(part.inputs[0]), intervals.shape(part.inputs[1])
        paddings = tuple(local_padding(part, 0, 2 + index) for index in range(self.spatial))
        strides = repeat(signature.argument("stride"), self.spatial)
        symmetric = symmetric_padding(
            paddings, image[2:], intervals.shape(part.outputs[0])[2:], strides, self._reaches(signature)
        )
        replace: dict[str, Argument] = {"groups": image[1] // weight[1], "padding": symmetric or paddings}
        if not owns_additions(part):
            replace["bias"] = None
        name = f"conv{self.spatial}d"
        target = f"soapstone.{name}" if symmetric is None else f"aten.{name}.default"
        return local_call(signature, part, gradients, target=target, replace=replace)

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each output element and each weight of its channel, and the bias."""
        outputs = call.outputs[0].elements
        biased = slot_of(call, "bias") is not None
        return 2.0 * outputs * prod(call.inputs[1].shape[1:]) + (outputs if biased else 0)


RULES: Mapping[str, BaseRule] = {
    target: ConvolutionRule(spatial)
    for spatial in (1, 2, 3)
    for target in (
        f"aten.conv{spatial}d.default",
        f"aten.conv{spatial}d.padding",
        f"soapstone.conv{spatial}d",
    )
}
