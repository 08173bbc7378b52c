"""Transposed convolution of some neighbouring outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional


def conv_transpose(  # noqa: PLR0913 - ATen's arguments, and its function
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002 - ATen's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    output_padding: int,
    groups: int,
    dilation: Sequence[int],
) -> torch.Tensor:
    """Return an unpadded result, lengthened at each end as the pairs in `padding` say (negative: cut off)."""
    del output_padding
    spatial = len(padding)
    widths = [width for pair in reversed(list(padding)) for width in pair]
    if input.numel():
        made = function(input, weight, None, stride, 0, 0, groups, dilation)
        result = functional.pad(made, widths)
    else:
        # No input reaches these positions.
        extents = _extents(input, weight, stride, dilation)
        sizes = [before + extent + after for (before, after), extent in zip(padding, extents, strict=True)]
        result = input.new_zeros((input.shape[0], weight.shape[1] * groups, *sizes))
    return result if bias is None else result + bias.view(-1, *([1] * spatial))


def _extents(
    input: torch.Tensor,  # noqa: A002 - ATen's name
    weight: torch.Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the length of an unpadded result in each spatial dim; zero where there is no input."""
    spatial = input.dim() - 2
    steps = list(stride) * (spatial // len(stride))
    reaches = list(dilation) * (spatial // len(dilation))
    return [
        (size - 1) * step + (kernel - 1) * reach + 1 if size else 0
        for size, step, kernel, reach in zip(input.shape[2:], steps, weight.shape[2:], reaches, strict=True)
    ]
