"""Weight prefetch: when a rank gathers (unshards) its sharded weights, and when it frees (reshards) them again.

The order is the plan's: an all-gather begins one operator before its first reader. In the forward a weight is freed
after its last reader; in the backward it is gathered again before the segment of that reader, and freed after that of
its first reader. An operator that reads a view of a weight is a reader of it. Of micro-batches each has all of that,
within the forward and the backward of one stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graph.buckets import BucketEntry, Gather, Gathers, gathers_begun
from graph.intervals import Region, shape
from graph.plan import Plan
from graph.strategy import Sharding
from graph.weight_placement import share_elements, shares
from runtime.instructions.base import Instruction
from runtime.instructions.gradient_synchronization import entries_by_dtype
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import (
    AllocateWeights,
    FillWeights,
    FinishAllGather,
    Reshard,
    ShardedCell,
    ShardGroup,
    StartAllGather,
    WeightPart,
    sharding_on,
)
from runtime.lowering.segments import Segments
from runtime.lowering.tensor_slots import TensorSlots


class WeightPrefetch:
    """The all-gathers of one rank.

    weights: its sharded weights by name, with their slots. parts: of each weight, those that the rank updates.
    """

    def __init__(
        self,
        plan: Plan,
        slots: TensorSlots,
        parts: Mapping[str, tuple[WeightPart, ...]],
        device: torch.device,
    ) -> None:
        """Find the sharded weights, and their first and last readers.

        Args:
            plan: to execute.
            slots: the rank's tensors.
            parts: of each weight, those that the rank updates.
            device: of the rank's tensors.
        """
        self._plan = plan
        self._slots = slots
        self.parts = parts
        self._device = device
        self._held = {name: plan.held[name][slots.rank] for name in slots.held}
        self._number = 0
        self._under_way: dict[tuple[bool, int], list[ShardGroup]] = {}
        self.weights = {
            name: slot
            for name, slot in slots.held.items()
            if sharding_on(plan, name, slots.rank) is Sharding.PARAMETERS
        }
        readers = {name: plan.graph.weight_readers[name] for name in self.weights}
        self._last_read: dict[int, list[str]] = {}
        # Of the readers that have a backward.
        self._first_active: dict[str, int] = {}
        for name, operators in readers.items():
            self._last_read.setdefault(max(operators), []).append(name)
            active = [index for index in operators if any(plan.active[index])]
            if active:
                self._first_active[name] = min(active)

    def groups(self, ranks: tuple[int, ...], entries: Sequence[BucketEntry]) -> list[ShardGroup]:
        """Return new groups of cells with the holders `ranks`: one for each dtype."""
        groups: list[ShardGroup] = []
        for dtype, of_dtype in entries_by_dtype(self._plan.graph, entries).items():
            cells: list[ShardedCell] = []
            length = 0
            for entry in of_dtype:
                cells.append(self._cell(entry, ranks.index(self._slots.rank), length))
                length += share_elements(shape(entry.cell.region), len(ranks))[0]
            groups.append(ShardGroup(self._number, ranks, tuple(cells), length, dtype, self._device))
            self._number += 1
        return groups

    def _cell(self, entry: BucketEntry, holder: int, offset: int) -> ShardedCell:
        """Return a cell whose shares begin at `offset` of a slice; this rank is its holder of that index."""
        within = self._held[entry.weight]
        regions = shares(entry.cell)
        selections = tuple(
            None if region is None else Selection(region, within, self._device) for region in regions
        )
        return ShardedCell(
            self._slots.held[entry.weight],
            offset,
            selections,
            next((part.number for part in self.parts[entry.weight] if part.region == regions[holder]), None),
            entry.cell.region == within,
            _even_dim(selections, within) if entry.cell.region == within else -1,
        )

    def before_forward(self, index: int) -> list[Instruction]:
        """Return the starts and ends of all-gathers before the forward of an operator."""
        return self._before(self._plan.forward_gathers, index, is_forward=True)

    def before_backward(self, index: int) -> list[Instruction]:
        """Return the starts and ends of all-gathers before the backward of an operator."""
        return self._before(self._plan.backward_gathers, index, is_forward=False)

    def after_forward(self, index: int) -> list[Instruction]:
        """Return the resharding of the weights that an operator is the last to read."""
        names = self._last_read.get(index, [])
        if not names:
            return []
        without_backward = [name for name in names if name not in self._first_active]
        return [Reshard(tuple(self.weights[name] for name in names), self._copies(without_backward))]

    def after_backward(self, index: int, segments: Segments) -> list[Instruction]:
        """Return the resharding of the weights that no later segment of the backward reads, where a segment ends."""
        if index and segments.number_of(index - 1) == segments.number_of(index):
            return []
        number = segments.number_of(index)
        names = [name for name, first in self._first_active.items() if segments.number_of(first) == number]
        return [Reshard(tuple(self.weights[name] for name in names), self._copies(names))] if names else []

    def _before(self, gathers: Gathers, index: int, *, is_forward: bool) -> list[Instruction]:
        result: list[Instruction] = []
        for operator, gather in gathers_begun(gathers, index, self._plan.stage_firsts):
            for group in self._groups_of(gather):
                self._under_way.setdefault((is_forward, operator), []).append(group)
                result.append(StartAllGather(group))
        under_way = self._under_way.pop((is_forward, index), [])
        if under_way:
            slots = tuple(dict.fromkeys(slot for group in under_way for slot in group.slots))
            result.append(AllocateWeights(slots))
            result.extend(FinishAllGather(group) for group in under_way)
            fill = self._fill(slots, is_forward=is_forward)
            result.extend([fill] if fill.alone or fill.copies else [])
        return result

    def _groups_of(self, gather: Gather) -> list[ShardGroup]:
        return self.groups(gather.devices, gather.entries) if self._slots.rank in gather.devices else []

    def _fill(self, slots: tuple[int, ...], *, is_forward: bool) -> FillWeights:
        names = [name for name, slot in self.weights.items() if slot in slots]
        alone = tuple(
            (self.weights[name], Selection(part.region, self._held[name], self._device), part.number)
            for name in names
            for part in self.parts[name]
            if part.alone
        )
        copies = []
        for read in self._slots.reads.values():
            if is_forward and read.value in names:
                selection = Selection(read.region, self._held[read.value], self._device)
                if not selection.is_view:
                    differentiable = self._plan.graph.value_by_name[read.value].requires_gradient
                    copies.append((read.slot, self.weights[read.value], selection, differentiable))
        return FillWeights(alone, tuple(copies))

    def _copies(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(
            read.slot
            for read in self._slots.reads.values()
            if read.value in names
            and not Selection(read.region, self._held[read.value], self._device).is_view
        )


def _even_dim(selections: Sequence[Selection | None], within: Region) -> int:
    """Return the dim along which equal shares make up a whole weight in their order; -1 where they do not."""
    first = selections[0]
    if first is None or first.indexed or len(first.narrowed) != 1:
        return -1
    dim, _, length = first.narrowed[0]
    consecutive = all(
        share is not None and not share.indexed and share.narrowed == [(dim, holder * length, length)]
        for holder, share in enumerate(selections)
    )
    return dim if consecutive and len(selections) * length == shape(within)[dim] else -1
