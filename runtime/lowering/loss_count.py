"""A mean loss over the targets of all micro-batches, of which one alone may have more or fewer that count.

A loss of a module that averages over its targets, but for those that are ignored, is a sum of losses divided by a sum
of weights (`graph.rules.reductions`). Where targets follow from inputs alone, the weights of all micro-batches are
added up before the first one begins, and each divides by that. Elsewhere a step's loss is the mean of the losses of its
micro-batches, as where gradients are accumulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graph.operators import Operator, OperatorGraph, Slot, ValueKind
from graph.rules import DRAWING, local_calls
from graph.rules.likelihoods import SUMS
from profiler.operators import ExecutionContext, compile_call
from profiler.operators.dtypes import sum_dtype
from profiler.operators.likelihoods import weight_of_targets

_SUMS = frozenset({"soapstone.cross_entropy_sums", *SUMS})


def counted_loss(graph: OperatorGraph) -> int | None:
    """Return the operator that divides the loss by the weight of its targets, where this follows from inputs."""
    index, _ = graph.producer[graph.loss]
    if graph.operators[index].target != "soapstone.ratio":
        return None
    sums = graph.producer.get(graph.operators[index].inputs[0])
    if sums is None or graph.operators[sums[0]].target not in _SUMS:
        return None
    operands = _counted_operands(graph.operators[sums[0]])
    if graph.value_by_name[operands["target"]].spec.dtype not in ("int64", "int32"):
        return None
    return index if all(_follows_from_inputs(graph, name) for name in operands.values()) else None


def _counted_operands(operator: Operator) -> dict[str, str]:
    """Return the values that targets, and the classes' weights where there are any, are read from."""
    arguments = dict(operator.arguments)
    return {
        name: operator.inputs[argument.index]
        for name in ("target", "weight")
        if isinstance(argument := arguments.get(name), Slot)
    }


def _follows_from_inputs(graph: OperatorGraph, name: str) -> bool:
    if graph.value_by_name[name].kind is not ValueKind.OPERATOR:
        return graph.value_by_name[name].kind is not ValueKind.WEIGHT
    operator = graph.operators[graph.producer[name][0]]
    return operator.target not in DRAWING and all(
        _follows_from_inputs(graph, operand) for operand in operator.inputs
    )


def loss_count(
    graph: OperatorGraph,
    buffers: Mapping[str, torch.Tensor],
    micro_batches: Sequence[Mapping[str, torch.Tensor]],
) -> torch.Tensor | None:
    """Return the weight of the targets of all micro-batches, a scalar; None where each has its own mean.

    Args:
        graph: of one micro-batch.
        buffers: whole, by name.
        micro_batches: the whole inputs of each, by name.
    """
    index = counted_loss(graph)
    if index is None:
        return None
    sums = graph.operators[graph.producer[graph.operators[index].inputs[0]][0]]
    kind = sum_dtype(getattr(torch, graph.value_by_name[sums.inputs[0]].spec.dtype))
    ignored: Any = sums.argument("ignore_index")
    operands = _counted_operands(sums)

    def count(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        known = {**buffers, **inputs}
        target = _value(graph, operands["target"], known)
        weight = _value(graph, operands["weight"], known) if "weight" in operands else None
        return weight_of_targets(target, weight, ignored, kind)

    with torch.no_grad():
        return torch.stack([count(inputs) for inputs in micro_batches]).sum()


def _value(graph: OperatorGraph, name: str, known: dict[str, torch.Tensor]) -> torch.Tensor:
    if name not in known:
        operator = graph.operators[graph.producer[name][0]]
        (call,) = local_calls(graph, operator, (1,) * len(operator.space.axes))
        inputs = [_value(graph, operand, known) for operand in operator.inputs]
        context = ExecutionContext(device=inputs[0].device if inputs else torch.device("cpu"))
        known.update(zip(operator.outputs, compile_call(call)(inputs, context), strict=True))
    return known[name]


def over_all(sums: torch.Tensor, context: ExecutionContext) -> torch.Tensor:
    """Return a micro-batch's sum of losses beside the weight of all micro-batches' targets, where that is known."""
    if context.loss_count is None:
        return sums
    return torch.stack((sums[0], context.loss_count.to(sums)))
