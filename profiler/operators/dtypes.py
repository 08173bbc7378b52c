"""Names of dtypes, and in which format a GPU multiplies float32 tensors."""

from __future__ import annotations

import torch

# Formats of 16 bits: kernels add their products in float32, and round the results.
HALVES = frozenset({torch.bfloat16, torch.float16})


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch prints as torch.<name>."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of a whole batch are kept: float16 ends at 65504, bfloat16 has 8 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiply_in_tf32(*, allowed: bool) -> None:
    """Let this process's GPU round the float32 factors of products and convolutions to TF32, or forbid it.

    Both are said: by default torch allows it to cuDNN, and not to cuBLAS. CPUs do not look at it.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
