"""Rules that fuse: operators become one that is executed as one compiled call (`graph.rules.fused`).

A group is as large as can be: an operator joins that of an operator whose value it reads, where nothing outside lies on
the way between two of them, and where the group can still be split along the batch as each of them could. Values that
others read leave the fused operator; the rest vanish from the graph.

Source: TASO (SOSP 2019) section 2, Unity (OSDI 2022) section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graph.aliasing import may_alias
from graph.axes import AxisKind, OperandMap
from graph.calls import LocalCall
from graph.compiled_calls import PartCall, compiled_call
from graph.importing.building import NOT_DIFFERENTIABLE, DraftOperator, GraphBuilder
from graph.operators import FLOATING, Operator, OperatorGraph
from graph.rules import local_gradients
from graph.rules.fused import FUSED, fusion
from graph.rules.pointwise_targets import POINTWISE
from graph.substitutions.rewriting_rule import RewritingRule

_POINTWISE = frozenset(target for target in POINTWISE - NOT_DIFFERENTIABLE if not may_alias(target))
# A mean is part of a root mean square norm as it is imported.
_NORMALIZATIONS = frozenset(
    {
        "aten.layer_norm.default",
        "aten.rms_norm.default",
        "aten.group_norm.default",
        "aten.softmax.int",
        "aten._softmax.default",
        "aten.mean.dim",
        "soapstone.batch_norm_apply",
    }
)
_PRODUCTS = frozenset(
    {
        "aten.linear.default",
        "aten.mm.default",
        "aten.bmm.default",
        "aten.matmul.default",
        "aten.addmm.default",
        "aten.baddbmm.default",
        "aten.conv1d.default",
        "aten.conv2d.default",
        "aten.conv3d.default",
    }
)


@dataclass(frozen=True, slots=True)
class _Form:
    """A group as a fused operator: the values that enter, its parts, and those of their values that leave."""

    inputs: tuple[str, ...]
    parts: tuple[PartCall, ...]
    made: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The numbers of the values that leave, as a compiled call numbers them."""
        return tuple(len(self.inputs) + self.made.index(name) for name in self.outputs)


def _form(graph: OperatorGraph, group: Sequence[Operator]) -> _Form:
    inside = {graph.index_by_name[operator.name] for operator in group}
    made = tuple(name for operator in group for name in operator.outputs)
    inputs = tuple(
        dict.fromkeys(name for operator in group for name in operator.inputs if name not in set(made))
    )
    numbers = {name: number for number, name in enumerate((*inputs, *made))}
    lasting = {graph.loss, *(value for _, value in graph.buffer_updates)}
    parts = []
    for operator in group:
        values = [graph.value_by_name[name] for name in operator.outputs]
        call = LocalCall(
            operator.target,
            operator.arguments,
            graph.input_specs(operator),
            graph.output_specs(operator),
            local_gradients(graph, operator),
        )
        constants = tuple(
            position
            for position, value in enumerate(values)
            if not value.requires_gradient and value.spec.dtype in FLOATING
        )
        parts.append(PartCall(call, tuple(numbers[name] for name in operator.inputs), constants))
    return _Form(
        inputs,
        tuple(parts),
        made,
        tuple(
            name
            for name in made
            if name in lasting or any(reader not in inside for reader, _ in graph.consumers[name])
        ),
    )


def _splits_along_batch(graph: OperatorGraph, group: Sequence[Operator]) -> bool:
    """Return whether a group can be split at all, and along the batch wherever each of its operators can."""
    form = _form(graph, group)
    if not form.outputs:
        return False
    inputs = [graph.value_by_name[name].spec for name in form.inputs]
    fused = fusion(form.parts, inputs, form.results)
    numbers = {name: number for number, name in enumerate((*form.inputs, *form.made))}
    return bool(fused.axes) and all(
        fused.dims[numbers[name]][dim] is not None
        for operator in group
        for name, dim in _dims_of_batch(operator)
    )


def _dims_of_batch(operator: Operator) -> Iterator[tuple[str, int]]:
    """Yield the dims of an operator's values along which samples lie."""
    space = operator.space

    def samples(operand: OperandMap) -> Iterator[int]:
        for dim, factors in enumerate(operand):
            axes = [space.axes[factor.axis] for factor in factors if factor.axis is not None]
            if any(axis.kind is AxisKind.SAMPLE for axis in axes):
                yield dim

    for names, operands in ((operator.inputs, space.inputs), (operator.outputs, space.outputs)):
        for name, operand in zip(names, operands, strict=True):
            for dim in samples(operand):
                yield name, dim


class _Grouping:
    """Groups that grow in the order of the graph, so that with each as one operator it still has an order.

    Sets of operators are bits of whole numbers.
    """

    def __init__(self, graph: OperatorGraph) -> None:
        self._graph = graph
        self.groups: list[list[int]] = []
        self._group_of: dict[int, int] = {}
        # For each operator: those that come before it, where all of a group come before what reads one of them.
        self._before: list[int] = []

    def add(self, index: int, *, joins: bool, starts: bool) -> None:
        """Take in the next operator: have it start a group, and join those that it reads from.

        One that starts none joins one group alone.
        """
        producers = self._producers(index)
        before = 0
        for producer in producers:
            before |= self._before[producer] | 1 << producer
        self._before.append(before)
        groups = {self._group_of[producer] for producer in producers if producer in self._group_of}
        own = [index]
        for group in sorted(groups, reverse=True) if joins else ():
            if self._is_joined(group, own):
                own = self.groups[group] = sorted((*self.groups[group], *own))
                self._close(own, group)
                if not starts:
                    break
        if starts and len(own) == 1:
            self._group_of[index] = len(self.groups)
            self.groups.append(own)

    def _producers(self, index: int) -> set[int]:
        operator = self._graph.operators[index]
        return {self._graph.producer[name][0] for name in operator.inputs if name in self._graph.producer}

    def _is_joined(self, group: int, own: Sequence[int]) -> bool:
        """Return whether operators that read from a group can be of it: no way from one to another leads outside."""
        together = sorted((*self.groups[group], *own))
        mask = _bits(together)
        outside = {producer for index in together for producer in self._producers(index)}.difference(together)
        around = any(self._before[producer] & mask for producer in outside)
        return not around and _splits_along_batch(self._graph, self._operators(together))

    def _close(self, members: Sequence[int], group: int) -> None:
        """Make operators one group, of which all come before what reads one of them."""
        before = 0
        for member in members:
            before |= self._before[member]
            left = self._group_of.get(member, group)
            if left != group:
                self.groups[left] = []
            self._group_of[member] = group
        mask = _bits(members)
        for other, earlier in enumerate(self._before):
            if mask >> other & 1:
                self._before[other] = before
            elif earlier & mask:
                self._before[other] |= before | mask

    def _operators(self, members: Sequence[int]) -> tuple[Operator, ...]:
        return tuple(self._graph.operators[index] for index in members)

    def found(self) -> list[tuple[Operator, ...]]:
        """Return the groups of two operators or more."""
        return [self._operators(members) for members in self.groups if len(members) > 1]


def _bits(members: Sequence[int]) -> int:
    return sum(1 << index for index in members)


def _pointwise_groups(graph: OperatorGraph) -> list[tuple[Operator, ...]]:
    """Return the groups of pointwise operators and normalizations that have a backward."""
    grouping = _Grouping(graph)
    for index, operator in enumerate(graph.operators):
        fusible = operator.target in _POINTWISE | _NORMALIZATIONS and graph.has_backward(operator)
        grouping.add(index, joins=fusible, starts=fusible)
    return grouping.found()


def _products_with_activations(graph: OperatorGraph) -> list[tuple[Operator, ...]]:
    """Return each product with the pointwise operators behind it, if these alone read it."""
    grouping = _Grouping(graph)
    for index, operator in enumerate(graph.operators):
        differentiated = graph.has_backward(operator)
        grouping.add(
            index,
            joins=operator.target in _POINTWISE and differentiated,
            starts=operator.target in _PRODUCTS and differentiated,
        )
    return [group for group in grouping.found() if group[0].outputs[0] not in _form(graph, group).outputs]


def _fused(
    builder: GraphBuilder, graph: OperatorGraph, operators: Sequence[Operator]
) -> tuple[DraftOperator]:
    form = _form(graph, operators)
    call = compiled_call([builder.spec(name) for name in form.inputs], form.parts, form.results)
    name = "+".join(operator.name for operator in operators)
    return (DraftOperator(name, FUSED, call.arguments, form.inputs, form.outputs),)


FUSING: Mapping[str, RewritingRule] = {
    "fuse-pointwise": RewritingRule(
        "all of a group of pointwise operators and normalizations that read each other's values",
        ("relu(add(x, y))", "relu(add(x, y))"),
        _pointwise_groups,
        _fused,
    ),
    "fuse-linear-activation": RewritingRule(
        "a linear layer, convolution or product with all pointwise operators behind it, which alone read it",
        ("relu(linear(x, w, b))", "linear_relu(x, w, b)"),
        _products_with_activations,
        _fused,
    ),
}
"""By name; whoever applies them needs a compiler where they are executed."""
