"""Whether a network's loss adds up the batch's samples, so that it is no mean of its micro-batches' losses."""

from __future__ import annotations

from graph.aliasing import VIEW_TARGETS, base_name
from graph.axes import AxisKind
from graph.operators import Operator, OperatorGraph, ValueKind
from graph.rules.reductions import NONE, SUM

_REDUCTIONS = frozenset({"sum", "mean"})
_SCALINGS = frozenset({"neg", "mul", "div", "_to_copy", "clone"}) | VIEW_TARGETS


def adds_up_samples(graph: OperatorGraph) -> bool:
    """Return whether the loss, or a part that it is a sum of, is a sum over all samples, perhaps times a number.

    That number may be one by their count, which the graph does not tell from any other.
    """
    left = [graph.loss]
    while left:
        made = graph.producer.get(left.pop())
        if made is None:
            continue
        operator = graph.operators[made[0]]
        name, reduction = base_name(operator.target), dict(operator.arguments).get("reduction", NONE)
        reduces = (
            name in _REDUCTIONS and _reduces_samples(operator) and _is_of_samples(graph, operator.inputs[0])
        )
        if reduction == SUM or (reduces and name == "sum"):
            return True
        if reduction != NONE or reduces:
            continue
        if name in ("add", "sub", *_REDUCTIONS) or (name in _SCALINGS and len(operator.inputs) == 1):
            left += operator.inputs
    return False


def _reduces_samples(operator: Operator) -> bool:
    """Return whether a reduction reduces the axis of samples, which a single sample does not have."""
    space = operator.space
    kept = {factor.axis for dim in space.outputs[0] for factor in dim}
    samples = [number for number, axis in enumerate(space.axes) if axis.kind is AxisKind.SAMPLE]
    return any(axis not in kept for axis in samples) if samples else not space.outputs[0]


def _is_of_samples(graph: OperatorGraph, value: str) -> bool:
    """Return whether a value follows from an input, and is no row of losses."""
    made = graph.producer.get(value)
    if made is not None and base_name(graph.operators[made[0]].target) == "stack":
        return False
    seen: set[str] = set()
    left = [value]
    while left:
        name = left.pop()
        if graph.value_by_name[name].kind is ValueKind.INPUT:
            return True
        if name not in seen and name in graph.producer:
            seen.add(name)
            left += graph.operators[graph.producer[name][0]].inputs
    return False
