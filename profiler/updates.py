"""Optimizer updates: one implementation that the profiler measures and the runtime runs.

An update touches each element of a weight once, with a fixed amount of work, so its time is taken as linear in the
number of elements and one size is measured for each optimizer and dtype of the weights; their gradients and the
optimizer's state have the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """Optimizer state: steps done, and for each kind of state one tensor a parameter (momentum; two moments).

    `steps`: of Adam the steps done, once a parameter, float32 scalars.
    """

    step: int
    slots: tuple[list[torch.Tensor], ...]
    steps: list[torch.Tensor] = field(default_factory=list)


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
    contiguous = torch.contiguous_format
    return UpdateState(
        0,
        tuple(
            [torch.zeros_like(weight, memory_format=contiguous) for weight in parameters]
            for _ in range(count)
        ),
    )


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
    with torch.no_grad():
        if optimizer == "sgd":
            torch._foreach_add_(list(parameters), list(gradients), alpha=-learning_rate)
        elif optimizer == "momentum":
            (velocity,) = state.slots
            torch._foreach_mul_(velocity, MOMENTUM)
            torch._foreach_add_(velocity, list(gradients))
            torch._foreach_add_(list(parameters), velocity, alpha=-learning_rate)
        else:
            _apply_adam(parameters, gradients, state, learning_rate)


def _apply_adam(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: UpdateState,
    learning_rate: float,
) -> None:
    """Source: Kingma and Ba (arXiv:1412.6980), Algorithm 1; by torch.optim's fused kernel, in one pass over memory."""
    import torch
    from torch.optim.adam import adam

    if not state.steps:
        # On the device, where the kernel reads them: a step that is issued copies nothing there.
        state.steps = [torch.full((), state.step - 1.0, device=weight.device) for weight in parameters]
    # The kernel takes elements in the order of memory, and so other ones of tensors of other strides.
    weights = [weight.contiguous() for weight in parameters]
    adam(
        weights,
        [gradient.contiguous() for gradient in gradients],
        state.slots[0],
        state.slots[1],
        [],
        state.steps,
        fused=True,
        amsgrad=False,
        beta1=ADAM_BETAS[0],
        beta2=ADAM_BETAS[1],
        lr=learning_rate,
        weight_decay=0.0,
        eps=ADAM_EPSILON,
        maximize=False,
    )
    for parameter, weight in zip(parameters, weights, strict=True):
        if weight is not parameter:
            parameter.copy_(weight)
