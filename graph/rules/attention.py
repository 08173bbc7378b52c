"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph import intervals
from graph.axes import AxisKind, Dim, IterationSpace, whole
from graph.calls import LocalCall
from graph.operators import Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, argument_or, broadcast_operand, local_call, slot_of

CUSTOM = "soapstone.attention"


class AttentionRule(BaseRule):
    """aten.scaled_dot_product_attention(query [..., L, E], key [..., S, E], value [..., S, F], mask [..., L, S]).

    Axes: sample, heads (further leading dims), query (L), channel (F). Grouped heads make the query's heads a product
    (heads, group). Split rows of a causal attention run as soapstone.attention, which knows the row that it starts
    at. The importer gives that name to attention with dropout too, whose draws depend on global positions.
    """

    # Five products for the forward's two: the scores are computed again.
    backward_forwards = 2.5
    rigid = frozenset({"query"})  # a causal part of the rows must be one interval

    def space(self, signature: Signature) -> IterationSpace:
        query, key, value = (spec.shape for spec in signature.inputs[:3])
        leading = signature.outputs[0].shape[:-2]
        builder = SpaceBuilder()
        grouped = bool(argument_or(signature, "enable_gqa", default=False)) and query[-3] != key[-3]
        batch: list[Dim] = []
        shared: list[Dim] = []
        for dim, size in enumerate(leading):
            name = "sample" if dim == 0 else ("heads" if dim == len(leading) - 1 else f"dim{dim}")
            kind = AxisKind.SAMPLE if dim == 0 else AxisKind.ATTRIBUTE
            if grouped and dim == len(leading) - 1:
                heads = builder.add(name, key[-3], kind)
                group = builder.add("group", size // key[-3], AxisKind.ATTRIBUTE)
                batch.append((*heads, *group))
                shared.append(heads)
            else:
                batch.append(builder.add(name, size, kind))
                shared.append(batch[-1])
        rows = builder.add("query", query[-2], AxisKind.ATTRIBUTE)
        channel = builder.add("channel", value[-1], AxisKind.ATTRIBUTE)
        source_shape = (*key[:-2],) if grouped else leading
        inputs = [
            (*broadcast_operand(batch, query[:-2], leading), rows, whole(query[-1])),
            (*broadcast_operand(shared, key[:-2], source_shape), whole(key[-2]), whole(key[-1])),
            (*broadcast_operand(shared, value[:-2], source_shape), whole(key[-2]), channel),
        ]
        if slot_of(signature, "attn_mask") is not None:
            mask = signature.inputs[3].shape
            dims = (*batch, rows, whole(key[-2]))
            inputs.append(broadcast_operand(dims, mask, (*leading, query[-2], key[-2])))
        return builder.space(inputs, [(*batch, rows, channel)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the plain attention, or the custom one for split causal rows and for dropout."""
        rows = part.outputs[0][-2]
        rows_whole = rows == intervals.full(signature.outputs[0].shape[-2])
        causal = signature.argument("is_causal") and not rows_whole
        if not causal and signature.target != CUSTOM:
            return local_call(signature, part, gradients)
        start: Argument = rows[0][0] if causal else 0
        arguments = (
            *((name, value) for name, value in signature.arguments if name != "start"),
            ("start", start),
        )
        bindings: tuple[tuple[str, Any], ...] = ()
        if signature.argument("dropout_p"):
            keys = signature.inputs[1].shape[-2]
            bindings = (
                ("region", (*part.outputs[0][:-1], intervals.full(keys))),
                ("shape", (*signature.outputs[0].shape[:-1], keys)),
            )
        custom = Signature(CUSTOM, arguments, signature.inputs, signature.outputs)
        return local_call(custom, part, gradients, bindings=bindings)

    def flops(self, call: LocalCall) -> float:
        """Return both products and the softmax between them; a causal mask halves them where all rows are there."""
        query, key = call.inputs[0].shape, call.inputs[1].shape
        scores = call.outputs[0].elements // call.outputs[0].shape[-1] * key[-2]
        full: float = scores * (2.0 * query[-1] + 2.0 * call.outputs[0].shape[-1] + 5.0)
        if not call.argument("is_causal"):
            return full
        start = argument_or(call, "start", default=0)
        seen: int = sum(min(start + row + 1, key[-2]) for row in range(query[-2]))
        return full * seen / max(query[-2] * key[-2], 1)


RULES: Mapping[str, BaseRule] = dict.fromkeys(
    ("aten.scaled_dot_product_attention.default", CUSTOM), AttentionRule()
)
