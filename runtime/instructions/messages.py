"""Instructions that send and receive messages: pieces of values in the forward, their gradients in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from profiler.process_groups import Message
from runtime.instructions.base import Communication, Slots
from runtime.instructions.region_assembly import Recipe
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor to receive: its sender, slot, shape and dtype."""

    peer: int
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Receive(Communication):
    """Waits for pieces and assembles a region from them and from the rank's own tensors.

    The result is a leaf: its gradient is sent back by `SendGradients`.
    """

    recipe: Recipe
    selections: tuple[Selection | None, ...]
    sources: Slots
    arrivals: Slots
    target: int
    differentiable: bool

    @property
    def touches(self) -> Slots:
        return (*self.sources, self.target)

    def run(self, state: StepState) -> None:
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
class Exchange(Communication):
    """Starts the messages of one forward event: parts of tensors to peers, and pieces from peers.

    `sends` are the distinct parts, so that one copy serves several peers; `order` holds, for each message in the plan's
    order, its peer and the index of its part in `sends`.
    """

    sends: tuple[tuple[int, Selection], ...]
    order: tuple[tuple[int, int], ...]
    arrivals: tuple[Arrival, ...]
    device: torch.device

    @property
    def touches(self) -> Slots:
        return (*(slot for slot, _ in self.sends), *(item.slot for item in self.arrivals))

    def run(self, state: StepState) -> None:
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
    """One piece's part of an assembly's gradient: to a peer, or into the gradient of a tensor of this rank.

    source, target: of a local piece, the slot of that tensor and the part of it that the piece is.
    """

    selection: Selection
    peer: int | None
    source: int
    target: Selection | None


@dataclass(frozen=True, slots=True)
class SendGradients(Communication):
    """Splits the gradients of received assemblies into their pieces and starts the messages of one backward event.

    `assemblies` holds slot, shape and dtype, and the parts, in the plan's order.
    """

    assemblies: tuple[tuple[Arrival, tuple[GradientPart, ...]], ...]
    arrivals: tuple[Arrival, ...]
    device: torch.device

    @property
    def touches(self) -> Slots:
        return tuple(item.slot for item in self.arrivals)

    def run(self, state: StepState) -> None:
        sends = []
        for assembly, parts in self.assemblies:
            gradient = state.gradients.pop(assembly.slot)
            if gradient is None:
                gradient = torch.zeros(assembly.shape, dtype=assembly.dtype, device=self.device)
            for part in parts:
                piece = part.selection.take(gradient)
                if part.peer is not None:
                    sends.append(Message(part.peer, piece.contiguous()))
                elif part.target is not None:
                    state.gradients.add_part(part.source, part.target, piece)
        state.exchange(sends, buffers(self.arrivals, self.device))


@dataclass(frozen=True, slots=True)
class ReceiveGradients(Communication):
    """Waits for gradients of sent pieces and adds them to the gradients of the tensors that the pieces are part of.

    `parts` holds the slot of each received gradient, the tensor's slot, and the part of the tensor.
    """

    parts: tuple[tuple[int, int, Selection], ...]

    @property
    def touches(self) -> Slots:
        return tuple(arrival for arrival, _, _ in self.parts)

    def run(self, state: StepState) -> None:
        for arrival, source, selection in self.parts:
            state.wait_for((arrival,))
            state.gradients.add_part(source, selection, state.values[arrival])
