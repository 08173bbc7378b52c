"""Linear layers and convolutions with a common input as one: weights joined by output channel, the result split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from profiler.operators.windows import Pairs, convolution

_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat(list(parts)) if parts else None


def _split(result: torch.Tensor, weights: Sequence[torch.Tensor], dim: int) -> tuple[torch.Tensor, ...]:
    # As the operators before would have made them: whoever reads one reads all of it, often more than once.
    return tuple(
        part.contiguous() for part in result.split_with_sizes([weight.shape[0] for weight in weights], dim)
    )


def merged_linear(
    input: torch.Tensor,  # noqa: A002 - ATen's name
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return the results of linear layers [..., I] -> [..., O_k] with `weights` [O_k, I] and `biases` [O_k]."""
    return _split(functional.linear(input, torch.cat(list(weights)), _joined(biases)), weights, -1)


def merged_convolution(
    input: torch.Tensor,  # noqa: A002 - ATen's name
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    stride: Sequence[int],
    padding: Sequence[int] | Pairs,
    dilation: Sequence[int],
    groups: int,
) -> tuple[torch.Tensor, ...]:
    """Return the results of convolutions [N, C, ...] -> [N, O_k, ...]; `padding` is a number or a pair a dim."""
    weight = torch.cat(list(weights))
    function = _CONVOLUTIONS[weight.dim() - 2]
    pairs = [(size, size) if isinstance(size, int) else tuple(size) for size in padding]
    result = convolution(function, input, weight, _joined(biases), stride, pairs, dilation, groups)
    return _split(result, weights, 1)
