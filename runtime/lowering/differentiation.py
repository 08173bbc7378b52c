"""The instructions that differentiate a segment: one for all of its backward, or one for each part of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from runtime.instructions.compute import Differentiate, DifferentiateInputs, DifferentiateWeights
from runtime.instructions.selections import Selection
from runtime.lowering.segments import Segment


class Differentiation(NamedTuple):
    """The instruction of a segment's backward; of one in parts that of the weight part, too."""

    backward: Differentiate
    weights: DifferentiateWeights | None = None


def differentiation(
    number: int, segment: Segment, read_parts: Mapping[int, Selection], apart: Collection[int]
) -> Differentiation | None:
    """Return how the segment of that number is differentiated; None where nothing is.

    read_parts: the part of the held weight that reads of a part are, by slot. apart: the slots of reads of weights
    whose gradients are made apart (`graph.backward_parts`).
    """
    if not segment.outputs or not segment.inputs:
        return None
    outputs = tuple(segment.outputs)
    targets = {leaf: (target, read_parts.get(leaf)) for leaf, target in segment.inputs.items()}
    if not apart:
        return Differentiation(Differentiate(outputs, tuple(targets), tuple(targets.values())))
    weights = {leaf: targets.pop(leaf) for leaf in segment.inputs if leaf in apart}
    return Differentiation(
        DifferentiateInputs(outputs, tuple(targets), tuple(targets.values()), number),
        DifferentiateWeights(number, tuple(weights), tuple(weights.values())),
    )
