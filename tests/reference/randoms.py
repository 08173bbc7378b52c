"""Random tensors for cases, from explicit seeds."""

from __future__ import annotations

import torch


def floats(*shape: int, seed: int, gradient: bool = True) -> torch.Tensor:
    """Return a float64 tensor of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(gradient)


def indexes(bound: int, *shape: int, seed: int) -> torch.Tensor:
    """Return an int64 tensor of indexes below `bound`."""
    return torch.randint(0, bound, shape, generator=torch.Generator().manual_seed(seed))
