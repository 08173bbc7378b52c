"""The interface of rules: the partitioning of operators, one rule per operator type.

A rule says, for an operator's shapes and arguments, which axes it iterates over, how its operands' dims follow them,
how to rewrite the call for one task's part, and how many flops and bytes a local call takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graph import intervals
from graph.axes import IterationSpace
from graph.calls import LocalCall
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


class Rule(Protocol):
    """The rule of one operator type (or of a family, for the generic pointwise rule)."""

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes (REPLICA_AXIS last) and operand maps; only axes of size > 1 are worth listing."""
        ...

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the task's call; its inputs are dense tensors of `part.inputs`' shapes.

        `part.space` may be refined: use `part.inputs` and `part.outputs`, or factors of the maps, not fixed axes.
        """
        ...

    def flops(self, call: LocalCall) -> float:
        """Return floating-point operations of one forward execution of a local call (a multiply-add is two)."""
        ...
