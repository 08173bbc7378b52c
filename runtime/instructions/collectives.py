"""The instructions that start a rank's collectives of exchanged values and of their gradients.

A collective works on flat tensors: a rank's inputs are packed, its outputs are views of one flat buffer. The readers
of these views wait for the collective (`messages.Receive`, `messages.ReceiveGradients`). In the backward, sent parts
receive gradients and received parts send them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graph.collectives import CollectiveKind
from runtime.communication import World
from runtime.instructions.base import Communication, Slots
from runtime.instructions.messages import Arrival
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One rank's call of a collective.

    ranks: of the process group, ascending; `root` is one of them or None.
    sizes: elements of each chunk that the rank receives, in the order of the ranks.
    arrivals: these chunks, or fewer tensors that hold them one after the other.
    """

    kind: CollectiveKind
    ranks: tuple[int, ...]
    root: int | None
    sizes: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def slots(self) -> Slots:
        """The slots of the received tensors."""
        return tuple(item.slot for item in self.arrivals)


@dataclass(frozen=True, slots=True)
class StartCollective(Communication):
    """Starts a collective of a value: `sends` are parts of the rank's own tensors, in the order of the ranks."""

    call: CollectiveCall
    sends: tuple[tuple[int, Selection], ...]

    @property
    def touches(self) -> Slots:
        return (*(slot for slot, _ in self.sends), *self.call.slots)

    def run(self, state: StepState) -> None:
        with torch.no_grad():
            _start(
                state,
                state.world,
                self.call,
                [part.take(state.values[slot].detach()) for slot, part in self.sends],
            )


@dataclass(frozen=True, slots=True)
class StartGradientCollective(Communication):
    """Starts a collective of gradients: `sends` are parts of the gradient of the rank's assembly, if it has one.

    apart: whether ranks differ in its order among those that go forward (`Plan.returning_groups`).
    """

    call: CollectiveCall
    assembly: Arrival | None
    sends: tuple[Selection, ...]
    apart: bool

    @property
    def touches(self) -> Slots:
        return self.call.slots

    def run(self, state: StepState) -> None:
        parts: list[torch.Tensor] = []
        if self.assembly is not None:
            gradient = state.gradients.pop(self.assembly.slot)
            if gradient is None:
                gradient = torch.zeros(
                    self.assembly.shape, dtype=self.assembly.dtype, device=self.call.device
                )
            parts = [part.take(gradient) for part in self.sends]
        _start(state, state.world.returning if self.apart else state.world, self.call, parts)


def _start(state: StepState, world: World, call: CollectiveCall, parts: Sequence[torch.Tensor]) -> None:
    """Start a collective; its results arrive in the slots of its arrivals."""
    buffer = torch.empty(sum(call.sizes), dtype=call.dtype, device=call.device)
    lengths = [torch.Size(item.shape).numel() for item in call.arrivals]
    views = buffer.split(lengths) if lengths else ()
    arriving = [(item.slot, view.view(item.shape)) for item, view in zip(call.arrivals, views, strict=True)]
    work, sent = _issue(world, call, parts, buffer)
    state.add_collective(work, arriving, sent)


def _issue(
    world: World, call: CollectiveCall, parts: Sequence[torch.Tensor], buffer: torch.Tensor
) -> tuple[Any, torch.Tensor]:
    """Start a collective into `buffer`; return its work, and the tensor that must stay alive until it is done."""
    kind, ranks = call.kind, call.ranks
    if kind is CollectiveKind.ALL_GATHER:
        packed = _packed(parts)
        return world.all_gather(buffer, packed, ranks), packed
    if kind is CollectiveKind.REDUCE_SCATTER:
        packed = _packed(parts)
        if packed.device.type == "cpu" and _share_memory(packed, parts[0]):
            packed = packed.clone()
        return world.reduce_scatter_in_place(buffer, packed, ranks), packed
    if kind is CollectiveKind.ALL_TO_ALL:
        packed = _packed(parts)
        sent_sizes = [part.numel() for part in parts]
        return world.all_to_all(buffer, packed, call.sizes, sent_sizes, ranks), packed
    if not len(buffer):
        # A rank that only sends: of a broadcast it is the root, whose tensor is not written to.
        buffer = _packed(parts)
        if kind is CollectiveKind.REDUCE and _share_memory(buffer, parts[0]):
            buffer = buffer.clone()
    elif parts:
        buffer.copy_(parts[0].reshape(-1))
    elif kind is CollectiveKind.REDUCE:
        buffer.zero_()
    if kind is CollectiveKind.ALL_REDUCE:
        return world.all_reduce(buffer, ranks), buffer
    if call.root is None:
        raise ValueError(f"a {kind.value} has no root")
    if kind is CollectiveKind.BROADCAST:
        return world.broadcast(buffer, call.root, ranks), buffer
    return world.reduce(buffer, call.root, ranks), buffer


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all parts in one flat tensor; contiguous parts of one storage are not copied."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        if not part.is_contiguous() or part.storage_offset() != end or not _share_memory(part, first):
            return torch.cat([part.reshape(-1) for part in parts])
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are views of one storage; those without data (of a memory trace) have one too."""
    same: bool = left.untyped_storage()._cdata == right.untyped_storage()._cdata
    return same
