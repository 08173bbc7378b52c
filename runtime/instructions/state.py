"""What a rank holds while a training step runs: values and gradients by slot, and messages on their way.

A slot is the number of one tensor of the rank: a task's output, an assembly, a received piece, a leaf that stands for
a tensor of an earlier segment, a weight, or one reading of a weight, buffer or input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from profiler.operators import ExecutionContext
from runtime.communication import Message, World
from runtime.instructions.selections import Selection


class GradientStore:
    """Gradients by slot, accumulated over segments and messages.

    Autograd may hand out one tensor as several gradients, so a tensor is added to in place only where it was made
    here (`_owned`).
    """

    __slots__ = ("_gradients", "_owned", "_shapes")

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Prepare for as many slots as there are `shapes`."""
        self._shapes = tuple(shapes)
        self._gradients: list[torch.Tensor | None] = [None] * len(self._shapes)
        self._owned = [False] * len(self._shapes)

    def get(self, slot: int) -> torch.Tensor | None:
        """Return what has come for `slot` so far."""
        return self._gradients[slot]

    def pop(self, slot: int) -> torch.Tensor | None:
        """Return what has come for `slot`, and forget it."""
        gradient = self._gradients[slot]
        self._gradients[slot] = None
        self._owned[slot] = False
        return gradient

    def set(self, slot: int, gradient: torch.Tensor) -> None:
        """Replace what has come for `slot`; `gradient` stays its maker's."""
        self._gradients[slot] = gradient
        self._owned[slot] = False

    def add(self, slot: int, gradient: torch.Tensor) -> None:
        """Add a gradient of the whole tensor."""
        known = self._gradients[slot]
        if known is None:
            self._gradients[slot] = gradient
        elif self._owned[slot]:
            known.add_(gradient)
        else:
            self._gradients[slot] = known + gradient
            self._owned[slot] = True

    def add_part(self, slot: int, selection: Selection, gradient: torch.Tensor) -> None:
        """Add a gradient of the part `selection` of the tensor."""
        if selection.whole:
            self.add(slot, gradient)
        else:
            selection.add(self.writable(slot, gradient), gradient)

    def writable(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `slot` as a tensor that may be written to; zeros where none has come."""
        known = self._gradients[slot]
        if known is None:
            known = like.new_zeros(self._shapes[slot])
        elif not self._owned[slot]:
            known = known.clone(memory_format=torch.contiguous_format)
        self._gradients[slot] = known
        self._owned[slot] = True
        return known


class StepState:
    """All that one training step changes."""

    __slots__ = (
        "arriving",
        "context",
        "gathering",
        "gradients",
        "leaving",
        "loss",
        "loss_scale",
        "parts",
        "reducing",
        "renewed",
        "shares",
        "sharing",
        "values",
        "weights",
        "world",
    )

    def __init__(self, world: World, shapes: Sequence[tuple[int, ...]]) -> None:
        """Prepare for the slots of one program, of which `shapes` are the shapes."""
        self.world = world
        self.context = ExecutionContext(seed=0, step=0)
        self.values: list[Any] = [None] * len(shapes)
        self.gradients = GradientStore(shapes)
        # By slot: the work to wait for, and the tensor that it needs until then.
        self.arriving: dict[int, tuple[Any, torch.Tensor]] = {}
        self.leaving: list[tuple[Any, torch.Tensor]] = []
        self.reducing: dict[int, Any] = {}
        # By number of a group: the work to wait for, and the flat tensor that it needs until then.
        self.sharing: dict[int, tuple[Any, torch.Tensor]] = {}
        self.gathering: dict[int, tuple[Any, torch.Tensor]] = {}
        # By number of a part: its value, and the sum of its gradients. By slot: the weights that the rank holds.
        self.parts: dict[int, torch.Tensor] = {}
        self.shares: dict[int, torch.Tensor] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.renewed: dict[int, torch.Tensor] = {}
        self.loss: torch.Tensor | None = None
        # Gradients are those of the loss times this.
        self.loss_scale = 1.0

    def exchange(self, sends: Sequence[Message], receives: Sequence[tuple[int, Message]]) -> None:
        """Start the messages of one event; received ones arrive in their slots (`wait_for`)."""
        sent, received = self.world.exchange(sends, [message for _, message in receives])
        # The tensors of sends stay referenced until they have left.
        self.leaving.extend((work, message.tensor) for work, message in zip(sent, sends, strict=True))
        for (slot, message), work in zip(receives, received, strict=True):
            self.values[slot] = message.tensor
            self.arriving[slot] = work, message.tensor

    def collect(self, work: Any, arriving: Sequence[tuple[int, torch.Tensor]], sent: torch.Tensor) -> None:
        """Note a started collective: what arrives in which slots, and what must stay referenced until it is done."""
        if not arriving:
            self.leaving.append((work, sent))
        for slot, tensor in arriving:
            self.values[slot] = tensor
            self.arriving[slot] = work, sent

    def wait_for(self, slots: Sequence[int]) -> None:
        """Wait until the messages of `slots` are here."""
        for slot in slots:
            work, _ = self.arriving.pop(slot)
            self.world.wait(work)

    def wait_for_sends(self) -> None:
        """Wait until all sends are done."""
        for work, _ in self.leaving:
            self.world.wait(work)
        self.leaving.clear()
