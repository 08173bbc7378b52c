"""What autograd keeps of a step's forward for its backward, by operator type: inputs, outputs, and what else.

A tensor that no operator keeps is gone when its last reader has run, so that it does not count at the end of the
forward. A view keeps its base. Unknown operators are taken to keep all that they read and make.

Sources: PyTorch's tools/autograd/derivatives.yaml for ATen's operators, `profiler.operators` for ours; a test compares
with what autograd saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from graph.aliasing import base_name
from graph.calls import LocalCall
from graph.compiled_calls import COMPILED, PartCall, parts_in, parts_of
from graph.operator_ranges import OperatorRanges, group_numbers
from graph.operators import Operator, OperatorGraph
from graph.rules.common import slots_in
from graph.rules.fused import FUSED
from search.space.groups import is_view

_NOTHING = frozenset(
    """
    add sub rsub neg cat stack sum mean pad constant_pad_nd repeat tile where masked_fill clone _to_copy to type_as
    contiguous fill flip roll cumsum index_select index index_add index_put gather scatter scatter_add embedding
    embedding_bag ragged_embedding_bag tril triu pixel_shuffle pixel_unshuffle dropout cross_entropy_loss
    cross_entropy_sums nll_loss nll_sums nll_loss_nd nll_loss2d lift_fresh_copy upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    """.split()  # noqa: SIM905 - easier to read
)
_OUTPUT = frozenset(
    """
    relu sigmoid tanh exp expm1 exp2 sqrt rsqrt reciprocal softmax log_softmax _softmax _log_softmax
    rnn_tanh_cell rnn_relu_cell
    """.split()  # noqa: SIM905
)
_INPUTS = frozenset(
    """
    gelu silu mish hardswish hardsigmoid hardtanh relu6 leaky_relu softplus log log1p log2 log10 sin cos erf abs square
    threshold clamp clamp_min clamp_max conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d
    conv_transpose3d linear max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d layer_norm rms_norm group_norm instance_norm batch_norm batch_norm_apply
    moments glu prelu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mse_loss l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss kl_div scaled_dot_product_attention attention
    grouped_mm pow ratio merged_linear merged_conv1d merged_conv2d merged_conv3d
    """.split()  # noqa: SIM905
)
# Of these an input is kept where another one has a gradient.
_FACTORS = frozenset(
    "mul div mm bmm matmul addmm baddbmm mv dot outer einsum tensordot addcmul addcdiv".split()  # noqa: SIM905
)
# Of these the first input alone.
_FIRST = frozenset({"softmax_nll_sums"})
_OUTPUT_BESIDE_INPUTS = frozenset({"scaled_dot_product_attention", "attention"})
# Gates and their like, in tensors of the size of the hidden state (`profiler.operators.custom_operators`).
_GATES = {"lstm_cell": 5, "gru_cell": 7}
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Lasting:
    """Which outputs of an operator are memory of their own that lasts.

    kept: until the backward. again: of an operator whose group is made again, which are there from then to its
    backward, those among them that are kept as well; None where it is in no group: what its backward needs is kept.
    """

    kept: tuple[bool, ...]
    again: tuple[bool, ...] | None = None


def kept_outputs(graph: OperatorGraph) -> tuple[tuple[bool, ...], ...]:
    """Return, for each operator, which of its outputs are memory of their own that lasts until the backward."""
    kept: set[str] = set()
    result: list[tuple[bool, ...]] = []
    for operator in reversed(graph.operators):
        if graph.has_backward(operator):
            wanted = graph.gradient_inputs(operator)
            kept.update(operator.inputs[slot] for slot in kept_inputs(operator, wanted))
            if keeps_output(operator):
                kept.update(operator.outputs)
        flags = tuple(name in kept for name in operator.outputs)
        if is_view(operator):
            if any(flags):
                kept.update(operator.inputs[:1])
            flags = (False,) * len(flags)
        result.append(flags)
    return tuple(reversed(result))


def lasting_outputs(graph: OperatorGraph, recomputation: OperatorRanges) -> tuple[Lasting, ...]:
    """Return, for each operator, which of its outputs last where groups of operators are made again in the backward.

    Kept is what enters a group, whether its reader keeps it or not, and what operators of no group keep.
    """
    group_of = group_numbers(graph, recomputation)
    kept: set[str] = set()
    again: set[str] = set()
    result: list[Lasting] = []
    for index in range(len(graph.operators) - 1, -1, -1):
        operator = graph.operators[index]
        grouped = group_of[index] >= 0 and graph.has_backward(operator)
        if graph.has_backward(operator):
            slots = kept_inputs(operator, graph.gradient_inputs(operator))
            for slot, name in enumerate(operator.inputs):
                if grouped and not _is_made_within(graph, group_of, index, name):
                    kept.add(name)
                elif slot in slots:
                    (again if grouped else kept).add(name)
            if keeps_output(operator):
                (again if grouped else kept).update(operator.outputs)
        flags = tuple(name in kept for name in operator.outputs)
        then = tuple(name in kept or name in again for name in operator.outputs) if grouped else None
        if is_view(operator):
            if any(flags):
                kept.update(operator.inputs[:1])
            if then is not None and any(then):
                # Where the base is made outside, it has entered, and is kept.
                again.update(operator.inputs[:1])
            flags = (False,) * len(flags)
            then = None if then is None else flags
        result.append(Lasting(flags, then))
    return tuple(reversed(result))


def _is_made_within(graph: OperatorGraph, group_of: Sequence[int], reader: int, name: str) -> bool:
    """Return whether a value that an operator of a group reads is made again with it."""
    if name not in graph.producer:
        return False
    maker, _ = graph.producer[name]
    return group_of[maker] == group_of[reader] and graph.has_backward(graph.operators[maker])


def kept_inputs(operator: Operator, wanted: tuple[bool, ...]) -> list[int]:
    """Return which input slots an operator keeps; `wanted` says through which of them a gradient flows back."""
    if operator.target == FUSED:
        kept = _kept_by_parts(parts_in(operator.arguments), len(operator.inputs))
        return [slot for slot in range(len(operator.inputs)) if slot in kept]
    return [] if is_view(operator) else _kept_slots(operator.target, wanted)


def keeps_output(operator: Operator) -> bool:
    """Return whether an operator keeps what it makes, one of several outputs at least."""
    if operator.target == FUSED:
        kept = _kept_by_parts(parts_in(operator.arguments), len(operator.inputs))
        return not kept.isdisjoint(operator.argument("results"))
    return not is_view(operator) and _keeps_outputs(operator.target)


def _kept_slots(target: str, wanted: tuple[bool, ...]) -> list[int]:
    name = base_name(target)
    slots = list(range(len(wanted)))
    if name in _NOTHING:
        return []
    if name in _FIRST:
        return slots[:1]
    if name in _FACTORS:
        return [slot for slot in slots if any(wanted[:slot] + wanted[slot + 1 :])]
    return [] if name in _OUTPUT and name not in _INPUTS else slots


def _keeps_outputs(target: str) -> bool:
    name = base_name(target)
    return (
        name in _OUTPUT or name in _OUTPUT_BESIDE_INPUTS or name not in _NOTHING | _INPUTS | _FACTORS | _FIRST
    )


def _kept_by_parts(parts: Sequence[PartCall], inputs: int) -> set[int]:
    """Return the tensors that the parts of a compiled call keep, by their numbers, if each keeps what it keeps alone.

    A compiler may keep less, and make the rest again.
    """
    kept: set[int] = set()
    made = inputs
    for part in parts:
        own = range(made, made + len(part.call.outputs))
        made += len(own)
        if part.call.has_backward:
            kept.update(part.sources[slot] for slot in _kept_slots(part.call.target, part.call.gradients))
            if _keeps_outputs(part.call.target):
                kept.update(own)
    return kept


def kept_bytes(outputs: Lasting, call: LocalCall) -> tuple[int, int]:
    """Return the bytes that a task leaves for the backward, and those that are there once it is made again."""
    own = sum(spec.size_bytes for spec, kept in zip(call.outputs, outputs.kept, strict=True) if kept)
    if outputs.again is None:
        return own + extra_bytes(call), 0
    again = sum(spec.size_bytes for spec, lasts in zip(call.outputs, outputs.again, strict=True) if lasts)
    return own, again + extra_bytes(call)


def extra_bytes(call: LocalCall) -> int:
    """Return the bytes that a call's backward needs beside inputs and outputs: masks, gates, joined weights."""
    name = base_name(call.target)
    if call.target == COMPILED:
        return _extra_bytes_of_parts(call)
    if name == "dropout":
        return call.outputs[0].elements
    if name.startswith("max_pool"):
        return _INDEX_BYTES * call.outputs[0].elements
    if name in _GATES:
        return _GATES[name] * call.outputs[0].size_bytes
    if name in ("cross_entropy_loss", "cross_entropy_sums"):
        return call.inputs[0].size_bytes
    if name == "softmax_nll_sums":
        # Of each target its logarithm, its place, whether it is here, and its weight.
        return call.inputs[1].elements * (8 + _INDEX_BYTES + 1 + call.inputs[0].item_bytes)
    if name.startswith("merged_"):
        # The weights as one; biases are not kept.
        weights = slots_in(dict(call.arguments)["weights"])
        return sum(call.inputs[slot].size_bytes for slot in weights)
    if name == "attention" and dict(call.arguments).get("dropout_p"):
        # Probabilities before and after dropout, and its mask.
        scores = prod(call.inputs[0].shape[:-1]) * call.inputs[1].shape[-2]
        return scores * (2 * call.inputs[0].item_bytes + 1)
    return 0


def _extra_bytes_of_parts(call: LocalCall) -> int:
    """Return the bytes of what is kept between the parts of a compiled call, and of what these need beside."""
    parts = parts_of(call)
    specs = (*call.inputs, *(spec for part in parts for spec in part.call.outputs))
    within = _kept_by_parts(parts, len(call.inputs)).difference(
        range(len(call.inputs)), call.argument("results")
    )
    return sum(specs[number].size_bytes for number in within) + sum(extra_bytes(part.call) for part in parts)
