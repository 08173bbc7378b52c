"""Negative log-likelihoods of targets over a part of the classes."""

from __future__ import annotations

from typing import Any

import torch

from profiler.operators.dtypes import sum_dtype


def _class_dim(values: torch.Tensor) -> int:
    return 0 if values.dim() == 1 else 1


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


@torch.no_grad()
def exp_sums(self: torch.Tensor) -> torch.Tensor:
    """Return the sums over a part of the classes of the exponentials of logits [N, C, ...], as float64 [N, ...].

    Each sum is taken of exponentials of differences to the largest logit, in the dtype of sums; the exponential of that
    one is of float64. It has no gradient: `softmax_nll_sums` knows that of logits.
    """
    dim = _class_dim(self)
    # Where all classes of a part are masked, the largest logit is minus infinity, and a difference would be none.
    largest = self.amax(dim, keepdim=True).clamp_(min=torch.finfo(self.dtype).min)
    exponentials = self.to(sum_dtype(self.dtype), copy=True).sub_(largest).exp_()
    return exponentials.sum(dim).double() * largest.squeeze(dim).double().exp()


class _SoftmaxNll(torch.autograd.Function):
    """The sum of weighted losses of the targets in a part of the classes; its gradient is that of the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        exp_sums: torch.Tensor,
        local: torch.Tensor,
        inside: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        logarithms = exp_sums.log()
        ctx.save_for_backward(values, logarithms, local, inside, weights)
        dim = _class_dim(values)
        picked = values.gather(dim, local.unsqueeze(dim)).squeeze(dim)
        # As float64: of what is likely, little is left.
        losses = torch.where(inside, (logarithms - picked.double()) * weights, 0.0)
        return losses.sum().to(sum_dtype(values.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, logarithms, local, inside, weights = ctx.saved_tensors
        dim, kind = _class_dim(values), sum_dtype(values.dtype)
        scales = (weights * gradients[0]).to(kind)
        # Samples that do not count may have logits without an exponential.
        logarithms = torch.where(scales == 0, 0.0, logarithms)
        # As two numbers, of which the second is what the first rounds off.
        first = logarithms.to(kind)
        second = (logarithms - first.double()).to(kind)
        first = torch.where(scales == 0, torch.inf, first)
        result = (values - first.unsqueeze(dim)).exp_().mul_((scales * second.neg().exp()).unsqueeze(dim))
        result.scatter_add_(dim, local.unsqueeze(dim), -(scales * inside).unsqueeze(dim))
        return result.to(values.dtype), None, None, None, None


def softmax_nll_sums(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    classes: int,
    exp_sums: torch.Tensor,
    start: int = 0,
) -> torch.Tensor:
    """Return `nll_sums` of the softmax over all classes, of which `exp_sums` are the denominators.

    The logits are of a part of the classes, the weights of all. The gradient of the logits is that of the whole, that
    of the denominators with it.
    """
    del classes
    kind = sum_dtype(self.dtype)
    counts = target != ignore_index
    weights = counts.to(self.dtype) if weight is None else weight[torch.where(counts, target, 0)] * counts
    local = target - start
    inside = (local >= 0) & (local < self.shape[_class_dim(self)]) & counts
    local = torch.where(inside, local, 0)
    losses = _SoftmaxNll.apply(self, exp_sums, local, inside, weights.detach())  # type: ignore[no-untyped-call]
    return torch.stack((losses, (weights.detach() * inside).sum(dtype=kind)))


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
