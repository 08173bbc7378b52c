"""Names of dtypes."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch prints as torch.<name>."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype
