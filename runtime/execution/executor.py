"""Executes training steps of a rank, with one of the optimizers that the profiler measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graph.plan import Plan
from graph.training import Training
from profiler.updates import apply_update, initial_state
from runtime.communication import World
from runtime.execution.step import StepRunner, whole_parts

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class InitialTensors:
    """Whole tensors by name: the values in place before the first step."""

    parameters: Tensors
    buffers: Tensors
    inputs: Tensors

    def map(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> InitialTensors:
        """Return the converted tensors."""

        def converted(tensors: Tensors) -> Tensors:
            return {name: convert(tensor) for name, tensor in tensors.items()}

        return InitialTensors(converted(self.parameters), converted(self.buffers), converted(self.inputs))


class Executor(StepRunner):
    """One rank of a plan that updates its weights by the optimizer of `training`: the executor that `app run` times.

    Every rank of `world` must make one, from equal arguments, and call `step` equally often.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        tensors: InitialTensors,
        training: Training,
        *,
        seed: int,
        learning_rate: float,
        device: torch.device,
    ) -> None:
        """Compile the rank's program and cut its parts out of `tensors`.

        Args:
            plan: to execute.
            world: the ranks; this rank executes the plan's device of its number.
            tensors: parameters, buffers and inputs of the whole graph.
            training: its optimizer updates the weights.
            seed: of dropout.
            learning_rate: of the optimizer.
            device: of this rank.
        """
        super().__init__(plan, world, seed=seed, device=device)
        self.load_weights(whole_parts(tensors.parameters))
        self.load_buffers(whole_parts(tensors.buffers))
        self.set_inputs(whole_parts(tensors.inputs))
        self._optimizer = training.optimizer
        self._learning_rate = learning_rate
        self._updated = [part for own in self.parts().values() for _, part in own]
        self._optimizer_state = initial_state(self._optimizer, self._updated)

    @property
    def weight_tensors(self) -> tuple[torch.Tensor, ...]:
        """The parts of weights that this rank holds; sharded weights themselves have no memory between steps."""
        return (*self._held.values(), *self._state.parts.values())

    @property
    def optimizer_tensors(self) -> tuple[torch.Tensor, ...]:
        """The optimizer's state."""
        return tuple(tensor for slot in self._optimizer_state.slots for tensor in slot)

    def step(self, number: int) -> None:
        """Execute one training step: forward, backward, gradient synchronization, update. `number` seeds dropout."""
        self.differentiate(number)
        self.update()

    def update(self) -> None:
        """Update the weights by the gradients of the last `differentiate`; all-gather shares of other ranks."""
        self.update_own()
        self.make_weights_whole()

    def update_own(self) -> None:
        """Update this rank's parts of the weights."""
        gradients = [gradient for own in self.gradients().values() for _, gradient in own]
        apply_update(self._optimizer, self._updated, gradients, self._optimizer_state, self._learning_rate)
