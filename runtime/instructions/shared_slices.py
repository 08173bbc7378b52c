"""Slices of weights whose update is shared, of the policy p3: reduce-scatter (push), update, all-gather (pull).

The gradients of a group of cells are packed holder by holder (`runtime.instructions.sharded_weights`); a slice is the
same range of elements of each holder's. Sums that stand behind a pull in the order, the updates of slices, and the
pulls are left to the next step's forward.

Source: P3, priority-based parameter propagation (SysML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.instructions.base import Communication
from runtime.instructions.sharded_weights import DenseCopies, ShardGroup, free, pack_gradients, write_shares
from runtime.instructions.state import PartRange, StepState


@dataclass(frozen=True, slots=True)
class OwnRange:
    """Elements of a part that this rank updates, and where they begin in the slice of a group."""

    elements: PartRange
    offset: int


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Elements from `first` to before `last` of what each holder of a group has a share of.

    part: the number of the slice, `parts` of them make up the group. own: the rank's parts that are in it.
    """

    group: ShardGroup
    part: int
    parts: int
    first: int
    last: int
    own: tuple[OwnRange, ...]

    @property
    def key(self) -> tuple[int, int]:
        """The slice among those of all groups."""
        return self.group.number, self.part

    @property
    def ranges(self) -> tuple[PartRange, ...]:
        """The elements of parts that the rank updates."""
        return tuple(own.elements for own in self.own)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the slice of all holders in the group's flat tensor, [holders, elements]."""
        return flat.view(len(self.group.ranks), -1)[:, self.first : self.last]


@dataclass(frozen=True, slots=True)
class PackGradients(Communication):
    """Packs the gradients of a group, of which slices are summed then."""

    group: ShardGroup

    def run(self, state: StepState) -> None:
        state.packed[self.group.number] = pack_gradients(self.group, state)


@dataclass(frozen=True, slots=True)
class StartPush(Communication):
    """Starts the reduce-scatter of a slice of packed gradients.

    is_last: no other slice of the group is needed any more. late: in the forward of the next step, where the step
    before has left it.
    """

    slice: GroupSlice
    is_last: bool
    late: bool = False

    def run(self, state: StepState) -> None:
        own, group = self.slice, self.slice.group
        if self.late and not state.work_left:
            return
        flat, result = state.packed[group.number]
        if self.is_last:
            del state.packed[group.number]
        # The whole group's is the flat tensor itself.
        packed = own.of(flat).contiguous().view(-1)
        del flat
        work = state.world.reduce_scatter_in_place(result[own.first : own.last], packed, group.ranks)
        state.pushes[own.key] = (work, packed)


@dataclass(frozen=True, slots=True)
class PullSlice(Communication):
    """Waits for the sum of a slice, updates the rank's share, and starts the all-gather.

    late: in the forward of the next step, where the step before has left it.
    """

    slice: GroupSlice
    late: bool = False

    def run(self, state: StepState) -> None:
        own, group = self.slice, self.slice.group
        if self.late and not state.work_left:
            return
        work, packed = state.pushes.pop(own.key)
        state.world.wait(work)
        free(packed)
        if own.own:
            state.update(own.ranges)
        gathered = torch.empty(
            len(group.ranks) * (own.last - own.first), dtype=group.dtype, device=group.device
        )
        row = gathered.view(len(group.ranks), -1)[group.ranks.index(state.world.rank)]
        copies = DenseCopies()
        for item in own.own:
            values = item.elements.of(state.parts[item.elements.part].detach())
            copies.add(row[item.offset : item.offset + values.numel()], values)
        copies.run()
        pulled = state.world.all_gather_in_place(gathered, group.ranks)
        state.pulls.setdefault(group.number, []).append((pulled, gathered))


@dataclass(frozen=True, slots=True)
class AwaitPulls(Communication):
    """Waits for all slices of groups, where they are under way, before an operator reads their weights.

    slices: of each group all of them, in the order of their pulls. weights: the names of the weights that are whole
    then.
    """

    slices: tuple[tuple[GroupSlice, ...], ...]
    weights: tuple[str, ...]

    def run(self, state: StepState) -> None:
        for of_group in self.slices:
            group = of_group[0].group
            pulls = state.pulls.pop(group.number, None)
            if pulls is None:
                continue
            whole = pulls[0][1] if len(of_group) == 1 else group.empty(len(group.ranks))
            for (work, gathered), own in zip(pulls, of_group, strict=True):
                state.world.wait(work)
                if gathered is not whole:
                    own.of(whole).copy_(gathered.view(len(group.ranks), -1))
                    free(gathered)
            write_shares(group, whole, state)
            free(whole)
        state.copy_reads(self.weights)
