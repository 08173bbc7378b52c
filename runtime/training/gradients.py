"""Gradients of which each rank has parts: clipping by their global norm, and loss scaling by torch's own `GradScaler`.

Each rank unscales its own gradients. Whether one of them is infinite or NaN is a sum over all ranks, so that all skip
an update or none does, and all scalers go on with the same scale. What a scaler keeps between `unscale_` and `update`
is not public; torch's `ShardedGradScaler` (torch/distributed/fsdp/sharded_grad_scaler.py) sums it in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState

from graph.errors import RuntimeFailure
from graph.intervals import full_region
from graph.operators import OperatorGraph
from graph.plan import Plan
from runtime.communication import World
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import parts_of_weight

# As torch.nn.utils.clip_grad_norm_ has it.
CLIP_EPSILON = 1e-6


class GradientClipping:
    """The elements of a rank's gradients that count in the global norm: each element of a weight on one rank alone."""

    def __init__(
        self, plan: Plan, world: World, parameters: Mapping[str, nn.Parameter], updated: Iterable[str]
    ) -> None:
        """Note the rank's shares, and the cells that it is the first to hold.

        Args:
            plan: for the holders of each weight.
            world: the ranks.
            parameters: the rank's, by name.
            updated: the names of parameters that get a gradient.
        """
        self._world = world
        self._parameters = list(parameters.values())
        self._counted: list[tuple[nn.Parameter, list[Selection]]] = []
        for name in updated:
            parameter = parameters[name]
            own = parts_of_weight(plan, name, world.rank)
            if len(own) > 1:
                # All of them are shares, or the rank's alone.
                whole = full_region(tuple(parameter.shape))
                self._counted.append((parameter, [Selection(whole, whole, parameter.device)]))
                continue
            counted_regions = [region for rank, region in plan.updated(name) if rank == world.rank]
            selections = [
                Selection(region, part.region, parameter.device) for part in own for region in counted_regions
            ]
            self._counted.append((parameter, selections))

    def clip(self, max_norm: float, norm_type: float, device: torch.device) -> torch.Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; return the norm before."""
        parts = [
            selection.take(parameter.grad)
            for parameter, selections in self._counted
            if parameter.grad is not None
            for selection in selections
        ]
        norms = [torch.linalg.vector_norm(part, norm_type).double() for part in parts]
        own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
        if norm_type == float("inf"):
            largest = torch.zeros(self._world.size, dtype=torch.float64, device=device)
            largest[self._world.rank] = own.max()
            total = self._world.sum(largest).max()
        else:
            total = self._world.sum((own**norm_type).sum()) ** (1.0 / norm_type)
        share = torch.clamp(max_norm / (total + CLIP_EPSILON), max=1.0)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(share.to(parameter.grad.dtype))
        return total


def scale_of(scaler: GradScaler, graph: OperatorGraph, device: torch.device) -> float:
    """Return the present scale of a scaler, which is 1 where it is disabled.

    Raises:
        RuntimeFailure: weights are float16, whose gradients a scaler does not unscale.
    """
    if not scaler.is_enabled():
        return 1.0
    for weight in graph.weights:
        if weight.spec.dtype == "float16":
            raise RuntimeFailure(
                f"scaler: parameter {weight.name} is float16, must be float32, since a GradScaler refuses float16 "
                "gradients; keep the module float32 and compute in float16 by torch.autocast in its forward"
            )
    return float(scaler.scale(torch.ones((), device=device)))


def step_scaled(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, world: World, device: torch.device
) -> None:
    """Do `scaler.step(optimizer)`: update where all gradients of all ranks are finite. All ranks must call it."""
    if scaler.is_enabled():
        state = cast(Any, scaler)._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        if state["stage"] is OptState.UNSCALED:
            flags = [flag.to(device, torch.float64) for flag in state["found_inf_per_device"].values()]
            # A rank without gradients has found nothing, which a scaler takes for a mistake.
            count = torch.stack(flags).sum() if flags else torch.zeros((), dtype=torch.float64, device=device)
            state["found_inf_per_device"] = {device: (world.sum(count) > 0).float()}
    scaler.step(optimizer)
