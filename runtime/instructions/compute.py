"""Instructions that compute on one rank: task calls, region assembly, and the backward of a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from profiler.operators import ExecutionContext
from runtime.instructions.base import Instruction, Slots, WrappedInstruction
from runtime.instructions.region_assembly import Recipe, assemble
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState

Execute = Callable[[Sequence[torch.Tensor], ExecutionContext], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Call(Instruction):
    """The local call of a task, recorded by autograd. Outputs in `constants` carry no gradient."""

    execute: Execute
    inputs: Slots
    outputs: Slots
    constants: Slots = ()

    @property
    def touches(self) -> Slots:
        return self.inputs + self.outputs

    def run(self, state: StepState) -> None:
        values = state.values
        results = self.execute([values[slot] for slot in self.inputs], state.context)
        for slot, result in zip(self.outputs, results, strict=True):
            values[slot] = result
        for slot in self.constants:
            values[slot] = values[slot].detach()


@dataclass(frozen=True, slots=True)
class Assemble(Instruction):
    """The assembly of a region from parts of the rank's own tensors, recorded by autograd."""

    recipe: Recipe
    selections: tuple[Selection, ...]
    sources: Slots
    target: int

    @property
    def touches(self) -> Slots:
        return (*self.sources, self.target)

    def run(self, state: StepState) -> None:
        values = state.values
        values[self.target] = assemble(self.recipe, self.selections, [values[slot] for slot in self.sources])


class Unrecorded(WrappedInstruction):
    """An instruction that autograd does not record: nothing needs its gradient."""

    __slots__ = ()

    def run(self, state: StepState) -> None:
        with torch.no_grad():
            self.inner.run(state)


@dataclass(frozen=True, slots=True)
class Recompute(WrappedInstruction):
    """Activation checkpointing: an instruction of the forward, executed again in the backward.

    Its outputs were released after the forward. Dropout draws by the step's number, and so the same mask.

    outputs: their slots.
    """

    outputs: Slots


@dataclass(frozen=True, slots=True)
class Detach(Instruction):
    """Leaves, for later segments, of tensors that this segment makes: pairs of (tensor, leaf)."""

    pairs: tuple[tuple[int, int], ...]

    @property
    def touches(self) -> Slots:
        return tuple(slot for pair in self.pairs for slot in pair)

    def run(self, state: StepState) -> None:
        values = state.values
        for source, leaf in self.pairs:
            values[leaf] = values[source].detach().requires_grad_()


@dataclass(frozen=True, slots=True)
class Copy(Instruction):
    """The copy of a tensor whose memory is freed before its messages have been sent."""

    source: int
    target: int

    @property
    def touches(self) -> Slots:
        return (self.source, self.target)

    def run(self, state: StepState) -> None:
        state.values[self.target] = state.values[self.source].detach().clone()


@dataclass(frozen=True, slots=True)
class Differentiate(Instruction):
    """The backward of one segment as a unit.

    `targets` holds, for each of `inputs`, the slot to whose gradient it adds, and the part of that tensor (None: all).
    """

    outputs: Slots
    inputs: Slots
    targets: tuple[tuple[int, Selection | None], ...]

    @property
    def touches(self) -> Slots:
        return self.outputs + self.inputs

    def run(self, state: StepState) -> None:
        outputs, gradients = self._begun(state)
        if outputs:
            inputs = [state.values[slot] for slot in self.inputs]
            results = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
            _add_gradients(state, self.targets, results)

    def _begun(self, state: StepState) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs that have a gradient, and their gradients, which leave the store."""
        outputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for slot in self.outputs:
            gradient, value = state.gradients.pop(slot), state.values[slot]
            if gradient is not None and value.requires_grad:
                outputs.append(value)
                gradients.append(gradient)
        return outputs, gradients


@dataclass(frozen=True, slots=True)
class DifferentiateInputs(Differentiate):
    """The input part of the backward of one segment: of its inputs but weights, which `DifferentiateWeights` takes.

    What autograd has saved stays for that, and so do the gradients of outputs; the outputs themselves need not.
    """

    segment: int

    def run(self, state: StepState) -> None:
        outputs, gradients = self._begun(state)
        if not outputs:
            return
        if self.inputs:
            inputs = [state.values[slot] for slot in self.inputs]
            results = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
            _add_gradients(state, self.targets, results)
        state.weight_parts[self.segment] = [get_gradient_edge(value) for value in outputs], gradients


@dataclass(frozen=True, slots=True)
class DifferentiateWeights(Instruction):
    """The weight part of the backward of one segment, after its input part; `targets` as in `Differentiate`."""

    segment: int
    weights: Slots
    targets: tuple[tuple[int, Selection | None], ...]

    def run(self, state: StepState) -> None:
        outputs, gradients = state.weight_parts.pop(self.segment, ([], []))
        if outputs:
            weights = [state.values[slot] for slot in self.weights]
            results = torch.autograd.grad(outputs, weights, gradients, allow_unused=True)
            _add_gradients(state, self.targets, results)


def _add_gradients(
    state: StepState,
    targets: Sequence[tuple[int, Selection | None]],
    results: Sequence[torch.Tensor | None],
) -> None:
    for (slot, selection), result in zip(targets, results, strict=True):
        if result is None:
            continue
        if selection is None:
            state.gradients.add(slot, result)
        else:
            state.gradients.add_part(slot, selection, result)


@dataclass(frozen=True, slots=True)
class Loss(Instruction):
    """The sum of this rank's parts of the loss, added to those of the micro-batches before."""

    parts: Slots

    @property
    def touches(self) -> Slots:
        return self.parts

    def run(self, state: StepState) -> None:
        total = state.values[self.parts[0]].detach()
        for slot in self.parts[1:]:
            total = total + state.values[slot].detach()
        state.loss = total if state.loss is None else state.loss + total


@dataclass(frozen=True, slots=True)
class Seed(Instruction):
    """The start of the backward: the gradient of each part of the loss is the loss scale."""

    parts: Slots

    @property
    def touches(self) -> Slots:
        return self.parts

    def run(self, state: StepState) -> None:
        for slot in self.parts:
            # Not full_like, which refuses a scale beyond the range of float16 that must become infinite.
            state.gradients.set(slot, torch.ones_like(state.values[slot]).mul_(state.loss_scale))


@dataclass(frozen=True, slots=True)
class Renew(Instruction):
    """A buffer's new value, kept for the next step: its slot, and that of the buffer's read."""

    source: int
    read: int

    @property
    def touches(self) -> Slots:
        return (self.source,)

    def run(self, state: StepState) -> None:
        state.renewed[self.read] = state.values[self.source].detach()


@dataclass(frozen=True, slots=True)
class EnterMicroBatch(Instruction):
    """The turn to a micro-batch, after the waits for what others have sent: their tensors are let go.

    sent: micro-batches whose messages must be out by now.
    """

    number: int
    sent: tuple[int, ...] = ()

    def run(self, state: StepState) -> None:
        for number in self.sent:
            state.enter(number)
            state.wait_for_sends()
        state.enter(self.number)


@dataclass(frozen=True, slots=True)
class GiveRenewals(Instruction):
    """Gives buffers their new values, for the next micro-batch's."""

    def run(self, state: StepState) -> None:
        state.renew()


@dataclass(frozen=True, slots=True)
class Release(Instruction):
    """The release of tensors that no later instruction touches."""

    slots: Slots

    def run(self, state: StepState) -> None:
        for slot in self.slots:
            state.values[slot] = None
