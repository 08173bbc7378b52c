"""Bags of embeddings: rows of a table looked up and reduced together."""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, IterationSpace, OperandMap, whole
from graph.calls import LocalCall
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, local_call, whole_operand


class EmbeddingBagRule(BaseRule):
    """soapstone.embedding_bag(weight [V, E], indices [N, L], per_sample_weights [N, L]; mode, padding_idx) -> [N, E].

    The importer writes it where all bags have one length. Axes: sample, channel (E); of sums and means also vocabulary
    (V) and element (L), both reductions. A mean without padding counts `bag` elements; with it, whole bags.
    """

    backward_forwards = 1.0
    rigid = frozenset({"vocabulary"})  # a part of it must be one interval

    def space(self, signature: Signature) -> IterationSpace:
        table, indices = signature.inputs[0].shape, signature.inputs[1].shape
        mode, padded = signature.argument("mode"), signature.argument("padding_idx") >= 0
        builder = SpaceBuilder()
        sample = builder.add("sample", indices[0], AxisKind.SAMPLE)
        channel = builder.add("channel", table[1], AxisKind.PARAMETER)
        vocabulary, element = whole(table[0]), whole(indices[1])
        if mode != "max":
            vocabulary = builder.add("vocabulary", table[0], AxisKind.REDUCTION)
        if mode == "sum" or (mode == "mean" and not padded):
            element = builder.add("element", indices[1], AxisKind.REDUCTION)
        bags = (sample, element)
        inputs: list[OperandMap] = [(vocabulary, channel), *([bags] * (len(signature.inputs) - 1))]
        return builder.space(inputs, [(sample, channel)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call with the row that its part of the vocabulary starts at."""
        rows = part.inputs[0][0]
        bindings = (("start", rows[0][0]),) if rows and rows[0][0] else ()
        return local_call(signature, part, gradients, bindings=bindings)

    def flops(self, call: LocalCall) -> float:
        """Return one addition for each row and channel."""
        return float(call.inputs[1].elements * call.outputs[0].shape[1])

    def bytes_moved(self, call: LocalCall) -> int:
        """Return the bytes of the indices, the rows read, and the sums."""
        row = call.outputs[0].shape[1] * call.outputs[0].item_bytes
        return call.inputs[1].size_bytes + call.inputs[1].elements * row + call.outputs[0].size_bytes

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the size of the vocabulary."""
        return {1: call.argument("vocabulary")}


class RaggedEmbeddingBagRule(BaseRule):
    """soapstone.ragged_embedding_bag(weight [V, E], indices [I], offsets [N], ...) -> [N, E]: the channels (E) split.

    How long a bag is, is data, so that nobody knows which indices a part of the bags needs.
    """

    def space(self, signature: Signature) -> IterationSpace:
        """Return the channel axis."""
        rows, channels = signature.inputs[0].shape
        builder = SpaceBuilder()
        channel = builder.add("channel", channels, AxisKind.PARAMETER)
        rest = [whole_operand(spec) for spec in signature.inputs[1:]]
        return builder.space(
            [(whole(rows), channel), *rest], [(whole(signature.outputs[0].shape[0]), channel)]
        )

    def flops(self, call: LocalCall) -> float:
        """Return one addition for each row and channel."""
        return float(call.inputs[1].elements * call.inputs[0].shape[1])

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the size of the vocabulary; all bags start at the first index, as the first one must."""
        return {1: call.inputs[0].shape[0], 2: 1}


RULES: Mapping[str, BaseRule] = {
    "soapstone.ragged_embedding_bag": RaggedEmbeddingBagRule(),
    "soapstone.embedding_bag": EmbeddingBagRule(),
}
