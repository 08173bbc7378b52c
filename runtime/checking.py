"""Verification of a strategy: its program against the graph on one device, both in float64.

In float32 a deep network with batch normalization amplifies the rounding of one sum into tenths of a gradient
(Inception-v3, batch 4: flipping the last bit of its inputs moves elements by 18 % of the largest). In float64 a right
program agrees to nine digits, and a wrong one does not. What is executed is otherwise the same: segments, messages,
buckets, local calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graph.operators import FLOATING, Operator, OperatorGraph, TensorSpec
from graph.plan import BUCKET_BYTES, Plan, build_plan
from profiler.operators import ExecutionContext
from runtime.collecting import collect_weights
from runtime.executor import Executor, InitialTensors
from runtime.verify import Verification, interpret, verification

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.communication import World
    from runtime.jobs import Job

DOUBLE = "float64"


def in_double(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with every floating-point tensor in float64."""
    return replace(
        graph,
        operators=tuple(_operator_in_double(operator) for operator in graph.operators),
        values=tuple(replace(value, spec=_spec_in_double(value.spec)) for value in graph.values),
        _cache={},
    )


def _spec_in_double(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype=DOUBLE) if spec.dtype in FLOATING else spec


def _operator_in_double(operator: Operator) -> Operator:
    """Tensors are made, or converted, in the dtype that an argument names."""
    arguments = tuple(
        (name, DOUBLE if name == "dtype" and value in FLOATING else value)
        for name, value in operator.arguments
    )
    return replace(operator, arguments=arguments)


def tensors_in_double(tensors: InitialTensors, device: torch.device) -> InitialTensors:
    """Return the tensors on `device`, the floating-point ones in float64."""

    def convert(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.to(device, torch.float64 if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in named.items()
        }

    return InitialTensors(convert(tensors.parameters), convert(tensors.buffers), convert(tensors.inputs))


def verify_strategy(
    job: Job, world: World, tensors: InitialTensors, device: torch.device
) -> Verification | None:
    """Execute one step of a job's strategy and compare it with one device; return the verdict on rank 0.

    All ranks of `world` must call it. It takes about twice the memory of a float32 step.
    """
    graph = in_double(job.graph)
    # Twice the bytes, so that the buckets hold the same gradients as those of the run.
    plan = build_plan(graph, job.strategy, job.node_of, 2 * BUCKET_BYTES)
    doubled = tensors_in_double(tensors, torch.device("cpu"))
    executor = Executor(
        plan,
        world,
        doubled,
        job.training,
        seed=job.seed,
        learning_rate=job.learning_rate,
        device=device,
    )
    executor.step(0)
    loss = executor.loss()
    gradients = collect_gradients(plan, world, executor, doubled, device)
    if world.rank != 0:
        return None
    del executor
    context = ExecutionContext(seed=job.seed, step=0, device=device)
    reference = interpret(graph, tensors_in_double(tensors, device), context, job.strategy)
    return verification(loss, gradients, reference)


def collect_gradients(
    plan: Plan, world: World, executor: Executor, tensors: InitialTensors, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return, on rank 0, the whole gradient of the last step of every weight that gets one."""
    # Which weights get a gradient follows from the plan, so that all ranks name the same ones.
    zeros = {
        weight.name: torch.zeros_like(tensors.parameters[weight.name])
        for weight in plan.graph.weights
        if weight.requires_gradient
        and any(any(plan.active[index]) for index, _ in plan.graph.consumers[weight.name])
    }
    return collect_weights(plan, world, executor.gradients(), zeros, device)
