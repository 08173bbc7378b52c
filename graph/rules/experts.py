"""Mixtures of experts: products by groups of rows, and counting.

Tokens are sorted by their expert; a grouped product multiplies each expert's run of rows by that expert's weight.
How long a run is is data, but the run's ends are an input, so that rows and experts can be split all the same.

Source: MegaBlocks (arXiv:2211.15841), section 3, for the grouped product; torch.nn.functional.grouped_mm.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, IterationSpace, whole
from graph.calls import LocalCall
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, local_call, whole_space


class GroupedProductRule(BaseRule):
    """soapstone.grouped_mm(self [S, K], mat2 [E, K, N], offs [E]) -> [S, N].

    Rows offs[e - 1] to offs[e] are multiplied by mat2[e]; offs[-1] is at most S, and rows from there on are zero.
    Axes: sample (the rows), channel (N), in (K, a reduction), expert (E, a reduction: a part of the experts gives zeros
    for the rows of others). A part is told at which row and expert it starts.
    """

    factors = slice(0, 2)
    rigid = frozenset({"sample", "expert"})  # a part of either must be one interval

    def space(self, signature: Signature) -> IterationSpace:
        rows = signature.inputs[0].shape[0]
        experts, contracted, channels = signature.inputs[1].shape
        builder = SpaceBuilder()
        sample = builder.add("sample", rows, AxisKind.SAMPLE)
        channel = builder.add("channel", channels, AxisKind.PARAMETER)
        reduction = builder.add("in", contracted, AxisKind.REDUCTION)
        expert = builder.add("expert", experts, AxisKind.REDUCTION)
        return builder.space(
            [(sample, reduction), (expert, reduction, channel), (whole(experts),)], [(sample, channel)]
        )

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the product with its first row and expert bound."""
        row, expert = part.outputs[0][0][0][0], part.inputs[1][0][0][0]
        return local_call(signature, part, gradients, bindings=(("row", row), ("expert", expert)))

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each output element and contracted point, of the local share of the experts."""
        experts, contracted, channels = call.inputs[1].shape
        share = experts / max(call.inputs[2].shape[0], 1)
        return 2.0 * call.inputs[0].shape[0] * contracted * channels * share


class HistogramRule(BaseRule):
    """aten.histc(self, bins, min, max): parts give partial counts; a range that data decides keeps it whole."""

    flops_per_input = 1.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an input dim."""
        if self.unsplit_reason(signature) is not None:
            return whole_space(signature)
        builder = SpaceBuilder()
        dims = activation_dims(builder, signature.inputs[0].shape)
        return builder.space([tuple(dims)], [(whole(signature.outputs[0].shape[0]),)])

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name a range that is data."""
        if signature.argument("min") == signature.argument("max"):
            return "runs whole: the range of its bins is the range of its input"
        return None


RULES: Mapping[str, BaseRule] = {
    "aten.histc.default": HistogramRule(),
    "soapstone.grouped_mm": GroupedProductRule(),
}
