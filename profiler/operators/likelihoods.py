"""Negative log-likelihoods of targets over a part of the classes."""

from __future__ import annotations

from typing import Any

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
    dim = _class_dim(values)
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


class _ExpSums(torch.autograd.Function):
    """Sums of exponentials, which are made again in the backward: all that is kept is the logits.

    Each sum is taken of exponentials of differences to the largest logit, in the dtype of sums; the exponential of
    that one is of float64.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        dim = _class_dim(values)
        # Where all classes of a part are masked, the largest logit is minus infinity, and a difference would be none.
        largest = values.amax(dim, keepdim=True).clamp_(min=torch.finfo(values.dtype).min)
        ctx.save_for_backward(values, largest)
        return _exponentials(values, largest).sum(dim).double() * largest.squeeze(dim).double().exp()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        values, largest = ctx.saved_tensors
        exponentials = _exponentials(values, largest)
        scales = gradients[0].unsqueeze(_class_dim(values)) * largest.double().exp()
        return exponentials.mul_(scales.to(exponentials.dtype)).to(values.dtype)


def _class_dim(values: torch.Tensor) -> int:
    return 0 if values.dim() == 1 else 1


def _exponentials(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    kind = sum_dtype(values.dtype)
    return (values.to(kind) - largest.to(kind)).exp_()


def exp_sums(self: torch.Tensor) -> torch.Tensor:
    """Return the sums over a part of the classes of the exponentials of logits [N, C, ...], as float64 [N, ...].

    Of logits above 709 they are infinite; zero, where all are below -745.
    """
    return _ExpSums.apply(self)  # type: ignore[no-any-return,no-untyped-call]


def softmax_nll_sums(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    classes: int,
    exp_sums: torch.Tensor,
    start: int = 0,
) -> torch.Tensor:
    """Return `nll_sums` of the softmax of logits over all classes, of which `exp_sums` are the denominators."""
    del classes
    kind = sum_dtype(self.dtype)
    losses, shares = _elements(self, target, weight, ignore_index, start)
    # Of the others no logarithm is taken: that of zero would make the gradient undefined.
    denominators = torch.where(shares != 0, exp_sums, 1.0).log() * shares
    return torch.stack(
        (losses.sum(dtype=kind) + denominators.sum().to(kind), shares.detach().sum(dtype=kind))
    )


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
