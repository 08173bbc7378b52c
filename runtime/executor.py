"""Executes one rank's program, step after step, on tensors that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graph.intervals import Region, full_region
from graph.operators import ValueKind
from graph.plan import Plan
from graph.training import Training
from profiler.operators import ExecutionContext
from profiler.updates import apply_update, initial_state
from runtime.communication import World
from runtime.layout import Reading
from runtime.program import compile_program
from runtime.selections import Selection
from runtime.state import StepState

Tensors = Mapping[str, torch.Tensor]
Held = tuple[Region, torch.Tensor]


@dataclass(frozen=True, slots=True)
class InitialTensors:
    """Whole tensors by name: the values in place before the first step."""

    parameters: Tensors
    buffers: Tensors
    inputs: Tensors


class Executor:
    """One rank of a plan: holds its parts of the weights and trains them step by step.

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
            plan: what to execute.
            world: the ranks; this rank executes the plan's device of its number.
            tensors: parameters, buffers and inputs of the whole graph.
            training: its optimizer updates the weights.
            seed: of dropout.
            learning_rate: of the optimizer.
            device: where this rank computes.
        """
        self._plan = plan
        self._training = training
        self._seed = seed
        self._learning_rate = learning_rate
        self._device = device
        self._world = world
        self._program = compile_program(plan, world.rank, device)
        self._state = StepState(world, self._program.shapes)
        self._held: dict[str, torch.Tensor] = {}
        for name, (_, region) in self._program.held.items():
            part = self._part(tensors.parameters[name], region)
            self._held[name] = part.detach().clone(memory_format=torch.contiguous_format)
        self._refreshed: list[tuple[int, torch.Tensor, Selection, bool]] = []
        self._place_readings(tensors)
        for slot, sizes, dtype in self._program.empty:
            self._state.values[slot] = torch.empty(sizes, dtype=dtype, device=device)
        self._updated = [(self._program.held[name][0], self._held[name]) for name in self._program.updated]
        self._optimizer = initial_state(training.optimizer, [weight for _, weight in self._updated])

    def _part(self, tensor: torch.Tensor, region: Region) -> torch.Tensor:
        selection = Selection(region, full_region(tuple(tensor.shape)), tensor.device)
        return selection.take(tensor).to(self._device)

    def _place_readings(self, tensors: InitialTensors) -> None:
        for reading in self._program.readings:
            value = self._plan.graph.value_by_name[reading.value]
            if value.kind is ValueKind.WEIGHT:
                self._place_weight(reading, differentiable=value.requires_gradient)
            elif value.kind is ValueKind.BUFFER:
                part = self._part(tensors.buffers[reading.value], reading.region)
                self._state.values[reading.slot] = part.detach().clone()
        self.set_inputs(tensors.inputs)

    def _place_weight(self, reading: Reading, *, differentiable: bool) -> None:
        """Make the leaf of a reading: it shares the held weight's memory where the region allows that."""
        weight = self._held[reading.value]
        selection = Selection(reading.region, self._program.held[reading.value][1], self._device)
        if selection.is_view:
            self._state.values[reading.slot] = selection.take(weight).detach().requires_grad_(differentiable)
        else:
            self._refreshed.append((reading.slot, weight, selection, differentiable))

    def set_inputs(self, inputs: Tensors) -> None:
        """Use other inputs, of the same shapes, from the next step on."""
        for reading in self._program.readings:
            if self._plan.graph.value_by_name[reading.value].kind is ValueKind.INPUT:
                part = self._part(inputs[reading.value], reading.region)
                self._state.values[reading.slot] = part.detach().contiguous()

    def step(self, number: int) -> None:
        """Do one training step: forward, backward, synchronization, update. `number` seeds dropout."""
        state = self._state
        state.context = ExecutionContext(seed=self._seed, step=number, device=self._device)
        for slot, _ in self._program.held.values():
            state.gradients.pop(slot)
        for slot, weight, selection, differentiable in self._refreshed:
            state.values[slot] = selection.take(weight).detach().requires_grad_(differentiable)
        for instruction in self._program.instructions:
            instruction.run(state)
        state.wait_for(tuple(state.arriving))
        state.wait_for_sends()
        self._update()

    def _update(self) -> None:
        state = self._state
        for slot, tensor in state.renewed.items():
            state.values[slot] = tensor
        state.renewed.clear()
        gradients = []
        for slot, weight in self._updated:
            gradient = state.gradients.get(slot)
            gradients.append(torch.zeros_like(weight) if gradient is None else gradient)
        weights = [weight for _, weight in self._updated]
        apply_update(self._training.optimizer, weights, gradients, self._optimizer, self._learning_rate)

    def loss(self) -> float:
        """Return the last step's loss. All ranks must call it: it is a sum over them."""
        part = self._state.loss
        total = torch.zeros((), dtype=torch.float64, device=self._device) if part is None else part.double()
        return float(self._world.sum(total))

    def gradients(self) -> dict[str, Held]:
        """Return, for each weight that was updated, the rank's region of it and the last step's gradient."""
        result = {}
        for name in self._program.updated:
            slot, region = self._program.held[name]
            gradient = self._state.gradients.get(slot)
            result[name] = (region, torch.zeros_like(self._held[name]) if gradient is None else gradient)
        return result

    def weights(self) -> dict[str, Held]:
        """Return the rank's region of each weight that it holds, and its value."""
        return {name: (region, self._held[name]) for name, (_, region) in self._program.held.items()}

    def buffers(self) -> dict[str, list[Held]]:
        """Return, for each buffer that the rank reads, its regions and their values."""
        result: dict[str, list[Held]] = {}
        for reading in self._program.readings:
            if self._plan.graph.value_by_name[reading.value].kind is ValueKind.BUFFER:
                held = (reading.region, self._state.values[reading.slot])
                result.setdefault(reading.value, []).append(held)
        return result
