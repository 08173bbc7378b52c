"""Slicing and joining: select, slice, split, unbind, cat, stack, index_select, and embedding."""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, Dim, DimFactor, IterationSpace, whole
from graph.calls import LocalCall
from graph.intervals import count
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, axis_of, local_call, positive
from graph.rules.views import ViewRule


class SelectRule(ViewRule):
    """aten.select(self, dim, index): a task needs that index alone, so its local dim has one element."""

    by_size = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim."""
        shape = signature.inputs[0].shape
        dim = positive(signature.argument("dim"), len(shape))
        index = positive(signature.argument("index"), shape[dim])
        builder = SpaceBuilder()
        dims = activation_dims(builder, signature.outputs[0].shape)
        selected: Dim = (DimFactor(shape[dim], None, index, 1, 1),)
        return builder.space([(*dims[:dim], selected, *dims[dim:])], [tuple(dims)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the selection of the local dim's only element."""
        return local_call(signature, part, gradients, replace={"index": 0})


class SliceRule(ViewRule):
    """aten.slice(self, dim, start, end, step): a task needs, and holds, the slice alone."""

    by_size = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim; the sliced input dim follows it with an offset and a stride."""
        shape, result = signature.inputs[0].shape, signature.outputs[0].shape
        dim = positive(signature.argument("dim"), len(shape))
        start = signature.argument("start") or 0
        start = min(max(positive(start, shape[dim]), 0), shape[dim])
        step = signature.argument("step")
        builder = SpaceBuilder()
        dims = activation_dims(builder, result)
        sliced: Dim = (DimFactor(shape[dim], axis_of(dims[dim]), start, step, 1),)
        if axis_of(dims[dim]) is None:
            sliced = (DimFactor(shape[dim], None, start, 1, result[dim]),)
        return builder.space([(*dims[:dim], sliced, *dims[dim + 1 :])], [tuple(dims)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the slice of the local dim from its first element on."""
        dim = positive(signature.argument("dim"), len(signature.inputs[0].shape))
        end = count(part.inputs[0][dim])
        return local_call(signature, part, gradients, replace={"start": 0, "end": end})


class SplitRule(ViewRule):
    """aten.split_with_sizes(self, split_sizes, dim).

    Parts of equal size s make the input dim a product (parts, s), of which the s split; other sizes keep it whole.
    """

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name sizes that differ."""
        sizes = signature.argument("split_sizes")
        return None if len(set(sizes)) == 1 else f"the split dim stays whole: its sizes {list(sizes)} differ"

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim, but none along parts that differ in size."""
        shape = signature.inputs[0].shape
        dim = positive(signature.argument("dim"), len(shape))
        sizes = signature.argument("split_sizes")
        equal = len(set(sizes)) == 1
        builder = SpaceBuilder()
        dims = activation_dims(
            builder, signature.outputs[0].shape, frozenset() if equal else frozenset({dim})
        )
        split: Dim = (*whole(len(sizes)), *dims[dim]) if equal else whole(shape[dim])
        return builder.space(
            [(*dims[:dim], split, *dims[dim + 1 :])],
            [(*dims[:dim], dims[dim] if equal else whole(size), *dims[dim + 1 :]) for size in sizes],
        )

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the split into local sizes."""
        dim = positive(signature.argument("dim"), len(signature.inputs[0].shape))
        sizes = tuple(count(region[dim]) for region in part.outputs)
        return local_call(signature, part, gradients, replace={"split_sizes": sizes})


class UnbindRule(ViewRule):
    """aten.unbind(self, dim): every task makes its share of all outputs."""

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim."""
        shape = signature.inputs[0].shape
        dim = positive(signature.argument("dim"), len(shape))
        builder = SpaceBuilder()
        dims = activation_dims(builder, signature.outputs[0].shape)
        return builder.space(
            [(*dims[:dim], whole(shape[dim]), *dims[dim:])], [tuple(dims)] * len(signature.outputs)
        )


class CatRule(BaseRule):
    """aten.cat(tensors, dim). Along the joined dim a task holds its share of each input, which may be empty."""

    computes_nothing = True
    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim; each input follows the joined one at its offset."""
        result = signature.outputs[0].shape
        dim = positive(signature.argument("dim"), len(result))
        builder = SpaceBuilder()
        dims = activation_dims(builder, result)
        inputs = []
        offset = 0
        for spec in signature.inputs:
            size = spec.shape[dim]
            joined: Dim = (DimFactor(size, axis_of(dims[dim]), -offset, 1, 1),)
            if axis_of(dims[dim]) is None:
                joined = whole(size)
            inputs.append((*dims[:dim], joined, *dims[dim + 1 :]))
            offset += size
        return builder.space(inputs, [tuple(dims)])


class StackRule(BaseRule):
    """aten.stack(tensors, dim): the new dim is whole, all others split."""

    computes_nothing = True
    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an input dim."""
        result = signature.outputs[0].shape
        dim = positive(signature.argument("dim"), len(result))
        builder = SpaceBuilder()
        dims = activation_dims(builder, result, frozenset({dim}))
        return builder.space([(*dims[:dim], *dims[dim + 1 :])] * len(signature.inputs), [tuple(dims)])


class IndexSelectRule(BaseRule):
    """aten.index_select(self, dim, index): the looked-up dim is whole, the index and all others split."""

    computes_nothing = True
    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim; the index follows the looked-up one."""
        shape, result = signature.inputs[0].shape, signature.outputs[0].shape
        dim = positive(signature.argument("dim"), len(shape))
        builder = SpaceBuilder()
        dims = activation_dims(builder, result)
        index = (dims[dim],) if signature.inputs[1].shape else ()
        return builder.space([(*dims[:dim], whole(shape[dim]), *dims[dim + 1 :]), index], [tuple(dims)])

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the size of the looked-up dim."""
        shape = call.inputs[0].shape
        return {1: shape[positive(call.argument("dim"), len(shape))]}


class EmbeddingRule(BaseRule):
    """aten.embedding(weight [V, E], indices [...]).

    Axes: the dims of the indices, channel (E), vocabulary (V, a reduction): a part of the vocabulary looks up its own
    rows and gives zeros for the others. Where gradients are divided by how often a row is looked up in all, channels
    alone split.
    """

    computes_nothing = True
    backward_flops_per_output = 1.0  # one addition
    rigid = frozenset({"vocabulary"})  # a part of it must be one interval

    def space(self, signature: Signature) -> IterationSpace:
        weight, indices = signature.inputs[0].shape, signature.inputs[1].shape
        builder = SpaceBuilder()
        by_frequency = bool(signature.argument("scale_grad_by_freq"))
        dims = [
            whole(size) if by_frequency else builder.add_dim(len(indices) + 1, dim, size)
            for dim, size in enumerate(indices)
        ]
        channel = builder.add("channel", weight[1], AxisKind.PARAMETER)
        vocabulary = whole(weight[0])
        if not by_frequency:
            vocabulary = builder.add("vocabulary", weight[0], AxisKind.REDUCTION)
        return builder.space([(vocabulary, channel), tuple(dims)], [(*dims, channel)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the lookup, in an interval of the vocabulary where it is split."""
        rows = part.inputs[0][0]
        size = signature.inputs[0].shape[0]
        if rows == ((0, size),) or not rows:
            return local_call(signature, part, gradients)
        padding = signature.argument("padding_idx")
        return local_call(
            signature,
            part,
            gradients,
            target="soapstone.embedding",
            extra=(("vocabulary", size),),
            replace={"padding_idx": positive(padding, size) if padding != -1 else -1},
            bindings=(("start", rows[0][0]),),
        )

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name gradients that depend on all indices."""
        if signature.argument("scale_grad_by_freq"):
            return "its indices run whole: gradients are divided by how often an index is among all of them"
        return None

    def bytes_moved(self, call: LocalCall) -> int:
        """Return the bytes of the indices, and of the rows read and written."""
        return call.inputs[1].size_bytes + 2 * call.outputs[0].size_bytes

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the size of the vocabulary."""
        for name, value in call.arguments:
            if name == "vocabulary":
                return {1: value}
        return {1: call.inputs[0].shape[0]}


RULES: Mapping[str, BaseRule] = {
    "aten.cat.default": CatRule(),
    "aten.stack.default": StackRule(),
    "aten.select.int": SelectRule(),
    "aten.slice.Tensor": SliceRule(),
    "aten.split_with_sizes.default": SplitRule(),
    "aten.unbind.int": UnbindRule(),
    "aten.index_select.default": IndexSelectRule(),
    **dict.fromkeys(("aten.embedding.default", "soapstone.embedding"), EmbeddingRule()),
}
