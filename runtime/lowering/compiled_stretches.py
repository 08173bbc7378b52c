"""The calls of the stretches that a strategy compiles, on one rank (`graph.stretches`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph.calls import LocalCall
from graph.compiled_calls import PartCall, compiled_call
from graph.operator_ranges import OperatorRange
from graph.operators import FLOATING
from graph.plan import Plan
from graph.rules import local_calls
from graph.stretches import is_internal, members
from runtime.lowering.tensor_slots import TensorSlots


@dataclass(frozen=True, slots=True)
class StretchCall:
    """A stretch on a rank: its call, the slots of the call's inputs and outputs, and its last operator there.

    wanted: for each input, whether a gradient flows back through it.
    """

    call: LocalCall
    inputs: tuple[int, ...]
    wanted: tuple[bool, ...]
    outputs: tuple[int, ...]
    last: int


def stretch_calls(
    plan: Plan, slots: TensorSlots, ranges: Sequence[OperatorRange], kept: frozenset[str] = frozenset()
) -> dict[OperatorRange, StretchCall]:
    """Return the calls of some stretches of a plan on the rank of `slots`; stretches without a task there have none.

    kept: values that stay after the step, which leave their stretch as if others read them.
    """
    calls = {stretch: _stretch_call(plan, slots, members(plan, stretch), kept) for stretch in ranges}
    return {stretch: call for stretch, call in calls.items() if call is not None}


def _stretch_call(
    plan: Plan, slots: TensorSlots, inside: Sequence[int], kept: frozenset[str]
) -> StretchCall | None:
    graph = plan.graph
    executed: list[tuple[LocalCall, list[int], list[int], tuple[int, ...]]] = []
    leaving: list[int] = []
    last = -1
    for index in inside:
        operator = graph.operators[index]
        calls = local_calls(graph, operator, plan.strategy.configurations[index].degrees)
        values = [graph.value_by_name[name] for name in operator.outputs]
        for task in slots.tasks[index]:
            read = [slots.sources[index, task, slot] for slot in range(len(operator.inputs))]
            made = [slots.outputs[index, task, position] for position in range(len(values))]
            constants = tuple(
                position
                for position, value in enumerate(values)
                if not value.requires_gradient and value.spec.dtype in FLOATING
            )
            executed.append((calls[task], read, made, constants))
            last = index
            leaving += [
                slot
                for slot, value in zip(made, values, strict=True)
                if not is_internal(plan, inside, value.name, kept)
            ]
    if not executed:
        return None
    made_inside = {slot for _, _, made, _ in executed for slot in made}
    inputs = list(
        dict.fromkeys(slot for _, read, _, _ in executed for slot in read if slot not in made_inside)
    )
    specs = {
        slot: spec
        for call, read, _, _ in reversed(executed)
        for slot, spec in zip(read, call.inputs, strict=True)
    }
    numbers = {slot: number for number, slot in enumerate(inputs)}
    for _, _, made, _ in executed:
        numbers.update({slot: len(numbers) + position for position, slot in enumerate(made)})
    parts = [
        PartCall(call, tuple(numbers[slot] for slot in read), constants)
        for call, read, _, constants in executed
    ]
    call = compiled_call([specs[slot] for slot in inputs], parts, [numbers[slot] for slot in leaving])
    return StretchCall(call, tuple(inputs), call.gradients, tuple(leaving), last)
