"""Negative log-likelihoods: each target picks one class, so that parts of the classes give partial sums."""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, Dim, IterationSpace, OperandMap, whole
from graph.calls import LocalCall
from graph.operators import Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, local_call, slot_of
from graph.rules.reductions import NONE

CUSTOM = "soapstone.nll_sums"


class LikelihoodRule(BaseRule):
    """aten.nll_loss_nd (nll_loss, nll_loss2d) that sums or keeps its elements; soapstone.nll_sums for means.

    soapstone.nll_sums(self [N, C, ...], target [N, ...], weight [C]; ignore_index) -> [2]: the sum of the weighted
    losses and the sum of the weights of the targets that are not ignored; the importer divides them by
    soapstone.ratio. Axes: the batch dims, and class (C, a reduction).
    """

    rigid = frozenset({"class"})  # a part of it must be one interval
    # Of the gradient, most of whose elements are zeros.
    backward_flops_per_input = 1.0

    def space(self, signature: Signature) -> IterationSpace:
        shape = signature.inputs[0].shape
        class_dim = 0 if len(shape) == 1 else 1
        builder = SpaceBuilder()
        rest = (*shape[:class_dim], *shape[class_dim + 1 :])
        batch: list[Dim] = activation_dims(builder, rest) if rest else []
        classes = builder.add("class", shape[class_dim], AxisKind.REDUCTION)
        inputs: list[OperandMap] = [(*batch[:class_dim], classes, *batch[class_dim:]), tuple(batch)]
        if slot_of(signature, "weight") is not None:
            inputs.append((classes,))
        if signature.target == CUSTOM:
            return builder.space(inputs, [(whole(2),)])
        kept = signature.argument("reduction") == NONE
        return builder.space(inputs, [tuple(batch) if kept else ()])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, or the custom one for a part of the classes."""
        region = part.inputs[0]
        class_dim = 0 if len(region) == 1 else 1
        classes = signature.inputs[0].shape[class_dim]
        start = region[class_dim][0][0] if region[class_dim] else 0
        bindings = (("start", start),) if start else ()
        if signature.target == CUSTOM:
            return local_call(signature, part, gradients, bindings=bindings)
        if region[class_dim] == ((0, classes),):
            return local_call(signature, part, gradients)
        extra: tuple[tuple[str, Argument], ...] = (("classes", classes),)
        return local_call(
            signature, part, gradients, target="soapstone.nll_loss", extra=extra, bindings=bindings
        )

    def flops(self, call: LocalCall) -> float:
        """Return two operations a target."""
        return 2.0 * call.inputs[1].elements

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the number of classes of the whole."""
        for name, value in call.arguments:
            if name == "classes":
                return {1: value}
        shape = call.inputs[0].shape
        return {1: shape[0 if len(shape) == 1 else 1]}


RULES: Mapping[str, BaseRule] = dict.fromkeys(
    (
        "aten.nll_loss_nd.default",
        "aten.nll_loss.default",
        "aten.nll_loss2d.default",
        "soapstone.nll_loss",
        "soapstone.nll_sums",
    ),
    LikelihoodRule(),
)
