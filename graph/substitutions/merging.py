"""Rules that merge: linear layers, or convolutions, of one input become one operator with their weights joined.

Source: TASO (SOSP 2019) section 2; the operator that stands in their place: `graph.rules.merged`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from graph.importing.building import DraftOperator, GraphBuilder
from graph.operators import Argument, Operator, OperatorGraph, Slot, ValueKind
from graph.rules.merged import MERGED
from graph.substitutions.rewriting_rule import RewritingRule


def _mergeable(targets: frozenset[str]) -> Callable[[OperatorGraph], list[tuple[Operator, ...]]]:
    """Return the groups of operators of some types that read the same input, alike but for their channels."""

    def matches(graph: OperatorGraph) -> list[tuple[Operator, ...]]:
        groups: dict[object, list[Operator]] = {}
        for operator in graph.operators:
            if operator.target in targets and (form := _form(graph, operator)) is not None:
                groups.setdefault(form, []).append(operator)
        return [tuple(group) for group in groups.values() if len(group) > 1]

    return matches


def _form(graph: OperatorGraph, operator: Operator) -> object:
    """Return the properties that operators must have in common to be merged; None of an operator that cannot be.

    Its weight and bias are there before the step, whole, each with an element for each channel, and read by it alone.
    """
    arguments = dict(operator.arguments)
    if arguments.get("groups", 1) != 1 or operator.inputs[0] in operator.inputs[1:]:
        return None
    own = operator.inputs[1:]
    if any(
        graph.value_by_name[name].kind is ValueKind.OPERATOR or len(graph.consumers[name]) > 1 for name in own
    ):
        return None
    weight, *biases = (graph.value_by_name[name] for name in own)
    others = tuple(
        (name, value) for name, value in operator.arguments if name not in ("input", "weight", "bias")
    )
    return (
        operator.target,
        operator.inputs[0],
        others,
        weight.spec.shape[1:],
        *[(value.spec.dtype, value.requires_gradient) for value in (weight, *biases)],
    )


def _merged(
    _builder: GraphBuilder, _graph: OperatorGraph, operators: Sequence[Operator]
) -> tuple[DraftOperator]:
    first = operators[0]
    count = len(operators)
    biased = len(first.inputs) > 2
    own: Mapping[str, tuple[str, Argument]] = {
        "input": ("input", Slot(0)),
        "weight": ("weights", tuple(Slot(1 + index) for index in range(count))),
        "bias": ("biases", tuple(Slot(1 + count + index) for index in range(count * biased))),
    }
    merged = DraftOperator(
        "+".join(operator.name for operator in operators),
        MERGED[first.target],
        tuple(own.get(name, (name, value)) for name, value in first.arguments),
        (
            first.inputs[0],
            *[operator.inputs[1] for operator in operators],
            *[operator.inputs[2] for operator in operators if biased],
        ),
        tuple(operator.outputs[0] for operator in operators),
    )
    return (merged,)


_ALIKE = "two or more of one type, alike but for their channels, with the same input"
MERGING: Mapping[str, RewritingRule] = {
    "merge-linears": RewritingRule(
        _ALIKE,
        (
            "matmul(x, w) ; matmul(x, v)",
            "split[1,0,o](matmul(x, concat[1](w, v))) ; split[1,1,o](matmul(x, concat[1](w, v)))",
        ),
        _mergeable(frozenset({"aten.linear.default"})),
        _merged,
        divisible=True,
    ),
    "merge-convolutions": RewritingRule(
        _ALIKE,
        (
            "conv(x, w) ; conv(x, u)",
            "split[1,0,o](conv(x, concat[0](w, u))) ; split[1,1,o](conv(x, concat[0](w, u)))",
        ),
        _mergeable(frozenset(MERGED) - frozenset({"aten.linear.default"})),
        _merged,
        divisible=True,
    ),
}
