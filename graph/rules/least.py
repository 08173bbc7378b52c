"""The least work of an operator's tasks together, in any configuration.

Whatever the split: each operation of the whole is done by some task, each element that the whole reads or makes is read
or made by some task. A task may do more (an overlap of windows, a partial sum), and replicas do all of it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graph.axes import read_elements
from graph.operators import Operator, OperatorGraph
from graph.rules import whole_call
from graph.rules.common import BaseRule, used_slots
from graph.rules.registry import rule_for

WorkPhase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Floating-point operations and bytes moved, both of all tasks together, at least."""

    flops: float
    size_bytes: int


def least_work(graph: OperatorGraph, operator: Operator) -> tuple[LeastWork, LeastWork]:
    """Return the least that all forwards do together, and that all backwards do, where every part has one."""
    call = whole_call(graph, operator)
    rule = rule_for(call.target)
    if not rule.adds_up:
        return LeastWork(0.0, 0), LeastWork(0.0, 0)
    moved = written = 0
    # Other counts of bytes depend on the operands' data; and a view moves nothing.
    if type(rule).bytes_moved is BaseRule.bytes_moved and rule.bytes_moved(call):
        sizes = [
            read_elements(operator.space, slot) * spec.item_bytes for slot, spec in enumerate(call.inputs)
        ]
        moved = sum(spec.size_bytes for spec in call.outputs) + sum(
            sizes[slot] for slot in used_slots(call.arguments)
        )
        written = sum(size for size, wanted in zip(sizes, call.gradients, strict=True) if wanted)
    backward = LeastWork(rule.backward_flops(call), moved + written)
    return LeastWork(rule.flops(call), moved), backward if call.has_backward else LeastWork(0.0, 0)
