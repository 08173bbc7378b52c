"""The rules of operator types: axes, operand maps, local calls and their costs.

Every function here is pure and needs no torch. Local calls are memoised per graph, since a search asks for the same
configurations again and again, and shared between like operators (forty unrolled steps).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from graph.axes import Degrees, coordinates, operand_region, operand_regions, part_of, task_points
from graph.calls import LocalCall
from graph.operators import Operator, OperatorGraph
from graph.rules.base import Signature, TaskPart
from graph.rules.call_classes import CallClass, CallClasses
from graph.rules.common import is_whole
from graph.rules.registry import rule_for

# Lists of local calls kept for one graph; the least recently used go first.
CACHED_CONFIGURATIONS = 65536


def signature(graph: OperatorGraph, operator: Operator) -> Signature:
    """Return an operator without its name: target, arguments, global shapes."""
    return Signature(
        operator.target, operator.arguments, graph.input_specs(operator), graph.output_specs(operator)
    )


def parts(operator: Operator, degrees: Degrees) -> tuple[TaskPart, ...]:
    """Return the parts of all tasks of a configuration, in task order."""
    space = operator.space
    inputs = [operand_regions(space.axes, operand, degrees) for operand in space.inputs]
    outputs = [operand_regions(space.axes, operand, degrees) for operand in space.outputs]
    return tuple(
        TaskPart(
            space,
            task_points(space, degrees, coordinate),
            tuple(regions[task] for regions in inputs),
            tuple(regions[task] for regions in outputs),
        )
        for task, coordinate in enumerate(coordinates(degrees))
    )


def part(operator: Operator, degrees: Degrees, task_index: int) -> TaskPart:
    """Return the part of one task of a configuration."""
    backwards = []
    for axis, degree in zip(reversed(operator.space.axes), reversed(degrees), strict=True):
        task_index, index = divmod(task_index, degree)
        backwards.append(part_of(axis, degree, index))
    points = tuple(reversed(backwards))
    return TaskPart(
        operator.space,
        points,
        tuple([operand_region(operand, points) for operand in operator.space.inputs]),
        tuple([operand_region(operand, points) for operand in operator.space.outputs]),
    )


def local_gradients(graph: OperatorGraph, operator: Operator) -> tuple[bool, ...]:
    """Return, for each input slot, whether the operator's backward computes its gradient."""
    if not graph.has_backward(operator):
        return (False,) * len(operator.inputs)
    return graph.gradient_inputs(operator)


def local_calls(graph: OperatorGraph, operator: Operator, degrees: Degrees) -> tuple[LocalCall, ...]:
    """Return the local calls of all tasks of a configuration, in task order; equal calls are one object."""
    cache: OrderedDict[tuple[int, Degrees], tuple[LocalCall, ...]] = graph._cache.setdefault(
        "rules.local_calls", OrderedDict()
    )
    key = (operator_class(graph, operator), degrees)
    calls = cache.get(key)
    if calls is None:
        calls = _make_calls(graph, operator, degrees)
        cache[key] = calls
        if len(cache) > CACHED_CONFIGURATIONS:
            cache.popitem(last=False)
    else:
        cache.move_to_end(key)
    return calls


def operator_class(graph: OperatorGraph, operator: Operator) -> int:
    """Return the number of the operator's class: equal degrees make equal local calls of its members."""
    classes: dict[str, int] = graph._cache.setdefault("rules.classes", {})
    if not classes:
        classes.update(_operator_classes(graph))
    return classes[operator.name]


def cost_class(graph: OperatorGraph, operator: Operator) -> int:
    """Return the number of the operator's cost class: equal degrees make local calls of equal cost of its members.

    Beside those of a class (`operator_class`) these are operators that differ in what they draw alone.
    """
    classes: dict[str, int] = graph._cache.setdefault("rules.cost_classes", {})
    if not classes:
        numbers: dict[object, int] = {}
        for member in graph.operators:
            classes[member.name] = numbers.setdefault(_form(graph, member), len(numbers))
    return classes[operator.name]


def whole_call(graph: OperatorGraph, operator: Operator) -> LocalCall:
    """Return the call of the one task that runs the operator whole."""
    return local_calls(graph, operator, (1,) * len(operator.space.axes))[0]


def _operator_classes(graph: OperatorGraph) -> dict[str, int]:
    """Number the classes of operators; an operator whose calls name it (dropout) has its own class."""
    numbers: dict[object, int] = {}
    result: dict[str, int] = {}
    for operator in graph.operators:
        key = _form(graph, operator)
        if operator.target in DRAWING:
            key = (*key, operator.name)
        result[operator.name] = numbers.setdefault(key, len(numbers))
    return result


def _form(graph: OperatorGraph, operator: Operator) -> tuple[object, ...]:
    warm = graph.rereads_weights[graph.index_by_name[operator.name]]
    return signature(graph, operator), operator.space, local_gradients(graph, operator), warm


# Operators that draw random numbers: their calls carry the operator's number.
DRAWING = frozenset({"soapstone.dropout", "soapstone.attention", "soapstone.random"})


def _make_calls(graph: OperatorGraph, operator: Operator, degrees: Degrees) -> tuple[LocalCall, ...]:
    interned: dict[LocalCall, LocalCall] = graph._cache.setdefault("rules.interned", {})
    if len(interned) > CACHED_CONFIGURATIONS:
        interned.clear()
    if not rule_for(operator.target).by_size:
        own, gradients = _whole(graph, operator)
        each = [_call(graph, operator, own, piece, gradients) for piece in parts(operator, degrees)]
        return tuple([interned.setdefault(call, call) for call in each])
    number = operator_class(graph, operator)
    classes_of: dict[int, CallClasses] = graph._cache.setdefault("rules.call_classes", {})
    if number not in classes_of:
        classes_of[number] = CallClasses(operator.space)
    # Under other degrees there are tasks of the same classes: their calls are there already.
    by_class: dict[tuple[int, CallClass], LocalCall] = graph._cache.setdefault("rules.by_class", {})
    if len(by_class) > CACHED_CONFIGURATIONS:
        by_class.clear()
    of_tasks = classes_of[number].of_tasks(degrees)
    calls = []
    for task, call_class in zip(of_tasks.first, of_tasks.classes, strict=True):
        call = by_class.get((number, call_class))
        if call is None:
            call = call_of(graph, operator, degrees, task)
            call = by_class[number, call_class] = interned.setdefault(call, call)
        calls.append(call)
    return tuple([calls[index] for index in of_tasks.class_of])


def first_call(graph: OperatorGraph, operator: Operator, degrees: Degrees) -> LocalCall:
    """Return the call of the first task of a configuration, without making the others' calls."""
    return call_of(graph, operator, degrees, 0)


def call_of(graph: OperatorGraph, operator: Operator, degrees: Degrees, task: int) -> LocalCall:
    """Return the call of one task of a configuration, made for it alone."""
    own, gradients = _whole(graph, operator)
    return _call(graph, operator, own, part(operator, degrees, task), gradients)


def _whole(graph: OperatorGraph, operator: Operator) -> tuple[Signature, tuple[bool, ...]]:
    """Return an operator's signature and gradients, made once: it gives many calls."""
    whole: dict[str, tuple[Signature, tuple[bool, ...]]] = graph._cache.setdefault("rules.signatures", {})
    if operator.name not in whole:
        whole[operator.name] = signature(graph, operator), local_gradients(graph, operator)
    return whole[operator.name]


def _call(
    graph: OperatorGraph, operator: Operator, own: Signature, piece: TaskPart, gradients: tuple[bool, ...]
) -> LocalCall:
    if operator.target.startswith("aten.") and is_whole(own, piece):
        # The whole operator runs the very kernel that the module would.
        call = LocalCall(own.target, own.arguments, own.inputs, own.outputs, gradients)
    else:
        call = rule_for(operator.target).localize(own, piece, gradients)
    if graph.rereads_weights[graph.index_by_name[operator.name]]:
        call = replace(call, warm=True)
    if operator.target in DRAWING:
        call = replace(call, bindings=(*call.bindings, ("operator", graph.draw_numbers[operator.name])))
    return call


def flops(call: LocalCall) -> float:
    """Return the floating-point operations of one forward execution; a multiply-add is two."""
    return rule_for(call.target).flops(call)


def backward_flops(call: LocalCall) -> float:
    """Return the floating-point operations of one backward execution, of all differentiated inputs."""
    return rule_for(call.target).backward_flops(call)


def bytes_moved(call: LocalCall) -> int:
    """Return the bytes that one forward execution reads and writes at least."""
    return rule_for(call.target).bytes_moved(call)


def index_bounds(call: LocalCall) -> dict[int, int]:
    """Return, for input slots that hold indexes, the bound below which they must stay."""
    return rule_for(call.target).index_bounds(call)
