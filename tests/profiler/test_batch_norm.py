"""Batch normalization by moments is that of torch, and takes few launches."""

from __future__ import annotations

import pytest
import torch

from profiler.operators.batch_norm import batch_norm_apply, moments, running_statistics
from scripts.benchmarks.launches import CountedOperators


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, weight, bias, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(6, 8, 5, 5, generator=generator).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(8, generator=generator).to(dtype) for _ in range(2))
    for tensor in (values, weight, bias):
        tensor.requires_grad_()
    return values, weight, bias, gradient


def by_moments(parts: int, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Normalize in parts of the batch, by the sum of their moments."""
    pieces = values.chunk(parts)
    of_all = sum((moments(piece) for piece in pieces), torch.zeros(2, 8, dtype=torch.float64))
    count = values.numel() // 8
    return torch.cat([batch_norm_apply(piece, of_all, weight, bias, count, 1e-5) for piece in pieces])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("parts", [1, 3])
def test_output_and_gradients_are_those_of_the_whole_batch(
    parts: int, dtype: torch.dtype, tolerance: float
) -> None:
    values, weight, bias, gradient = operands(dtype)
    found = by_moments(parts, values, weight, bias)
    expected = torch.nn.functional.batch_norm(values, None, None, weight, bias, training=True)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    pairs = zip(
        torch.autograd.grad(found, (values, weight, bias), gradient),
        torch.autograd.grad(expected, (values, weight, bias), gradient),
        strict=True,
    )
    for by_parts, by_whole in pairs:
        torch.testing.assert_close(by_parts, by_whole, rtol=tolerance, atol=tolerance)


def test_a_part_of_a_synchronized_batch_norm_launches_22_kernels() -> None:
    values, weight, bias, gradient = operands(torch.float32)
    with CountedOperators() as counted:
        found = batch_norm_apply(values, moments(values), weight, bias, 150, 1e-5)
        assert counted.kernels.total() == 9
        found.backward(gradient)
    # Beside the backward's own, autograd adds the gradients of the values: of the output's and of the moments'.
    assert counted.kernels.total() == 9 + 13 + 1


def test_running_statistics_are_those_of_torch_and_launch_7_kernels() -> None:
    values, _, _, _ = operands(torch.float32)
    mean, variance = torch.zeros(8), torch.ones(8)
    of_values = moments(values)
    with CountedOperators() as counted:
        found = running_statistics(of_values, mean, variance, 0.1, 150)
    assert counted.kernels.total() == 7
    torch.nn.functional.batch_norm(values, mean, variance, training=True, momentum=0.1)
    torch.testing.assert_close(found, (mean, variance))
