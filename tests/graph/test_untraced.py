"""What a module does beside its forward's operators: refused in one line, where the graph would not have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.errors import ImportFailure
from graph.importer import import_module
from graph.operators import OperatorGraph


class Square(torch.autograd.Function):
    """A backward of its own that is what autograd makes of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = 2 * x * gradients[0]
        return gradient


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients through: autograd's would be zero."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(_context: Any, _inputs: Any, _output: Any) -> None:
        pass

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Scaled(torch.autograd.Function):
    """Scales by a list's number: what no random input repeats."""

    @staticmethod
    def forward(_context: Any, x: Tensor, scales: list[float]) -> Tensor:
        return x * scales.pop()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


# As users keep them.
square: Any = Square.apply
rounded: Any = Rounded.apply
scaled: Any = Scaled.apply


class Net(nn.Module):
    """Two layers, and what is done between them."""

    calls = 0

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.between = between
        self.step = 0

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.second(self.between(self, self.first(x))), targets)


def count(module: Net, x: Tensor) -> Tensor:
    module.step += 1
    return x * module.step


def count_over_the_class(module: Net, x: Tensor) -> Tensor:
    module.calls += 1
    return x * module.calls


def settle(module: Net, x: Tensor) -> Tensor:
    module.step = min(module.step + 1, 1)
    return x * module.step


def double_by_a_hook(module: Net, x: Tensor) -> Tensor:
    """Register a forward hook once, as transformers' models do to capture hidden states."""
    if not module.step:
        module.step = 1
        module.second.register_forward_hook(lambda _module, _inputs, output: output * 2)
    return x


def hook(_module: Net, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def import_net(module: nn.Module) -> OperatorGraph:
    return import_module(module, (torch.randn(3, 4), torch.randint(0, 2, (3,))), name="net")


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda _module, x: x * random.random(), "its forward draws from Python's random, must not"),
        (lambda _module, x: x * float(np.random.rand()), "its forward draws from numpy's random, must not"),
        (count, "its forward changes attribute step (1 to 2), must not"),
        (count_over_the_class, "its forward changes attribute calls (1 to 2), must not"),
        (hook, "its forward puts hooks on tensors, must not"),
        (lambda _module, x: rounded(x), "Rounded has a backward of its own, must be what autograd makes"),
        (lambda _module, x: scaled(x, [2.0]), "Scaled has a backward of its own that cannot be compared (IndexError)"),
    ],
)  # fmt: skip
def test_what_a_forward_does_beside_its_operators_is_refused(
    between: Callable[[Net, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(ImportFailure) as refused:
        import_net(Net(between))
    assert str(refused.value).startswith(f"model net: {message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "between",
    [
        lambda module, x: x + module.first.bias.data,
        lambda module, x: x + module.first.bias.data.mul_(0.9),
    ],
    ids=["read", "written"],
)
def test_data_of_a_tensor_is_refused(between: Callable[[Net, Tensor], Tensor], device: str) -> None:
    """The exporter takes it for a constant without data, and crashes the process where that is on meta."""
    with torch.device(device), pytest.raises(ImportFailure) as refused:
        import_net(Net(between))
    assert str(refused.value).startswith("model net: torch.export ")
    assert "\n" not in str(refused.value)


def test_hooks_of_the_backward_are_refused() -> None:
    for register, where in (
        (lambda module: module.first.weight.register_hook(torch.neg), "parameter first.weight"),
        (
            lambda module: module.first.weight.register_post_accumulate_grad_hook(lambda _weight: None),
            "parameter first.weight",
        ),
        (lambda module: module.second.register_full_backward_hook(lambda *_: None), "module second"),
        (lambda module: module.register_full_backward_pre_hook(lambda *_: None), "the module"),
    ):
        module = Net(lambda _module, x: x)
        register(module)  # type: ignore[no-untyped-call]
        with pytest.raises(ImportFailure, match=f"model net: {where} has a hook that runs in the backward"):
            import_net(module)


def test_a_hook_that_a_forward_registers_once_is_there_once() -> None:
    module = Net(double_by_a_hook)
    for _ in range(2):
        graph = import_net(module)
        assert [operator.target for operator in graph.operators].count("aten.mul.Tensor") == 1
        assert (module.step, len(module.second._forward_hooks)) == (0, 0)


def test_what_loses_nothing_is_imported() -> None:
    module = Net(settle)
    import_net(module)
    assert module.step == 0
    module = Net(lambda _module, x: square(x))
    module.first.register_forward_hook(lambda _module, _inputs, output: output * 2)
    forward = Square.forward
    import_net(module)
    assert Square.forward is forward
    assert torch.Tensor.register_hook.__module__ == "torch._tensor"
