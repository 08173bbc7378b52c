"""Negative log-likelihoods of targets over a part of the classes."""

from __future__ import annotations

import torch

from profiler.operators.dtypes import sum_dtype


def weight_of_targets(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, kind: torch.dtype
) -> torch.Tensor:
    """Return the sum of the weights of the targets that are not ignored: their number where there are no weights."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(kind)
    return (weight[torch.where(kept, target, 0)] * kept).sum(dtype=kind)


def _elements(
    values: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted losses and the weights of the targets in classes [start, start + C); zeros for others."""
    dim = 0 if values.dim() == 1 else 1
    local = target - start
    inside = (local >= 0) & (local < values.shape[dim]) & (target != ignore_index)
    local = torch.where(inside, local, 0)
    shares = inside.to(values.dtype)
    if weight is not None:
        shares = shares * weight[local]
    picked = values.gather(dim, local.unsqueeze(dim)).squeeze(dim)
    # Not a product: a class of probability zero outside of the part must not make the sum undefined.
    return torch.where(inside, -picked * shares, 0.0), shares


def nll_sums(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    classes: int,
    start: int = 0,
) -> torch.Tensor:
    """Return the sum of weighted losses and the sum of the weights of the targets that are not ignored."""
    del classes
    kind = sum_dtype(self.dtype)
    losses, shares = _elements(self, target, weight, ignore_index, start)
    return torch.stack((losses.sum(dtype=kind), shares.detach().sum(dtype=kind)))


def nll_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    classes: int,
    start: int = 0,
) -> torch.Tensor:
    """Return the losses, or their sum, of the targets whose class the part holds; zeros for the others."""
    del classes
    losses, _ = _elements(self, target, weight, ignore_index, start)
    return losses if reduction == 0 else losses.sum()
