"""Gather and scatter along a dim of which a part holds only an interval of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


def gather(
    self: torch.Tensor, *, dim: int, index: torch.Tensor, sparse_grad: bool, places: int, start: int = 0
) -> torch.Tensor:
    """Gather from the positions [start, start + K) that `self` [..., K, ...] holds; other indexes give zeros."""
    del sparse_grad, places
    local = index - start
    inside = (local >= 0) & (local < self.shape[dim])
    return self.gather(dim, torch.where(inside, local, 0)) * inside


def scatter(  # noqa: PLR0913 - ATen's arguments, and what a part of it needs
    self: torch.Tensor | None,
    *,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor | float,
    reduce: str | None,
    include_self: bool,
    size: Sequence[int],
    places: int,
    start: int = 0,
) -> torch.Tensor:
    """Scatter to the positions [start, start + K) of a result of `size`, dropping others; without `self`, into zeros.

    Dropped elements go to one more position, which is cut off again.
    """
    del places
    held = size[dim]
    if self is None:
        # Only sums are split so; their elements have the result's dtype.
        self = torch.zeros(tuple(size), dtype=getattr(src, "dtype", None), device=index.device)
    local = index - start
    local = torch.where((local >= 0) & (local < held), local, held)
    pad = [0, 0] * (self.dim() - 1 - dim) + [0, 1]
    target = functional.pad(self, pad)
    if reduce == "sum" and include_self:
        assert isinstance(src, torch.Tensor)
        result = target.scatter_add(dim, local, src)
    elif reduce is not None:
        assert isinstance(src, torch.Tensor)
        result = target.scatter_reduce(dim, local, src, reduce, include_self=include_self)
    else:
        result = target.scatter(dim, local, src)
    return result.narrow(dim, 0, held)


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    *,
    mode: str,
    padding_idx: int,
    vocabulary: int,
    bag: int,
    start: int = 0,
) -> torch.Tensor:
    """Look up bags of rows [N, L] of a vocabulary of which `weight` holds [start, start + rows), and reduce each bag.

    A mean divides by `bag`, the length of a whole bag, of which the part may hold some elements; with padding, by the
    number of elements of the bag that are none.
    """
    rows = weight.shape[0]
    padding = None if padding_idx < 0 else padding_idx
    if rows == vocabulary and (mode != "mean" or bag == indices.shape[1]):
        return functional.embedding_bag(
            indices, weight, mode=mode, per_sample_weights=per_sample_weights, padding_idx=padding
        )
    counted = None
    if mode == "mean" and padding is not None:
        counted = (indices != padding).sum(1, keepdim=True).clamp(min=1)
    local = indices - start
    inside = (local >= 0) & (local < rows)
    if padding is not None:
        inside = inside & (indices != padding)
    shares = inside.to(weight.dtype)
    if per_sample_weights is not None:
        shares = shares * per_sample_weights
    total = functional.embedding_bag(
        torch.where(inside, local, 0), weight, mode="sum", per_sample_weights=shares
    )
    if mode == "sum":
        return total
    return total / (bag if counted is None else counted.to(total.dtype))


def ragged_embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    *,
    mode: str,
    padding_idx: int,
    scale_grad_by_freq: bool,
    include_last_offset: bool,
) -> torch.Tensor:
    """Look up rows of a vocabulary, and reduce those of each bag; bag k starts at index offsets[k]."""
    return functional.embedding_bag(
        indices,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        padding_idx=None if padding_idx < 0 else padding_idx,
        scale_grad_by_freq=scale_grad_by_freq,
        include_last_offset=include_last_offset,
    )
