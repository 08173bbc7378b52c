"""What CUDA's kernels of some operators demand of their operands, and the CPU's do not.

Sources: torch 2.13, aten/src/ATen/native/cuda (Normalization.cu, layer_norm_kernel.cu, group_norm_kernel.cu), and
native/cudnn (BatchNorm.cpp, ConvShared.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ACCUMULATED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class CudaPreconditions(TorchDispatchMode):
    """A spy that checks, of operators on any tensors, what CUDA's kernels demand."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_preconditions(func._schema.name.rpartition("::")[2], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def check_preconditions(name: str, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what a CUDA kernel would raise, or what it asserts, of an operator's operands."""
    check = _CHECKS.get(name)
    if check is None:
        return
    names = [argument.name for argument in overload._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}
    check({**defaults, **dict(zip(names, args, strict=False)), **kwargs})


def _demand(condition: object, what: str) -> None:
    if not condition:
        raise RuntimeError(f"INTERNAL ASSERT FAILED: {what}")


def _batch_norm_backward(of: Mapping[str, Any]) -> None:
    values = of["input"]
    accumulated = _ACCUMULATED.get(values.dtype, values.dtype)
    # Only where the fused kernel is not taken; which one is taken depends on sizes and memory formats.
    for saved in ("save_mean", "save_invstd"):
        _demand(of[saved] is not None, f"{saved} should always be defined")
        _demand(of[saved].dtype == accumulated, f"{saved} is {of[saved].dtype}, must be {accumulated}")
    _demand(
        of["weight"] is not None or not of["output_mask"][1], "the gradient of a missing weight was asked for"
    )
    _demand(of["grad_out"].shape == values.shape, "gradient and input have different shapes")


def _layer_norm_backward(of: Mapping[str, Any]) -> None:
    _demand(of["mean"] is not None and of["rstd"] is not None, "mean and rstd should be defined")


def _group_norm_backward(of: Mapping[str, Any]) -> None:
    accumulated = (of["input"].dtype, _ACCUMULATED.get(of["input"].dtype))
    _demand(
        of["mean"].dtype in accumulated and of["rstd"].dtype in accumulated,
        "mean and rstd have another dtype",
    )


def _convolution(of: Mapping[str, Any]) -> None:
    bias = of.get("bias")
    _demand(of["input"].dtype == of["weight"].dtype, "Input type and weight type should be the same")
    _demand(bias is None or bias.dtype == of["weight"].dtype, "Input type and bias type should be the same")


def _targets(of: Mapping[str, Any]) -> None:
    _demand(of["target"].dtype in (torch.int64, torch.uint8), "nll_loss: targets must be int64 or uint8")


_CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "convolution": _convolution,
    "nll_loss_forward": _targets,
    "nll_loss2d_forward": _targets,
}
