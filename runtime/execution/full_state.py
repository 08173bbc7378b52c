"""Full state: whole weights and buffers on rank 0, gathered from the ranks' parts, and scattered to them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graph.intervals import Region, intersect_regions, shape
from graph.plan import Plan
from profiler.process_groups import Message
from runtime.communication import World
from runtime.instructions.selections import Selection, selection_of


def full_weights(
    plan: Plan,
    world: World,
    parts: Mapping[str, Sequence[tuple[Region, torch.Tensor]]],
    initial: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return, on rank 0, whole tensors of the weights in `initial`, on the CPU; elsewhere an empty dict.

    All ranks of `world` must call it with the same names. One cell is sent at a time, by the first of its holders, or,
    where it is sharded, by each of them its share.

    Args:
        plan: for the holders of each weight.
        world: the ranks.
        parts: the rank's regions of each weight and their tensors (of the weight itself, or its gradient).
        initial: for each weight, the values of elements that no rank holds.
        device: of this rank.
    """
    result = {}
    for name, start in initial.items():
        whole = start.detach().to("cpu", copy=True) if world.rank == 0 else None
        for owner, region in plan.updated(name):
            if world.rank == owner:
                within, tensor = next(
                    part for part in parts[name] if intersect_regions(part[0], region) == region
                )
                part = Selection(region, within, tensor.device).take(tensor).contiguous()
                if owner != 0:
                    works, _ = world.exchange([Message(0, part)], [])
                    world.wait(works[0])
            elif world.rank == 0:
                part = torch.empty(shape(region), dtype=start.dtype, device=device)
                _, works = world.exchange([], [Message(owner, part)])
                world.wait(works[0])
            if whole is not None:
                selection_of(region, tuple(start.shape), torch.device("cpu")).put(whole, part.cpu())
        if whole is not None:
            result[name] = whole
    return result


def full_buffers(
    world: World, parts: Mapping[str, list[tuple[Region, torch.Tensor]]], initial: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return, on rank 0, whole buffers from the regions that the ranks read; elsewhere an empty dict."""
    portable = {
        name: [(region, tensor.cpu()) for region, tensor in regions] for name, regions in parts.items()
    }
    gathered = world.gather(portable)
    if gathered is None:
        return {}
    result = {name: start.detach().to("cpu", copy=True) for name, start in initial.items()}
    for parts_of_rank in gathered:
        for name, regions in parts_of_rank.items():
            for region, tensor in regions:
                selection_of(region, tuple(result[name].shape), torch.device("cpu")).put(result[name], tensor)
    return result


def scatter_parts(
    world: World,
    placements: Mapping[str, Mapping[int, Region]],
    wholes: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> dict[str, tuple[Region, torch.Tensor]]:
    """Return the rank's regions of tensors that rank 0 has whole; the counterpart of `full_weights`.

    All ranks of `world` must call it with the same names.

    Args:
        world: the ranks.
        placements: for each name, for each rank that takes part, its region.
        wholes: on rank 0, the whole tensors; unused elsewhere.
        dtypes: of the tensors, by name.
        device: of this rank.
    """
    result = {}
    for name, regions in placements.items():
        if world.rank == 0:
            whole = wholes[name].detach()
            sizes = tuple(whole.shape)
            messages = []
            for rank, region in regions.items():
                part = selection_of(region, sizes, whole.device).take(whole)
                part = part.to(device, dtypes[name]).contiguous()
                if rank == 0:
                    result[name] = (region, part)
                elif part.numel():
                    messages.append(Message(rank, part))
            works, _ = world.exchange(messages, [])
        else:
            if world.rank not in regions:
                continue
            region = regions[world.rank]
            part = torch.empty(shape(region), dtype=dtypes[name], device=device)
            result[name] = (region, part)
            _, works = world.exchange([], [Message(0, part)] if part.numel() else [])
        for work in works:
            world.wait(work)
    return result


def broadcast_full(
    world: World, whole: torch.Tensor | None, like: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return rank 0's tensor on all ranks of `world`, on the CPU; `like` has its shape and dtype everywhere."""
    if whole is not None and world.size == 1:
        return whole.cpu()
    # Rank 0 sends a copy of its own; the others receive into fresh memory.
    staged = torch.empty(like.shape, dtype=like.dtype, device=device)
    if whole is not None:
        staged.copy_(whole)
    if staged.numel():
        world.wait(world.broadcast(staged.reshape(-1), 0, tuple(range(world.size))))
    world.wait_for_device(device)
    return staged.cpu()
