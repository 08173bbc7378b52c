"""One training step of the user's module itself, in plain PyTorch and float64, with all that an import may lose.

torch.export records the operators of a forward, and nothing else: custom backwards, hooks, and Python's own side
effects are not in the graph. Here they run. The module is the factory's, its weights and inputs converted; below
autograd every operator computes in float64, whatever format the forward asks for, as the graph does in verification,
and random operators draw the graph's own numbers, in the order of its operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from graph.importing.exporting import loss_of
from graph.operators import OperatorGraph
from profiler.operators import ExecutionContext
from runtime.jobs.eager_random import GraphRandomNumbers
from runtime.jobs.models import Built
from runtime.jobs.verify import EAGER, EAGER_SECOND, Deviation, Reference, deviations, loss_deviation

# Floating-point formats that are computed in float64 instead.
_NARROWER = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class EagerStep:
    """The results of one step of a module itself.

    result: loss; gradients of the trainable parameters that got one; all buffers afterwards.
    second_loss: of a second forward from the same buffers and random numbers: it differs where Python keeps state.
    initial: all buffers before.
    """

    result: Reference
    second_loss: float
    initial: dict[str, torch.Tensor]


def eager_step(built: Built, graph: OperatorGraph, context: ExecutionContext) -> EagerStep:
    """Return the results of one step of a freshly built module, in float64.

    Args:
        built: module and inputs as a factory returned them; both are converted, and nothing else may use them then.
        graph: imported from the module; its random operators give the random numbers.
        context: seed and step of the random numbers, and the device.
    """
    module, args, kwargs = built
    module = module.to(context.device, torch.float64)
    if not module.training:
        module.train()
    args, kwargs = tree_map_only(torch.Tensor, partial(_moved, device=context.device), (args, kwargs))
    initial = _buffers(module)
    with _plain_kernels(context.device):
        with _Double(GraphRandomNumbers(graph, context)):
            # A forward may write into its inputs.
            copied, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            loss = loss_of(module(*copied, **named))
            if loss.requires_grad:
                loss.backward()
        result = Reference(
            loss=float(loss.detach()),
            gradients={
                name: parameter.grad.to_dense()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            },
            buffers=_buffers(module),
        )
        del loss
        for name, buffer in module.named_buffers():
            buffer.copy_(initial[name])
        with _Double(GraphRandomNumbers(graph, context)):
            second_loss = float(loss_of(module(*args, **kwargs)).detach())
    return EagerStep(result, second_loss, initial)


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def from_eager(of_graph: Reference, step: EagerStep) -> tuple[Deviation, ...]:
    """Return the deviations of loss, gradients and buffers of the graph on one device from the module's own."""
    eager = step.result
    gradients = {name: torch.zeros_like(gradient) for name, gradient in of_graph.gradients.items()}
    gradients |= eager.gradients
    buffers = {**step.initial, **of_graph.buffers}
    # Infinities that stay would have no difference, and most buffers stay.
    changed = [
        name
        for name, buffer in eager.buffers.items()
        if name in of_graph.buffers or not torch.equal(buffer.double(), buffers[name].double())
    ]
    return (
        loss_deviation(of_graph.loss, eager.loss, EAGER),
        loss_deviation(of_graph.loss, step.second_loss, EAGER_SECOND),
        *deviations(f"{EAGER} gradient", of_graph.gradients, gradients),
        *deviations(
            f"{EAGER} buffer",
            {name: buffers[name].double() for name in changed},
            {name: eager.buffers[name].double() for name in changed},
        ),
    )


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, torch.float64 if tensor.is_floating_point() else tensor.dtype)


@contextmanager
def _plain_kernels(device: torch.device) -> Iterator[None]:
    """Seed torch's generators and make tensors as for export, and restore the generators at the end."""
    devices = [device] if device.type == "cuda" else []
    # A fused recurrent kernel would draw its dropout below the dispatcher.
    with torch.random.fork_rng(devices), torch.backends.cudnn.flags(enabled=False), torch.device(device):
        torch.manual_seed(0)
        yield


class _Double(TorchDispatchMode):
    """Executes every operator in float64, and random operators with the graph's random numbers."""

    def __init__(self, draws: GraphRandomNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute one operator."""
        given, named = tree_map_only(torch.dtype, _wider_dtype, (tuple(args), kwargs or {}))
        if not isinstance(function, torch._ops.OpOverload):
            return function(*given, **named)
        if not function._schema.is_mutable:
            given, named = tree_map_only(torch.Tensor, _wider, (given, named))
        if torch.Tag.nondeterministic_seeded in function.tags:
            result = self._draws.draw(function, given, named)
        elif function is torch.ops.aten.lift_fresh.default:
            # A constant of the forward: export has it in float32.
            result = tree_map_only(torch.Tensor, _rounded, function(*given, **named))
        elif function is torch.ops.aten._grouped_mm.default:
            result = _grouped_product(*given, **named)
        else:
            result = function(*given, **named)
        return tree_map_only(torch.Tensor, _wider, result)


def _wider_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _NARROWER else dtype


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype in _NARROWER else tensor


def _grouped_product(
    first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor | None = None, **_options: Any
) -> torch.Tensor:
    """Multiply runs of rows, or of the contracted dim, each with its own factor: torch's kernel lacks float64."""
    ends = [] if offs is None else offs.tolist()
    starts = [0, *ends[:-1]]
    if first.dim() == 2 and second.dim() == 3:
        result = first.new_zeros(first.shape[0], second.shape[2])
        for run, (start, end) in enumerate(zip(starts, ends, strict=True)):
            result[start:end] = first[start:end] @ second[run]
        return result
    if first.dim() == 2 and second.dim() == 2:
        runs = zip(starts, ends, strict=True)
        return torch.stack([first[:, start:end] @ second[start:end] for start, end in runs])
    return torch.bmm(first, second)
