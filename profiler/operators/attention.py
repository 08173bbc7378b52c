"""Attention on some rows of a causal mask, and attention with reproducible dropout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from graph.intervals import Region
from profiler.operators.counter_rng import dropout, keep_mask, whole_region

if TYPE_CHECKING:
    from profiler.operators.compiling import ExecutionContext


def attention(  # noqa: PLR0913 - ATen's arguments, and what a part of it needs
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    start: int,
    context: ExecutionContext,
    region: Region | None = None,
    shape: tuple[int, ...] = (),
    operator: int = 0,
) -> torch.Tensor:
    """Return attention of query rows that start at row `start` of the whole.

    A causal row i sees keys 0..i, so keys beyond the last row are not touched. With dropout the scores are made
    explicitly, since no fused kernel draws from a counter.
    """
    rows, full_keys = query.shape[-2], key.shape[-2]
    if is_causal:
        seen = min(start + rows, key.shape[-2])
        key, value = key[..., :seen, :], value[..., :seen, :]
    if not dropout_p:
        if is_causal and start == 0:
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
        mask = _causal(rows, start, seen, query.device) if is_causal else attn_mask
        return functional.scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        unseen = torch.ones(rows, seen, dtype=torch.bool, device=query.device).triu(start + 1)
        scores = scores.masked_fill(unseen, float("-inf"))
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    if region is None:
        region, shape = whole_region((*scores.shape[:-1], full_keys))
    region = (*region[:-1], ((0, scores.shape[-1]),))
    mask = keep_mask(region, shape, dropout_p, (context.seed, context.step, operator), query.device)
    return dropout(weights, mask, dropout_p) @ value


def _causal(rows: int, start: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the bool mask [rows, keys] of the keys that rows from `start` on may see."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(start)
