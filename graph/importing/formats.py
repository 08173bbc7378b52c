"""A module and its example inputs in another number format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from graph.errors import ImportFailure


def converted(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: str
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a module and its inputs with every floating-point tensor in `dtype`; the module itself is changed.

    Parameters, buffers and inputs are rounded to it; whole numbers and booleans stay. What the forward itself converts
    or makes in a dtype of its own stays as the forward has it.
    """
    wanted: torch.dtype = getattr(torch, dtype)

    def convert(item: Any) -> Any:
        return item.to(wanted) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    return module.to(wanted), tree_map(convert, tuple(args)), tree_map(convert, dict(kwargs))


def require_dtype(module: nn.Module, dtype: str, name: str) -> None:
    """Check that all trainable parameters are of `dtype`.

    Raises:
        ImportFailure: one is not; the message says which.
    """
    for parameter_name, parameter in module.named_parameters():
        own_dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and own_dtype != dtype:
            advice = (
                f"pass --precision {own_dtype}"
                if own_dtype in ("bfloat16", "float16")
                else "convert it by .float()"
            )
            raise ImportFailure(
                f"model {name}: weight {parameter_name} is {own_dtype}, must be {dtype} as all weights are for this "
                f"--precision; {advice}"
            )
