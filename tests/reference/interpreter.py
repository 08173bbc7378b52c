"""The graph on one device: local calls in order, autograd through all of them.

Run whole, this is what any execution of any strategy must reproduce: loss, every gradient, every updated buffer.
Run in parts, every operator's tasks gather their regions and add up their outputs, as slowly and obviously as can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graph.axes import Degrees, coordinates
from graph.operators import Operator, OperatorGraph
from graph.rules import local_calls, parts
from profiler.operators import ExecutionContext, compile_call
from tests.reference.assemble import gather, placed_in


@dataclass(frozen=True)
class Interpretation:
    """What one step gives: the loss, gradients by weight, new values by updated buffer."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def interpret(
    graph: OperatorGraph,
    weights: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    context: ExecutionContext,
    degrees: Mapping[str, Degrees] | None = None,
) -> Interpretation:
    """Execute one step.

    Args:
        graph: the graph.
        weights: by name; others than the graph's are ignored.
        buffers: by name; they are not changed.
        inputs: in the order of `graph.inputs`.
        context: seed, step and device.
        degrees: by operator; one task each where None.
    """
    leaves = {value.name: weights[value.name].detach().clone().requires_grad_() for value in graph.weights}
    frozen = {name: buffers[name] for name in graph.value_by_name if name in buffers and name not in leaves}
    values = {**frozen, **leaves, **dict(zip(graph.inputs, inputs, strict=True))}
    for operator in graph.operators:
        chosen = (1,) * len(operator.space.axes) if degrees is None else degrees[operator.name]
        _run(graph, operator, chosen, values, context)
    loss = values[graph.loss]
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return Interpretation(
        loss.detach(),
        {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        },
        {buffer: values[name].detach() for buffer, name in graph.buffer_updates},
    )


def _run(
    graph: OperatorGraph,
    operator: Operator,
    degrees: Degrees,
    values: dict[str, torch.Tensor],
    context: ExecutionContext,
) -> None:
    """Execute all tasks of one operator and assemble its outputs; of replicas only the first counts."""
    pieces = parts(operator, degrees)
    calls = local_calls(graph, operator, degrees)
    for coordinate, piece, call in zip(coordinates(degrees), pieces, calls, strict=True):
        if coordinate[-1] > 0:
            continue
        local = [
            gather(values[name], region) for name, region in zip(operator.inputs, piece.inputs, strict=True)
        ]
        outputs = compile_call(call)(local, context)
        if len(pieces) == 1:
            values.update(zip(operator.outputs, outputs, strict=True))
            return
        for name, region, output in zip(operator.outputs, piece.outputs, outputs, strict=True):
            shape = graph.value_by_name[name].spec.shape
            known = values.get(name)
            placed = placed_in(shape, region, output)
            values[name] = placed if known is None else known + placed
