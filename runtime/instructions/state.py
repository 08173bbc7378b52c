"""The state of a training step on a rank: values and gradients by slot, and messages and collectives under way.

A slot is the number of one tensor of the rank: a task's output, an assembly, a received piece, a leaf that stands for
a tensor of an earlier segment, a weight, or one read of a weight, buffer or input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from profiler.operators import ExecutionContext
from profiler.process_groups import Message
from runtime.communication import World
from runtime.instructions.selections import Selection


@dataclass(slots=True)
class _SlotGradient:
    """The gradient of a slot so far, whether it is the store's own tensor, and the tensor that it is to stand in."""

    gradient: torch.Tensor | None = None
    owned: bool = False
    home: torch.Tensor | None = None


class GradientStore:
    """Gradients by slot, accumulated over segments and messages.

    Autograd may return one tensor as several gradients, so only a tensor of the store's own (`owned`) is added to in
    place.
    """

    __slots__ = ("_entries", "_shapes")

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        common: Iterable[int] = (),
        of: GradientStore | None = None,
    ) -> None:
        """Prepare for as many slots as there are `shapes`; the `common` ones are also those of another store."""
        self._shapes = tuple(shapes)
        self._entries = [_SlotGradient() for _ in self._shapes]
        if of is not None:
            for slot in common:
                self._entries[slot] = of._entries[slot]

    def get(self, slot: int) -> torch.Tensor | None:
        """Return the gradient of `slot` so far."""
        return self._entries[slot].gradient

    def pop(self, slot: int) -> torch.Tensor | None:
        """Remove the gradient of `slot` and return it."""
        entry = self._entries[slot]
        gradient = entry.gradient
        entry.gradient, entry.owned = None, False
        return gradient

    def take_out(self, slot: int, part: Selection) -> None:
        """Leave nothing of the gradient of `slot` in a part of the tensor."""
        entry = self._entries[slot]
        if part.whole:
            self.pop(slot)
        elif entry.gradient is not None:
            part.put(self.writable(slot, entry.gradient), entry.gradient.new_zeros(part.shape))

    def set(self, slot: int, gradient: torch.Tensor) -> None:
        """Replace the gradient of `slot` by a tensor of the caller, which is not added to in place."""
        entry = self._entries[slot]
        entry.gradient, entry.owned = gradient, False

    def stand_in(self, slot: int, home: torch.Tensor) -> None:
        """Let all gradients of `slot` add up in a tensor of the caller, from the first one on."""
        self._entries[slot].home = home

    def add(self, slot: int, gradient: torch.Tensor) -> None:
        """Add a gradient of the whole tensor."""
        entry = self._entries[slot]
        if entry.gradient is None and entry.home is not None:
            entry.gradient, entry.owned = entry.home.copy_(gradient), True
        elif entry.gradient is None:
            entry.gradient = gradient
        elif entry.owned:
            entry.gradient.add_(gradient)
        else:
            entry.gradient = entry.gradient + gradient
            entry.owned = True

    def add_part(self, slot: int, selection: Selection, gradient: torch.Tensor) -> None:
        """Add a gradient of the part `selection` of the tensor."""
        if selection.whole:
            self.add(slot, gradient)
        else:
            selection.add(self.writable(slot, gradient), gradient)

    def writable(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `slot` as a tensor that may be written to; zeros where there is none."""
        entry = self._entries[slot]
        total = entry.gradient
        if total is None:
            total = like.new_zeros(self._shapes[slot]) if entry.home is None else entry.home.zero_()
        elif not entry.owned:
            total = total.clone(memory_format=torch.contiguous_format)
        entry.gradient, entry.owned = total, True
        return total


@dataclass(frozen=True, slots=True)
class PartRange:
    """A part of a weight that a rank updates, by its number: all of it, or elements in row-major order.

    bounds: the first and one beyond the last element.
    """

    part: int
    bounds: tuple[int, int] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the range of the part, or of a tensor like it, as a view; a range of elements is flat."""
        return tensor if self.bounds is None else tensor.view(-1)[slice(*self.bounds)]


@dataclass(slots=True)
class MicroBatchState:
    """What each micro-batch has of its own: values and gradients by slot, and messages under way.

    context: of its random numbers. pending_receives: by slot, the work to wait for, and the tensor that must stay alive
    until then; pending_sends likewise. weight_parts: by segment, where the weight part of its backward begins in
    autograd's graph, and the gradients there.
    """

    values: list[Any]
    gradients: GradientStore
    context: ExecutionContext = field(default_factory=lambda: ExecutionContext(seed=0, step=0))
    pending_receives: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    pending_sends: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    weight_parts: dict[int, tuple[list[GradientEdge], list[torch.Tensor]]] = field(default_factory=dict)


class StepState:
    """The mutable state of one training step: that of the micro-batch at work, and what all have in common."""

    def __init__(
        self,
        world: World,
        shapes: Sequence[tuple[int, ...]],
        micro_batches: int = 1,
        common: Iterable[int] = (),
    ) -> None:
        """Prepare for the slots of one program.

        Args:
            world: the ranks.
            shapes: of all slots.
            micro_batches: of a step.
            common: slots whose gradients add up over micro-batches, those of the rank's weights.
        """
        self.world = world
        first = MicroBatchState([None] * len(shapes), GradientStore(shapes))
        own = tuple(common)
        self.micro_batches = (
            first,
            *(
                MicroBatchState([None] * len(shapes), GradientStore(shapes, own, first.gradients))
                for _ in range(1, micro_batches)
            ),
        )
        self.enter(0)
        # By number of a flat bucket: the works of its slices.
        self.all_reduces: dict[int, list[Any]] = {}
        # By number of a group: the work to wait for, and the flat tensor that must stay alive until then.
        self.reduce_scatters: dict[int, tuple[Any, torch.Tensor]] = {}
        self.all_gathers: dict[int, tuple[Any, torch.Tensor]] = {}
        # By number of a group: the gathers that the last update has left to the next forward.
        self.gathers_due: set[int] = set()
        # Of slices of groups: by number of the group, packed gradients and the room for the rank's own sums; by slice,
        # the work of its sum and the tensor that must stay alive until then; by group, those of its gathers.
        self.packed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pushes: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self.pulls: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        # By number of a part of a weight: its value, and the sum of its gradients. By slot: the rank's weights.
        self.parts: dict[int, torch.Tensor] = {}
        self.shard_gradients: dict[int, torch.Tensor] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.renewed: dict[int, torch.Tensor] = {}
        # Whether the step before has left updates, sums and gathers to this one's forward.
        self.work_left = False
        # Updates parts of weights by the gradients that the step before has left; who executes steps sets it.
        self.update: Callable[[tuple[PartRange, ...]], None] = lambda _ranges: None
        # Drops the gradients that weights were updated by, and copies the parts of weights that are read as copies; who
        # executes steps sets both, too.
        self.drop_gradients: Callable[[tuple[str, ...]], None] = lambda _weights: None
        self.copy_reads: Callable[[tuple[str, ...]], None] = lambda _weights: None
        # Of all micro-batches so far.
        self.loss: torch.Tensor | None = None
        # Gradients are those of a micro-batch's loss times this.
        self.loss_scale = 1.0

    def enter(self, micro_batch: int) -> None:
        """Work on a micro-batch from now on."""
        state = self.micro_batches[micro_batch]
        self.values = state.values
        self.gradients = state.gradients
        self.context = state.context
        self.pending_receives = state.pending_receives
        self.pending_sends = state.pending_sends
        self.weight_parts = state.weight_parts

    def place(self, slot: int, tensor: torch.Tensor | None) -> None:
        """Set a slot's value of every micro-batch: a weight's, or a buffer's."""
        for state in self.micro_batches:
            state.values[slot] = tensor

    def use_context(self, contexts: Sequence[ExecutionContext]) -> None:
        """Draw the random numbers of each micro-batch by its own context."""
        for state, context in zip(self.micro_batches, contexts, strict=True):
            state.context = context
        self.enter(0)

    def renew(self) -> None:
        """Give buffers their new values."""
        for slot, tensor in self.renewed.items():
            self.place(slot, tensor)
        self.renewed.clear()

    def wait_for_all(self) -> None:
        """Wait for the messages of all micro-batches."""
        for number in range(len(self.micro_batches)):
            self.enter(number)
            self.wait_for(tuple(self.pending_receives))
            self.wait_for_sends()

    def exchange(self, sends: Sequence[Message], receives: Sequence[tuple[int, Message]]) -> None:
        """Start the messages of one event; received ones arrive in their slots (`wait_for`)."""
        sent, received = self.world.exchange(sends, [message for _, message in receives])
        self.pending_sends.extend((work, message.tensor) for work, message in zip(sent, sends, strict=True))
        for (slot, message), work in zip(receives, received, strict=True):
            self.values[slot] = message.tensor
            self.pending_receives[slot] = work, message.tensor

    def add_collective(
        self, work: Any, arriving: Sequence[tuple[int, torch.Tensor]], sent: torch.Tensor
    ) -> None:
        """Add a started collective: its results by slot, and the tensor that must stay alive until it is done."""
        if not arriving:
            self.pending_sends.append((work, sent))
        for slot, tensor in arriving:
            self.values[slot] = tensor
            self.pending_receives[slot] = work, sent

    def wait_for(self, slots: Sequence[int]) -> None:
        """Wait until the messages of `slots` are here."""
        for slot in slots:
            work, _ = self.pending_receives.pop(slot)
            self.world.wait(work)

    def wait_for_sends(self) -> None:
        """Wait until all sends are done."""
        for work, _ in self.pending_sends:
            self.world.wait(work)
        self.pending_sends.clear()
