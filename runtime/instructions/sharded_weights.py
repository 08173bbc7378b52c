"""What the holders of a weight share of it: sums of gradients in shares, and gathers of weights from shares.

A bucket's gradients are packed rank by rank: first all cells' shares of the first holder, then those of the second, in
equal slices. One reduce-scatter gives each holder the sums of its own. A gather is the way back: every holder puts in
its shares and gets all of them. A weight that is kept in shares has memory of its own only from a gather until its
last reader is done; what autograd has kept of it lies in the same memory, which is then filled again.

Sources: ZeRO (arXiv:1910.02054); PyTorch FSDP (arXiv:2304.11277), section 4, for the memory that comes and goes under
tensors that stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graph.holdings import cells, share_elements, shares
from graph.intervals import Region, shape, volume
from graph.operators import OperatorGraph
from graph.plan import BucketEntry, Plan
from graph.strategy import Sharding
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState


@dataclass(frozen=True, slots=True)
class Part:
    """A region of a weight that this rank updates; a rank that shares nothing of a weight updates all that it holds.

    alone: no other rank takes part in it, so that its gradient is that of the rank's own tensor.
    """

    weight: str
    region: Region
    number: int
    alone: bool


def parts_of(plan: Plan, rank: int) -> dict[str, tuple[Part, ...]]:
    """Return, for each weight that a rank holds, what the rank updates of it."""
    found: dict[str, tuple[Part, ...]] = {}
    number = 0
    for weight in plan.graph.weights:
        if rank in plan.held[weight.name]:
            found[weight.name] = parts_of_weight(plan, weight.name, rank, number)
            number += len(found[weight.name])
    return found


def parts_of_weight(plan: Plan, weight: str, rank: int, first_number: int = 0) -> tuple[Part, ...]:
    """Return what a rank updates of a weight, numbered from `first_number` on."""
    held = plan.held.get(weight, {})
    if rank not in held:
        return ()
    own: list[tuple[Region, bool]] = []
    if sharing_on(plan, weight, rank) is Sharding.NONE:
        own.append((held[rank], True))
    else:
        for cell in cells(held):
            if rank in cell.devices:
                alone = len(cell.devices) == 1
                region = cell.region if alone else shares(cell)[cell.devices.index(rank)]
                if region is not None:
                    own.append((region, alone))
    return tuple(
        Part(weight, region, first_number + place, alone) for place, (region, alone) in enumerate(own)
    )


def joined_shape(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the shape of the one tensor that a rank has of a weight: its part's.

    Several parts stand in it one after the other, along the first of as many dims as the weight has.
    """
    if len(parts) == 1:
        return shape(parts[0].region)
    return (sum(volume(part.region) for part in parts), *(1,) * (len(parts[0].region) - 1))


def joined(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of a weight's parts as one."""
    if len(parts) == 1:
        return tensors[0]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(joined_shape(parts))


def taken_apart(parts: Sequence[Part], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the views of a weight's parts in a tensor as `joined` returns it."""
    if len(parts) == 1:
        return (tensor,)
    pieces = tensor.view(-1).split([volume(part.region) for part in parts])
    return tuple(piece.view(shape(part.region)) for part, piece in zip(parts, pieces, strict=True))


def is_copied(parts: Sequence[Part], place: Selection) -> bool:
    """Return whether a part of a weight that a rank has whole, at a place of it, is memory of its own."""
    return len(parts) > 1 or not place.is_view


def sharing_on(plan: Plan, weight: str, rank: int) -> Sharding:
    """Return what a rank shares of a weight: nothing where it is the only one that holds what it holds."""
    level = plan.sharding[weight]
    if level is Sharding.NONE:
        return level
    several = any(rank in cell.devices and len(cell.devices) > 1 for cell in cells(plan.held[weight]))
    return level if several else Sharding.NONE


@dataclass(frozen=True, slots=True)
class SharedCell:
    """A cell of a group: the weight's slot, where each holder's share is in it, and where the shares start in a slice.

    own: the rank's part, if it has a share. whole: the cell is all that the rank holds of the weight.
    even: where it is, and its holders have equal shares one after the other along a dim: that dim, else -1. All of them
        are then copied at once.
    """

    slot: int
    offset: int
    places: tuple[Selection | None, ...]
    own: int | None
    whole: bool
    even: int = -1


@dataclass(frozen=True, slots=True)
class Group:
    """Cells of one dtype with the same holders, whose shares travel together; `length`: elements of a slice."""

    number: int
    ranks: tuple[int, ...]
    cells: tuple[SharedCell, ...]
    length: int
    dtype: torch.dtype
    device: torch.device

    def shares_in(self, flat: torch.Tensor, cell: SharedCell) -> torch.Tensor:
        """Return the shares of an even cell in a flat tensor of all slices, [holders, ...]."""
        first = cell.places[0]
        if first is None:
            raise ValueError("shares of a cell: the first holder has none, must have one of an even cell")
        slices = flat.view(len(self.ranks), self.length)
        shares = slices.narrow(1, cell.offset, torch.Size(first.shape).numel())
        return shares.view(len(self.ranks), *first.shape)

    def shares_of(self, weight: torch.Tensor, cell: SharedCell) -> torch.Tensor:
        """Return the shares of an even cell in the weight, or in its gradient, [holders, ...]."""
        shares: torch.Tensor = weight.unflatten(cell.even, (len(self.ranks), -1))
        return shares.movedim(cell.even, 0)

    @property
    def slots(self) -> tuple[int, ...]:
        """The weights' slots."""
        return tuple(dict.fromkeys(cell.slot for cell in self.cells))

    def empty(self, slices: int) -> torch.Tensor:
        """Return a new flat tensor of so many slices."""
        return torch.empty(slices * self.length, dtype=self.dtype, device=self.device)


def groups_of(
    graph: OperatorGraph,
    ranks: tuple[int, ...],
    entries: Sequence[BucketEntry],
    slots: Mapping[str, int],
    held: Mapping[str, Region],
    parts: Mapping[str, tuple[Part, ...]],
    rank: int,
    device: torch.device,
    first_number: int,
) -> list[Group]:
    """Return the groups of some cells that `ranks` share, on one of them: one for each dtype.

    Args:
        graph: the graph, for the weights' dtypes.
        ranks: the holders of all cells.
        entries: the cells.
        slots: for each weight, the slot of what the rank holds.
        held: for each weight, the region that the rank holds.
        parts: what the rank updates.
        rank: the rank.
        device: where its tensors are.
        first_number: groups are numbered from here.
    """
    by_dtype: dict[str, list[BucketEntry]] = {}
    for entry in entries:
        by_dtype.setdefault(graph.value_by_name[entry.weight].spec.dtype, []).append(entry)
    result: list[Group] = []
    for dtype, members in by_dtype.items():
        found = []
        offset = 0
        for entry in members:
            within = held[entry.weight]
            regions = shares(entry.cell)
            own = regions[ranks.index(rank)]
            places = tuple(None if one is None else Selection(one, within, device) for one in regions)
            found.append(
                SharedCell(
                    slots[entry.weight],
                    offset,
                    places,
                    next((part.number for part in parts[entry.weight] if part.region == own), None),
                    entry.cell.region == within,
                    _even_dim(places, within) if entry.cell.region == within else -1,
                )
            )
            offset += share_elements(shape(entry.cell.region), len(ranks))[0]
        number = first_number + len(result)
        result.append(Group(number, ranks, tuple(found), offset, getattr(torch, dtype), device))
    return result


def _even_dim(places: Sequence[Selection | None], within: Region) -> int:
    """Return the dim along which equal shares of all of a weight follow each other; -1 where they do not."""
    first = places[0]
    if first is None or first.indexed or len(first.narrowed) != 1:
        return -1
    dim, _, length = first.narrowed[0]
    follow_each_other = all(
        one is not None and not one.indexed and one.narrowed == [(dim, place * length, length)]
        for place, one in enumerate(places)
    )
    return dim if follow_each_other and len(places) * length == shape(within)[dim] else -1


def _view(flat: torch.Tensor, start: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the elements of a flat tensor from `start` on as a tensor of some shape."""
    return flat.narrow(0, start, torch.Size(sizes).numel()).view(sizes)


@dataclass(frozen=True, slots=True)
class StartSharedSum:
    """Packs gradients and starts their sum in shares; waits for the sum `before`, so that two at most are under way."""

    group: Group
    before: Group | None

    @property
    def touches(self) -> tuple[int, ...]:
        """None: it looks at gradients."""
        return ()

    def run(self, state: StepState) -> None:
        """Pack what this rank has (zeros for the others), then start."""
        if self.before is not None:
            _finish(state, self.before)
        group = self.group
        flat, result = group.empty(len(group.ranks)), group.empty(1)
        for cell in group.cells:
            gradient = state.gradients.get(cell.slot)
            if cell.even >= 0:
                together = group.shares_in(flat, cell)
                if gradient is None:
                    together.zero_()
                else:
                    together.copy_(group.shares_of(gradient, cell))
                del together
            for place, selection in enumerate(cell.places if cell.even < 0 else ()):
                if selection is None:
                    continue
                target = _view(flat, place * group.length + cell.offset, selection.shape)
                if gradient is None:
                    target.zero_()
                else:
                    target.copy_(selection.take(gradient))
            own = cell.places[group.ranks.index(state.world.rank)]
            if cell.own is not None and own is not None:
                state.shares[cell.own] = _view(result, cell.offset, own.shape)
            del gradient
            if cell.whole:
                state.gradients.pop(cell.slot)
        work = state.world.sum_in_shares(result, flat, group.ranks)
        state.sharing[group.number] = (work, flat)


@dataclass(frozen=True, slots=True)
class FinishSharedSum:
    """Waits for a sum in shares."""

    group: Group

    @property
    def touches(self) -> tuple[int, ...]:
        """None: it looks at gradients."""
        return ()

    def run(self, state: StepState) -> None:
        """Wait."""
        _finish(state, self.group)


def _finish(state: StepState, group: Group) -> None:
    started = state.sharing.pop(group.number, None)
    if started is not None:
        work, flat = started
        state.world.wait(work)
        _drop(flat)


def _drop(tensor: torch.Tensor) -> None:
    """Free a tensor's memory now: a thread of the communication library may hold on to the tensor for a moment."""
    tensor.untyped_storage().resize_(0)


@dataclass(frozen=True, slots=True)
class StartGather:
    """Starts to gather weights from their holders' shares."""

    group: Group

    @property
    def touches(self) -> tuple[int, ...]:
        """None: weights stay in their slots."""
        return ()

    def run(self, state: StepState) -> None:
        """Pack this rank's shares, then start."""
        group = self.group
        flat = group.empty(len(group.ranks))
        first = group.ranks.index(state.world.rank) * group.length
        for cell in group.cells:
            if cell.own is not None:
                part = state.parts[cell.own].detach()
                _view(flat, first + cell.offset, tuple(part.shape)).copy_(part)
        work = state.world.gather_slices(flat, group.ranks)
        state.gathering[group.number] = (work, flat)


@dataclass(frozen=True, slots=True)
class FinishGather:
    """Waits for a gather and writes the shares into the weights."""

    group: Group

    @property
    def touches(self) -> tuple[int, ...]:
        """None: weights stay in their slots."""
        return ()

    def run(self, state: StepState) -> None:
        """Wait, then write."""
        group = self.group
        work, flat = state.gathering.pop(group.number)
        state.world.wait(work)
        for cell in group.cells:
            # Not the tensor itself: autograd would take its new memory for other values.
            weight = state.weights[cell.slot].data
            if cell.even >= 0:
                group.shares_of(weight, cell).copy_(group.shares_in(flat, cell))
                continue
            for place, selection in enumerate(cell.places):
                if selection is not None:
                    start = place * group.length + cell.offset
                    selection.put(weight, _view(flat, start, selection.shape))
        _drop(flat)


@dataclass(frozen=True, slots=True)
class Allocate:
    """Gives weights that are kept in shares the memory to be gathered in."""

    slots: tuple[int, ...]

    @property
    def touches(self) -> tuple[int, ...]:
        """None: weights stay in their slots."""
        return ()

    def run(self, state: StepState) -> None:
        """Allocate."""
        for slot in self.slots:
            weight = state.weights[slot]
            weight.untyped_storage().resize_(weight.numel() * weight.element_size())


@dataclass(frozen=True, slots=True)
class Fill:
    """Writes what this rank alone has of gathered weights, and makes the copies of parts that its tasks read.

    alone: slot, place in the weight, and part. copies: the slot of a reading, its weight's, its place, and whether a
    gradient flows back.
    """

    alone: tuple[tuple[int, Selection, int], ...]
    copies: tuple[tuple[int, int, Selection, bool], ...]

    @property
    def touches(self) -> tuple[int, ...]:
        """None: weights and readings stay in their slots."""
        return ()

    def run(self, state: StepState) -> None:
        """Write and copy."""
        for slot, selection, part in self.alone:
            selection.put(state.weights[slot].data, state.parts[part].detach())
        for reading, slot, selection, differentiable in self.copies:
            copied = selection.take(state.weights[slot].data)
            state.values[reading] = copied.detach().requires_grad_(differentiable)


@dataclass(frozen=True, slots=True)
class Free:
    """Takes the memory of gathered weights back, and drops copies of parts of them."""

    slots: tuple[int, ...]
    copies: tuple[int, ...] = ()

    @property
    def touches(self) -> tuple[int, ...]:
        """None: weights stay in their slots."""
        return ()

    def run(self, state: StepState) -> None:
        """Free."""
        for slot in self.slots:
            state.weights[slot].untyped_storage().resize_(0)
        for slot in self.copies:
            state.values[slot] = None


@dataclass(frozen=True, slots=True)
class PutBack:
    """Writes an updated part that is a copy back into its weight."""

    slot: int
    place: Selection
    part: int

    @property
    def touches(self) -> tuple[int, ...]:
        """None: weights stay in their slots."""
        return ()

    def run(self, state: StepState) -> None:
        """Write."""
        self.place.put(state.weights[self.slot].data, state.parts[self.part].detach())
