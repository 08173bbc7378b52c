"""Random inputs on which a local call can be executed and measured."""

from __future__ import annotations

import torch

from graph.calls import LocalCall
from graph.compiled_calls import COMPILED, parts_of
from graph.operators import FLOATING, TensorSpec
from graph.rules import index_bounds
from graph.rules.common import slot_of
from profiler.operators.dtypes import torch_dtype

# Losses that take logarithms of probabilities, and the arguments that hold them.
_PROBABILITIES = {"binary_cross_entropy": ("self", "target")}


def random_inputs(call: LocalCall, device: torch.device | str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return dense inputs of a call: normal floats, indexes in bounds, moments of a unit normal, even groups.

    Sums of exponentials are above zero. All are drawn on their device: a GPU would else run idle while the host draws,
    and its clock fall. Inputs of a compiled call are those of the first of its parts that reads them.
    """
    if call.target == COMPILED:
        return _of_parts(call, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    bounds = index_bounds(call)
    tensors = [_random(spec, bounds.get(slot), generator, device) for slot, spec in enumerate(call.inputs)]
    for name in _PROBABILITIES.get(call.target.split(".")[1], ()):
        slot = slot_of(call, name)
        if slot is not None:
            tensors[slot] = torch.sigmoid(tensors[slot])
    if call.target == "soapstone.grouped_mm":
        # Every expert has as many of the rows as any other.
        rows, experts = call.inputs[0].shape[0], call.inputs[2].shape[0]
        ends = torch.arange(1, experts + 1, device=device) * rows // experts
        tensors[2] = ends.to(tensors[2].dtype)
    slot = slot_of(call, "exp_sums")
    if slot is not None:
        tensors[slot] = tensors[slot].exp()
    slot = slot_of(call, "moments")
    if slot is not None:
        count = float(call.argument("count"))
        tensors[slot] = torch.stack(
            (torch.zeros_like(tensors[slot][0]), torch.full_like(tensors[slot][1], count))
        )
    return tuple(
        tensor.to(device).requires_grad_(needs and tensor.is_floating_point())
        for tensor, needs in zip(tensors, call.gradients, strict=True)
    )


def _of_parts(call: LocalCall, device: torch.device | str, seed: int) -> tuple[torch.Tensor, ...]:
    tensors: dict[int, torch.Tensor] = {}
    for position, part in enumerate(parts_of(call)):
        if any(number < len(call.inputs) and number not in tensors for number in part.sources):
            drawn = random_inputs(part.call, device, seed + position)
            for number, tensor in zip(part.sources, drawn, strict=True):
                tensors.setdefault(number, tensor)
    return tuple(
        tensors[number].detach().requires_grad_(needs and tensors[number].is_floating_point())
        for number, needs in enumerate(call.gradients)
    )


def _random(
    spec: TensorSpec, bound: int | None, generator: torch.Generator, device: torch.device | str
) -> torch.Tensor:
    dtype = torch_dtype(spec.dtype)
    if bound is None and spec.dtype in FLOATING:
        return torch.randn(spec.shape, generator=generator, device=device).to(dtype)
    # Integers of unknown meaning are zeros and ones: small enough for an exponent, large enough for a condition.
    if spec.dtype in FLOATING:
        return torch.rand(spec.shape, generator=generator, device=device).to(dtype)
    most = max(bound if bound is not None else 2, 1)
    return torch.randint(0, most, spec.shape, generator=generator, device=device).to(dtype)
