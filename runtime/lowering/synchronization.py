"""Gradient synchronization of one rank: all-reduces and reduce-scatters of buckets, and the all-gathers of what others
have updated.

The order is the plan's (`graph.pulls.slice_starts`): an all-reduce starts as soon as its bucket is full and
those before it in the order are full too. What a plan leaves to the next step's forward (late updates, late gathers)
is waited for there, before the first operator that reads the weight, where steps follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

import torch

from graph.intervals import Region
from graph.plan import Plan
from graph.pulls import SliceStart
from graph.strategy import Sharding
from graph.synchronization import slice_bound, slice_bounds
from runtime.instructions.base import Instruction
from runtime.instructions.gradient_synchronization import (
    FillBucket,
    FinishAllReduce,
    FlatBucket,
    StartAllReduce,
    UpdateFirst,
    flat_buckets,
)
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import (
    AwaitGathers,
    BeginGathers,
    CopyBack,
    FinishAllGather,
    FinishReduceScatter,
    ShardGroup,
    StartAllGather,
    StartReduceScatter,
    WeightPart,
    is_copied,
)
from runtime.instructions.shared_slices import (
    AwaitPulls,
    GroupSlice,
    OwnRange,
    PackGradients,
    PullSlice,
    StartPush,
)
from runtime.instructions.state import PartRange
from runtime.lowering.tensor_slots import TensorSlots
from runtime.lowering.weight_prefetch import WeightPrefetch


class SynchronizationLowering:
    """The buckets of one rank, and the instructions that synchronize them.

    held: the region of each of the rank's weights. parts: of each weight, those that the rank updates.
    """

    def __init__(
        self,
        plan: Plan,
        slots: TensorSlots,
        prefetch: WeightPrefetch,
        device: torch.device,
        *,
        in_succession: bool,
    ) -> None:
        """Allocate the flat buckets of the rank.

        Args:
            plan: to execute.
            slots: the rank's tensors.
            prefetch: makes the groups of shares.
            device: of the rank's tensors.
            in_succession: what the plan leaves to the next step's forward is left to it.
        """
        self._plan = plan
        self._slots = slots
        self._prefetch = prefetch
        self._device = device
        self._updates_late = in_succession and plan.updates_late
        self._gathers_late = in_succession and plan.gathers_late
        # Else there are no pulls, and all sums start as soon as they can.
        self._starts = plan.starts if in_succession else replace(plan, pulls=()).starts
        self.held: Mapping[str, Region] = {name: plan.held[name][slots.rank] for name in slots.held}
        self.parts: dict[str, tuple[WeightPart, ...]] = dict(prefetch.parts)
        # By number of the bucket.
        self._flats: dict[int, list[FlatBucket]] = {}
        self._updated_groups: dict[int, list[ShardGroup]] = {}
        # Of late updates, by number of the bucket and of the slice: one of each group.
        self._shared_slices: dict[tuple[int, int], list[GroupSlice]] = {}
        first = 0
        for number, bucket in enumerate(plan.buckets):
            if slots.rank in bucket.devices and bucket.sharding is Sharding.NONE:
                each = plan.summed_each[number]
                made = flat_buckets(plan.graph, bucket, slots.held, self.held, device, first, each=each)
                self._flats[number] = made
                first += len(made)
        for number in plan.gather_order:
            bucket = plan.buckets[number]
            if slots.rank in bucket.devices:
                self._updated_groups[number] = prefetch.groups(bucket.devices, bucket.entries)
                if self._updates_late:
                    self._cut(number)

    def _cut(self, number: int) -> None:
        """Cut the groups of a bucket whose update is shared into slices."""
        parts = self._plan.slice_counts[number]
        for group in self._updated_groups[number]:
            for part, (first, last) in enumerate(slice_bounds(group.length, parts)):
                # A group of a second dtype may have fewer elements than its bucket has slices.
                if first < last:
                    own = tuple(self._own_ranges(group, first, last))
                    made = GroupSlice(group, part, parts, first, last, own)
                    self._shared_slices.setdefault((number, part), []).append(made)

    def _own_ranges(self, group: ShardGroup, first: int, last: int) -> Iterator[OwnRange]:
        """Yield the rank's parts that are in a slice of a group, each with where it begins in the slice."""
        for cell in group.cells:
            share = cell.shares[group.ranks.index(self._slots.rank)]
            if cell.own is not None and share is not None:
                begin = max(first, cell.offset)
                end = min(last, cell.offset + prod(share.shape))
                if begin < end:
                    elements = PartRange(cell.own, (begin - cell.offset, end - cell.offset))
                    yield OwnRange(elements, begin - first)

    def gradient_homes(self) -> dict[int, torch.Tensor]:
        """Return, of several micro-batches, where in its bucket the gradient of each weight that is one cell stands."""
        if self._plan.strategy.micro_batches.count == 1:
            return {}
        # Gradients that are summed in every micro-batch are copied there.
        flats = [flat for of_bucket in self._flats.values() for flat in of_bucket if not flat.each]
        return {piece.slot: piece.view for flat in flats for piece in flat.slices if piece.part.whole}

    def after_backward(self, index: int) -> tuple[list[Instruction], list[Instruction]]:
        """Return what the synchronization does after an operator's backward, and the waits at the end of the step."""
        instructions: list[Instruction] = []
        finishing: list[Instruction] = []
        for number in self._plan.buckets_after.get(index, ()):
            bucket = self._plan.buckets[number]
            if bucket.sharding is not Sharding.NONE and self._slots.rank in bucket.devices:
                groups = self._updated_groups.get(number)
                if groups is not None and self._updates_late:
                    instructions.extend(map(PackGradients, groups))
                    groups = []
                elif groups is None:
                    groups = self._prefetch.groups(bucket.devices, bucket.entries)
                for group in groups:
                    each = self._plan.summed_each[number]
                    instructions.append(StartReduceScatter(replace(group, sums_each=each)))
                    finishing.append(FinishReduceScatter(group))
            instructions.extend(FillBucket(flat) for flat in self._flats.get(number, ()))
            for start in self._starts[number]:
                instructions.extend(self._started(start))
            if not self._updates_late:
                finishing.extend(FinishAllReduce(flat) for flat in self._flats.get(number, ()))
        return instructions, finishing

    def _started(self, start: SliceStart, *, late: bool = False) -> Iterator[Instruction]:
        """Yield the sums of one slice of a bucket, all-reduces or reduce-scatters, or its pulls: one for each dtype."""
        pieces = self._shared_slices.get((start.bucket, start.part), ())
        if start.is_pull:
            yield from (PullSlice(piece, late) for piece in pieces)
            return
        for flat in self._flats.get(start.bucket, ()):
            count = self._plan.slice_counts[start.bucket]
            yield StartAllReduce(flat, *slice_bound(flat.flat.numel(), count, start.part), late)
        for piece in pieces:
            yield StartPush(piece, start.part == piece.parts - 1, late)

    def late(self) -> dict[int, tuple[Instruction, ...]]:
        """Return, for each operator, what the step before leaves to be done before its forward."""
        result: dict[int, list[Instruction]] = {}
        for made in (self._late_starts(), self._late_updates(), self._late_pulls(), self._late_gathers()):
            for index, instruction in made:
                result.setdefault(index, []).append(instruction)
        return {index: tuple(instructions) for index, instructions in result.items()}

    def _late_starts(self) -> Iterator[tuple[int, Instruction]]:
        """Yield the rank's pulls, and the sums that go behind them, each with the operator before which it stands."""
        for index in self._plan.graph.order.of_loss if self._updates_late else ():
            for start in self._plan.starts_before(index):
                for instruction in self._started(start, late=True):
                    yield index, instruction

    def _late_pulls(self) -> Iterator[tuple[int, AwaitPulls]]:
        """Yield, for each operator, the wait for the slices of the rank's weights that it is the first to read."""
        for index, numbers in self._plan.pulls_awaited.items() if self._updates_late else ():
            slices: dict[int, list[GroupSlice]] = {}
            names: dict[str, None] = {}
            for number in numbers:
                for part in range(self._plan.slice_counts[number]):
                    for piece in self._shared_slices.get((number, part), ()):
                        slices.setdefault(piece.group.number, []).append(piece)
                if number in self._updated_groups:
                    names.update(dict.fromkeys(entry.weight for entry in self._plan.buckets[number].entries))
            if slices:
                yield index, AwaitPulls(tuple(map(tuple, slices.values())), tuple(names))

    def _late_updates(self) -> Iterator[tuple[int, UpdateFirst]]:
        """Yield, for each operator, the update of the rank's weights that it is the first to read."""
        if not self._updates_late:
            return
        flats_of: dict[int, list[FlatBucket]] = {}
        for flat in (flat for flats in self._flats.values() for flat in flats):
            for slot in dict.fromkeys(piece.slot for piece in flat.slices):
                flats_of.setdefault(slot, []).append(flat)
        for index, names in self._plan.updated_before.items():
            own = tuple(name for name in names if name in self._slots.held)
            flats = dict.fromkeys(flat for name in own for flat in flats_of.get(self._slots.held[name], ()))
            if own:
                alone = [part for name in own for part in self.parts[name] if part.alone]
                ranges = tuple(PartRange(part.number) for part in alone)
                finishes = tuple(FinishAllReduce(flat) for flat in flats)
                yield index, UpdateFirst(own, finishes, ranges, tuple(self._copies_back(own)))

    def _copies_back(self, names: Iterable[str]) -> Iterator[CopyBack]:
        """Yield the copies, into weights whose update is shared, of updated parts that have memory of their own."""
        for name in names:
            own = self.parts[name]
            for part in own if self._plan.sharding[name] is Sharding.OPTIMIZER else ():
                selection = Selection(part.region, self.held[name], self._device)
                if part.alone and is_copied(own, selection):
                    yield CopyBack(self._slots.held[name], selection, part.number)

    def _late_gathers(self) -> Iterator[tuple[int, AwaitGathers]]:
        """Yield, for each operator, the wait for the rank's weights that are gathered before it."""
        for index, awaited in self._plan.gathers_awaited.items() if self._gathers_late else ():
            gathers, names = [], {}
            for number in awaited:
                following = self._plan.gather_after(number)
                own = tuple(self._updated_groups.get(number, ()))
                started = () if following is None else tuple(self._updated_groups.get(following, ()))
                if own or started:
                    gathers.append((own, started))
                if own:
                    names.update(dict.fromkeys(entry.weight for entry in self._plan.buckets[number].entries))
            if gathers:
                yield index, AwaitGathers(tuple(gathers), tuple(names))

    def after_update(self) -> tuple[Instruction, ...]:
        """Return the copies of own parts into their weights, and the all-gathers of shares, the next one under way."""
        if self._updates_late:
            return ()
        result: list[Instruction] = [*self._copies_back(self.parts)]
        groups = [group for of in self._updated_groups.values() for group in of]
        if self._gathers_late:
            first = [g for number in self._plan.first_gathers for g in self._updated_groups.get(number, ())]
            return (*result, BeginGathers(tuple(groups), tuple(first))) if groups else tuple(result)
        starts = [StartAllGather(group) for group in groups]
        ends = [FinishAllGather(group) for group in groups]
        result.extend(starts[:1])
        for number, end in enumerate(ends):
            result.extend(starts[number + 1 : number + 2])
            result.append(end)
        return tuple(result)
