"""Gradient synchronization of one rank: all-reduces and reduce-scatters of buckets, and the all-gathers of what others
have updated.

The order is the plan's (`graph.synchronization.started_after`): an all-reduce starts as soon as its bucket is full and
those before it in the order are full too. What a plan leaves to the next step's forward (late updates, late gathers)
is waited for there, before the first operator that reads the weight, where steps follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from graph.intervals import Region
from graph.plan import Plan
from graph.strategy import Sharding
from graph.synchronization import slice_bounds
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
        self.held: Mapping[str, Region] = {name: plan.held[name][slots.rank] for name in slots.held}
        self.parts: dict[str, tuple[WeightPart, ...]] = dict(prefetch.parts)
        # By number of the bucket.
        self._flats: dict[int, list[FlatBucket]] = {}
        self._updated_groups: dict[int, list[ShardGroup]] = {}
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
                for group in self._updated_groups.get(number) or self._prefetch.groups(
                    bucket.devices, bucket.entries
                ):
                    each = self._plan.summed_each[number]
                    instructions.append(StartReduceScatter(replace(group, sums_each=each)))
                    finishing.append(FinishReduceScatter(group))
            instructions.extend(FillBucket(flat) for flat in self._flats.get(number, ()))
            for started, part in self._plan.sums_after[number]:
                instructions.extend(self._sums(started, part))
            if not self._updates_late:
                finishing.extend(FinishAllReduce(flat) for flat in self._flats.get(number, ()))
        return instructions, finishing

    def _sums(self, number: int, part: int) -> Iterator[StartAllReduce]:
        """Yield the all-reduces of one slice of a bucket: one for each dtype."""
        for flat in self._flats.get(number, ()):
            first, last = slice_bounds(flat.flat.numel(), self._plan.slice_counts[number])[part]
            yield StartAllReduce(flat, first, last)

    def late_updates(self) -> dict[int, UpdateFirst]:
        """Return, for each operator, the update of the rank's weights that it is the first to read."""
        if not self._updates_late:
            return {}
        flats_of: dict[int, list[FlatBucket]] = {}
        for flat in (flat for flats in self._flats.values() for flat in flats):
            for slot in dict.fromkeys(piece.slot for piece in flat.slices):
                flats_of.setdefault(slot, []).append(flat)
        result = {}
        for index, names in self._plan.updated_before.items():
            own = tuple(name for name in names if name in self._slots.held)
            flats = dict.fromkeys(flat for name in own for flat in flats_of.get(self._slots.held[name], ()))
            if own:
                result[index] = UpdateFirst(own, tuple(FinishAllReduce(flat) for flat in flats))
        return result

    def late_gathers(self) -> dict[int, AwaitGathers]:
        """Return, for each operator, the wait for the rank's weights that are gathered before it."""
        if not self._gathers_late:
            return {}
        result = {}
        for index, awaited in self._plan.gathers_awaited.items():
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
                result[index] = AwaitGathers(tuple(gathers), tuple(names))
        return result

    def after_update(self) -> tuple[Instruction, ...]:
        """Return the copies of own parts into their weights, and the all-gathers of shares, the next one under way."""
        result: list[Instruction] = []
        for name, own in self.parts.items():
            if self._plan.sharding[name] is Sharding.OPTIMIZER:
                for part in own:
                    selection = Selection(part.region, self.held[name], self._device)
                    if part.alone and is_copied(own, selection):
                        result.append(CopyBack(self._slots.held[name], selection, part.number))
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
