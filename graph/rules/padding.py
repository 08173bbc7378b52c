"""Padding with a constant, and ranges of numbers: a part of them depends on its offset."""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import Dim, DimFactor, IterationSpace
from graph.calls import LocalCall
from graph.intervals import count
from graph.operators import Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, argument_or, axis_of, local_call
from graph.rules.generic import DimwiseRule, FactoryRule, padded_dims


class PadRule(DimwiseRule):
    """aten.pad(self, pad, mode, value), aten.constant_pad_nd(self, pad, value).

    A constant's dims all split: a part holds its share of the input, which may be empty, and pads the rest. Other modes
    (reflect, circular) keep the padded dims whole.
    """

    computes_nothing = True

    def __init__(self) -> None:
        super().__init__(padded_dims, flops_per_input=0.0)

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim; the input follows it with an offset."""
        if argument_or(signature, "mode", "constant") != "constant":
            return super().space(signature)
        shape, result = signature.inputs[0].shape, signature.outputs[0].shape
        builder = SpaceBuilder()
        dims = activation_dims(builder, result)
        inputs: list[Dim] = []
        for dim, (before, after) in enumerate(_pairs(signature)):
            if before == after == 0:
                inputs.append(dims[dim])
            else:
                inputs.append((DimFactor(shape[dim], axis_of(dims[dim]), -before, 1, 1),))
        return builder.space([tuple(inputs)], [tuple(dims)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the padding that is left to do around the local input."""
        if argument_or(signature, "mode", "constant") != "constant":
            return super().localize(signature, part, gradients)
        pad: list[int] = []
        for (before, after), have, want in zip(
            _pairs(signature), part.inputs[0], part.outputs[0], strict=True
        ):
            missing = count(want) - count(have)
            start = want[0][0] if want else 0
            left = min(max(before - start, 0), missing) if before or after else 0
            pad = [left, missing - left, *pad]
        length = len(signature.argument("pad"))
        return local_call(signature, part, gradients, replace={"pad": tuple(pad[:length])})


def _pairs(signature: Signature) -> list[tuple[int, int]]:
    """Return the padding before and after each dim; the argument names them from the last dim on."""
    rank = len(signature.inputs[0].shape)
    pad: tuple[Argument, ...] = signature.argument("pad")
    pairs = [(pad[2 * position], pad[2 * position + 1]) for position in range(len(pad) // 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


class RangeRule(FactoryRule):
    """aten.arange(start, end, step): a part is soapstone.arange, told the indexes that it makes."""

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the numbers at the part's indexes."""
        (indexes,) = part.outputs[0]
        return LocalCall(
            target="soapstone.arange",
            arguments=(
                ("count", count(indexes)),
                ("start", signature.argument("start")),
                ("step", signature.argument("step")),
                ("dtype", signature.argument("dtype")),
            ),
            inputs=(),
            outputs=part.output_specs(signature),
            gradients=gradients,
            bindings=(("indexes", indexes),),
        )


RULES: Mapping[str, BaseRule] = {
    **dict.fromkeys(("aten.pad.default", "aten.constant_pad_nd.default"), PadRule()),
    **dict.fromkeys(("aten.arange.start_step", "soapstone.arange"), RangeRule()),
}
