"""A rank's share in the collectives of exchanges: what it puts in, what it gets, and the instructions that start them.

A collective works on flat tensors: what a rank puts in is packed, what it gets is views of one flat buffer. Whoever
reads these views waits for the collective (`instructions.Receive`, `instructions.ReceiveGradients`). Backward, what
was sent receives a gradient and what was received sends one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graph.collectives import CollectiveKind
from runtime.communication import World
from runtime.instructions.base import Arrival, Slots
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part in a collective.

    ranks: all that take part, ascending; `root` is one of them or None.
    sizes: elements of each chunk that the rank gets, in the order of the ranks.
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
        """The slots of what the rank gets."""
        return tuple(item.slot for item in self.arrivals)


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Starts a collective of a value: `sends` are parts of the rank's own tensors, in the order of the ranks."""

    share: Share
    sends: tuple[tuple[int, Selection], ...]

    @property
    def touches(self) -> Slots:
        """What is sent, and what arrives."""
        return (*(slot for slot, _ in self.sends), *self.share.slots)

    def run(self, state: StepState) -> None:
        """Pack and start."""
        with torch.no_grad():
            _start(state, self.share, [part.take(state.values[slot].detach()) for slot, part in self.sends])


@dataclass(frozen=True, slots=True)
class StartGradientCollective:
    """Starts a collective of gradients: parts of the gradient of the rank's assembly, if it has one."""

    share: Share
    assembly: Arrival | None
    sends: tuple[Selection, ...]

    @property
    def touches(self) -> Slots:
        """What arrives; the rest are gradients."""
        return self.share.slots

    def run(self, state: StepState) -> None:
        """Take the gradient apart and start."""
        parts: list[torch.Tensor] = []
        if self.assembly is not None:
            gradient = state.gradients.pop(self.assembly.slot)
            if gradient is None:
                gradient = torch.zeros(
                    self.assembly.shape, dtype=self.assembly.dtype, device=self.share.device
                )
            parts = [part.take(gradient) for part in self.sends]
        _start(state, self.share, parts)


def _start(state: StepState, share: Share, parts: Sequence[torch.Tensor]) -> None:
    """Start a collective; its results arrive in the slots of its arrivals."""
    buffer = torch.empty(sum(share.sizes), dtype=share.dtype, device=share.device)
    lengths = [torch.Size(item.shape).numel() for item in share.arrivals]
    views = buffer.split(lengths) if lengths else ()
    arriving = [(item.slot, view.view(item.shape)) for item, view in zip(share.arrivals, views, strict=True)]
    work, sent = _issue(state.world, share, parts, buffer)
    state.collect(work, arriving, sent)


def _issue(
    world: World, share: Share, parts: Sequence[torch.Tensor], buffer: torch.Tensor
) -> tuple[Any, torch.Tensor]:
    """Start a collective into `buffer`; return its work, and the tensor that must live as long as it."""
    kind, ranks = share.kind, share.ranks
    if kind is CollectiveKind.ALL_GATHER:
        packed = _packed(parts)
        return world.all_gather(buffer, packed, ranks), packed
    if kind is CollectiveKind.REDUCE_SCATTER:
        packed = _packed(parts)
        if packed.device.type == "cpu" and _share_memory(packed, parts[0]):
            packed = packed.clone()
        return world.sum_in_shares(buffer, packed, ranks), packed
    if kind is CollectiveKind.ALL_TO_ALL:
        packed = _packed(parts)
        given = [part.numel() for part in parts]
        return world.all_to_all(buffer, packed, share.sizes, given, ranks), packed
    if not len(buffer):
        # A rank that only gives: of a broadcast it is the root, whose tensor is not written to.
        buffer = _packed(parts)
        if kind is CollectiveKind.REDUCE and _share_memory(buffer, parts[0]):
            buffer = buffer.clone()
    elif parts:
        buffer.copy_(parts[0].reshape(-1))
    elif kind is CollectiveKind.REDUCE:
        buffer.zero_()
    if kind is CollectiveKind.ALL_REDUCE:
        return world.all_reduce(buffer, ranks), buffer
    if share.root is None:
        raise ValueError(f"a {kind.value} has no root")
    if kind is CollectiveKind.BROADCAST:
        return world.broadcast(buffer, share.root, ranks), buffer
    return world.reduce(buffer, share.root, ranks), buffer


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all parts in one flat tensor; nothing is copied where they stand one after the other already."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        if not part.is_contiguous() or part.storage_offset() != end or not _share_memory(part, first):
            return torch.cat([part.reshape(-1) for part in parts])
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are views of one storage; those without data (of a memory trace) have one too."""
    same: bool = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same
