"""Repetition along dims: a dim that is repeated becomes a product with the number of repetitions."""

from __future__ import annotations

from collections.abc import Mapping

from graph import intervals
from graph.axes import AxisKind, Dim, IterationSpace
from graph.calls import LocalCall
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, dim_name, joined, local_call, whole_space


class RepeatRule(BaseRule):
    """aten.repeat(self, repeats), aten.tile(self, dims): an output dim is (repetition, dim of self)."""

    computes_nothing = True

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def _repeats(self, signature: Signature) -> tuple[int, ...]:
        """Return the repetitions of each output dim; tile's may be fewer than the dims."""
        repeats = signature.argument(self.argument)
        return (1,) * (len(signature.outputs[0].shape) - len(repeats)) + tuple(repeats)

    def space(self, signature: Signature) -> IterationSpace:
        """Return an axis for each dim, and one for its repetitions."""
        result = signature.outputs[0].shape
        if 0 in result:
            return whole_space(signature)
        shape = (1,) * (len(result) - len(signature.inputs[0].shape)) + signature.inputs[0].shape
        builder = SpaceBuilder()
        inputs: list[Dim] = []
        outputs: list[Dim] = []
        for dim, (size, times) in enumerate(zip(shape, self._repeats(signature), strict=True)):
            kind = AxisKind.SAMPLE if dim == 0 else AxisKind.ATTRIBUTE
            name = dim_name(len(result), dim)
            # The samples are where they vary most slowly, or where they are not repeated.
            times_dim = builder.add(name if size == 1 else f"{name}_repeat", times, kind)
            size_dim = builder.add(name, size, kind)
            inputs.append(size_dim)
            outputs.append(joined(times_dim, size_dim))
        return builder.space(
            [tuple(inputs[len(result) - len(signature.inputs[0].shape) :])], [tuple(outputs)]
        )

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call with as many repetitions as the part has."""
        have = intervals.shape(part.inputs[0])
        want = intervals.shape(part.outputs[0])
        have = (1,) * (len(want) - len(have)) + have
        repeats = tuple(count // size if size else 1 for count, size in zip(want, have, strict=True))
        return local_call(signature, part, gradients, replace={self.argument: repeats})


RULES: Mapping[str, BaseRule] = {
    "aten.repeat.default": RepeatRule("repeats"),
    "aten.tile.default": RepeatRule("dims"),
}
