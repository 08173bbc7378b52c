"""A synchronized batch norm for CPUs in PyTorch's own operators: the other side of the benchmark `runtime`.

`torch.nn.SyncBatchNorm` refuses tensors of a CPU in training (torch 2.13), and its four kernels are for GPUs alone.
This one has its algorithm (torch/nn/modules/_functions.py) step by step, with the fastest operators that a CPU has:
local statistics and counts, one all-gather, normalization; in the backward the sums by which the statistics get a
gradient, one all-reduce, the input's gradient. It gathers variances instead of their inverse roots, which saves it
operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def with_synchronized_batch_norm(module: nn.Module) -> nn.Module:
    """Return the module with every batch norm replaced, of the same parameters and buffers."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(module, name, SynchronizedBatchNorm(child))
        else:
            with_synchronized_batch_norm(child)
    return module


class SynchronizedBatchNorm(nn.Module):
    """A batch norm in training whose statistics are those of all ranks' samples."""

    def __init__(self, local: nn.modules.batchnorm._BatchNorm) -> None:
        """Take over parameters, buffers and settings of a batch norm that tracks its statistics."""
        super().__init__()
        self.weight, self.bias = local.weight, local.bias
        self.eps, self.momentum = local.eps, local.momentum
        self.running_mean, self.running_var = local.running_mean, local.running_var
        self.num_batches_tracked = local.num_batches_tracked

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the normalized activation; renews the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        result: torch.Tensor = _SynchronizedBatchNorm.apply(  # type: ignore[no-untyped-call]
            values, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum
        )
        return result


class _SynchronizedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_variance: torch.Tensor,
        eps: float,
        momentum: float,
    ) -> torch.Tensor:
        channels = values.shape[1]
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        count = torch.full((1,), values.numel() // channels, dtype=mean.dtype)
        combined = torch.cat((mean, variance, count))
        gathered = [torch.empty_like(combined) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, combined)
        means, variances, counts = torch.stack(gathered).split((channels, channels, 1), 1)
        total = counts.sum()
        shares = counts / total
        mean = (means * shares).sum(0)
        variance = torch.addcmul(variances, means - mean, means - mean).mul_(shares).sum(0)
        running_mean.lerp_(mean, momentum)
        running_variance.lerp_(variance * (total / (total - 1)), momentum)
        ctx.save_for_backward(values, weight, mean, variance, total)
        ctx.eps = eps
        return torch.native_batch_norm(
            values, weight, bias, mean, variance, training=False, momentum=0.0, eps=eps
        )[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean, variance, total = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        precision = (variance + ctx.eps).rsqrt_()
        _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward.default(
            gradient,
            values,
            weight,
            mean,
            variance,
            mean,
            precision,
            train=False,
            eps=ctx.eps,
            output_mask=[False, True, True],
        )
        by_input = None
        if ctx.needs_input_grad[0]:
            combined = torch.stack((by_bias, by_weight))
            dist.all_reduce(combined)
            # Of every element: scale * (dy - mean(dy) - (x - mean) * precision * mean(dy * normalized x)).
            sums = combined.div_(total)
            scale = weight * precision
            by_value = -scale * precision * sums[1]
            shift = -scale * sums[0] - by_value * mean
            scale, by_value, shift = (
                vector.view(1, -1, *([1] * (values.dim() - 2))) for vector in (scale, by_value, shift)
            )
            by_input = torch.addcmul(shift, values, by_value).addcmul_(gradient, scale)
        return by_input, by_weight, by_bias, None, None, None, None
