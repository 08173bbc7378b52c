"""Contractions that an equation describes: einsum and tensordot. A split of a summed label gives partial sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from graph.axes import AxisKind, Dim, IterationSpace, whole
from graph.calls import LocalCall
from graph.operators import TensorSpec
from graph.rules.base import Signature
from graph.rules.common import BaseRule, SpaceBuilder, dim_name, positive, whole_space

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Equation:
    """One label for each dim of the operands and of the result; ellipsis dims are "...0", the last, "...1", ..."""

    operands: tuple[Labels, ...]
    result: Labels

    def sizes(self, inputs: Sequence[TensorSpec]) -> dict[str, int]:
        """Return the size of each label."""
        sizes: dict[str, int] = {}
        for labels, spec in zip(self.operands, inputs, strict=True):
            for label, size in zip(labels, spec.shape, strict=True):
                sizes[label] = max(sizes.get(label, 1), size)
        return sizes


def _spelled(term: str, rank: int) -> Labels:
    """Return the labels of a term of an equation, its ellipsis written out for an operand of `rank` dims."""
    before, dots, after = term.partition("...")
    left = rank - len(before) - len(after) if dots else 0
    return (*before, *(f"...{position}" for position in reversed(range(left))), *after)


def _einsum(equation: str, ranks: Sequence[int]) -> _Equation:
    """Return the labels of an equation, its result written out as torch.einsum would."""
    terms, arrow, wanted = equation.replace(" ", "").partition("->")
    operands = tuple(_spelled(term, rank) for term, rank in zip(terms.split(","), ranks, strict=True))
    counts = Counter(label for labels in operands for label in labels)
    dotted = sorted((label for label in counts if label.startswith("...")), reverse=True)
    if not arrow:
        once = sorted(label for label, count in counts.items() if count == 1 and label not in dotted)
        return _Equation(operands, (*dotted, *once))
    named = len(wanted) - (3 if "..." in wanted else 0)
    return _Equation(operands, _spelled(wanted, named + len(dotted)))


def _tensordot(signature: Signature) -> _Equation:
    """Return the equation of aten.tensordot(self, other, dims_self, dims_other)."""
    left, right = (len(spec.shape) for spec in signature.inputs)
    mine = [f"l{dim}" for dim in range(left)]
    theirs = [f"r{dim}" for dim in range(right)]
    pairs = zip(signature.argument("dims_self"), signature.argument("dims_other"), strict=True)
    for position, (first, second) in enumerate(pairs):
        mine[positive(first, left)] = theirs[positive(second, right)] = f"s{position}"
    free = [label for label in (*mine, *theirs) if not label.startswith("s")]
    return _Equation((tuple(mine), tuple(theirs)), tuple(free))


class ContractionRule(BaseRule):
    """aten.einsum(equation, tensors), aten.tensordot: one axis a label; those that the result lacks are reductions.

    An equation that takes a diagonal (a label twice in one operand) runs whole.
    """

    def space(self, signature: Signature) -> IterationSpace:
        equation = self._equation(signature)
        if not _splits(equation):
            return whole_space(signature)
        sizes = equation.sizes(signature.inputs)
        builder = SpaceBuilder()
        dims: dict[str, Dim] = {}
        rank = len(equation.result)
        for position, label in enumerate(equation.result):
            kind, name = _kind(label, position, equation), dim_name(rank, position)
            dims[label] = builder.add(name, sizes[label], kind)
        for label, size in sizes.items():
            if label not in dims:
                dims[label] = builder.add("in", size, AxisKind.REDUCTION)

        def operand(labels: Labels, shape: Sequence[int]) -> tuple[Dim, ...]:
            return tuple(
                dims[label] if size == sizes[label] else whole(size)
                for label, size in zip(labels, shape, strict=True)
            )

        inputs = [
            operand(labels, spec.shape)
            for labels, spec in zip(equation.operands, signature.inputs, strict=True)
        ]
        return builder.space(inputs, [operand(equation.result, signature.outputs[0].shape)])

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name diagonals."""
        return None if _splits(self._equation(signature)) else "runs whole: it takes a diagonal"

    def _equation(self, signature: Signature | LocalCall) -> _Equation:
        if signature.target == "aten.tensordot.default":
            return _tensordot(Signature(signature.target, signature.arguments, signature.inputs, ()))
        return _einsum(signature.argument("equation"), [len(spec.shape) for spec in signature.inputs])

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each point of the box of labels, for each product between operands."""
        equation = self._equation(call)
        return 2.0 * prod(equation.sizes(call.inputs).values()) * max(len(equation.operands) - 1, 0.5)


def _splits(equation: _Equation) -> bool:
    return all(len(set(labels)) == len(labels) for labels in equation.operands)


def _kind(label: str, position: int, equation: _Equation) -> AxisKind:
    """Return SAMPLE for the first dim, PARAMETER for a dim that the first operand lacks, else ATTRIBUTE."""
    if position == 0:
        return AxisKind.SAMPLE
    return AxisKind.ATTRIBUTE if label in equation.operands[0] else AxisKind.PARAMETER


class OuterRule(BaseRule):
    """aten.outer(self [M], vec2 [N]) -> [M, N]."""

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a vector."""
        builder = SpaceBuilder()
        row = builder.add("sample", signature.inputs[0].shape[0], AxisKind.SAMPLE)
        column = builder.add("column", signature.inputs[1].shape[0], AxisKind.PARAMETER)
        return builder.space([(row,), (column,)], [(row, column)])

    def backward_flops(self, call: LocalCall) -> float:
        """Return a multiply-add an output element for each differentiated vector."""
        return 2.0 * call.outputs[0].elements * sum(call.gradients)


RULES: Mapping[str, BaseRule] = {
    "aten.outer.default": OuterRule(),
    "aten.einsum.default": ContractionRule(),
    "aten.tensordot.default": ContractionRule(),
}
