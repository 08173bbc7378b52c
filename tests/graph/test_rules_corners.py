"""Corners that random networks found: parts that read padding alone, images of one column in other memory layouts."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from profiler.operators.batch_norm import batch_norm, batch_norm_apply, moments
from tests.reference.randoms import floats
from tests.reference.rules import Case, check_case

LAYOUTS = ("contiguous", "channels_last", "transposed")


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_parts_of_a_convolution_that_read_padding_alone(spatial: int) -> None:
    """A kernel of one element over padding: the first and last positions read nothing, and give the bias."""
    x, weight = floats(2, 4, *((3,) * spatial), seed=0), floats(6, 2, *((1,) * spatial), seed=1)
    bias = floats(6, seed=2)
    function = getattr(functional, f"conv{spatial}d")
    arguments = {
        "input": x,
        "weight": weight,
        "bias": bias,
        "stride": (1,) * spatial,
        "padding": (1,) * spatial,
        "dilation": (1,) * spatial,
        "groups": 2,
    }
    case = Case(
        f"aten.conv{spatial}d.default",
        arguments,
        (x, weight, bias),
        lambda x, w, b: function(x, w, b, padding=1, groups=2),
    )
    # Axes: sample, group, channel, the spatial ones, in, replica.
    check_case(case, random.Random(0), degrees=(1, 1, 1, *((5,) * spatial), 1, 1))
    check_case(case, random.Random(0), degrees=(2, 2, 1, *((5,) * spatial), 2, 1))


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_block_of_a_transposed_convolution_alone(stride: int) -> None:
    """With a stride beyond the kernel some outputs are the bias alone."""
    x, weight, bias = floats(2, 3, 4, seed=0), floats(3, 2, 2, seed=1), floats(2, seed=2)
    arguments = {
        "input": x,
        "weight": weight,
        "bias": bias,
        "stride": (stride,),
        "padding": (1,),
        "output_padding": (stride - 1,),
        "groups": 1,
        "dilation": (1,),
    }
    case = Case(
        "aten.conv_transpose1d.default",
        arguments,
        (x, weight, bias),
        lambda x, w, b: functional.conv_transpose1d(x, w, b, stride, 1, stride - 1),
    )
    positions = int(functional.conv_transpose1d(x, weight, bias, stride, 1, stride - 1).shape[2])
    check_case(case, random.Random(0), degrees=(1, 1, -(-positions // stride), 1, 1))


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return equal values in another memory layout."""
    if layout == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    return values.contiguous()


@pytest.mark.parametrize("of_values", LAYOUTS)
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 4, 2, 1), (5, 4, 1, 2), (3, 4, 1, 1), (2, 4, 3, 2)])
def test_batch_norm_in_any_memory_layout(shape: tuple[int, ...], of_values: str, of_gradient: str) -> None:
    """Assembled gradients have other layouts than values; torch's own backward is then wrong for one column."""
    values = _laid_out(floats(*shape, seed=0, gradient=False), of_values).requires_grad_()
    gradient = _laid_out(floats(*shape, seed=1, gradient=False), of_gradient)
    weight, bias = floats(4, seed=2), floats(4, seed=3)
    count = values.numel() // 4
    leaves = (values, weight, bias)

    mean = values.mean((0, 2, 3), keepdim=True)
    variance = (values - mean).square().mean((0, 2, 3), keepdim=True)
    expected = (values - mean) / (variance + 1e-5).sqrt() * weight.view(1, 4, 1, 1) + bias.view(1, 4, 1, 1)
    wanted = torch.autograd.grad(expected, leaves, gradient)
    for output in (
        batch_norm_apply(values, moments(values), weight, bias, count, 1e-5),
        batch_norm(values, weight, bias, 1e-5)[0],
    ):
        torch.testing.assert_close(output, expected)
        for found, own in zip(torch.autograd.grad(output, leaves, gradient), wanted, strict=True):
            torch.testing.assert_close(found, own, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", range(6))
def test_a_shorter_last_window_splits(seed: int) -> None:
    """What ceil_mode adds is a window over more padding; every position on its own."""
    x = floats(2, 2, 8, seed=seed)
    kernel, stride, padding = 3, 2 + seed % 2, seed % 2
    arguments = {
        "self": x,
        "kernel_size": (kernel,),
        "stride": (stride,),
        "padding": (padding,),
        "dilation": (1,),
        "ceil_mode": True,
    }
    case = Case(
        "aten.max_pool1d.default",
        arguments,
        (x,),
        lambda x: functional.max_pool1d(x, kernel, stride, padding, ceil_mode=True),
    )
    positions = int(case.reference(x).shape[2])  # type: ignore[union-attr]
    check_case(case, random.Random(seed), degrees=(1, 1, positions, 1))
