"""Operators and updates in formats of 16 bits, and GPUs that multiply in TF32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from graph.calls import LocalCall
from graph.operators import Slot, TensorSpec
from profiler.devices import available_devices
from profiler.environment import environment
from profiler.estimate import work_of
from profiler.measure import FailedMeasurement, Measurement, MeasureOptions, measure_call
from profiler.operators.batch_norm import batch_norm, batch_norm_apply, moments
from profiler.operators.custom_operators import _cross_entropy_sums, _mean, _mean_loss
from profiler.updates import apply_update, initial_state, update_call

HALVES = (torch.bfloat16, torch.float16)
QUICK = MeasureOptions(warm_ups=1, repetitions=3, budget_s=0.001)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Euclidean distance, relative to what is expected."""
    exact = expected.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_parameters", [True, False])
def test_statistics_of_a_batch_norm_are_not_rounded_to_16_bits(
    dtype: torch.dtype, *, has_parameters: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    # A mean of some deviations: the variance is a difference of large numbers.
    values = (torch.randn(16, 5, 3, 3, generator=generator) + 8).to(dtype)
    slopes = torch.randn(16, 5, 3, 3, generator=generator).to(dtype)
    vectors = [torch.rand(5, generator=generator).to(dtype) for _ in range(2 * has_parameters)]
    results = []
    for wide in (torch.float64, dtype):
        given = [tensor.to(wide).requires_grad_() for tensor in (values, *vectors)]
        weight, bias = given[1:] or (None, None)
        own, found = batch_norm(given[0], weight, bias, 1e-5)
        synchronized = batch_norm_apply(given[0], moments(given[0]), weight, bias, 16 * 9, 1e-5)
        gradients = torch.autograd.grad(own, given, slopes.to(wide))
        results.append((found, own, synchronized, *gradients))
    assert distance(results[1][0], results[0][0]) < 1e-6
    rounding = torch.finfo(dtype).eps
    for mine, exact in zip(results[1][1:], results[0][1:], strict=True):
        assert mine.dtype == dtype
        assert distance(mine, exact) < rounding


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_over_a_batch_do_not_overflow_16_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.full((20000, 8), 0.0)
    logits[:, 0] = 12.0
    targets = torch.randint(1, 8, (20000,), generator=generator)
    total, count = _cross_entropy_sums(logits.to(dtype), targets, None, -100, 0.1)
    exact = functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    assert float(total) == pytest.approx(float(exact), rel=torch.finfo(dtype).eps)
    assert float(total) > 65504
    assert float(count) == 20000
    values = torch.full((400, 400), 3.0, dtype=dtype, requires_grad=True)
    mean = _mean(values, dim=(0, 1), keepdim=False, dtype=None, count=400 * 400)
    loss = _mean_loss(
        torch.ops.aten.mse_loss.default,
        400 * 400,
        self=values,
        target=torch.zeros(400, 400, dtype=dtype),
        reduction=2,
    )
    assert (mean.item(), loss.item()) == (3.0, 9.0)
    assert mean.dtype == loss.dtype == dtype
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 6 / 400**2))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_an_update_is_of_its_dtype(optimizer: str) -> None:
    call = update_call(optimizer, 1000, "bfloat16")
    assert {spec.dtype for spec in call.inputs} == {"bfloat16"}
    assert call.digest != update_call(optimizer, 1000).digest
    assert (
        2 * work_of(call, "update").size_bytes == work_of(update_call(optimizer, 1000), "update").size_bytes
    )
    assert work_of(call, "update").precision == "bfloat16"
    weights = [torch.ones(4, dtype=torch.bfloat16)]
    state = initial_state(optimizer, weights)
    apply_update(optimizer, weights, [torch.full((4,), 2.0, dtype=torch.bfloat16)], state, 0.125)
    assert weights[0].dtype == torch.bfloat16
    assert {tensor.dtype for slot in state.slots for tensor in slot} <= {torch.bfloat16}
    assert weights[0].tolist() == [0.875 if optimizer == "adam" else 0.75] * 4


def test_an_update_in_bfloat16_is_measured() -> None:
    device = available_devices("cpu")[0]
    (found,) = measure_call(update_call("sgd", 4096, "bfloat16"), device, QUICK)
    assert isinstance(found, Measurement)
    assert found.peak_bytes == 2 * 4096 * 2


def test_an_operator_without_a_kernel_for_the_format_fails_with_its_reason() -> None:
    device = available_devices("cpu")[0]
    spec, distances = TensorSpec((4, 3), "bfloat16"), TensorSpec((6,), "bfloat16")
    call = LocalCall("aten.pdist.default", (("self", Slot(0)), ("p", 2.0)), (spec,), (distances,), (True,))
    outcomes = measure_call(call, device, QUICK)
    assert [one.phase for one in outcomes if isinstance(one, FailedMeasurement)] == ["forward", "backward"]
    assert "not implemented for 'BFloat16'" in getattr(outcomes[0], "reason", "")


def test_the_environment_of_a_gpu_says_how_float32_is_multiplied() -> None:
    single, tf32 = environment("cuda"), environment("cuda", tf32=True)
    assert (single.facts["matmul_tf32"], single.facts["cudnn_tf32"]) == (False, False)
    assert (tf32.facts["matmul_tf32"], tf32.facts["cudnn_tf32"]) == (True, True)
    assert single.digest != tf32.digest
    assert environment("cpu").digest == environment("cpu", tf32=True).digest


@pytest.mark.cuda
def test_a_gpu_rounds_factors_only_where_it_is_said_to() -> None:
    device = available_devices("cuda")[0]
    if torch.cuda.get_device_capability(device.index) < (8, 0):
        pytest.skip("no TF32 before Ampere")
    generator = torch.Generator().manual_seed(6)
    left, right = (torch.randn(256, 256, generator=generator).to(device.torch_name) for _ in range(2))
    images = torch.randn(4, 16, 32, 32, generator=generator).to(device.torch_name)
    kernels = torch.randn(16, 16, 3, 3, generator=generator).to(device.torch_name)
    exact = left.double() @ right.double(), functional.conv2d(images.double(), kernels.double())
    for tf32 in (True, False, True):
        replace(device, tf32=tf32).occupy()
        for found, expected in zip((left @ right, functional.conv2d(images, kernels)), exact, strict=True):
            assert (distance(found, expected) > 1e-5) == tf32
