"""The instruction of a rank's static program. All regions, peers and slots are settled before the first step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from runtime.instructions.state import StepState

Slots = tuple[int, ...]


class Instruction(ABC):
    """One entry of a program."""

    __slots__ = ()

    @property
    def touches(self) -> Slots:
        """The slots of values to read or write: a tensor is released after the last instruction that touches its slot.

        Weights, buffers and reads of them stay in their slots, and gradients are in a store of their own: they are
        in no `touches`.
        """
        return ()

    @abstractmethod
    def run(self, state: StepState) -> None:
        """Execute the instruction on the state of a step."""


class Communication(Instruction):
    """An instruction that packs, sends, receives or hands out tensors: its memory is that of communication."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WrappedInstruction(Instruction):
    """An instruction that executes another one, the `inner`."""

    inner: Instruction

    @property
    def touches(self) -> Slots:
        return self.inner.touches

    def run(self, state: StepState) -> None:
        self.inner.run(state)
