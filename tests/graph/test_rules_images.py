"""Rules of convolutions, pooling and batch normalization against the whole operators."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.reference.randoms import floats
from tests.reference.rules import Case, check_case

SEEDS = range(12)


def _convolution(generator: random.Random, seed: int, spatial: int) -> Case:
    groups = generator.choice([1, 1, 2, 3])
    per_group, out_per_group = generator.randint(1, 4), generator.randint(1, 4)
    kernel = [generator.randint(1, 4) for _ in range(spatial)]
    stride = tuple(generator.randint(1, 3) for _ in range(spatial))
    dilation = tuple(generator.randint(1, 2) for _ in range(spatial))
    padding = tuple(generator.randint(0, 3) for _ in range(spatial))
    sizes = [
        max(generator.randint(3, 10), (k - 1) * d + 1 - 2 * p)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    image = floats(generator.randint(1, 3), groups * per_group, *sizes, seed=seed)
    weight = floats(groups * out_per_group, per_group, *kernel, seed=seed + 1)
    bias = floats(groups * out_per_group, seed=seed + 2) if generator.random() < 0.7 else None
    function = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[spatial]
    arguments: dict[str, Any] = {
        "input": image,
        "weight": weight,
        "bias": bias,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }
    return Case(
        f"aten.conv{spatial}d.default",
        arguments,
        (image, weight) if bias is None else (image, weight, bias),
        lambda x, w, b=None: function(x, w, b, stride, padding, dilation, groups),
    )


@pytest.mark.parametrize("seed", range(40))
def test_convolution_2d(seed: int) -> None:
    generator = random.Random(seed)
    case = _convolution(generator, seed, 2)
    for _ in range(3):
        check_case(case, generator)


@pytest.mark.parametrize("spatial", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_convolution_of_other_ranks(seed: int, spatial: int) -> None:
    generator = random.Random(seed)
    check_case(_convolution(generator, seed, spatial), generator)


@pytest.mark.filterwarnings(
    "ignore:Using padding='same'"
)  # torch remarks that an even kernel copies its input
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("seed", SEEDS)
def test_convolution_with_named_padding(seed: int, padding: str) -> None:
    generator = random.Random(seed)
    image = floats(2, 4, generator.randint(5, 8), generator.randint(5, 8), seed=seed)
    weight = floats(3, 4, generator.randint(1, 4), generator.randint(1, 4), seed=seed + 1)
    dilation = (generator.randint(1, 2), 1) if padding == "same" or weight.shape[2] < 3 else (1, 1)
    arguments = {
        "input": image,
        "weight": weight,
        "bias": None,
        "stride": (1, 1),
        "padding": padding,
        "dilation": dilation,
        "groups": 1,
    }
    case = Case(
        "aten.conv2d.padding",
        arguments,
        (image, weight),
        lambda x, w: functional.conv2d(x, w, padding=padding, dilation=dilation),
    )
    check_case(case, generator)


def _pooling(generator: random.Random, seed: int, kind: str, *, ceil_mode: bool) -> Case:
    kernel = (generator.randint(1, 4), generator.randint(1, 4))
    stride = tuple(generator.randint(1, 3) for _ in range(2)) if generator.random() < 0.8 else ()
    padding = tuple(generator.randint(0, size // 2) for size in kernel)
    dilation = tuple(generator.randint(1, 2) for _ in range(2))
    image = floats(
        generator.randint(1, 3),
        generator.randint(1, 3),
        generator.randint(7, 11),
        generator.randint(7, 11),
        seed=seed,
    )
    arguments: dict[str, Any] = {"self": image, "kernel_size": kernel, "stride": stride, "padding": padding}
    if kind == "max":
        arguments |= {"dilation": dilation, "ceil_mode": ceil_mode}
        return Case(
            "aten.max_pool2d.default",
            arguments,
            (image,),
            lambda x: functional.max_pool2d(x, kernel, stride or None, padding, dilation, ceil_mode),
        )
    include = generator.random() < 0.5
    divisor = generator.choice([None, None, 3])
    arguments |= {"ceil_mode": ceil_mode, "count_include_pad": include, "divisor_override": divisor}
    return Case(
        "aten.avg_pool2d.default",
        arguments,
        (image,),
        lambda x: functional.avg_pool2d(x, kernel, stride or None, padding, ceil_mode, include, divisor),
    )


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_pooling(seed: int, kind: str, *, ceil_mode: bool) -> None:
    generator = random.Random(seed)
    case = _pooling(generator, seed, kind, ceil_mode=ceil_mode)
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_average_pooling(seed: int) -> None:
    generator = random.Random(seed)
    image = floats(2, 3, generator.choice([4, 6, 8]), generator.choice([6, 7]), seed=seed)
    size = (generator.choice([1, 2, 4]), generator.choice([1, 2, 3]))
    case = Case(
        "aten.adaptive_avg_pool2d.default",
        {"self": image, "output_size": size},
        (image,),
        lambda x: functional.adaptive_avg_pool2d(x, size),
    )
    check_case(case, generator)


def _image(generator: random.Random, seed: int) -> torch.Tensor:
    sizes = [generator.randint(2, 5) for _ in range(generator.randint(0, 2))]
    return floats(generator.randint(2, 4), generator.randint(1, 5), *sizes, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_moments(seed: int) -> None:
    generator = random.Random(seed)
    image = _image(generator, seed)
    dims = [dim for dim in range(image.dim()) if dim != 1]
    case = Case(
        "soapstone.moments",
        {"input": image},
        (image,),
        lambda x: torch.stack((x.sum(dims), (x * x).sum(dims))),
    )
    check_case(case, generator)


def _normalized(
    x: torch.Tensor, moments: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, count: int
) -> torch.Tensor:
    shape = [1, -1, *([1] * (x.dim() - 2))]
    mean = moments[0] / count
    variance = moments[1] / count - mean * mean
    scale = weight * (variance + 1e-3).rsqrt()
    return (x - mean.view(shape)) * scale.view(shape) + bias.view(shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_norm_apply(seed: int) -> None:
    generator = random.Random(seed)
    image = _image(generator, seed)
    channels = image.shape[1]
    count = image.numel() // channels
    weight, bias = floats(channels, seed=seed + 1), floats(channels, seed=seed + 2)
    mean, deviation = floats(2, channels, seed=seed + 3, gradient=False)
    moments = (torch.stack((mean, mean * mean + deviation * deviation + 0.1)) * count).requires_grad_()
    arguments = {
        "input": image,
        "moments": moments,
        "weight": weight,
        "bias": bias,
        "count": count,
        "eps": 1e-3,
    }
    case = Case(
        "soapstone.batch_norm_apply",
        arguments,
        (image, moments, weight, bias),
        lambda x, m, w, b: _normalized(x, m, w, b, count),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_batch_norm_without_weights(seed: int) -> None:
    generator = random.Random(seed)
    image = _image(generator, seed)
    channels = image.shape[1]
    count = image.numel() // channels
    moments = torch.stack((torch.zeros(channels), torch.ones(channels))).double() * count
    arguments = {
        "input": image,
        "moments": moments,
        "weight": None,
        "bias": None,
        "count": count,
        "eps": 1e-5,
    }
    case = Case(
        "soapstone.batch_norm_apply",
        arguments,
        (image, moments),
        lambda x, m: x * (1 + 1e-5) ** -0.5 + 0 * m.sum(),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_running_statistics(seed: int) -> None:
    generator = random.Random(seed)
    image = floats(3, generator.randint(1, 6), 4, seed=seed, gradient=False)
    channels = image.shape[1]
    mean = floats(channels, seed=seed + 1, gradient=False)
    variance = floats(channels, seed=seed + 2, gradient=False).abs()
    moments = torch.stack((image.sum((0, 2)), (image * image).sum((0, 2))))

    def reference(_moments: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
        new_mean, new_variance = mean.clone(), variance.clone()
        functional.batch_norm(image, new_mean, new_variance, training=True, momentum=0.3)
        return [new_mean, new_variance]

    arguments = {"moments": moments, "mean": mean, "variance": variance, "momentum": 0.3, "count": 12}
    check_case(
        Case("soapstone.running_statistics", arguments, (moments, mean, variance), reference), generator
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_local_batch_norm_over_channels(seed: int) -> None:
    """Channels and replicas alone split: any other split changes the statistics, by definition."""
    generator = random.Random(seed)
    image = _image(generator, seed)
    channels = image.shape[1]
    weight, bias = floats(channels, seed=seed + 1), floats(channels, seed=seed + 2)
    dims = [dim for dim in range(image.dim()) if dim != 1]
    case = Case(
        "soapstone.batch_norm",
        {"input": image, "weight": weight, "bias": bias, "eps": 1e-3},
        (image, weight, bias),
        lambda x, w, b: [
            functional.batch_norm(x, None, None, w, b, training=True, eps=1e-3),
            torch.stack((x.sum(dims), (x * x).sum(dims))).detach(),
        ],
    )
    degrees = [1] * (image.dim() + 1)
    if channels == 1:
        degrees.pop()
    else:
        degrees[1] = generator.randint(1, channels)
    degrees[-1] = 2
    check_case(case, generator, degrees=tuple(degrees))


@pytest.mark.parametrize("seed", SEEDS)
def test_local_batch_norm_is_that_of_each_part(seed: int) -> None:
    generator = random.Random(seed)
    image = floats(generator.randint(4, 7), 3, 2, 2, seed=seed)
    weight, bias = floats(3, seed=seed + 1), floats(3, seed=seed + 2)

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        halves = [functional.batch_norm(half, None, None, w, b, training=True) for half in x.tensor_split(2)]
        return [torch.cat(halves), torch.stack((x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)))).detach()]

    arguments = {"input": image, "weight": weight, "bias": bias, "eps": 1e-5}
    case = Case("soapstone.batch_norm", arguments, (image, weight, bias), reference)
    check_case(case, generator, degrees=(2, 1, 1, 1, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_fixed_moments(seed: int) -> None:
    generator = random.Random(seed)
    mean = floats(generator.randint(1, 6), seed=seed)
    variance = floats(*mean.shape, seed=seed + 1)
    case = Case(
        "soapstone.fixed_moments",
        {"mean": mean, "variance": variance},
        (mean, variance),
        lambda m, v: torch.stack((m, v + m * m)),
    )
    check_case(case, generator)
