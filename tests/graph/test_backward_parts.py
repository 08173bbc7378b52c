"""Parts of backwards: which inputs each differentiates, and that both together are the whole, on real operators."""

from __future__ import annotations

import pytest
import torch

from graph.backward_parts import backward_parts, part_of, parts_of_backward
from graph.calls import LocalCall
from graph.rules import whole_call
from profiler.operators import ExecutionContext, compile_call, random_inputs
from tests.runtime.oracle import graph_of

NAMES = ("branches", "convolutions", "dropped", "mixed", "perceptron", "recurrent")


def gradients(call: LocalCall, seed: int) -> list[torch.Tensor | None]:
    """Return the gradient of each input that a call differentiates, from outputs' gradients of ones."""
    inputs = random_inputs(call, "cpu", seed)
    made = [output for output in compile_call(call)(inputs, ExecutionContext()) if output.requires_grad]
    wanted = [value for value in inputs if value.requires_grad]
    found = iter(
        torch.autograd.grad(made, wanted, [torch.ones_like(output) for output in made], allow_unused=True)
    )
    return [next(found) if value.requires_grad else None for value in inputs]


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_of_both_parts_differentiate_what_the_whole_does(name: str) -> None:
    graph, divided = graph_of(name), 0
    for operator in graph.operators:
        parts, call = backward_parts(graph, operator), whole_call(graph, operator)
        assert not any(of_input and of_weight for of_input, of_weight in zip(*parts, strict=True))
        if not parts.has_weights:
            assert parts.inputs == graph.gradient_inputs(operator)
            assert parts_of_backward(graph, operator, call) == ()
            continue
        whole = gradients(call, 3)
        calls = [part for part in (part_of(call, slots) for slots in parts) if part.has_backward]
        of_parts = [gradients(part, 3) for part in calls]
        for slot, gradient in enumerate(whole):
            found = [of_part[slot] for of_part in of_parts if of_part[slot] is not None]
            assert len(found) == (gradient is not None)
            if gradient is not None:
                torch.testing.assert_close(found[0], gradient)
        divided += len(calls) == 2
        assert parts_of_backward(graph, operator, call) == (tuple(calls) if len(calls) == 2 else ())
    assert divided


def test_batch_normalization_is_not_divided() -> None:
    graph = graph_of("convolutions")
    apply = next(operator for operator in graph.operators if operator.target == "soapstone.batch_norm_apply")
    assert backward_parts(graph, apply) == (graph.gradient_inputs(apply), (False,) * len(apply.inputs))
