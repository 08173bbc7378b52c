"""Weights sharded over their holders: reduce-scatters of gradients, all-gathers of weights (unshard), and resharding.

Each holder of a cell owns one part of it, its share. The gradients of a bucket are packed rank by rank: first all
cells' shares of the first holder, then those of the second, in slices of equal length. One reduce-scatter gives each
holder the sums of its own slice. An all-gather is the way back. A weight with sharded parameters has memory only from
its all-gather until its last reader is done; what autograd has saved of it lies in the same memory, which is filled
again.

Sources: ZeRO (arXiv:1910.02054); PyTorch FSDP (arXiv:2304.11277), section 4, for storages that are resized under
tensors that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graph.intervals import Region, shape, volume
from graph.plan import Plan
from graph.strategy import Sharding
from graph.weight_placement import cells, shares
from runtime.instructions.base import Communication, Instruction
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A region of a weight that this rank updates: its shares, or all that it holds of a weight that is not sharded.

    alone: no other rank holds the region, so that its gradient is that of the rank's own tensor.
    """

    weight: str
    region: Region
    number: int
    alone: bool


def parts_of(plan: Plan, rank: int) -> dict[str, tuple[WeightPart, ...]]:
    """Return the parts of each weight that a rank updates."""
    parts: dict[str, tuple[WeightPart, ...]] = {}
    number = 0
    for weight in plan.graph.weights:
        if rank in plan.held[weight.name]:
            parts[weight.name] = parts_of_weight(plan, weight.name, rank, number)
            number += len(parts[weight.name])
    return parts


def parts_of_weight(plan: Plan, weight: str, rank: int, first_number: int = 0) -> tuple[WeightPart, ...]:
    """Return the parts of a weight that a rank updates, numbered from `first_number` on."""
    held = plan.held.get(weight, {})
    if rank not in held:
        return ()
    regions: list[tuple[Region, bool]] = []
    if sharding_on(plan, weight, rank) is Sharding.NONE:
        regions.append((held[rank], True))
    else:
        for cell in cells(held):
            if rank in cell.devices:
                alone = len(cell.devices) == 1
                region = cell.region if alone else shares(cell)[cell.devices.index(rank)]
                if region is not None:
                    regions.append((region, alone))
    return tuple(
        WeightPart(weight, region, number, alone)
        for number, (region, alone) in enumerate(regions, first_number)
    )


def joined_shape(parts: Sequence[WeightPart]) -> tuple[int, ...]:
    """Return the shape of the one tensor that a rank has of a weight: its part's.

    Several parts stand in it one after the other, along the first of as many dims as the weight has.
    """
    if len(parts) == 1:
        return shape(parts[0].region)
    return (sum(volume(part.region) for part in parts), *(1,) * (len(parts[0].region) - 1))


def joined(parts: Sequence[WeightPart], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of a weight's parts as one."""
    if len(parts) == 1:
        return tensors[0]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(joined_shape(parts))


def split_joined(parts: Sequence[WeightPart], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the views of a weight's parts in a tensor as `joined` returns it."""
    if len(parts) == 1:
        return (tensor,)
    pieces = tensor.view(-1).split([volume(part.region) for part in parts])
    return tuple(piece.view(shape(part.region)) for part, piece in zip(parts, pieces, strict=True))


def is_copied(parts: Sequence[WeightPart], selection: Selection) -> bool:
    """Return whether the parts of a weight have memory of their own beside the whole weight."""
    return len(parts) > 1 or not selection.is_view


def sharding_on(plan: Plan, weight: str, rank: int) -> Sharding:
    """Return the sharding of a weight on a rank: none where no other rank holds any of the rank's region."""
    level = plan.sharding[weight]
    if level is Sharding.NONE:
        return level
    several = any(rank in cell.devices and len(cell.devices) > 1 for cell in cells(plan.held[weight]))
    return level if several else Sharding.NONE


@dataclass(frozen=True, slots=True)
class ShardedCell:
    """A cell of a group: the weight's slot, each holder's share of the weight, and the offset of a share in a slice.

    own: the number of the rank's part, if it has a share. whole: the cell is all that the rank holds of the weight.
    even: the dim along which the holders' equal shares make up a whole cell, so that all of them are copied at once;
        else -1.
    """

    slot: int
    offset: int
    shares: tuple[Selection | None, ...]
    own: int | None
    whole: bool
    even: int = -1


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Cells of one dtype with the same holders, for one collective.

    length: elements of a holder's slice. sums_each: gradients are summed in every micro-batch, not only in the last.
    """

    number: int
    ranks: tuple[int, ...]
    cells: tuple[ShardedCell, ...]
    length: int
    dtype: torch.dtype
    device: torch.device
    sums_each: bool = False

    def shares_in(self, flat: torch.Tensor, cell: ShardedCell) -> torch.Tensor:
        """Return the shares of an even cell in a flat tensor of all slices, [holders, ...]."""
        first = cell.shares[0]
        if first is None:
            raise ValueError("shares of a cell: the first holder has none, must have one of an even cell")
        slices = flat.view(len(self.ranks), self.length)
        shares = slices.narrow(1, cell.offset, torch.Size(first.shape).numel())
        return shares.view(len(self.ranks), *first.shape)

    def shares_of(self, weight: torch.Tensor, cell: ShardedCell) -> torch.Tensor:
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

    def own_in(self, flat: torch.Tensor, cell: ShardedCell, own: Selection, rank: int) -> torch.Tensor:
        """Return a rank's `own` share of a cell in a flat tensor of all slices."""
        return _view(flat, self.ranks.index(rank) * self.length + cell.offset, own.shape)


def _view(flat: torch.Tensor, start: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the elements of a flat tensor from `start` on as a tensor of some shape."""
    return flat.narrow(0, start, torch.Size(sizes).numel()).view(sizes)


def free(tensor: torch.Tensor) -> None:
    """Free a tensor's memory now: a thread of the communication library may keep the tensor alive for a moment."""
    tensor.untyped_storage().resize_(0)


def _finish_reduce_scatter(number: int, state: StepState) -> None:
    """Wait for the reduce-scatter of a group, unless it has been waited for."""
    started = state.reduce_scatters.pop(number, None)
    if started is not None:
        work, flat = started
        state.world.wait(work)
        free(flat)


class DenseCopies:
    """Copies between tensors of one dtype; one kernel does those between contiguous tensors of a GPU."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one tensor to another of its shape, at the latest in `run`."""
        if target.is_contiguous() and source.is_contiguous():
            self._targets.append(target)
            self._sources.append(source)
        else:
            target.copy_(source)

    def add_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy [rows, ...] to [rows, ...], at the latest in `run`."""
        # On a CPU each row would be a copy of its own.
        if target.device.type == "cuda" and target[0].is_contiguous() and source[0].is_contiguous():
            self._targets += target.unbind()
            self._sources += source.unbind()
        else:
            target.copy_(source)

    def run(self) -> None:
        """Do all copies that were not done at once."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        self._targets, self._sources = [], []


def pack_gradients(group: ShardGroup, state: StepState) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a group that this rank has, zeros for the others, slice by slice, and its own sums' room.

    The gradients of the rank's parts are views of that room from now on. Where gradients are summed in every
    micro-batch, the rank adds its share of the sums so far to its own slice.
    """
    flat, result, copies = group.empty(len(group.ranks)), group.empty(1), DenseCopies()
    for cell in group.cells:
        gradient = state.gradients.get(cell.slot)
        if cell.even >= 0:
            together = group.shares_in(flat, cell)
            if gradient is None:
                together.zero_()
            else:
                copies.add_rows(together, group.shares_of(gradient, cell))
            del together
        for holder, selection in enumerate(cell.shares if cell.even < 0 else ()):
            if selection is None:
                continue
            target = _view(flat, holder * group.length + cell.offset, selection.shape)
            if gradient is None:
                target.zero_()
            elif selection.is_view:
                copies.add(target, selection.take(gradient))
            else:
                target.copy_(selection.take(gradient))
        del gradient
    copies.run()
    for cell in group.cells:
        own = cell.shares[group.ranks.index(state.world.rank)]
        if cell.own is not None and own is not None:
            sums = state.shard_gradients.get(cell.own) if group.sums_each else None
            if sums is not None:
                group.own_in(flat, cell, own, state.world.rank).add_(sums)
            state.shard_gradients[cell.own] = _view(result, cell.offset, own.shape)
        if cell.whole:
            state.gradients.pop(cell.slot)
        elif group.sums_each:
            for selection in cell.shares:
                if selection is not None:
                    state.gradients.take_out(cell.slot, selection)
    return flat, result


def write_shares(group: ShardGroup, flat: torch.Tensor, state: StepState) -> None:
    """Copy gathered shares, slice by slice, into the weights."""
    copies = DenseCopies()
    for cell in group.cells:
        # Not the tensor itself: autograd would take its new memory for other values.
        weight = state.weights[cell.slot].data
        if cell.even >= 0:
            copies.add_rows(group.shares_of(weight, cell), group.shares_in(flat, cell))
            continue
        for holder, selection in enumerate(cell.shares):
            if selection is not None:
                start = holder * group.length + cell.offset
                part = _view(flat, start, selection.shape)
                if selection.is_view:
                    copies.add(selection.take(weight), part)
                else:
                    selection.put(weight, part)
    copies.run()


@dataclass(frozen=True, slots=True)
class StartReduceScatter(Communication):
    """Packs the gradients that this rank has, zeros for the others, and starts their reduce-scatter.

    It waits for the one before first, so that one at most is under way. Where gradients are summed in every
    micro-batch, it takes those that have come since the last sum.
    """

    group: ShardGroup

    def run(self, state: StepState) -> None:
        for number in tuple(state.reduce_scatters):
            _finish_reduce_scatter(number, state)
        group = self.group
        flat, result = pack_gradients(group, state)
        work = state.world.reduce_scatter_in_place(result, flat, group.ranks)
        state.reduce_scatters[group.number] = (work, flat)


@dataclass(frozen=True, slots=True)
class FinishReduceScatter(Communication):
    """Waits for a reduce-scatter."""

    group: ShardGroup

    def run(self, state: StepState) -> None:
        _finish_reduce_scatter(self.group.number, state)


@dataclass(frozen=True, slots=True)
class StartAllGather(Communication):
    """Packs this rank's shares of weights and starts their all-gather (unshard)."""

    group: ShardGroup

    def run(self, state: StepState) -> None:
        group = self.group
        flat, copies = group.empty(len(group.ranks)), DenseCopies()
        first = group.ranks.index(state.world.rank) * group.length
        for cell in group.cells:
            if cell.own is not None:
                part = state.parts[cell.own].detach()
                copies.add(_view(flat, first + cell.offset, tuple(part.shape)), part)
        copies.run()
        work = state.world.all_gather_in_place(flat, group.ranks)
        state.all_gathers[group.number] = (work, flat)


@dataclass(frozen=True, slots=True)
class FinishAllGather(Communication):
    """Waits for an all-gather and copies the shares into the weights."""

    group: ShardGroup

    def run(self, state: StepState) -> None:
        group = self.group
        work, flat = state.all_gathers.pop(group.number)
        state.world.wait(work)
        write_shares(group, flat, state)
        free(flat)


@dataclass(frozen=True, slots=True)
class BeginGathers(Communication):
    """Notes the all-gathers that are due after an update, and starts the first ones: the forward does the others."""

    groups: tuple[ShardGroup, ...]
    first: tuple[ShardGroup, ...]

    def run(self, state: StepState) -> None:
        state.gathers_due.update(group.number for group in self.groups)
        for group in self.first:
            _start_due(group, state)


@dataclass(frozen=True, slots=True)
class AwaitGathers(Communication):
    """Waits for all-gathers of updated weights before an operator reads these, and starts those that follow.

    In a first step, and where all weights are whole already, it does nothing.

    gathers: for each that is awaited, this rank's groups of it, and its groups of the one that starts then.
    weights: the names of the weights that are whole then.
    """

    gathers: tuple[tuple[tuple[ShardGroup, ...], tuple[ShardGroup, ...]], ...]
    weights: tuple[str, ...]

    def run(self, state: StepState) -> None:
        for awaited, following in self.gathers:
            for group in awaited:
                if group.number in state.all_gathers:
                    FinishAllGather(group).run(state)
            for group in following:
                _start_due(group, state)
        state.copy_reads(self.weights)


def _start_due(group: ShardGroup, state: StepState) -> None:
    if group.number in state.gathers_due:
        state.gathers_due.remove(group.number)
        StartAllGather(group).run(state)


@dataclass(frozen=True, slots=True)
class AllocateWeights(Instruction):
    """Allocates the memory of sharded weights before their all-gather is finished."""

    slots: tuple[int, ...]

    def run(self, state: StepState) -> None:
        for slot in self.slots:
            weight = state.weights[slot]
            weight.untyped_storage().resize_(weight.numel() * weight.element_size())


@dataclass(frozen=True, slots=True)
class FillWeights(Instruction):
    """Copies the parts that this rank alone holds into gathered weights, and makes the copies that its tasks read.

    alone: slot, part of the weight, and number of the part. copies: slot of the read, slot of the weight, part of the
    weight, and whether a gradient flows back.
    """

    alone: tuple[tuple[int, Selection, int], ...]
    copies: tuple[tuple[int, int, Selection, bool], ...]

    def run(self, state: StepState) -> None:
        for slot, selection, part in self.alone:
            selection.put(state.weights[slot].data, state.parts[part].detach())
        for read, slot, selection, differentiable in self.copies:
            copied = selection.take(state.weights[slot].data)
            state.values[read] = copied.detach().requires_grad_(differentiable)


@dataclass(frozen=True, slots=True)
class Reshard(Instruction):
    """Frees the memory of gathered weights, and drops copies of parts of them."""

    slots: tuple[int, ...]
    copies: tuple[int, ...] = ()

    def run(self, state: StepState) -> None:
        for slot in self.slots:
            state.weights[slot].untyped_storage().resize_(0)
        for slot in self.copies:
            state.values[slot] = None


@dataclass(frozen=True, slots=True)
class CopyBack(Instruction):
    """Copies an updated part that has memory of its own back into its weight."""

    slot: int
    selection: Selection
    part: int

    def run(self, state: StepState) -> None:
        self.selection.put(state.weights[self.slot].data, state.parts[self.part].detach())
