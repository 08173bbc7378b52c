"""Optimizer updates against torch.optim."""

import pytest
import torch

from graph.calls import call_from_json
from graph.errors import TrainingError
from graph.training import OPTIMIZERS
from profiler.updates import (
    apply_update,
    initial_state,
    is_update,
    update_bytes,
    update_call,
    update_flops,
    update_optimizer,
    update_s_per_element,
)


def _reference(name: str, parameters: list[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=learning_rate)
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9 if name == "momentum" else 0.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_update_equals_torch_optim(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (11,), (), (6, 4), (8, 3)]
    ours = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    # Parts of weights: columns, and rows of a transposed tensor.
    ours[3] = torch.randn(6, 9, generator=generator, dtype=torch.float64)[:, 2:6]
    ours[4] = torch.randn(3, 8, generator=generator, dtype=torch.float64).T
    theirs = [weight.clone().requires_grad_() for weight in ours]
    reference = _reference(optimizer, theirs, 0.05)
    state = initial_state(optimizer, ours)
    for _ in range(5):
        gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        gradients[0] = gradients[0].T.contiguous().T
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = gradient.clone()
        reference.step()
        apply_update(optimizer, ours, gradients, state, 0.05)
    assert state.step == 5
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_update_works_on_leaves_that_need_gradients(optimizer: str) -> None:
    weight = torch.ones(4, requires_grad=True)
    apply_update(optimizer, [weight], [torch.ones(4)], initial_state(optimizer, [weight]), 0.5)
    assert weight.requires_grad
    assert (weight < 1).all()


def test_update_of_nothing_counts_a_step() -> None:
    state = initial_state("adam", [])
    apply_update("adam", [], [], state, 0.1)
    assert state.step == 1


@pytest.mark.parametrize(
    ("optimizer", "tensors", "flops"), [("sgd", 2, 2), ("momentum", 3, 4), ("adam", 4, 12)]
)
def test_update_call_holds_weight_gradient_and_state(optimizer: str, tensors: int, flops: int) -> None:
    call = update_call(optimizer, 1000)
    assert is_update(call)
    assert update_optimizer(call) == optimizer
    assert [spec.shape for spec in call.inputs] == [(1000,)] * tensors
    assert not call.has_backward
    assert update_flops(call) == 1000 * flops
    # weight twice, gradient once, each state tensor twice
    assert update_bytes(call) == 4000 * (3 + 2 * (tensors - 2))
    assert call_from_json(call.document) == call


def test_an_element_takes_its_share_of_what_was_measured() -> None:
    assert update_s_per_element(0.5, 1000) == 0.0005


def test_unknown_optimizer_is_named() -> None:
    with pytest.raises(TrainingError, match="optimizer: is lion, must be one of sgd, momentum, adam"):
        update_call("lion")
