"""The oracle of rules: local calls on inferred regions, assembled, are the whole operator, forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graph import rules
from graph.axes import AxisKind, Degrees, IterationSpace, coordinates, refinable, refine
from graph.calls import LocalCall
from graph.importing.building import NOT_DIFFERENTIABLE_OUTPUTS
from graph.operators import Operator, OperatorGraph, Slot, TensorSpec, Value, ValueKind
from graph.rules.base import Signature, TaskPart
from graph.rules.least import least_work
from graph.rules.registry import rule_for
from profiler.estimate import may_become, work_of
from profiler.operators import ExecutionContext, compile_call
from tests.gpu.preconditions import CudaPreconditions
from tests.reference.assemble import gather, scatter_add

Outputs = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operator on whole tensors, and what torch makes of them, independently of the rules."""

    target: str
    arguments: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    reference: Callable[..., Outputs]


def _slotted(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return Slot(next(index for index, tensor in enumerate(tensors) if tensor is value))
    if isinstance(value, (tuple, list)):
        return tuple(_slotted(item, tensors) for item in value)
    return value


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def one_operator(
    case: Case, outputs: Sequence[torch.Tensor], generator: random.Random | None
) -> OperatorGraph:
    """Return a graph of the case's operator alone; its axes randomly refined where a generator is given."""
    arguments = tuple((name, _slotted(value, case.tensors)) for name, value in case.arguments.items())
    inputs = tuple(_spec(tensor) for tensor in case.tensors)
    results = tuple(_spec(tensor) for tensor in outputs)
    rule = rule_for(case.target)
    space = rule.space(Signature(case.target, arguments, inputs, results))
    _check_shapes(space, inputs, results)
    if generator is not None:
        space = _randomly_refined(space, rule.rigid, generator)
        _check_shapes(space, inputs, results)
    names = tuple(f"x{slot}" for slot in range(len(inputs)))
    made = tuple(f"y{slot}" for slot in range(len(results)))
    plain = NOT_DIFFERENTIABLE_OUTPUTS.get(case.target, frozenset())
    return OperatorGraph(
        "one",
        (Operator("op", case.target, arguments, names, made, space),),
        (
            *(
                Value(name, spec, ValueKind.WEIGHT, tensor.requires_grad)
                for name, spec, tensor in zip(names, inputs, case.tensors, strict=True)
            ),
            *(
                Value(name, spec, ValueKind.OPERATOR, output.requires_grad and position not in plain)
                for position, (name, spec, output) in enumerate(zip(made, results, outputs, strict=True))
            ),
        ),
        (),
        made[0],
    )


def _check_shapes(space: IterationSpace, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    for operand, spec in zip((*space.inputs, *space.outputs), (*inputs, *outputs), strict=True):
        sizes = []
        for dim in operand:
            size = 1
            for factor in dim:
                size *= factor.size
            sizes.append(size)
        assert tuple(sizes) == spec.shape
    names = [axis.name for axis in space.axes]
    assert len(set(names)) == len(names)


def _randomly_refined(
    space: IterationSpace, rigid: frozenset[str], generator: random.Random
) -> IterationSpace:
    factors = {}
    for axis in refinable(space):
        size = space.axes[axis].size
        divisors = [divisor for divisor in range(2, size) if size % divisor == 0]
        if space.axes[axis].name not in rigid and divisors and generator.random() < 0.5:
            inner = generator.choice(divisors)
            factors[axis] = [size // inner, inner]
    return refine(space, factors)


def random_degrees(space: IterationSpace, generator: random.Random, most: int = 3) -> Degrees:
    """Return degrees of up to `most` a split axis; about half of the axes stay whole."""
    degrees = []
    for axis in space.axes:
        limit = 2 if axis.kind is AxisKind.REPLICA else min(axis.size, most)
        degrees.append(generator.randint(1, limit) if generator.random() < 0.6 else 1)
    return tuple(degrees)


def check_case(
    case: Case,
    generator: random.Random,
    *,
    degrees: Degrees | None = None,
    tolerance: float = 1e-9,
    context: ExecutionContext | None = None,
    seed: int = 0,
) -> None:
    """Compare the assembled parts of one configuration with the reference; CUDA's kernels would take them, too."""
    expected = _tuple(case.reference(*case.tensors))
    graph = one_operator(case, expected, generator if degrees is None else None)
    operator = graph.operators[0]
    degrees = degrees or random_degrees(operator.space, generator)
    randomness = torch.Generator().manual_seed(seed)
    out_gradients = [
        torch.randn(output.shape, generator=randomness, dtype=torch.float64).to(output.dtype)
        for output in expected
    ]
    made = [torch.zeros(output.shape, dtype=_sum_dtype(output.dtype)) for output in expected]
    in_gradients = [torch.zeros_like(tensor) for tensor in case.tensors]
    differentiable = [graph.value_by_name[name].requires_gradient for name in operator.outputs]
    replicas: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
    calls = rules.local_calls(graph, operator, degrees)
    parts = rules.parts(operator, degrees)
    assert calls == tuple(rules.call_of(graph, operator, degrees, task) for task in range(len(parts)))
    _check_work(graph, calls)
    for coordinate, part, call in zip(coordinates(degrees), parts, calls, strict=True):
        local = [
            gather(tensor.detach(), region).clone().requires_grad_(tensor.requires_grad)
            for tensor, region in zip(case.tensors, part.inputs, strict=True)
        ]
        with CudaPreconditions():
            outputs = compile_call(call)(local, context or ExecutionContext())
        assert tuple(_spec(output) for output in outputs) == call.outputs
        assert tuple(_spec(tensor) for tensor in local) == call.inputs
        known = replicas.setdefault(coordinate[:-1], outputs)
        if known is not outputs:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(known, outputs, strict=True))
            continue
        for whole, region, output in zip(made, part.outputs, outputs, strict=True):
            scatter_add(whole, region, output.detach())
        with CudaPreconditions():
            _add_gradients(part, call.gradients, local, outputs, differentiable, out_gradients, in_gradients)
    for whole, output in zip(made, expected, strict=True):
        torch.testing.assert_close(
            whole.to(output.dtype), output.detach(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    _compare_gradients(case, expected, differentiable, out_gradients, in_gradients, tolerance)


def _check_work(graph: OperatorGraph, calls: Sequence[LocalCall]) -> None:
    """Calls are of types that the operator's may become, and do together at least what is said of all of them."""
    operator = graph.operators[0]
    whole = rules.whole_call(graph, operator)
    assert all(may_become(whole.target, call.target) for call in calls)
    forward, backward = least_work(graph, operator)
    assert sum(rules.flops(call) for call in calls) >= forward.flops * (1 - 1e-12)
    assert sum(rules.bytes_moved(call) for call in calls) >= forward.size_bytes
    differentiated = [call for call in calls if call.has_backward]
    assert sum(rules.backward_flops(call) for call in differentiated) >= backward.flops * (1 - 1e-12)
    moved = sum(work_of(call, "backward").size_bytes for call in differentiated)
    assert moved >= backward.size_bytes


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.bool else dtype


def _add_gradients(
    part: TaskPart,
    flags: Sequence[bool],
    local: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    differentiable: Sequence[bool],
    out_gradients: Sequence[torch.Tensor],
    in_gradients: Sequence[torch.Tensor],
) -> None:
    chosen = [
        (output, gather(gradient, region))
        for output, gradient, region, carries in zip(
            outputs, out_gradients, part.outputs, differentiable, strict=True
        )
        if carries and output.requires_grad
    ]
    slots = [slot for slot, flag in enumerate(flags) if flag]
    if not chosen or not slots:
        return
    gradients = torch.autograd.grad(
        [output for output, _ in chosen],
        [local[slot] for slot in slots],
        [gradient for _, gradient in chosen],
        allow_unused=True,
    )
    for slot, gradient in zip(slots, gradients, strict=True):
        if gradient is not None:
            scatter_add(in_gradients[slot], part.inputs[slot], gradient)


def _compare_gradients(
    case: Case,
    expected: Sequence[torch.Tensor],
    differentiable: Sequence[bool],
    out_gradients: Sequence[torch.Tensor],
    in_gradients: Sequence[torch.Tensor],
    tolerance: float,
) -> None:
    chosen = [
        (output, gradient)
        for output, gradient, carries in zip(expected, out_gradients, differentiable, strict=True)
        if carries
    ]
    slots = [slot for slot, tensor in enumerate(case.tensors) if tensor.requires_grad]
    if not chosen or not slots:
        return
    whole = torch.autograd.grad(
        [output for output, _ in chosen],
        [case.tensors[slot] for slot in slots],
        [gradient for _, gradient in chosen],
        allow_unused=True,
    )
    for slot, gradient in zip(slots, whole, strict=True):
        reference = torch.zeros_like(case.tensors[slot]) if gradient is None else gradient
        torch.testing.assert_close(in_gradients[slot], reference, rtol=tolerance, atol=tolerance)
