"""What rules see: an operator's signature, and the part of it that is one task's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph import intervals
from graph.axes import IterationSpace
from graph.intervals import Interval, Region
from graph.operators import Argument, TensorSpec


@dataclass(frozen=True, slots=True)
class Signature:
    """An operator without its name: target, arguments and global shapes, as rules see it.

    Shapes are global. `arguments` are complete, by schema name, with `Slot`s for tensors.
    """

    target: str
    arguments: tuple[tuple[str, Argument], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def argument(self, name: str) -> Argument:
        """Return the argument called `name`; raises KeyError where there is none."""
        return dict(self.arguments)[name]


@dataclass(frozen=True, slots=True)
class TaskPart:
    """One task's share of an operator: the points of each axis and the region of each operand."""

    space: IterationSpace
    points: tuple[Interval, ...]
    inputs: tuple[Region, ...]
    outputs: tuple[Region, ...]

    def input_specs(self, signature: Signature) -> tuple[TensorSpec, ...]:
        """Local input specs."""
        return _specs(self.inputs, signature.inputs)

    def output_specs(self, signature: Signature) -> tuple[TensorSpec, ...]:
        """Local output specs."""
        return _specs(self.outputs, signature.outputs)


def _specs(regions: Sequence[Region], whole: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(
        [TensorSpec(intervals.shape(region), spec.dtype) for region, spec in zip(regions, whole, strict=True)]
    )
