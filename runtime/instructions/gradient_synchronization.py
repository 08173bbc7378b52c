"""Gradient synchronization of replicated weights: all-reduces of buckets or slices of them, beside the backward.

The gradients of a bucket are copied into one flat tensor. The gradient of a weight held as one cell is a view of the
flat tensor from then on, so that the copied gradient is freed before the next bucket fills; others are copied back
after the sum. The loss is a global mean already, so sums are right.

A bucket that is summed in every micro-batch (`Plan.summed_each`) takes what gradients have come since its last sum. Its
first rank adds them to the sums so far, the others begin at zero, so that one more all-reduce makes the new sums on all
of them, without memory beside the flat tensor.

With the policy p3 (`graph.synchronization`) sums last into the next step's forward, in which each weight is updated
just before it is read first; of weights whose update is shared see `runtime.instructions.shared_slices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graph.buckets import Bucket, BucketEntry
from graph.intervals import Region, volume
from graph.operators import OperatorGraph
from runtime.instructions.base import Communication, Instruction
from runtime.instructions.selections import Selection
from runtime.instructions.state import PartRange, StepState


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """One cell of a weight in a flat bucket: the weight's slot, the part of the weight, and its view of the bucket."""

    slot: int
    part: Selection
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """One flat tensor of gradients, the ranks over which it is summed, and its slices.

    each: it is summed in every micro-batch, not only in the last.
    """

    number: int
    ranks: tuple[int, ...]
    flat: torch.Tensor
    slices: tuple[BucketSlice, ...]
    each: bool = False

    def wait(self, state: StepState) -> bool:
        """Wait for the bucket's all-reduces; return whether any were under way."""
        works = state.all_reduces.pop(self.number, None)
        for work in works or ():
            state.world.wait(work)
        return works is not None


@dataclass(frozen=True, slots=True)
class FillBucket(Communication):
    """Copies the gradients that this rank has into a bucket, zeros for the others; adds them to sums so far."""

    bucket: FlatBucket

    def run(self, state: StepState) -> None:
        if self.bucket.each:
            self._add(state)
            return
        views, gradients = [], []
        for piece in self.bucket.slices:
            gradient = state.gradients.get(piece.slot)
            if gradient is None:
                piece.view.zero_()
            elif gradient is not piece.view:
                views.append(piece.view)
                gradients.append(piece.part.take(gradient))
        if views:
            torch._foreach_copy_(views, gradients)
        for piece in self.bucket.slices:
            if piece.part.whole:
                state.gradients.set(piece.slot, piece.view)

    def _add(self, state: StepState) -> None:
        """Wait for the last sum of the step, if there was one, and take the gradients that have come since."""
        has_sums = self.bucket.wait(state) and state.world.rank == self.bucket.ranks[0]
        views, gradients = [], []
        for piece in self.bucket.slices:
            gradient = state.gradients.get(piece.slot)
            if gradient is not None:
                views.append(piece.view)
                gradients.append(piece.part.take(gradient))
            elif not has_sums:
                piece.view.zero_()
        if views:
            (torch._foreach_add_ if has_sums else torch._foreach_copy_)(views, gradients)
        del gradients
        for piece in self.bucket.slices:
            state.gradients.take_out(piece.slot, piece.part)


@dataclass(frozen=True, slots=True)
class StartAllReduce(Communication):
    """Starts the all-reduce of a slice of a full bucket: of its elements from `first` to before `last`.

    late: in the forward of the next step, where the step before has left it.
    """

    bucket: FlatBucket
    first: int
    last: int
    late: bool = False

    def run(self, state: StepState) -> None:
        if self.first < self.last and (state.work_left or not self.late):
            work = state.world.all_reduce(self.bucket.flat[self.first : self.last], self.bucket.ranks)
            state.all_reduces.setdefault(self.bucket.number, []).append(work)


@dataclass(frozen=True, slots=True)
class FinishAllReduce(Communication):
    """Waits for the all-reduces of a bucket, where any is under way, and copies sums to weights of several cells."""

    bucket: FlatBucket

    def run(self, state: StepState) -> None:
        if not self.bucket.wait(state):
            return
        for piece in self.bucket.slices:
            if piece.part.whole:
                if self.bucket.each:
                    state.gradients.set(piece.slot, piece.view)
            else:
                piece.part.put(state.gradients.writable(piece.slot, piece.view), piece.view)


@dataclass(frozen=True, slots=True)
class UpdateFirst(Instruction):
    """Updates weights of which the step before has left gradients, after the waits for the buckets that have them.

    weights: of which the rank has nothing more to update then. ranges: the parts that are updated here, those in no
    shared slice. copies: of parts of them that have memory of their own, back into the weights.
    """

    weights: tuple[str, ...]
    finishes: tuple[FinishAllReduce, ...]
    ranges: tuple[PartRange, ...]
    copies: tuple[Instruction, ...] = ()

    def run(self, state: StepState) -> None:
        if not state.work_left:
            return
        for finish in self.finishes:
            finish.run(state)
        if self.ranges:
            state.update(self.ranges)
        for copy in self.copies:
            copy.run(state)
        state.drop_gradients(self.weights)
        state.copy_reads(self.weights)


def entries_by_dtype(
    graph: OperatorGraph, entries: Sequence[BucketEntry]
) -> dict[torch.dtype, list[BucketEntry]]:
    """Return cells of weights by the dtype of the weight: a collective has one."""
    by_dtype: dict[torch.dtype, list[BucketEntry]] = {}
    for entry in entries:
        by_dtype.setdefault(getattr(torch, graph.value_by_name[entry.weight].spec.dtype), []).append(entry)
    return by_dtype


def flat_buckets(
    graph: OperatorGraph,
    bucket: Bucket,
    slots: Mapping[str, int],
    held: Mapping[str, Region],
    device: torch.device,
    first_number: int,
    *,
    each: bool = False,
) -> list[FlatBucket]:
    """Return the flat buckets of one bucket of the plan on a rank of its devices: one for each dtype.

    Args:
        graph: for the dtypes of the weights.
        bucket: cells with the same holders.
        slots: for each weight, the slot of the rank's held region.
        held: for each weight, the region that the rank holds.
        device: of the rank's tensors.
        first_number: of the buckets, which are numbered from here.
        each: the bucket is summed in every micro-batch.
    """
    result: list[FlatBucket] = []
    for dtype, entries in entries_by_dtype(graph, bucket.entries).items():
        sizes = [volume(entry.cell.region) for entry in entries]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        slices = []
        for entry, view in zip(entries, flat.split(sizes), strict=True):
            part = Selection(entry.cell.region, held[entry.weight], device)
            slices.append(BucketSlice(slots[entry.weight], part, view.view(part.shape)))
        result.append(FlatBucket(first_number + len(result), bucket.devices, flat, tuple(slices), each))
    return result
