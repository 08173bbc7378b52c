"""Transfer lowering: the plan's exchanges as instructions that send and receive, forward and backward.

All ranks issue collectives and messages in the plan's order, each those that it takes part in. A received tensor has a
slot; its first reader waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from graph.collectives import BACKWARD, Collective, CollectiveKind, assembly_on, by_source, received, sent
from graph.exchange import Assembly, Piece
from graph.intervals import Region, normalize, shape, volume
from graph.plan import Plan
from graph.strategy import Sharding
from runtime.instructions.base import Instruction
from runtime.instructions.collectives import CollectiveCall, StartCollective, StartGradientCollective
from runtime.instructions.compute import Copy
from runtime.instructions.messages import Arrival, Exchange, GradientPart, Receive, SendGradients
from runtime.instructions.region_assembly import Recipe
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import sharding_on
from runtime.lowering.segments import Segments
from runtime.lowering.tensor_slots import LocalAssembly, TensorSlots


@dataclass(frozen=True, slots=True)
class ValueTransfer:
    """One value's exchange; `name` is the value, or the buffer that it renews."""

    name: str
    value: str
    assemblies: tuple[Assembly, ...]
    collectives: tuple[Collective, ...]


class TransferLowering:
    """The exchanges of one rank, and the slots of the tensors that it receives."""

    def __init__(self, plan: Plan, slots: TensorSlots, segments: Segments, device: torch.device) -> None:
        """Prepare the exchanges of the rank of `slots`, for tensors on `device`."""
        self._plan = plan
        self._slots = slots
        self._segments = segments
        self._device = device
        # By event and assembly: the slots of its pieces, or the one slot of a region that arrives whole.
        self._arrivals: dict[tuple[str, int, Piece], int] = {}
        self._wholes: dict[tuple[str, int], int] = {}
        self._gradient_arrivals: dict[int, list[tuple[int, int, Selection]]] = {}
        # Views of these are sent as copies: their memory goes when their readers are done, which may be before.
        self._sharded = frozenset(
            name for name in slots.held if sharding_on(plan, name, slots.rank) is Sharding.PARAMETERS
        )

    def cut(self, value: str, piece: Piece) -> Selection:
        """Return the part of its task's output that a piece is."""
        return Selection(piece.region, self._slots.source_region(value, piece), self._device)

    def dtype(self, value: str) -> torch.dtype:
        """Return a value's dtype."""
        dtype: torch.dtype = getattr(torch, self._plan.graph.value_by_name[value].spec.dtype)
        return dtype

    # ---- forward

    def receive(self, local: LocalAssembly, event: str, *, differentiable: bool) -> Receive:
        """Return the instruction that waits for the pieces of an assembly, or for all of it, and assembles it.

        Args:
            local: the assembly.
            event: the name of the transfer that brings it.
            differentiable: whether a gradient flows back.
        """
        regions = [piece.region for piece in local.assembly.pieces]
        selections: list[Selection | None] = []
        sources = []
        arrivals = []
        if (event, local.number) in self._wholes:
            regions = [local.assembly.region]
            selections = [None]
            arrivals = sources = [self._wholes[event, local.number]]
        else:
            for piece in local.assembly.pieces:
                if piece.source_device == self._slots.rank:
                    selections.append(self.cut(local.value, piece))
                    sources.append(self._slots.piece_slot(local.value, piece))
                else:
                    slot = self._arrivals[event, local.number, piece]
                    selections.append(None)
                    sources.append(slot)
                    arrivals.append(slot)
        recipe = Recipe(local.assembly.region, regions, self._device)
        return Receive(recipe, tuple(selections), tuple(sources), tuple(arrivals), local.slot, differentiable)

    def issue(self, transfers: Sequence[ValueTransfer]) -> list[Instruction]:
        """Return the collectives and then the messages of some values, as far as the rank takes part in any."""
        instructions: list[Instruction] = []
        # By slot: the slot of the copy to send.
        copies: dict[int, int] = {}
        for event in transfers:
            for collective in event.collectives:
                if self._slots.rank in collective.devices:
                    instructions.append(self._collective(event, collective, copies))
        sends: dict[tuple[int, Region], tuple[int, Selection]] = {}
        order = []
        arrivals = []
        for event in transfers:
            for number, assembly, piece in self._slots.messages(event.assemblies, event.collectives):
                if assembly.device == self._slots.rank:
                    slot = self._slots.new_slot(shape(piece.region))
                    self._arrivals[event.name, number, piece] = slot
                    arrivals.append(self._arrival(piece.source_device, slot, piece.region, event.value))
                else:
                    source = self._send_slot(event.value, piece, copies)
                    key = (source, piece.region)
                    if key not in sends:
                        sends[key] = (source, self.cut(event.value, piece))
                    order.append((assembly.device, list(sends).index(key)))
        if order or arrivals:
            instructions.append(Exchange(tuple(sends.values()), tuple(order), tuple(arrivals), self._device))
        return [*(Copy(source, target) for source, target in copies.items()), *instructions]

    def _send_slot(self, value: str, piece: Piece, copies: dict[int, int]) -> int:
        """Return the slot to send a piece from; `copies` gets that of a new copy, where it must be a copy."""
        source = self._slots.piece_slot(value, piece)
        if self._sharded.isdisjoint(self._plan.graph.weights_behind[value]):
            return source
        if source not in copies:
            copies[source] = self._slots.new_slot(self._slots.shapes[source])
        return copies[source]

    def _collective(
        self, event: ValueTransfer, collective: Collective, copies: dict[int, int]
    ) -> StartCollective:
        """Return the start of a collective; note the slots of its results, and the copies to make first."""
        regions = received(collective, event.assemblies, self._slots.rank)
        assembly = assembly_on(collective, event.assemblies, self._slots.rank)
        whole = assembly is not None and _stacked(assembly.region, regions)
        arrivals = [
            self._arrival(self._slots.rank, self._slots.new_slot(shape(region)), region, event.value)
            for region in ((assembly.region,) if assembly is not None and whole else regions)
        ]
        if assembly is not None:
            number = event.assemblies.index(assembly)
            if whole:
                self._wholes[event.name, number] = arrivals[0].slot
            else:
                for piece, arrival in zip(by_source(assembly), arrivals, strict=True):
                    self._arrivals[event.name, number, piece] = arrival.slot
        sends = tuple(
            (self._send_slot(event.value, piece, copies), self.cut(event.value, piece))
            for piece in sent(collective, event.assemblies, self._slots.rank)
        )
        return StartCollective(self._call(collective, collective.kind, event.value, regions, arrivals), sends)

    def _call(
        self,
        collective: Collective,
        kind: CollectiveKind,
        value: str,
        regions: Sequence[Region],
        arrivals: Sequence[Arrival],
    ) -> CollectiveCall:
        return CollectiveCall(
            kind,
            collective.devices,
            collective.root,
            tuple(volume(region) for region in regions),
            tuple(arrivals),
            self.dtype(value),
            self._device,
        )

    def _arrival(self, peer: int, slot: int, region: Region, value: str) -> Arrival:
        return Arrival(peer, slot, shape(region), self.dtype(value))

    # ---- backward

    def issue_gradients(self, index: int) -> list[Instruction]:
        """Return the collectives and then the messages of the gradients complete after operator `index`."""
        return [*self._gradient_collectives(index), *self._gradient_messages(index)]

    def gradients_for(self, segment: int) -> list[tuple[int, int, Selection]]:
        """Return the gradients that arrive for tensors of a segment: (slot, tensor's slot, part of the tensor)."""
        return self._gradient_arrivals.pop(segment, [])

    def _gradient_collectives(self, index: int) -> Iterator[Instruction]:
        for back in self._plan.gradient_collectives.get(index, ()):
            collective = self._plan.collectives[back.value][back.number]
            if self._slots.rank not in collective.devices:
                continue
            assemblies = self._plan.exchanges[back.value]
            pieces = sent(collective, assemblies, self._slots.rank)
            arrivals = []
            for piece in pieces:
                slot = self._slots.new_slot(shape(piece.region))
                arrivals.append(self._arrival(self._slots.rank, slot, piece.region, back.value))
                self._expect_gradient(slot, back.value, piece)
            assembly = assembly_on(collective, assemblies, self._slots.rank)
            whole = None if assembly is None else self._assembly(back.value, assembly)
            sends = [
                Selection(region, assembly.region, self._device)
                for region in received(collective, assemblies, self._slots.rank)
                if assembly is not None
            ]
            regions = [piece.region for piece in pieces]
            call = self._call(collective, BACKWARD[collective.kind], back.value, regions, arrivals)
            apart = collective.devices in self._plan.returning_groups
            yield StartGradientCollective(call, whole, tuple(sends), apart)

    def _assembly(self, value: str, assembly: Assembly) -> Arrival:
        """Return the slot of an assembly of the rank, with its shape and dtype."""
        reader = assembly.readers[0]
        slot = self._slots.sources[reader.operator, reader.task, reader.slot]
        return self._arrival(self._slots.rank, slot, assembly.region, value)

    def _expect_gradient(self, slot: int, value: str, piece: Piece) -> None:
        """Note that the gradient of a sent piece arrives in `slot`."""
        source = self._slots.piece_slot(value, piece)
        maker = self._segments.made_in(source)
        if maker is not None:
            self._gradient_arrivals.setdefault(maker, []).append((slot, source, self.cut(value, piece)))

    def _gradient_messages(self, index: int) -> Iterator[Instruction]:
        split = []
        arrivals = []
        for transfer in self._plan.gradient_transfers.get(index, ()):
            value = transfer.value
            assembly = self._plan.exchanges[value][transfer.assembly]
            if not assembly.remote_pieces:
                continue
            if assembly.device == self._slots.rank:
                parts = tuple(self._gradient_part(value, assembly, piece) for piece in assembly.pieces)
                split.append((self._assembly(value, assembly), parts))
                continue
            for piece in assembly.pieces:
                if piece.source_device == self._slots.rank:
                    slot = self._slots.new_slot(shape(piece.region))
                    arrivals.append(self._arrival(assembly.device, slot, piece.region, value))
                    self._expect_gradient(slot, value, piece)
        if split or arrivals:
            yield SendGradients(tuple(split), tuple(arrivals), self._device)

    def _gradient_part(self, value: str, assembly: Assembly, piece: Piece) -> GradientPart:
        selection = Selection(piece.region, assembly.region, self._device)
        if piece.source_device != self._slots.rank:
            return GradientPart(selection, piece.source_device, -1, None)
        source = self._slots.piece_slot(value, piece)
        return GradientPart(selection, None, source, self.cut(value, piece))


def _stacked(region: Region, parts: Sequence[Region]) -> bool:
    """Return whether the dense tensors of `parts`, one after the other, are that of `region`."""
    if len(parts) == 1 or not region:
        return tuple(parts) == (region,)
    ascending = all(here[0][-1][1] <= there[0][0][0] for here, there in itertools.pairwise(parts))
    rows = normalize([interval for part in parts for interval in part[0]])
    return ascending and rows == region[0] and all(part[1:] == region[1:] for part in parts)
