"""Optimizer updates: one implementation that the profiler measures and the runtime runs.

An update touches each element of a weight once, with a fixed amount of work, so its time is taken as linear in the
number of elements and one size is measured for each optimizer and dtype of the weights; their gradients and the
optimizer's state have the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from graph.calls import LocalCall
from graph.errors import TrainingError
from graph.operators import TensorSpec
from graph.training import OPTIMIZER_STATE

if TYPE_CHECKING:
    import torch

UPDATE_PREFIX = "soapstone.update."
UPDATE_ELEMENTS = 2**22
MOMENTUM = 0.9
# Kingma and Ba (arXiv:1412.6980), Algorithm 1.
ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8

# Floating-point operations an element, as `apply_update` writes them.
UPDATE_FLOPS = {"sgd": 2, "momentum": 4, "adam": 12}
# Tensors read or written an element: weight twice, gradient once, each state tensor twice.
UPDATE_TRAFFIC = {name: 3 + 2 * count for name, count in OPTIMIZER_STATE.items()}


@dataclass(slots=True)
class UpdateState:
    """Optimizer state: steps done, and for each kind of state one tensor a parameter (momentum; two moments)."""

    step: int
    slots: tuple[list[torch.Tensor], ...]


def _require_known(optimizer: str) -> None:
    if optimizer not in OPTIMIZER_STATE:
        raise TrainingError(
            f"optimizer: is {optimizer}, must be one of {', '.join(OPTIMIZER_STATE)}; choose one"
        )


def update_call(optimizer: str, elements: int = UPDATE_ELEMENTS, dtype: str = "float32") -> LocalCall:
    """Return the call that stands for one update of `elements` weights of a dtype.

    Its inputs are weight, gradient and state; it changes them in place and has no outputs.

    Raises:
        TrainingError: there is no such optimizer.
    """
    _require_known(optimizer)
    spec = TensorSpec((elements,), dtype)
    inputs = (spec,) * (2 + OPTIMIZER_STATE[optimizer])
    return LocalCall(UPDATE_PREFIX + optimizer, (), inputs, (), (False,) * len(inputs))


def is_update(call: LocalCall) -> bool:
    """True for a call that `update_call` made."""
    return call.target.startswith(UPDATE_PREFIX)


def update_optimizer(call: LocalCall) -> str:
    """Return the optimizer of an update call."""
    return call.target.removeprefix(UPDATE_PREFIX)


def update_flops(call: LocalCall) -> float:
    """Return the floating-point operations of an update call."""
    return float(UPDATE_FLOPS[update_optimizer(call)] * call.inputs[0].elements)


def update_bytes(call: LocalCall) -> int:
    """Return the bytes that an update call must at least read and write."""
    return UPDATE_TRAFFIC[update_optimizer(call)] * call.inputs[0].size_bytes


def update_s_per_element(measured_s: float, measured_elements: int = UPDATE_ELEMENTS) -> float:
    """Return the seconds of an update for each weight, from those of `measured_elements` of them."""
    return measured_s / measured_elements


def initial_state(optimizer: str, parameters: Sequence[torch.Tensor]) -> UpdateState:
    """Return the state before the first step: zeros.

    Raises:
        TrainingError: there is no such optimizer.
    """
    import torch

    _require_known(optimizer)
    count = OPTIMIZER_STATE[optimizer]
    return UpdateState(0, tuple([torch.zeros_like(weight) for weight in parameters] for _ in range(count)))


def apply_update(
    optimizer: str,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: UpdateState,
    learning_rate: float,
) -> None:
    """Do one optimizer step in place, as torch.optim's SGD, SGD with momentum, and Adam do it.

    Raises:
        TrainingError: there is no such optimizer.
    """
    import torch

    _require_known(optimizer)
    state.step += 1
    if not parameters:
        return
    weights, slopes = list(parameters), list(gradients)
    with torch.no_grad():
        if optimizer == "sgd":
            torch._foreach_add_(weights, slopes, alpha=-learning_rate)
        elif optimizer == "momentum":
            (velocity,) = state.slots
            torch._foreach_mul_(velocity, MOMENTUM)
            torch._foreach_add_(velocity, slopes)
            torch._foreach_add_(weights, velocity, alpha=-learning_rate)
        else:
            _apply_adam(weights, slopes, state, learning_rate)


def _apply_adam(
    weights: list[torch.Tensor], slopes: list[torch.Tensor], state: UpdateState, learning_rate: float
) -> None:
    """Source: Kingma and Ba (arXiv:1412.6980), Algorithm 1."""
    import torch

    first, second = state.slots
    correction_1 = 1 - ADAM_BETAS[0] ** state.step
    correction_2 = 1 - ADAM_BETAS[1] ** state.step
    torch._foreach_lerp_(first, slopes, 1 - ADAM_BETAS[0])
    torch._foreach_mul_(second, ADAM_BETAS[1])
    torch._foreach_addcmul_(second, slopes, slopes, value=1 - ADAM_BETAS[1])
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, sqrt(correction_2))
    torch._foreach_add_(denominators, ADAM_EPSILON)
    torch._foreach_addcdiv_(weights, first, denominators, value=-learning_rate / correction_1)
