"""Which operators have a backward in every strategy, and which in some."""

from __future__ import annotations

from math import prod

from graph.axes import is_gapless, operand_region
from graph.intervals import volume
from graph.operators import OperatorGraph
from graph.weight_placement import cells


def operators_with_backward(graph: OperatorGraph, *, surely: bool) -> list[bool]:
    """Return, for each operator, whether in every strategy each of its parts has a backward; or in some, some part.

    Each has where the loss depends on all of some output, by operators of which that is true: every part then makes
    something that one of their parts reads. Of replicas of a part only some may have one.
    """
    has_backward = [False] * len(graph.operators)
    for index in reversed(range(len(graph.operators))):
        for name in graph.operators[index].outputs:
            if not graph.value_by_name[name].requires_gradient:
                continue
            readers = [
                (reader, slot)
                for reader, slot in graph.readers[name]
                if has_backward[reader] and graph.gradient_inputs(graph.operators[reader])[slot]
            ]
            has_backward[index] = (
                has_backward[index]
                or name == graph.loss
                or (_read_whole(graph, name, readers) if surely else bool(readers))
            )
    return has_backward


def _read_whole(graph: OperatorGraph, name: str, readers: list[tuple[int, int]]) -> bool:
    """Return whether some readings together touch every element of a value, however the readers are split."""
    regions = {}
    for index, (reader, slot) in enumerate(readers):
        space = graph.operators[reader].space
        operand = space.inputs[slot]
        if is_gapless(operand):
            regions[index] = operand_region(operand, [(0, axis.size) for axis in space.axes[:-1]])
    shape = graph.value_by_name[name].spec.shape
    return bool(regions) and sum(volume(cell.region) for cell in cells(regions)) == prod(shape)
