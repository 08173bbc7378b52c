"""Pooling over windows, and adaptive average pooling."""

from __future__ import annotations

from collections.abc import Mapping

from graph import intervals
from graph.axes import AxisKind, Dim, DimFactor, IterationSpace, whole
from graph.calls import LocalCall
from graph.operators import Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, argument_or, axis_of, elements, local_call, whole_space
from graph.rules.windows import (
    SPATIAL_NAMES,
    local_padding,
    repeat,
    symmetric_padding,
    window_dim,
    window_reaches,
)


class PoolingRule(BaseRule):
    """aten.max_poolNd and aten.avg_poolNd on [N, C, ...].

    A last, shorter window, which `ceil_mode` adds, is one over more padding. Only an average that divides by the size
    of such a window, padding included, then differs: its spatial dims are not split.
    """

    by_size = True

    def __init__(self, name: str, spatial: int) -> None:
        self.name = name
        self.spatial = spatial

    def _geometry(self, signature: Signature) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return strides, paddings and reaches."""
        kernel = repeat(signature.argument("kernel_size"), self.spatial)
        stride = signature.argument("stride")
        strides = kernel if stride in ((), None) else repeat(stride, self.spatial)
        reaches = window_reaches(kernel, argument_or(signature, "dilation", 1), self.spatial)
        return strides, repeat(signature.argument("padding"), self.spatial), reaches

    def _shorter_last_window(self, signature: Signature) -> bool:
        strides, paddings, reaches = self._geometry(signature)
        image, result = (
            signature.inputs[0].shape[-self.spatial :],
            signature.outputs[0].shape[-self.spatial :],
        )
        return any(
            count != (size + 2 * padding - reach) // stride + 1
            for size, count, stride, padding, reach in zip(
                image, result, strides, paddings, reaches, strict=True
            )
        )

    def _own_divisor(self, signature: Signature) -> bool:
        """True where a shorter last window is divided by its own size, padding included."""
        counts = argument_or(signature, "count_include_pad", default=False)
        has_divisor = argument_or(signature, "divisor_override", None) is not None
        return bool(counts) and not has_divisor and self._shorter_last_window(signature)

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Say where `ceil_mode` keeps the spatial dims whole."""
        if self._own_divisor(signature):
            return "spatial dims are whole: ceil_mode adds a shorter last window, averaged with its padding"
        return None

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a dim; spatial input dims are windows on their output positions."""
        image, result = signature.inputs[0].shape, signature.outputs[0].shape
        if len(image) != self.spatial + 2:
            return whole_space(signature)
        builder = SpaceBuilder()
        sample = builder.add("sample", image[0], AxisKind.SAMPLE)
        channel = builder.add("channel", image[1], AxisKind.ATTRIBUTE)
        strides, paddings, reaches = self._geometry(signature)
        fixed = self._own_divisor(signature)
        inputs: list[Dim] = [sample, channel]
        outputs: list[Dim] = [sample, channel]
        for index, name in enumerate(SPATIAL_NAMES[self.spatial]):
            size, positions = image[2 + index], result[2 + index]
            if fixed:
                window, position = whole(size), whole(positions)
            else:
                end = (positions - 1) * strides[index] - paddings[index] + reaches[index]
                window, position = window_dim(
                    builder,
                    name,
                    size,
                    positions,
                    before=paddings[index],
                    after=max(paddings[index], end - size),
                    stride=strides[index],
                    reach=reaches[index],
                )
            inputs.append(window)
            outputs.append(position)
        return builder.space([tuple(inputs)], [tuple(outputs)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the plain pooling where symmetric padding does, else the custom one with a pair a dim."""
        if len(part.inputs[0]) != self.spatial + 2 or part.outputs[0][2:] == intervals.full_region(
            signature.outputs[0].shape[2:]
        ):
            return local_call(signature, part, gradients)
        strides, _, reaches = self._geometry(signature)
        pairs = tuple(local_padding(part, 0, 2 + index) for index in range(self.spatial))
        symmetric = symmetric_padding(
            pairs, intervals.shape(part.inputs[0])[2:], intervals.shape(part.outputs[0])[2:], strides, reaches
        )
        name = f"{self.name}{self.spatial}d"
        return local_call(
            signature,
            part,
            gradients,
            target=f"soapstone.{name}" if symmetric is None else f"aten.{name}.default",
            replace={"padding": pairs if symmetric is None else symmetric, "ceil_mode": False},
        )

    def flops(self, call: LocalCall) -> float:
        """Return one operation for each element of each window."""
        kernel = repeat(call.argument("kernel_size"), self.spatial)
        return float(call.outputs[0].elements * elements(kernel))

    def backward_flops(self, call: LocalCall) -> float:
        """Return as many operations as the forward for averages, one an output for maxima."""
        if not any(call.gradients):
            return 0.0
        return self.flops(call) if self.name == "avg_pool" else float(call.outputs[0].elements)


class AdaptiveAveragePoolingRule(BaseRule):
    """aten.adaptive_avg_poolNd. A spatial dim splits where the input size is a multiple of the output size."""

    by_size = True
    flops_per_input = 1.0

    def __init__(self, spatial: int) -> None:
        self.spatial = spatial

    def _irregular(self, signature: Signature) -> bool:
        image, result = (
            signature.inputs[0].shape[-self.spatial :],
            signature.outputs[0].shape[-self.spatial :],
        )
        return any(count > 1 and size % count != 0 for size, count in zip(image, result, strict=True))

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Say where windows of unequal sizes keep a spatial dim whole."""
        if self._irregular(signature):
            return "spatial dims are whole where the output size does not divide the input size"
        return None

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a dim; windows are disjoint and of equal size."""
        image, result = signature.inputs[0].shape, signature.outputs[0].shape
        builder = SpaceBuilder()
        leading = len(image) - self.spatial
        names = ("sample", "channel") if leading == 2 else ("channel",)
        inputs = [
            builder.add(name, size, AxisKind.SAMPLE if name == "sample" else AxisKind.ATTRIBUTE)
            for name, size in zip(names, image, strict=False)
        ]
        outputs = list(inputs)
        for index, name in enumerate(SPATIAL_NAMES[self.spatial]):
            size, positions = image[leading + index], result[leading + index]
            window, position = whole(size), whole(positions)
            if positions > 1 and size % positions == 0:
                position = builder.add(name, positions, AxisKind.ATTRIBUTE)
                window = (DimFactor(size, axis_of(position), 0, size // positions, size // positions),)
            inputs.append(window)
            outputs.append(position)
        return builder.space([tuple(inputs)], [tuple(outputs)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the pooling to the local output size."""
        size: Argument = intervals.shape(part.outputs[0])[-self.spatial :]
        return local_call(signature, part, gradients, replace={"output_size": size})


RULES: Mapping[str, BaseRule] = {
    f"aten.adaptive_avg_pool{spatial}d.default": AdaptiveAveragePoolingRule(spatial) for spatial in (1, 2, 3)
} | {
    target: PoolingRule(name, spatial)
    for name in ("max_pool", "avg_pool")
    for spatial in (1, 2, 3)
    for target in (f"aten.{name}{spatial}d.default", f"soapstone.{name}{spatial}d")
}
