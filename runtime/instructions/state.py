"""The state of a training step on a rank: values and gradients by slot, and messages and collectives under way.

A slot is the number of one tensor of the rank: a task's output, an assembly, a received piece, a leaf that stands for
a tensor of an earlier segment, a weight, or one read of a weight, buffer or input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from profiler.operators import ExecutionContext
from runtime.communication import Message, World
from runtime.instructions.selections import Selection


class GradientStore:
    """Gradients by slot, accumulated over segments and messages.

    Autograd may return one tensor as several gradients, so only a tensor of the store's own (`_owned`) is added to in
    place.
    """

    __slots__ = ("_gradients", "_owned", "_shapes")

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Prepare for as many slots as there are `shapes`."""
        self._shapes = tuple(shapes)
        self._gradients: list[torch.Tensor | None] = [None] * len(self._shapes)
        self._owned = [False] * len(self._shapes)

    def get(self, slot: int) -> torch.Tensor | None:
        """Return the gradient of `slot` so far."""
        return self._gradients[slot]

    def pop(self, slot: int) -> torch.Tensor | None:
        """Remove the gradient of `slot` and return it."""
        gradient = self._gradients[slot]
        self._gradients[slot] = None
        self._owned[slot] = False
        return gradient

    def set(self, slot: int, gradient: torch.Tensor) -> None:
        """Replace the gradient of `slot` by a tensor of the caller, which is not added to in place."""
        self._gradients[slot] = gradient
        self._owned[slot] = False

    def add(self, slot: int, gradient: torch.Tensor) -> None:
        """Add a gradient of the whole tensor."""
        total = self._gradients[slot]
        if total is None:
            self._gradients[slot] = gradient
        elif self._owned[slot]:
            total.add_(gradient)
        else:
            self._gradients[slot] = total + gradient
            self._owned[slot] = True

    def add_part(self, slot: int, selection: Selection, gradient: torch.Tensor) -> None:
        """Add a gradient of the part `selection` of the tensor."""
        if selection.whole:
            self.add(slot, gradient)
        else:
            selection.add(self.writable(slot, gradient), gradient)

    def writable(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `slot` as a tensor that may be written to; zeros where there is none."""
        total = self._gradients[slot]
        if total is None:
            total = like.new_zeros(self._shapes[slot])
        elif not self._owned[slot]:
            total = total.clone(memory_format=torch.contiguous_format)
        self._gradients[slot] = total
        self._owned[slot] = True
        return total


class StepState:
    """The mutable state of one training step."""

    def __init__(self, world: World, shapes: Sequence[tuple[int, ...]]) -> None:
        """Prepare for the slots of one program, of which `shapes` are the shapes."""
        self.world = world
        self.context = ExecutionContext(seed=0, step=0)
        self.values: list[Any] = [None] * len(shapes)
        self.gradients = GradientStore(shapes)
        # By slot: the work to wait for, and the tensor that must stay alive until then.
        self.pending_receives: dict[int, tuple[Any, torch.Tensor]] = {}
        self.pending_sends: list[tuple[Any, torch.Tensor]] = []
        # By number of a flat bucket: the works of its slices.
        self.all_reduces: dict[int, list[Any]] = {}
        # By number of a group: the work to wait for, and the flat tensor that must stay alive until then.
        self.reduce_scatters: dict[int, tuple[Any, torch.Tensor]] = {}
        self.all_gathers: dict[int, tuple[Any, torch.Tensor]] = {}
        # By number of a group: the gathers that the last update has left to the next forward.
        self.gathers_due: set[int] = set()
        # By number of a part of a weight: its value, and the sum of its gradients. By slot: the rank's weights.
        self.parts: dict[int, torch.Tensor] = {}
        self.shard_gradients: dict[int, torch.Tensor] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.renewed: dict[int, torch.Tensor] = {}
        # Updates weights by the gradients that the step before has left, where it has; who executes steps sets it.
        self.update: Callable[[tuple[str, ...]], None] = lambda _weights: None
        # Copies the parts of weights that are read as copies; who executes steps sets it, too.
        self.copy_reads: Callable[[tuple[str, ...]], None] = lambda _weights: None
        self.loss: torch.Tensor | None = None
        # Gradients are those of the loss times this.
        self.loss_scale = 1.0

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
