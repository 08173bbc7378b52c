"""When a rank gathers the weights that it keeps in shares, and when it drops them again.

The order is the plan's: a gather begins one operator before that which needs it. In the forward a weight goes after its
last reader; in the backward it comes again before that reader's segment, and goes after that of its first reader. Who
reads a view of it is a reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graph.plan import BucketEntry, Gather, Gathers, Plan, gathers_begun
from graph.strategy import Sharding
from runtime.instructions.base import Instruction
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import (
    Allocate,
    Fill,
    FinishGather,
    Free,
    Group,
    Part,
    StartGather,
    groups_of,
    sharing_on,
)
from runtime.lowering.segments import Segments
from runtime.lowering.tensor_slots import Layout


class Gathering:
    """The gathers of one rank. `weights`: those that it keeps in shares, by name, with their slots."""

    def __init__(
        self, plan: Plan, layout: Layout, parts: Mapping[str, tuple[Part, ...]], device: torch.device
    ) -> None:
        """Find what the rank gathers.

        Args:
            plan: what is executed.
            layout: the rank's tensors.
            parts: what the rank updates of each weight.
            device: where the rank's tensors are.
        """
        self._plan = plan
        self._layout = layout
        self._parts = parts
        self._device = device
        self._held = {name: plan.held[name][layout.rank] for name in layout.held}
        self._number = 0
        self._under_way: dict[tuple[bool, int], list[Group]] = {}
        self.weights = {
            name: slot
            for name, slot in layout.held.items()
            if sharing_on(plan, name, layout.rank) is Sharding.PARAMETERS
        }
        readers = {name: plan.graph.weight_readers[name] for name in self.weights}
        reached = {name: [index for index in readers[name] if any(plan.active[index])] for name in readers}
        self._last_read = _by_operator({name: max(readers[name]) for name in readers})
        self._first_reached = {name: min(found) for name, found in reached.items() if found}

    def groups(self, ranks: tuple[int, ...], entries: Sequence[BucketEntry]) -> list[Group]:
        """Return new groups of cells that `ranks` share."""
        made = groups_of(
            self._plan.graph,
            ranks,
            entries,
            self._layout.held,
            self._held,
            self._parts,
            self._layout.rank,
            self._device,
            self._number,
        )
        self._number += len(made)
        return made

    def before_forward(self, index: int) -> list[Instruction]:
        """Return what begins and what ends before an operator's forward."""
        return self._before(self._plan.forward_gathers, index, is_forward=True)

    def before_backward(self, index: int) -> list[Instruction]:
        """Return what begins and what ends before an operator's backward."""
        return self._before(self._plan.backward_gathers, index, is_forward=False)

    def after_forward(self, index: int) -> list[Instruction]:
        """Return what drops the weights that an operator is the last to read."""
        found = self._last_read.get(index, [])
        if not found:
            return []
        unreached = [name for name in found if name not in self._first_reached]
        return [Free(tuple(self.weights[name] for name in found), self._copies(unreached))]

    def after_backward(self, index: int, segments: Segments) -> list[Instruction]:
        """Return what drops the weights that no later segment of the backward reads, where a segment ends."""
        if index and segments.number_of(index - 1) == segments.number_of(index):
            return []
        number = segments.number_of(index)
        found = [name for name, first in self._first_reached.items() if segments.number_of(first) == number]
        return [Free(tuple(self.weights[name] for name in found), self._copies(found))] if found else []

    def _before(self, gathers: Gathers, index: int, *, is_forward: bool) -> list[Instruction]:
        result: list[Instruction] = []
        for operator, gather in gathers_begun(gathers, index):
            for group in self._groups_of(gather):
                self._under_way.setdefault((is_forward, operator), []).append(group)
                result.append(StartGather(group))
        under_way = self._under_way.pop((is_forward, index), [])
        if under_way:
            slots = tuple(dict.fromkeys(slot for group in under_way for slot in group.slots))
            result.append(Allocate(slots))
            result.extend(FinishGather(group) for group in under_way)
            fill = self._fill(slots, is_forward=is_forward)
            result.extend([fill] if fill.alone or fill.copies else [])
        return result

    def _groups_of(self, gather: Gather) -> list[Group]:
        return self.groups(gather.devices, gather.entries) if self._layout.rank in gather.devices else []

    def _fill(self, slots: tuple[int, ...], *, is_forward: bool) -> Fill:
        names = [name for name, slot in self.weights.items() if slot in slots]
        alone = tuple(
            (self.weights[name], Selection(part.region, self._held[name], self._device), part.number)
            for name in names
            for part in self._parts[name]
            if part.alone
        )
        copies = []
        for reading in self._layout.readings.values():
            if is_forward and reading.value in names:
                place = Selection(reading.region, self._held[reading.value], self._device)
                if not place.is_view:
                    differentiable = self._plan.graph.value_by_name[reading.value].requires_gradient
                    copies.append((reading.slot, self.weights[reading.value], place, differentiable))
        return Fill(alone, tuple(copies))

    def _copies(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(
            reading.slot
            for reading in self._layout.readings.values()
            if reading.value in names
            and not Selection(reading.region, self._held[reading.value], self._device).is_view
        )


def _by_operator(operators: Mapping[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, operator in operators.items():
        found.setdefault(operator, []).append(name)
    return found
