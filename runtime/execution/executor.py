"""Executes training steps of a rank, with one of the optimizers that the profiler measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from graph.plan import Plan
from graph.training import Training
from profiler.updates import UpdateState, apply_update, initial_state
from runtime.communication import World
from runtime.execution.step import CopiedRead, Held, StepRunner, whole_parts
from runtime.instructions.gradient_synchronization import UpdateFirst
from runtime.instructions.shared_slices import PullSlice
from runtime.instructions.state import PartRange

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class InitialTensors:
    """Whole tensors by name: the values in place before the first step.

    inputs: of the first micro-batch; `further_inputs`: those of the others.
    """

    parameters: Tensors
    buffers: Tensors
    inputs: Tensors
    further_inputs: tuple[Tensors, ...] = ()

    @property
    def micro_batches(self) -> tuple[Tensors, ...]:
        """The inputs of each micro-batch."""
        return (self.inputs, *self.further_inputs)

    def of_micro_batch(self, number: int) -> InitialTensors:
        """Return the same parameters and buffers with one micro-batch's inputs alone."""
        return InitialTensors(self.parameters, self.buffers, self.micro_batches[number])

    def map(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> InitialTensors:
        """Return the converted tensors."""

        def converted(tensors: Tensors) -> Tensors:
            return {name: convert(tensor) for name, tensor in tensors.items()}

        return InitialTensors(
            converted(self.parameters),
            converted(self.buffers),
            converted(self.inputs),
            tuple(converted(inputs) for inputs in self.further_inputs),
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is updated together: the rank's parts of weights, or ranges of them, and the optimizer's state."""

    ranges: tuple[PartRange, ...]
    tensors: tuple[torch.Tensor, ...]
    optimizer: UpdateState


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
        super().__init__(plan, world, seed=seed, device=device, in_succession=True)
        self.load_weights(whole_parts(tensors.parameters))
        self.load_buffers(whole_parts(tensors.buffers))
        for number, inputs in enumerate(tensors.micro_batches):
            self.set_inputs(whole_parts(inputs), number)
        if tensors.further_inputs:
            self.count_loss(tensors.buffers, tensors.micro_batches)
        self._optimizer = training.optimizer
        self._learning_rate = learning_rate
        self._part = {part.number: part for of in self._program.parts.values() for part in of}
        self._units = {ranges: self._unit(ranges) for ranges in self._updated_together()}
        self._copies: dict[str, list[CopiedRead]] = {}
        for copy in self._refreshed:
            self._copies.setdefault(copy.weight, []).append(copy)
        self._state.update = self._update_ranges
        self._state.copy_reads = self._copy_reads_of
        self._state.drop_gradients = self._drop_gradients

    def _updated_together(self) -> Iterator[tuple[PartRange, ...]]:
        """Yield the parts of weights, or ranges of them, that are updated at once."""
        if not self._plan.updates_late:
            parts = self._program.parts
            yield tuple(PartRange(part.number) for name in self._program.updated for part in parts[name])
            return
        for item in self._program.instructions:
            if isinstance(item, UpdateFirst):
                yield item.ranges
            elif isinstance(item, PullSlice):
                yield item.slice.ranges

    def _unit(self, ranges: tuple[PartRange, ...]) -> _Unit:
        tensors = tuple(item.of(self._state.parts[item.part]) for item in ranges)
        return _Unit(ranges, tensors, initial_state(self._optimizer, tensors))

    @property
    def weight_tensors(self) -> tuple[torch.Tensor, ...]:
        """The parts of weights that this rank holds; sharded weights themselves have no memory between steps."""
        return (*self._held.values(), *self._state.parts.values())

    @property
    def optimizer_tensors(self) -> tuple[torch.Tensor, ...]:
        """The optimizer's state."""
        return tuple(
            tensor for unit in self._units.values() for slot in unit.optimizer.slots for tensor in slot
        )

    def step(self, number: int) -> None:
        """Execute one training step: forward, backward, gradient synchronization, update. `number` seeds dropout.

        Where weights are updated late, their update by this step's gradients is left to the next step, or to `finish`;
        so are gathers of updated weights where these are late.
        """
        self.differentiate(number)
        if self._plan.updates_late:
            self._state.work_left = True
        else:
            self.update_own()
            super().make_weights_whole()

    def differentiate(self, number: int, *, loss_scale: float = 1.0) -> None:
        """Execute one step as `StepRunner.differentiate`; its forward does what the step before has left to it."""
        super().differentiate(number, loss_scale=loss_scale)
        self._state.work_left = False

    def finish(self) -> None:
        """Do what was left to the next step: updates of weights, gathers of updated ones. Gradients stay."""
        self._state.drop_gradients = lambda _weights: None
        for instruction in self._program.late:
            instruction.run(self._state)
        self._state.drop_gradients = self._drop_gradients
        self._state.work_left = False

    @property
    def in_succession(self) -> bool:
        """Whether a step leaves a part of its work to the next one."""
        return self._plan.updates_late or self._plan.gathers_late

    def update(self) -> None:
        """Update the weights by the gradients of the last `differentiate`; all-gather shares of other ranks."""
        self.update_own()
        self.make_weights_whole()

    def make_weights_whole(self) -> None:
        """All-gather, after an update, the shares of weights that other ranks have updated, late ones too."""
        super().make_weights_whole()
        self.finish()

    def update_own(self) -> None:
        """Update this rank's parts of the weights."""
        if self._plan.updates_late:
            self._state.work_left = True
            self.finish()
            return
        for unit in self._units.values():
            self._update_unit(unit)

    def _update_ranges(self, ranges: tuple[PartRange, ...]) -> None:
        self._update_unit(self._units[ranges])

    def _drop_gradients(self, weights: tuple[str, ...]) -> None:
        for name in weights:
            self._state.gradients.pop(self._program.held[name][0])
            for part in self._program.parts[name]:
                self._state.shard_gradients.pop(part.number, None)

    def _copy_reads_of(self, weights: tuple[str, ...]) -> None:
        self._copy_reads([copy for name in weights for copy in self._copies.get(name, ())])

    def _update_unit(self, unit: _Unit) -> None:
        gradients = [item.of(self._gradient(self._part[item.part])) for item in unit.ranges]
        apply_update(self._optimizer, unit.tensors, gradients, unit.optimizer, self._learning_rate)

    def _begin_step(self) -> None:
        if not self._state.work_left:
            super()._begin_step()

    def gradients(self) -> dict[str, list[Held]]:
        """Return the gradients of the last step as `StepRunner.gradients`, after all updates that are due."""
        self.finish()
        return super().gradients()

    def weights(self) -> dict[str, list[Held]]:
        """Return the weights as `StepRunner.weights`, after all updates that are due."""
        self.finish()
        return super().weights()

    def forget_step(self) -> None:
        """Drop the tensors of the last step as `StepRunner.forget_step`, after all updates that are due."""
        self.finish()
        super().forget_step()
