"""Sums of weight gradients over the devices that hold them: one all-reduce a bucket, overlapped with backward.

The gradients of a bucket are copied into one flat tensor. The gradient of a weight held as one cell is its slice of the
flat tensor from then on, so that what was copied is gone before the next bucket fills; others are copied back after the
sum. The loss is a global mean already, so sums are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graph.intervals import Region, volume
from graph.operators import OperatorGraph
from graph.plan import Bucket
from runtime.instructions.selections import Selection
from runtime.instructions.state import StepState


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a flat tensor: the weight's slot, which part of it, and its slice of the flat tensor."""

    slot: int
    place: Selection
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class Reduction:
    """One flat tensor, the ranks over which it is summed, and its cells."""

    number: int
    ranks: tuple[int, ...]
    flat: torch.Tensor
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class StartReduction:
    """Fills a flat tensor and starts its all-reduce."""

    reduction: Reduction

    @property
    def touches(self) -> tuple[int, ...]:
        """None: it looks at gradients."""
        return ()

    def run(self, state: StepState) -> None:
        """Copy the gradients that this rank has (zeros for the others), then start."""
        views, gradients = [], []
        for cell in self.reduction.cells:
            gradient = state.gradients.get(cell.slot)
            if gradient is None:
                cell.view.zero_()
            else:
                views.append(cell.view)
                gradients.append(cell.place.take(gradient))
        if views:
            torch._foreach_copy_(views, gradients)
        for cell in self.reduction.cells:
            if cell.place.whole:
                state.gradients.set(cell.slot, cell.view)
        work = state.world.all_reduce(self.reduction.flat, self.reduction.ranks)
        state.reducing[self.reduction.number] = work


@dataclass(frozen=True, slots=True)
class FinishReduction:
    """Waits for an all-reduce and gives each weight its sum."""

    reduction: Reduction

    @property
    def touches(self) -> tuple[int, ...]:
        """None: it looks at gradients."""
        return ()

    def run(self, state: StepState) -> None:
        """Wait, then hand out the sums."""
        state.world.wait(state.reducing.pop(self.reduction.number))
        for cell in self.reduction.cells:
            if not cell.place.whole:
                cell.place.put(state.gradients.writable(cell.slot, cell.view), cell.view)


def reductions(
    graph: OperatorGraph,
    bucket: Bucket,
    slots: Mapping[str, int],
    held: Mapping[str, Region],
    device: torch.device,
    first_number: int,
) -> list[Reduction]:
    """Return the reductions of one bucket on a rank that takes part in it: one for each dtype.

    Args:
        graph: the graph, for the weights' dtypes.
        bucket: cells with the same holders.
        slots: for each weight, the slot of the rank's held region.
        held: for each weight, the region that the rank holds.
        device: where the rank's tensors are.
        first_number: reductions are numbered from here.
    """
    by_dtype: dict[str, list[tuple[int, Selection]]] = {}
    for entry in bucket.entries:
        dtype = graph.value_by_name[entry.weight].spec.dtype
        place = Selection(entry.cell.region, held[entry.weight], device)
        by_dtype.setdefault(dtype, []).append((slots[entry.weight], place))
    result: list[Reduction] = []
    sizes = {
        dtype: sum(
            volume(entry.cell.region)
            for entry in bucket.entries
            if graph.value_by_name[entry.weight].spec.dtype == dtype
        )
        for dtype in by_dtype
    }
    for dtype, members in by_dtype.items():
        flat = torch.zeros(sizes[dtype], dtype=getattr(torch, dtype), device=device)
        cells = []
        offset = 0
        for slot, place in members:
            elements = torch.Size(place.shape).numel()
            cells.append(Cell(slot, place, flat[offset : offset + elements].view(place.shape)))
            offset += elements
        result.append(Reduction(first_number + len(result), bucket.devices, flat, tuple(cells)))
    return result
