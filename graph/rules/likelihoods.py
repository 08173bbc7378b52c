"""Negative log-likelihoods, also behind a softmax: parts of the classes give partial sums.

Each target picks one class. A softmax over classes that are split takes sums of exponentials over all of them first:
soapstone.exp_sums -> soapstone.softmax_nll_sums, for each sample one number between the two, and none back: the second
has the whole gradient of the logits.

Source: Megatron-LM (arXiv:1909.08053) section 3 and Partial FC (arXiv:2010.05222) for the split softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph.axes import AxisKind, Dim, IterationSpace, OperandMap, whole
from graph.calls import LocalCall
from graph.operators import Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, local_call, slot_of, whole_operand
from graph.rules.reductions import NONE

SOFTMAX_NLL_SUMS = "soapstone.softmax_nll_sums"
SUMS = frozenset({"soapstone.nll_sums", SOFTMAX_NLL_SUMS})


def _class_dim(rank: int) -> int:
    """Return the dim of the classes of values of that rank: [C] or [N, C, ...]."""
    return 0 if rank == 1 else 1


def _operand(builder: SpaceBuilder, shape: Sequence[int]) -> tuple[OperandMap, Dim, tuple[Dim, ...]]:
    """Add the axes of values [N, C, ...]; return their map, the dim of the classes, and all others."""
    class_dim = _class_dim(len(shape))
    rest = (*shape[:class_dim], *shape[class_dim + 1 :])
    batch: list[Dim] = activation_dims(builder, rest) if rest else []
    classes = builder.add("class", shape[class_dim], AxisKind.REDUCTION)
    return (*batch[:class_dim], classes, *batch[class_dim:]), classes, tuple(batch)


class LikelihoodRule(BaseRule):
    """aten.nll_loss_nd (nll_loss, nll_loss2d) that sums or keeps its elements; soapstone.nll_sums for means.

    soapstone.nll_sums(self [N, C, ...], target [N, ...], weight [C]; ignore_index) -> [2]: the sum of the weighted
    losses and the sum of the weights of the targets that are not ignored; the importer divides them by
    soapstone.ratio. soapstone.softmax_nll_sums takes logits as `self`, the sums of their exponentials over all classes
    as `exp_sums` [N, ...], and all of the weights. Axes: the batch dims, and class (C, a reduction).
    """

    rigid = frozenset({"class"})  # a part of it must be one interval
    # Of the gradient, most of whose elements are zeros.
    backward_flops_per_input = 1.0

    def space(self, signature: Signature) -> IterationSpace:
        builder = SpaceBuilder()
        values, classes, batch = _operand(builder, signature.inputs[0].shape)
        inputs = [values, batch]
        if slot_of(signature, "weight") is not None:
            is_softmax = signature.target == SOFTMAX_NLL_SUMS
            inputs.append(whole_operand(signature.inputs[2]) if is_softmax else (classes,))
        if slot_of(signature, "exp_sums") is not None:
            inputs.append(batch)
        if signature.target in SUMS:
            return builder.space(inputs, [(whole(2),)])
        kept = signature.argument("reduction") == NONE
        return builder.space(inputs, [batch if kept else ()])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, or the custom one for a part of the classes."""
        region = part.inputs[0]
        class_dim = _class_dim(len(region))
        classes = signature.inputs[0].shape[class_dim]
        start = region[class_dim][0][0] if region[class_dim] else 0
        bindings = (("start", start),) if start else ()
        if signature.target in SUMS:
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
        return {1: shape[_class_dim(len(shape))]}


class ExpSumsRule(BaseRule):
    """soapstone.exp_sums(self [N, C, ...]) -> [N, ...]: sums over the classes of exponentials, as float64."""

    # Of each logit: maximum, subtraction, exponential, sum.
    flops_per_input = 4.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return the batch dims, and class (C, a reduction)."""
        builder = SpaceBuilder()
        values, _, batch = _operand(builder, signature.inputs[0].shape)
        return builder.space([values], [batch])


RULES: Mapping[str, BaseRule] = {
    "soapstone.exp_sums": ExpSumsRule(),
    **dict.fromkeys(
        (
            "aten.nll_loss_nd.default",
            "aten.nll_loss.default",
            "aten.nll_loss2d.default",
            "soapstone.nll_loss",
            *SUMS,
        ),
        LikelihoodRule(),
    ),
}
