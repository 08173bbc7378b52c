"""The calls of the stretches that a strategy compiles, on one rank (`graph.stretches`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph.calls import LocalCall
from graph.compiled_calls import PartCall, compiled_call
from graph.operator_ranges import OperatorRange
from graph.operators import FLOATING, TensorSpec
from graph.plan import Plan
from graph.rules import local_calls
from graph.stretches import members, values_read_outside
from runtime.lowering.tensor_slots import TensorSlots


@dataclass(frozen=True, slots=True)
class StretchCall:
    """A stretch on a rank: its call, and the slots of the call's inputs and outputs.

    parts: the calls of its operators on the rank, each with its operator, in order.
    """

    call: LocalCall
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parts: tuple[tuple[int, LocalCall], ...]


def stretch_calls(
    plan: Plan, slots: TensorSlots, ranges: Sequence[OperatorRange], kept: frozenset[str] = frozenset()
) -> dict[OperatorRange, StretchCall]:
    """Return the calls of some stretches of a plan on the rank of `slots`; stretches without a task there have none.

    kept: values that stay after the step, which leave their stretch as if others read them.
    """
    calls = {stretch: _stretch_call(plan, slots, stretch, kept) for stretch in ranges}
    return {stretch: call for stretch, call in calls.items() if call.parts}


def _stretch_call(
    plan: Plan, slots: TensorSlots, stretch: OperatorRange, kept: frozenset[str]
) -> StretchCall:
    graph = plan.graph
    leaving = values_read_outside(plan, stretch, kept)
    # The number of each tensor, by slot: inputs of the whole come first, and are known at the end.
    specs: dict[int, TensorSpec] = {}
    made: dict[int, int] = {}
    outputs: list[int] = []
    executed: list[tuple[int, LocalCall, list[int], tuple[int, ...]]] = []
    for index in members(plan, stretch):
        operator = graph.operators[index]
        calls = local_calls(graph, operator, plan.strategy.configurations[index].degrees)
        values = [graph.value_by_name[name] for name in operator.outputs]
        constants = tuple(
            position
            for position, value in enumerate(values)
            if not value.requires_gradient and value.spec.dtype in FLOATING
        )
        for task in slots.tasks[index]:
            read = [slots.sources[index, task, slot] for slot in range(len(operator.inputs))]
            for slot, spec in zip(read, calls[task].inputs, strict=True):
                if slot not in made:
                    specs.setdefault(slot, spec)
            for position, value in enumerate(values):
                slot = slots.outputs[index, task, position]
                made[slot] = len(made)
                if value.name in leaving:
                    outputs.append(slot)
            executed.append((index, calls[task], read, constants))
    numbers = {slot: number for number, slot in enumerate(specs)}
    numbers.update({slot: len(specs) + number for slot, number in made.items()})
    call = compiled_call(
        list(specs.values()),
        [
            PartCall(part, tuple(numbers[slot] for slot in read), constants)
            for _, part, read, constants in executed
        ],
        [numbers[slot] for slot in outputs],
    )
    parts = tuple((index, part) for index, part, _, _ in executed)
    return StretchCall(call, tuple(specs), tuple(outputs), parts)
