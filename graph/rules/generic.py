"""Rules of whole families: pointwise, factories, operators that treat some dims as one, and the unknown."""

from __future__ import annotations

from collections.abc import Callable

from graph.axes import AxisKind, IterationSpace, whole
from graph.rules.base import Signature
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    activation_dims,
    argument_or,
    broadcast_operand,
    positive,
    whole_operand,
    whole_space,
)


class WholeRule(BaseRule):
    """Runs whole, or replicated: operators without a rule, or without dims worth splitting."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    def space(self, signature: Signature) -> IterationSpace:
        """Return the space with the replica axis alone."""
        return whole_space(signature)

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Return the reason that the rule was made with."""
        return self.reason.format(target=signature.target) if self.reason else None


class PointwiseRule(BaseRule):
    """Every output element depends on the input elements at its own (broadcast) position."""

    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim; inputs follow by broadcasting."""
        shape = signature.outputs[0].shape
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape)
        return builder.space(
            [broadcast_operand(dims, spec.shape, shape) for spec in signature.inputs],
            [tuple(dims)] * len(signature.outputs),
        )


class FactoryRule(BaseRule):
    """Makes a constant tensor from no input: zeros, ones, full. `size` is the local shape."""

    computes_nothing = True
    sized = "size"

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim."""
        builder = SpaceBuilder()
        return builder.space([], [tuple(activation_dims(builder, signature.outputs[0].shape))])


DimsOf = Callable[[Signature], tuple[int, ...]]


def dims_argument(name: str = "dim") -> DimsOf:
    """Return a function that reads the dims of the first input named by an argument; None or () means all."""

    def dims(signature: Signature) -> tuple[int, ...]:
        rank = len(signature.inputs[0].shape)
        value = argument_or(signature, name, None)
        if value is None or value == ():
            return tuple(range(rank))
        listed = value if isinstance(value, tuple) else (value,)
        return tuple(sorted(positive(dim, rank) for dim in listed)) if rank else ()

    return dims


def last_dims(count: int) -> DimsOf:
    """Return a function that gives the last `count` dims of the first input."""

    def dims(signature: Signature) -> tuple[int, ...]:
        rank = len(signature.inputs[0].shape)
        return tuple(range(max(rank - count, 0), rank))

    return dims


class DimwiseRule(BaseRule):
    """Works along some dims as a whole (softmax, cumulative sums, maxima); all other dims split freely.

    Outputs have the input's shape, or lack those dims (or keep them as one) where the operator reduces them.
    """

    inherits_names = True

    def __init__(self, dims_of: DimsOf, *, reduces: bool = False, flops_per_input: float = 1.0) -> None:
        self.dims_of = dims_of
        self.reduces = reduces
        self.flops_per_input = flops_per_input

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis for each dim that the operator does not work along."""
        shape = signature.inputs[0].shape
        fixed = frozenset(self.dims_of(signature))
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape, fixed)
        result = []
        for spec in signature.outputs:
            if not self.reduces:
                result.append(
                    tuple(whole(spec.shape[dim]) if dim in fixed else dims[dim] for dim in range(len(shape)))
                )
            elif len(spec.shape) == len(shape):
                result.append(tuple(whole(1) if dim in fixed else dims[dim] for dim in range(len(shape))))
            else:
                result.append(tuple(dims[dim] for dim in range(len(shape)) if dim not in fixed))
        return builder.space([tuple(dims)], result)


def dims_from(first: int) -> DimsOf:
    """Return a function that gives the dims of the first input from `first` on."""

    def dims(signature: Signature) -> tuple[int, ...]:
        return tuple(range(first, len(signature.inputs[0].shape)))

    return dims


def padded_dims(signature: Signature) -> tuple[int, ...]:
    """Return the dims that aten.pad changes: its list names them from the last on, a pair each."""
    rank = len(signature.inputs[0].shape)
    pad = signature.argument("pad")
    return tuple(
        rank - 1 - pair for pair in reversed(range(len(pad) // 2)) if pad[2 * pair] or pad[2 * pair + 1]
    )


class SampleRule(BaseRule):
    """Works on every sample alone: dim 0 of the first input and of the outputs splits, all else is whole."""

    flops_per_output = 1.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return the sample axis."""
        builder = SpaceBuilder()
        samples = signature.inputs[0].shape[0]
        sample = builder.add("sample", samples, AxisKind.SAMPLE)
        first = (sample, *(whole(size) for size in signature.inputs[0].shape[1:]))
        outputs = [(sample, *(whole(size) for size in spec.shape[1:])) for spec in signature.outputs]
        return builder.space([first, *(whole_operand(spec) for spec in signature.inputs[1:])], outputs)
