"""Matrix products: linear layers and batched products. A split contraction gives partial sums."""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, Dim, IterationSpace
from graph.calls import LocalCall
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    activation_dims,
    argument_or,
    broadcast_operand,
    local_call,
    owns_additions,
    slot_of,
    slots_in,
    whole_operand,
)


class LinearRule(BaseRule):
    """aten.linear(input [..., I], weight [O, I], bias [O]).

    Axes: the leading dims, channel (outputs), in (a reduction). Over a split of `in` the bias is added by the part
    that starts at 0; the others run without it, and their gradient of it is zero.
    """

    by_size = True
    # Backward, the forward's operations once for the data and once for the weight gradient.
    factors = slice(0, 2)

    def space(self, signature: Signature) -> IterationSpace:
        shape, weight = signature.inputs[0].shape, signature.inputs[1].shape
        builder = SpaceBuilder()
        leading = _leading(builder, shape)
        channel = builder.add("channel", weight[0], AxisKind.PARAMETER)
        reduction = builder.add("in", weight[1], AxisKind.REDUCTION)
        inputs = [(*leading, reduction), (channel, reduction)]
        if slot_of(signature, "bias") is not None:
            inputs.append((channel,))
        return builder.space(inputs, [(*leading, channel)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, without bias where another part adds it."""
        replace = {} if owns_additions(part) else {"bias": None}
        return local_call(signature, part, gradients, replace=replace)

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each output element and input feature, and the bias."""
        outputs = call.outputs[0].elements
        biased = slot_of(call, "bias") is not None
        return 2.0 * outputs * call.inputs[1].shape[1] + (outputs if biased else 0)


class MatrixProductRule(BaseRule):
    """aten.mm, aten.bmm and aten.matmul: [..., M, K] x [..., K, N]; leading dims broadcast.

    Axes: batch dims, row (M), in (K, a reduction), column (N). Vectors (matmul) lack row or column.
    """

    def space(self, signature: Signature) -> IterationSpace:
        left, right = (spec.shape for spec in signature.inputs)
        result = signature.outputs[0].shape
        builder = SpaceBuilder()
        has_row, has_column = len(left) > 1, len(right) > 1
        batch_shape = result[: len(result) - has_row - has_column]
        batch = activation_dims(builder, batch_shape) if batch_shape else []
        row: tuple[Dim, ...] = ()
        if has_row:
            first = not batch_shape
            kind = AxisKind.SAMPLE if first else AxisKind.ATTRIBUTE
            row = (builder.add("sample" if first else "row", left[-2], kind),)
        reduction = builder.add("in", left[-1], AxisKind.REDUCTION)
        column = (builder.add("column", right[-1], AxisKind.PARAMETER),) if has_column else ()
        left_batch = broadcast_operand(batch, left[:-2], batch_shape)
        right_batch = broadcast_operand(batch, right[:-2], batch_shape)
        return builder.space(
            [(*left_batch, *row, reduction), (*right_batch, reduction, *column)], [(*batch, *row, *column)]
        )

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each output element and contracted point."""
        first = slots_in(tuple(value for _, value in call.arguments))[0]
        return 2.0 * call.outputs[0].elements * call.inputs[first].shape[-1]


class AddedProductRule(BaseRule):
    """aten.addmm and aten.baddbmm: beta * self + alpha * (left x right); `self` broadcasts.

    Over a split of `in` the part that starts at 0 adds `self`; the others are plain products, which needs alpha 1:
    with another alpha the contraction is not split.
    """

    by_size = True
    factors = slice(1, 3)

    def space(self, signature: Signature) -> IterationSpace:
        added, left, right = (spec.shape for spec in signature.inputs)
        result = signature.outputs[0].shape
        builder = SpaceBuilder()
        batch = [builder.add("sample", result[0], AxisKind.SAMPLE)] if len(result) == 3 else []
        kind = AxisKind.ATTRIBUTE if batch else AxisKind.SAMPLE
        row = builder.add("row" if batch else "sample", left[-2], kind)
        reduction = whole_operand(signature.inputs[1])[-1]
        if argument_or(signature, "alpha", 1) == 1:
            reduction = builder.add("in", left[-1], AxisKind.REDUCTION)
        column = builder.add("column", right[-1], AxisKind.PARAMETER)
        output = (*batch, row, column)
        return builder.space(
            [broadcast_operand(output, added, result), (*batch, row, reduction), (*batch, reduction, column)],
            [output],
        )

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, or the product alone where another part adds `self`."""
        if owns_additions(part):
            return local_call(signature, part, gradients)
        batched = len(part.outputs[0]) == 3
        left, right = ("batch1", "batch2") if batched else ("mat1", "mat2")
        product = Signature(
            "aten.bmm.default" if batched else "aten.mm.default",
            (("self", signature.argument(left)), ("mat2", signature.argument(right))),
            signature.inputs,
            signature.outputs,
        )
        return local_call(product, part, gradients)

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each output element and contracted point, and the addition."""
        return call.outputs[0].elements * (2.0 * call.inputs[1].shape[-1] + 1)


def _leading(builder: SpaceBuilder, shape: tuple[int, ...]) -> list[Dim]:
    names = {1: ("sample",), 2: ("sample", "length")}.get(len(shape) - 1)
    return [
        builder.add(
            names[dim] if names else ("sample" if dim == 0 else f"dim{dim}"),
            size,
            AxisKind.SAMPLE if dim == 0 else AxisKind.ATTRIBUTE,
        )
        for dim, size in enumerate(shape[:-1])
    ]


RULES: Mapping[str, BaseRule] = {
    "aten.linear.default": LinearRule(),
    **dict.fromkeys(
        ("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default", "aten.dot.default"),
        MatrixProductRule(),
    ),
    **dict.fromkeys(("aten.addmm.default", "aten.baddbmm.default"), AddedProductRule()),
}
