"""The instructions of a rank's static program. All regions, peers and slots are settled before the first step.

Each has `touches`, the value slots that it reads or writes, so that a tensor is released after the last instruction
that needs it, and `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from profiler.operators import ExecutionContext
from runtime.communication import Message
from runtime.instructions.region_assembly import Recipe, assemble
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState

Slots = tuple[int, ...]
Execute = Callable[[Sequence[torch.Tensor], ExecutionContext], tuple[torch.Tensor, ...]]


class Instruction(Protocol):
    """One entry of a program."""

    @property
    def touches(self) -> Slots:
        """The value slots that it reads or writes."""
        ...

    def run(self, state: StepState) -> None:
        """Do it."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """Executes one task. Outputs in `constants` carry no gradient."""

    execute: Execute
    inputs: Slots
    outputs: Slots
    constants: Slots = ()

    @property
    def touches(self) -> Slots:
        """Inputs and outputs."""
        return self.inputs + self.outputs

    def run(self, state: StepState) -> None:
        """Execute the local call, recorded by autograd."""
        values = state.values
        results = self.execute([values[slot] for slot in self.inputs], state.context)
        for slot, result in zip(self.outputs, results, strict=True):
            values[slot] = result
        for slot in self.constants:
            values[slot] = values[slot].detach()


@dataclass(frozen=True, slots=True)
class Assemble:
    """Puts a region together from parts of the rank's own tensors, within autograd."""

    recipe: Recipe
    selections: tuple[Selection, ...]
    sources: Slots
    target: int

    @property
    def touches(self) -> Slots:
        """Sources and target."""
        return (*self.sources, self.target)

    def run(self, state: StepState) -> None:
        """Assemble, recorded by autograd."""
        values = state.values
        values[self.target] = assemble(self.recipe, self.selections, [values[slot] for slot in self.sources])


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """An instruction that autograd shall not see: nobody asks for its gradient."""

    inner: Instruction

    @property
    def touches(self) -> Slots:
        """Those of the instruction."""
        return self.inner.touches

    def run(self, state: StepState) -> None:
        """Run the instruction."""
        with torch.no_grad():
            self.inner.run(state)


@dataclass(frozen=True, slots=True)
class Recompute:
    """An instruction of the forward that is run again in the backward; what it made before is gone since.

    made: the slots of what it makes.
    """

    inner: Instruction
    made: Slots

    @property
    def touches(self) -> Slots:
        """Those of the instruction."""
        return self.inner.touches

    def run(self, state: StepState) -> None:
        """Run the instruction: dropout draws by the step's number, and so the same."""
        self.inner.run(state)


@dataclass(frozen=True, slots=True)
class Receive:
    """Waits for pieces and puts a region together from them and from the rank's own tensors.

    The result is a leaf: its gradient goes back by `SendGradients`.
    """

    recipe: Recipe
    selections: tuple[Selection | None, ...]
    sources: Slots
    arrivals: Slots
    target: int
    differentiable: bool

    @property
    def touches(self) -> Slots:
        """Sources and target."""
        return (*self.sources, self.target)

    def run(self, state: StepState) -> None:
        """Wait, then assemble."""
        state.wait_for(self.arrivals)
        values = state.values
        with torch.no_grad():
            parts = [
                values[slot] if selection is None else selection.take(values[slot])
                for slot, selection in zip(self.sources, self.selections, strict=True)
            ]
            result = self.recipe.build(parts)
        if self.differentiable:
            result = result.detach().requires_grad_()
        values[self.target] = result


@dataclass(frozen=True, slots=True)
class Detach:
    """Makes leaves, for later segments, of tensors that this segment made."""

    pairs: tuple[tuple[int, int], ...]

    @property
    def touches(self) -> Slots:
        """The tensors and their leaves."""
        return tuple(slot for pair in self.pairs for slot in pair)

    def run(self, state: StepState) -> None:
        """Make the leaves."""
        values = state.values
        for source, leaf in self.pairs:
            values[leaf] = values[source].detach().requires_grad_()


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies a tensor whose memory goes before what is sent of it has left."""

    source: int
    target: int

    @property
    def touches(self) -> Slots:
        """The tensor and its copy."""
        return (self.source, self.target)

    def run(self, state: StepState) -> None:
        """Copy."""
        state.values[self.target] = state.values[self.source].detach().clone()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message to come: who sends it, its slot, its shape and dtype."""

    peer: int
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Exchange:
    """Starts the messages of one forward event: parts of tensors to peers, and pieces from peers.

    `sends` are grouped by what is sent, so that one copy serves several peers; `order` holds, for each message in
    the plan's order, its peer and which of `sends` it carries.
    """

    sends: tuple[tuple[int, Selection], ...]
    order: tuple[tuple[int, int], ...]
    arrivals: tuple[Arrival, ...]
    device: torch.device

    @property
    def touches(self) -> Slots:
        """What is sent, and what is received."""
        return (*(slot for slot, _ in self.sends), *(item.slot for item in self.arrivals))

    def run(self, state: StepState) -> None:
        """Start the messages."""
        values = state.values
        with torch.no_grad():
            parts = [selection.take(values[slot].detach()).contiguous() for slot, selection in self.sends]
        state.exchange(
            [Message(peer, parts[part]) for peer, part in self.order], buffers(self.arrivals, self.device)
        )


def buffers(arrivals: Sequence[Arrival], device: torch.device) -> list[tuple[int, Message]]:
    """Return fresh receive buffers with their slots."""
    return [
        (item.slot, Message(item.peer, torch.empty(item.shape, dtype=item.dtype, device=device)))
        for item in arrivals
    ]


@dataclass(frozen=True, slots=True)
class GradientPart:
    """One piece's share of an assembly's gradient: to a peer, or into the gradient of a tensor of this rank."""

    selection: Selection
    peer: int | None
    source: int
    place: Selection | None


@dataclass(frozen=True, slots=True)
class SendGradients:
    """Takes the gradients of received assemblies apart and starts the messages of one backward event.

    `assemblies` holds slot, shape and dtype, and the parts, in the plan's order.
    """

    assemblies: tuple[tuple[Arrival, tuple[GradientPart, ...]], ...]
    arrivals: tuple[Arrival, ...]
    device: torch.device

    @property
    def touches(self) -> Slots:
        """What is received; the rest are gradients."""
        return tuple(item.slot for item in self.arrivals)

    def run(self, state: StepState) -> None:
        """Add local parts to their tensors' gradients, send the others."""
        sends = []
        for assembly, parts in self.assemblies:
            gradient = state.gradients.pop(assembly.slot)
            if gradient is None:
                gradient = torch.zeros(assembly.shape, dtype=assembly.dtype, device=self.device)
            for part in parts:
                share = part.selection.take(gradient)
                if part.peer is not None:
                    sends.append(Message(part.peer, share.contiguous()))
                elif part.place is not None:
                    state.gradients.add_part(part.source, part.place, share)
        state.exchange(sends, buffers(self.arrivals, self.device))


@dataclass(frozen=True, slots=True)
class ReceiveGradients:
    """Waits for gradients of sent pieces and adds them to the gradients of the tensors they were cut from."""

    parts: tuple[tuple[int, int, Selection], ...]

    @property
    def touches(self) -> Slots:
        """The received gradients."""
        return tuple(arrival for arrival, _, _ in self.parts)

    def run(self, state: StepState) -> None:
        """Wait and add."""
        for arrival, source, place in self.parts:
            state.wait_for((arrival,))
            state.gradients.add_part(source, place, state.values[arrival])


@dataclass(frozen=True, slots=True)
class Differentiate:
    """The backward of one segment as a unit.

    `targets` says, for each of `inputs`, whose gradient it adds to: a slot, and the part of it (None: all).
    """

    outputs: Slots
    inputs: Slots
    targets: tuple[tuple[int, Selection | None], ...]

    @property
    def touches(self) -> Slots:
        """The tensors on both ends of the segment."""
        return self.outputs + self.inputs

    def run(self, state: StepState) -> None:
        """Differentiate the segment."""
        values = state.values
        outputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for slot in self.outputs:
            gradient = state.gradients.pop(slot)
            if gradient is not None and values[slot].requires_grad:
                outputs.append(values[slot])
                gradients.append(gradient)
        if not outputs:
            return
        inputs = [values[slot] for slot in self.inputs]
        results = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        for (slot, place), result in zip(self.targets, results, strict=True):
            if result is None:
                continue
            if place is None:
                state.gradients.add(slot, result)
            else:
                state.gradients.add_part(slot, place, result)


@dataclass(frozen=True, slots=True)
class Loss:
    """Keeps the sum of this rank's parts of the loss."""

    parts: Slots

    @property
    def touches(self) -> Slots:
        """The parts."""
        return self.parts

    def run(self, state: StepState) -> None:
        """Add them up."""
        total = state.values[self.parts[0]].detach()
        for slot in self.parts[1:]:
            total = total + state.values[slot].detach()
        state.loss = total


@dataclass(frozen=True, slots=True)
class Seed:
    """Starts the backward: the gradient of each part of the loss is the loss scale."""

    parts: Slots

    @property
    def touches(self) -> Slots:
        """The parts."""
        return self.parts

    def run(self, state: StepState) -> None:
        """Set the gradients."""
        for slot in self.parts:
            # Not full_like, which refuses a scale beyond the range of float16 that must become infinite.
            state.gradients.set(slot, torch.ones_like(state.values[slot]).mul_(state.loss_scale))


@dataclass(frozen=True, slots=True)
class Renew:
    """Keeps a buffer's new value for the next step."""

    source: int
    reading: int

    @property
    def touches(self) -> Slots:
        """The new value."""
        return (self.source,)

    def run(self, state: StepState) -> None:
        """Keep it."""
        state.renewed[self.reading] = state.values[self.source].detach()


@dataclass(frozen=True, slots=True)
class Release:
    """Drops tensors that nothing needs any more."""

    slots: Slots

    @property
    def touches(self) -> Slots:
        """None."""
        return ()

    def run(self, state: StepState) -> None:
        """Drop them."""
        values: list[Any] = state.values
        for slot in self.slots:
            values[slot] = None
