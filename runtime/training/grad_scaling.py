"""Loss scaling by torch's own `GradScaler`, over ranks that each have some of the gradients.

Each rank unscales its own gradients. Whether one of them is infinite or NaN is a sum over all ranks, so that all skip
an update or none does, and all scalers go on with the same scale. What a scaler keeps between `unscale_` and `update`
is not public; torch's `ShardedGradScaler` (torch/distributed/fsdp/sharded_grad_scaler.py) sums it in the same place.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from graph.errors import RuntimeFailure
from graph.operators import OperatorGraph
from runtime.communication import World


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
