"""Verification of a strategy: its program against the graph on one device, both in float64, from the run's own weights.

The graph on one device is compared with the user's module itself (`runtime.jobs.eager`), so that an operator lost by
the import is noticed.

In float32 a deep network with batch normalization amplifies the rounding of one sum into tenths of a gradient
(Inception-v3, batch 4: flipping the last bit of its inputs moves elements by 18 % of the largest). In float64 a right
program agrees to nine digits, and a wrong one does not. What is executed is otherwise the same: segments, messages,
buckets, local calls. Of tf32, bfloat16 and float16 the step is also made as the run makes it: its gradients may be as
far from those in float64 as the graph's on one device in that format, a few times over.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graph.operators import FLOATING, ITEM_BYTES, Argument, Operator, OperatorGraph, TensorSpec
from graph.plan import Plan
from profiler.operators import ExecutionContext
from profiler.updates import apply_update, initial_state
from runtime.execution.executor import Executor, InitialTensors
from runtime.execution.fingerprints import fingerprints
from runtime.execution.full_state import full_buffers, full_weights
from runtime.jobs.eager import eager_step, from_eager
from runtime.jobs.models import split_batch, tensors_of
from runtime.jobs.verify import (
    ALLOWED_TIMES,
    OWN_STATISTICS,
    ROUNDING,
    Deviation,
    Reference,
    Verification,
    deviations,
    deviations_in,
    interpret,
    loss_deviation,
    of_step,
)
from runtime.lowering.loss_count import loss_count
from runtime.ranks.watchdog import heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime.communication import World
    from runtime.jobs.job import Job

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
    """Return an operator whose dtype argument, for tensors to make or convert to, is float64; so those of its parts."""
    arguments = tuple(
        (name, _in_double(value) if name in ("dtype", "parts") else value)
        for name, value in operator.arguments
    )
    return replace(operator, arguments=arguments)


def _in_double(argument: Argument) -> Argument:
    if isinstance(argument, tuple):
        return tuple(map(_in_double, argument))
    return DOUBLE if isinstance(argument, str) and argument in FLOATING else argument


def in_double_on(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that moves tensors to `device`, floating-point ones in float64."""
    return lambda tensor: tensor.to(device, torch.float64 if tensor.is_floating_point() else tensor.dtype)


@contextmanager
def _double_by_default() -> Iterator[None]:
    """Make float64 the default dtype, of quotients of whole numbers and factories, while the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def verify_strategy(
    job: Job, world: World, tensors: InitialTensors, device: torch.device
) -> Verification | None:
    """Execute one step of a job's strategy and compare it with one device; return the verdict on rank 0.

    All ranks of `world` must call it. It takes about twice the memory of a float32 step.
    """
    # Twice the bytes (four times those of 16 bits), so that the buckets hold the same gradients as those of the run.
    factor = ITEM_BYTES[DOUBLE] // ITEM_BYTES[job.training.dtype]
    graph = in_double(job.graph)
    size_bytes = job.strategy.synchronization.size_bytes
    plan = job.plan(graph, factor * size_bytes)
    doubled = tensors.map(in_double_on(torch.device("cpu")))
    differing = differing_tensors(world, tensors)
    with _double_by_default():
        executor = _executed(job, plan, world, doubled, device)
        loss = executor.loss()
        gradients = collect_gradients(plan, world, executor, doubled, device)
        weights = full_weights(plan, world, executor.weights(), doubled.parameters, device)
        buffers = full_buffers(world, executor.buffers(), doubled.buffers)
        del executor
    precision = job.training.precision
    run_gradients = _run_gradients(job, world, tensors, device) if precision in ROUNDING else {}
    if world.rank != 0:
        return None
    context = ExecutionContext(seed=job.seed, step=0, device=device)
    whole = tensors.map(in_double_on(device))
    with _double_by_default():
        reference = _step_on_one_device(graph, whole, job, device)
        first = reference
        if tensors.further_inputs:
            first = interpret(graph, whole.of_micro_batch(0), context, job.strategy)
    of_module, not_eager = _from_module(job, graph, whole, context, first)
    updated = {name: whole.parameters[name].detach().clone() for name in reference.gradients}
    state = initial_state(job.training.optimizer, list(updated.values()))
    slopes = list(reference.gradients.values())
    apply_update(job.training.optimizer, list(updated.values()), slopes, state, job.learning_rate)
    verification = Verification(
        reference.loss,
        (
            loss_deviation(loss, reference.loss),
            *deviations("gradient", gradients, reference.gradients),
            *deviations("weight", weights, updated),
            *deviations("buffer", buffers, {**reference.buffers}),
            *of_module,
        ),
        differing,
        not_eager,
    )
    if precision not in ROUNDING:
        # A module may round to 16 bits itself.
        coarsest = max(ROUNDING.get(value.spec.dtype, 0.0) for value in job.graph.values)
        return replace(
            verification, allowed_of_run=max(verification.allowed_of_run, ALLOWED_TIMES * coarsest)
        )
    # The same rounded weights and inputs in the run's own precision, on one device.
    alone = _step_on_one_device(job.graph, tensors.map(lambda tensor: tensor.to(device)), job, device)
    rounding = max(ROUNDING[precision], loss_deviation(alone.loss, reference.loss).relative)
    return replace(
        verification,
        deviations=(
            *verification.deviations,
            *deviations_in(precision, run_gradients, alone.gradients, reference.gradients),
        ),
        allowed_of_run=ALLOWED_TIMES * rounding,
    )


def _step_on_one_device(
    graph: OperatorGraph, tensors: InitialTensors, job: Job, device: torch.device
) -> Reference:
    """Return a step on one device, each micro-batch from the buffers that the one before has renewed."""
    micro_batches = tensors.micro_batches
    count = loss_count(graph, tensors.buffers, micro_batches) if len(micro_batches) > 1 else None
    references: list[Reference] = []
    buffers = dict(tensors.buffers)
    for number, inputs in enumerate(micro_batches):
        context = ExecutionContext(seed=job.seed, step=number, device=device, loss_count=count)
        alone = InitialTensors(tensors.parameters, buffers, inputs)
        references.append(interpret(graph, alone, context, job.strategy))
        buffers.update(references[-1].buffers)
    return of_step(references, 1.0 if count is not None else 1.0 / len(micro_batches))


def _from_module(
    job: Job, graph: OperatorGraph, whole: InitialTensors, context: ExecutionContext, reference: Reference
) -> tuple[tuple[Deviation, ...], str]:
    """Return the deviations of the graph on one device from the module itself, or the reason why there are none.

    Of several micro-batches the first one is compared.
    """
    heartbeat("verifying the module itself")
    # Built anew: Python's own state starts from the beginning, and the run's tensors stay as they are.
    built = split_batch(job.graph, job.model.build(job.seed), job.strategy.micro_batches.count)[0]
    rebuilt = tensors_of(job.graph, built).map(in_double_on(context.device))
    for before, after in ((whole.parameters, rebuilt.parameters), (whole.inputs, rebuilt.inputs)):
        for name, tensor in before.items():
            if not torch.equal(tensor, after[name]):
                return (), f"{name} is built otherwise the second time"
    del rebuilt
    try:
        with _double_by_default():
            if any(operator.target in OWN_STATISTICS for operator in graph.operators):
                # A module has the statistics of the whole batch.
                reference = interpret(graph, whole, context)
            eager = eager_step(built, graph, context)
    except Exception as error:  # any error of the user's module is part of the verdict
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return (), f"it fails in float64 ({reason[:200]})"
    return from_eager(reference, eager), ""


def _executed(job: Job, plan: Plan, world: World, tensors: InitialTensors, device: torch.device) -> Executor:
    """Return an executor of a plan after one step from `tensors`."""
    executor = Executor(
        plan, world, tensors, job.training, seed=job.seed, learning_rate=job.learning_rate, device=device
    )
    executor.step(0)
    return executor


def _run_gradients(
    job: Job, world: World, tensors: InitialTensors, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return, on rank 0, the gradients of one step as the run itself makes it; all ranks must call it."""
    plan = job.plan()
    return collect_gradients(plan, world, _executed(job, plan, world, tensors, device), tensors, device)


def differing_tensors(world: World, tensors: InitialTensors) -> tuple[str, ...]:
    """Return, on rank 0, one line for each tensor that another rank has built otherwise; all ranks must call it."""
    named = {
        **{f"parameter {name}": tensor for name, tensor in tensors.parameters.items()},
        **{f"buffer {name}": tensor for name, tensor in tensors.buffers.items()},
        **tensors.inputs,
    }
    gathered = world.gather(fingerprints(named))
    if gathered is None:
        return ()
    return tuple(
        f"{name} is built otherwise on rank {rank} than on rank 0"
        for rank, fingerprints_of_rank in enumerate(gathered)
        for name, value in fingerprints_of_rank.items()
        if value != gathered[0][name]
    )


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
    return full_weights(plan, world, executor.gradients(), zeros, device)
