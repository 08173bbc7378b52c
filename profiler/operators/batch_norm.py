"""Batch normalization in parts, on torch's native kernels.

Moments are float64 [2, C]: sums and sums of squares over the elements of each channel. Of activations in a format of
16 bits the kernels are given parameters and statistics in float32, as they take them: rounded to 8 bits, a mean would
shift every element, and the difference of two moments would be no variance.
Derivation of the gradients: Ioffe and Szegedy, Batch Normalization (arXiv:1502.03167), section 3, with the statistics
as inputs of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from profiler.operators.dtypes import HALVES, sum_dtype

_native_backward = torch.ops.aten.native_batch_norm_backward.default


def _one_layout(values: torch.Tensor) -> torch.Tensor:
    """Return images with a spatial dim of one element in plain layout.

    torch's batch norm on a CPU takes such images for channels-last or not, whichever it asks first, and its backward is
    wrong where it decides differently for values and gradients (torch 2.13). A part is often such an image.
    """
    return values.contiguous() if 1 in values.shape[2:] else values


class _OneLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - autograd's signature
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - autograd's signature
        return _one_layout(gradients[0])


def _wide(vector: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter or statistic in the dtype that the kernels take beside `values`."""
    return vector.float() if vector is not None and values.dtype in HALVES else vector


def _channel_view(vector: torch.Tensor, rank: int) -> torch.Tensor:
    return vector.view(1, -1, *([1] * (rank - 2)))


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        count = values.numel() // max(values.shape[1], 1)
        if count == 0:
            return values.new_zeros((2, values.shape[1]), dtype=torch.float64)
        unused = values.new_zeros(values.shape[1], dtype=torch.float32) if values.dtype in HALVES else None
        return _moments_of(_stacked(*torch.batch_norm_update_stats(values, unused, unused, 0.0)), count)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        shift, scale = gradients[0].to(values.dtype).unbind(0)
        shift, scale = (_channel_view(vector, values.dim()) for vector in (shift, scale))
        return torch.addcmul(shift, values, scale, value=2)


def moments(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - ATen's name
    """Return sums and sums of squares [2, C] of an activation [N, C, ...]."""
    result: torch.Tensor = _Moments.apply(input)  # type: ignore[no-untyped-call]
    return result


def fixed_moments(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return the moments [2, C] of one element with this mean and variance."""
    mean, variance = mean.double(), variance.double()
    return torch.stack((mean, variance + mean * mean))


def _stacked(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return two vectors [C] as one float64 tensor [2, C], by one kernel."""
    result = first.new_empty((2, len(first)), dtype=torch.float64)
    return torch.stack((first, second), out=result)


def _moments_of(statistics: torch.Tensor, count: int) -> torch.Tensor:
    """Return the moments of `count` elements a channel; overwrites their mean and biased variance [2, C]."""
    statistics[1].addcmul_(statistics[0], statistics[0])
    return statistics.mul_(count)


def _statistics(moments: torch.Tensor, count: int) -> torch.Tensor:
    """Return mean and biased variance [2, C], in float64."""
    statistics = moments / count
    statistics[1].addcmul_(statistics[0], statistics[0], value=-1).clamp_(min=0.0)
    return statistics


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        moments: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        count: int,
        eps: float,
    ) -> torch.Tensor:
        values = _one_layout(values)
        statistics = _statistics(moments, count)
        ctx.kinds = [None if vector is None else vector.dtype for vector in (weight, bias)]
        if weight is None:
            # Its gradient is asked for below, which CUDA's kernels give of no weight that is missing.
            weight = values.new_ones(values.shape[1])
        kind = torch.float32 if values.dtype in HALVES else weight.dtype
        weight, bias = _wide(weight, values), _wide(bias, values)
        narrow = statistics.to(kind)
        mean, variance = narrow.unbind(0)
        ctx.save_for_backward(values, weight, statistics, narrow)
        ctx.count, ctx.eps, ctx.has_bias = count, eps, bias is not None
        return torch.native_batch_norm(
            values, weight, bias, mean, variance, training=False, momentum=0.0, eps=eps
        )[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, statistics, narrow = ctx.saved_tensors
        precision = (statistics[1] + ctx.eps).rsqrt_()
        # Most of CUDA's kernels take mean and precision from these, and not from the statistics; a CPU's never do.
        kept = sum_dtype(values.dtype)
        by_input, by_weight, by_bias = _native_backward(
            _one_layout(gradients[0]),
            values,
            weight,
            narrow[0],
            narrow[1],
            narrow[0].to(kept),
            precision.to(kept),
            train=False,
            eps=ctx.eps,
            output_mask=[ctx.needs_input_grad[0], True, True],
        )
        by_moments = None
        if ctx.needs_input_grad[1]:
            # By the mean the first row, by the variance the second, times -1 and -1/2.
            by_moments = torch.stack((by_bias, by_weight)) * (weight * precision)
            by_moments[1].mul_(precision)
            by_moments[0].addcmul_(statistics[0], by_moments[1], value=-1)
            by_moments[1].mul_(0.5)
            by_moments.mul_(-1 / ctx.count)
        return (
            by_input,
            by_moments,
            by_weight.to(ctx.kinds[0]) if ctx.needs_input_grad[2] else None,
            by_bias.to(ctx.kinds[1]) if ctx.needs_input_grad[3] else None,
            None,
            None,
        )


def batch_norm_apply(
    input: torch.Tensor,  # noqa: A002 - ATen's name
    moments: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    eps: float,
) -> torch.Tensor:
    """Return an activation normalized by moments of `count` elements a channel; gradients reach the moments."""
    result: torch.Tensor = _Apply.apply(input, moments, weight, bias, count, eps)  # type: ignore[no-untyped-call]
    return result


def batch_norm(
    input: torch.Tensor,  # noqa: A002 - ATen's name
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an activation normalized by its own statistics, and its moments, which carry no gradient."""
    if weight is None and input.dtype in HALVES:
        # Without parameters the kernel would round the statistics.
        weight = input.new_ones(input.shape[1])
    weight, bias = _wide(weight, input), _wide(bias, input)
    output, mean, precision = torch.native_batch_norm(
        _one_layout(input), weight, bias, None, None, training=True, momentum=0.0, eps=eps
    )
    if 1 in input.shape[2:]:
        output = _OneLayout.apply(output)  # type: ignore[no-untyped-call]
    count = input.numel() // max(input.shape[1], 1)
    statistics = _stacked(mean.detach(), precision.detach())
    statistics[1].pow_(-2).sub_(eps)
    return output, _moments_of(statistics, count)


def running_statistics(
    moments: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, momentum: float, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the running mean and (unbiased) variance after a batch of `count` elements a channel."""
    statistics = _statistics(moments.detach(), count)
    if count > 1:
        statistics[1].mul_(count / (count - 1))
    batch_mean, batch_variance = statistics.to(mean.dtype).unbind(0)
    return mean.lerp(batch_mean, momentum), variance.lerp(batch_variance, momentum)
