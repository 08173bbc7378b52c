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
        mean, variance = torch.batch_norm_update_stats(values, unused, unused, 0.0)
        mean, variance = mean.double(), variance.double()
        return torch.stack((mean * count, (variance + mean * mean) * count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        sums, squares = gradients[0].unbind(0)
        shift = _channel_view(sums.to(values.dtype), values.dim())
        scale = _channel_view((2 * squares).to(values.dtype), values.dim())
        return torch.addcmul(shift, values, scale)


def moments(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - ATen's name
    """Return sums and sums of squares [2, C] of an activation [N, C, ...]."""
    result: torch.Tensor = _Moments.apply(input)  # type: ignore[no-untyped-call]
    return result


def fixed_moments(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return the moments [2, C] of one element with this mean and variance."""
    mean, variance = mean.double(), variance.double()
    return torch.stack((mean, variance + mean * mean))


def _statistics(moments: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and biased variance [C], in float64."""
    mean = moments[0] / count
    return mean, (moments[1] / count - mean * mean).clamp_(min=0.0)


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
        mean, variance = _statistics(moments, count)
        ctx.kinds = [None if vector is None else vector.dtype for vector in (weight, bias)]
        if weight is None:
            # Its gradient is asked for below, which CUDA's kernels give of no weight that is missing.
            weight = values.new_ones(values.shape[1])
        kind = torch.float32 if values.dtype in HALVES else weight.dtype
        weight, bias = _wide(weight, values), _wide(bias, values)
        mean32, variance32 = mean.to(kind), variance.to(kind)
        ctx.save_for_backward(values, weight, mean32, variance32, mean, variance)
        ctx.count, ctx.eps, ctx.has_bias = count, eps, bias is not None
        return torch.native_batch_norm(
            values, weight, bias, mean32, variance32, training=False, momentum=0.0, eps=eps
        )[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean32, variance32, mean, variance = ctx.saved_tensors
        precision = (variance + ctx.eps).rsqrt()
        # Most of CUDA's kernels take mean and precision from these, and not from the statistics; a CPU's never do.
        kept = sum_dtype(values.dtype)
        by_input, by_weight, by_bias = _native_backward(
            _one_layout(gradients[0]),
            values,
            weight,
            mean32,
            variance32,
            mean.to(kept),
            precision.to(kept),
            train=False,
            eps=ctx.eps,
            output_mask=[ctx.needs_input_grad[0], True, True],
        )
        by_moments = None
        if ctx.needs_input_grad[1]:
            scale = weight.double()
            by_mean = -scale * precision * by_bias.double()
            by_variance = -0.5 * scale * precision * precision * by_weight.double()
            by_moments = torch.stack(((by_mean - 2 * mean * by_variance), by_variance)) / ctx.count
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
    mean = mean.detach().double()
    variance = precision.detach().double().pow(-2) - eps
    return output, torch.stack((mean * count, (variance + mean * mean) * count))


def running_statistics(
    moments: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, momentum: float, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the running mean and (unbiased) variance after a batch of `count` elements a channel."""
    batch_mean, batch_variance = _statistics(moments.detach(), count)
    unbiased = batch_variance * (count / (count - 1)) if count > 1 else batch_variance
    return (
        mean * (1 - momentum) + batch_mean.to(mean.dtype) * momentum,
        variance * (1 - momentum) + unbiased.to(variance.dtype) * momentum,
    )
