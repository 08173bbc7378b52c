"""Gather regions of whole tensors and put local tensors back: slow and obvious."""

from __future__ import annotations

import torch

from graph.intervals import Region, full_region


def _indexes(region: Region) -> list[torch.Tensor]:
    return [
        torch.tensor([index for start, stop in intervals for index in range(start, stop)], dtype=torch.int64)
        for intervals in region
    ]


def gather(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the dense local tensor that holds `region` of a whole tensor; the whole tensor is returned itself."""
    if region == full_region(tensor.shape):
        return tensor
    result = tensor
    for dim, indexes in enumerate(_indexes(region)):
        result = result.index_select(dim, indexes)
    return result


def scatter_add(whole: torch.Tensor, region: Region, local: torch.Tensor) -> None:
    """Add a dense local tensor to `region` of a whole tensor, in place."""
    indexes = _indexes(region)
    if not indexes:
        whole += local
        return
    grid = torch.meshgrid(*indexes, indexing="ij")
    whole.index_put_(tuple(grid), local.to(whole.dtype), accumulate=True)


def placed_in(shape: tuple[int, ...], region: Region, local: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor of zeros with a dense local tensor in `region`; autograd goes through it."""
    indexes = _indexes(region)
    if not indexes:
        return local
    grid = torch.meshgrid(*indexes, indexing="ij")
    return local.new_zeros(shape).index_put(tuple(grid), local)
