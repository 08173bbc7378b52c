"""Sums and means over dims, and losses: parts along reduced axes are partial sums.

A mean divides by the count of the whole tensor, so that the parts of a mean simply add up.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import Dim, IterationSpace, whole
from graph.calls import LocalCall
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    activation_dims,
    argument_or,
    broadcast_operand,
    elements,
    local_call,
    slot_of,
    sums_whole,
)
from graph.rules.generic import dims_argument

# torch's numbers of the reduction argument of a loss.
NONE, MEAN, SUM = 0, 1, 2


class SumRule(BaseRule):
    """aten.sum and aten.mean, over all or some dims."""

    by_size = True

    inherits_names = True
    flops_per_input = 1.0
    backward_flops_per_input = 1.0

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an input dim; the output lacks the reduced ones."""
        shape = signature.inputs[0].shape
        reduced = dims_argument()(signature)
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape)
        keep = argument_or(signature, "keepdim", default=False)
        output: list[Dim] = []
        for dim, factors in enumerate(dims):
            if dim not in reduced:
                output.append(factors)
            elif keep:
                output.append(whole(1))
        return builder.space([tuple(dims)], [tuple(output)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the plain reduction, or for a part of a mean the sum divided by the global count."""
        if not self.mean or sums_whole(part):
            return local_call(signature, part, gradients)
        shape = signature.inputs[0].shape
        reduced = dims_argument()(signature)
        call = Signature(
            "soapstone.mean",
            (
                ("self", signature.argument("self")),
                ("dim", reduced),
                ("keepdim", argument_or(signature, "keepdim", default=False)),
                ("dtype", argument_or(signature, "dtype", default=None)),
                ("count", elements([shape[dim] for dim in reduced])),
            ),
            signature.inputs,
            signature.outputs,
        )
        return local_call(call, part, gradients)


class ElementwiseLossRule(BaseRule):
    """Losses that are a mean or a sum of a pointwise function: mse_loss, binary_cross_entropy_with_logits, ...

    A part of a mean becomes soapstone.<name>: the sum over the part, divided by the global `count`.
    """

    by_size = True

    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a dim of the broadcast operands; reduced losses lack them all."""
        rank = max(len(spec.shape) for spec in signature.inputs)
        shape = tuple(
            max(
                spec.shape[dim - rank + len(spec.shape)]
                for spec in signature.inputs
                if dim - rank + len(spec.shape) >= 0
            )
            for dim in range(rank)
        )
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape)
        reduced = signature.argument("reduction") != NONE
        return builder.space(
            [broadcast_operand(dims, spec.shape, shape) for spec in signature.inputs],
            [() if reduced else tuple(dims)],
        )

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the plain loss, or for a part of a mean the sum divided by the global count."""
        if signature.argument("reduction") != MEAN or sums_whole(part):
            return local_call(signature, part, gradients)
        count = elements([axis.size for axis in part.space.axes[:-1]])
        return local_call(
            signature,
            part,
            gradients,
            target=signature.target.replace("aten.", "soapstone.").removesuffix(".default"),
            replace={"reduction": SUM},
            extra=(("count", count),),
        )

    def flops(self, call: LocalCall) -> float:
        """Return four operations an element."""
        return 4.0 * max(spec.elements for spec in call.inputs)


def loss_operands(signature: Signature) -> tuple[SpaceBuilder, list[tuple[Dim, ...]], tuple[Dim, ...]]:
    """Return builder, input maps and batch dims of a cross entropy: its class dim is whole, all others are batch."""
    logits, target = signature.inputs[0].shape, signature.inputs[1].shape
    class_dim = 0 if len(logits) == 1 else 1
    builder = SpaceBuilder()
    batch_shape = (*logits[:class_dim], *logits[class_dim + 1 :])
    batch = activation_dims(builder, batch_shape) if batch_shape else []
    full: tuple[Dim, ...] = (*batch[:class_dim], whole(logits[class_dim]), *batch[class_dim:])
    inputs = [full, full if len(target) == len(logits) else tuple(batch)]
    if slot_of(signature, "weight") is not None:
        inputs.append((whole(logits[class_dim]),))
    return builder, inputs, tuple(batch)


class CrossEntropyRule(BaseRule):
    """aten.cross_entropy_loss that sums or keeps its elements; soapstone.cross_entropy_sums for means.

    soapstone.cross_entropy_sums(logits, target, weight) -> [2]: the sum of the weighted losses and the sum of the
    weights of the targets that are not ignored; the importer divides them by soapstone.ratio.
    """

    inherits_names = True
    # Of each logit: maximum, subtraction, exponential, sum, logarithm.
    flops_per_input = 5.0
    backward_flops_per_input = 2.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a batch dim; the class dim is whole."""
        builder, inputs, batch = loss_operands(signature)
        if signature.target == "soapstone.cross_entropy_sums":
            return builder.space(inputs, [(whole(2),)])
        kept = signature.argument("reduction") == NONE
        return builder.space(inputs, [batch if kept else ()])

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the number of classes."""
        logits = call.inputs[0].shape
        return {1: logits[0 if len(logits) == 1 else 1]}


# Losses element by element, which a reduction of "none", "sum" or "mean" follows.
LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "kl_div",
)

RULES: Mapping[str, BaseRule] = {
    **dict.fromkeys(("aten.sum.default", "aten.sum.dim_IntList"), SumRule(mean=False)),
    **dict.fromkeys(("aten.mean.default", "aten.mean.dim", "soapstone.mean"), SumRule(mean=True)),
    **dict.fromkeys(("aten.cross_entropy_loss.default", "soapstone.cross_entropy_sums"), CrossEntropyRule()),
    **dict.fromkeys(
        (target for name in LOSSES for target in (f"aten.{name}.default", f"soapstone.{name}")),
        ElementwiseLossRule(),
    ),
}
