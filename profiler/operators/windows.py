"""Convolutions and poolings with another padding at each end of a dim, as parts of split ones have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

Pairs = Sequence[Sequence[int]]
"""Pairs of padding (before, after), one a spatial dim."""


def _padded(values: torch.Tensor, padding: Pairs, fill: float = 0.0) -> tuple[torch.Tensor, list[int]]:
    """Pad the spatial dims whose ends differ, or that are empty; return the values and the padding left to do."""
    widths: list[int] = []
    left: list[int] = []
    sizes = values.shape[values.dim() - len(padding) :]
    for (before, after), size in zip(reversed(list(padding)), reversed(sizes), strict=True):
        symmetric = before == after and size > 0
        widths += [0, 0] if symmetric else [before, after]
        left.append(before if symmetric else 0)
    return functional.pad(values, widths, value=fill), left[::-1]


def convolution(
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002 - ATen's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Return a convolution whose padding is a pair a dim."""
    values, symmetric = _padded(input, padding)
    return function(values, weight, bias, stride, symmetric, dilation, groups)


def max_pool(
    function: Callable[..., torch.Tensor],
    self: torch.Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """Return a maximum pooling whose padding is a pair a dim."""
    values, symmetric = _padded(self, padding, float("-inf"))
    return function(values, kernel_size, stride or kernel_size, symmetric, dilation, ceil_mode)


def avg_pool(
    function: Callable[..., torch.Tensor],
    self: torch.Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Pairs,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Return an average pooling whose padding is a pair a dim."""
    spatial = len(padding)
    kernels = (
        list(kernel_size) * (spatial // len(kernel_size)) if len(kernel_size) != spatial else kernel_size
    )
    strides = list(stride or kernels)
    strides = strides * (spatial // len(strides)) if len(strides) != spatial else strides
    if count_include_pad or divisor_override is not None:
        values, symmetric = _padded(self, padding)
        if divisor_override is None:
            return function(values, kernels, strides, symmetric, ceil_mode)
        return function(values, kernels, strides, symmetric, ceil_mode, divisor_override=divisor_override)
    # Padding does not count: pad everything, average, and correct by how many inputs each window holds.
    widths = [width for pair in reversed(list(padding)) for width in pair]
    averages = function(functional.pad(self, widths), kernels, strides, 0, ceil_mode)
    for dim, ((before, _), kernel, step) in enumerate(zip(padding, kernels, strides, strict=True)):
        size = self.shape[dim - spatial]
        starts = torch.arange(averages.shape[dim - spatial], device=self.device) * step - before
        inside = (starts + kernel).clamp(max=size) - starts.clamp(min=0)
        factor = kernel / inside.to(self.dtype)
        averages = averages * factor.view(-1, *([1] * (spatial - 1 - dim)))
    return averages
