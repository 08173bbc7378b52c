"""Rewrites a graph by substitutions: where a rule matches, and the graph after it.

Operators that stay keep their names, and so do all values: what a rewritten graph's step trains and renews is what the
module holds, under its own names.

Source: TASO (SOSP 2019), Unity (OSDI 2022) section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graph.errors import StrategyError
from graph.importing.building import DraftOperator, DraftValue, GraphBuilder
from graph.importing.finishing import finished
from graph.operators import Argument, Operator, OperatorGraph, Slot, ValueKind
from graph.rules.merged import MERGED
from graph.substitutions.substitution import Substitution
from graph.texts import meant, shown

MOST_SUBSTITUTIONS = 10_000
"""Of one graph, as many as any has operators to merge."""


@dataclass(frozen=True, slots=True)
class RewritingRule:
    """A rule: `matches` returns the groups of operators that it can be applied to, each as large as can be.

    A part of a group, of two operators or more, is a match too. `rewrite` returns the operator in place of a group's.
    `sides`: the proven rule that it rests on, for two operators (`graph.substitutions.rules`).
    """

    sides: tuple[str, str]
    matches: Callable[[OperatorGraph], list[tuple[Operator, ...]]]
    rewrite: Callable[[Sequence[Operator]], DraftOperator]


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


def _merged(operators: Sequence[Operator]) -> DraftOperator:
    first = operators[0]
    count = len(operators)
    biased = len(first.inputs) > 2
    own: Mapping[str, tuple[str, Argument]] = {
        "input": ("input", Slot(0)),
        "weight": ("weights", tuple(Slot(1 + index) for index in range(count))),
        "bias": ("biases", tuple(Slot(1 + count + index) for index in range(count * biased))),
    }
    return DraftOperator(
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


RULES: Mapping[str, RewritingRule] = {
    "merge-linears": RewritingRule(
        (
            "matmul(x, w) ; matmul(x, v)",
            "split[1,0,o](matmul(x, concat[1](w, v))) ; split[1,1,o](matmul(x, concat[1](w, v)))",
        ),
        _mergeable(frozenset({"aten.linear.default"})),
        _merged,
    ),
    "merge-convolutions": RewritingRule(
        (
            "conv(x, w) ; conv(x, u)",
            "split[1,0,o](conv(x, concat[0](w, u))) ; split[1,1,o](conv(x, concat[0](w, u)))",
        ),
        _mergeable(frozenset(MERGED) - frozenset({"aten.linear.default"})),
        _merged,
    ),
}


def matches(graph: OperatorGraph) -> tuple[Substitution, ...]:
    """Return all substitutions that a graph allows, each with as many operators as can be; they do not overlap."""
    return tuple(
        Substitution(name, tuple(operator.name for operator in group))
        for name, rule in RULES.items()
        for group in rule.matches(graph)
    )


def rewritten(graph: OperatorGraph, substitutions: Sequence[Substitution]) -> OperatorGraph:
    """Return a graph with substitutions applied, as if it had been imported so.

    Args:
        graph: as imported.
        substitutions: of which each names operators of it.

    Raises:
        StrategyError: a rule is unknown, or cannot be applied to the operators that are named.
    """
    if not substitutions:
        return graph
    found = {
        name: [frozenset(group) for group in _names(rule.matches(graph))] for name, rule in RULES.items()
    }
    taken: dict[str, DraftOperator] = {}
    firsts: set[str] = set()
    for substitution in substitutions:
        operators = _operators(graph, substitution, found)
        for operator in operators:
            if operator.name in taken:
                raise StrategyError(
                    f"substitution {substitution.text}: {operator.name} is in another one already, must be in one "
                    "alone; correct the strategy"
                )
        merged = RULES[substitution.rule].rewrite(operators)
        firsts.add(operators[0].name)
        taken.update((operator.name, merged) for operator in operators)
    builder = GraphBuilder(
        graph.name,
        {value.name: DraftValue(value.spec, value.kind, value.requires_gradient) for value in graph.values},
    )
    for operator in graph.operators:
        if operator.name not in taken:
            builder.operators.append(
                DraftOperator(
                    operator.name, operator.target, operator.arguments, operator.inputs, operator.outputs
                )
            )
        elif operator.name in firsts:
            # Its input and the weights of all are there.
            builder.operators.append(taken[operator.name])
    return finished(
        builder,
        inputs=graph.inputs,
        loss=graph.loss,
        updates=graph.buffer_updates,
        aliases=graph.aliases,
        batch_norm=graph.batch_norm,
        substitutions=tuple(sorted(substitutions)),
    )


def _names(groups: Sequence[Sequence[Operator]]) -> list[list[str]]:
    return [[operator.name for operator in group] for group in groups]


def _operators(
    graph: OperatorGraph, substitution: Substitution, found: Mapping[str, Sequence[frozenset[str]]]
) -> list[Operator]:
    """Return the operators of a substitution, in the graph's order.

    Raises:
        StrategyError: it is no match of a rule that there is.
    """
    if substitution.rule not in RULES:
        raise StrategyError(
            f"substitution {shown(substitution.rule)}: is unknown, must be one of {', '.join(RULES)}; "
            f"{meant(substitution.rule, tuple(RULES), 'correct the strategy')}"
        )
    names = frozenset(substitution.operators)
    for name in substitution.operators:
        if name not in graph.operator_by_name:
            raise StrategyError(
                f"substitution {substitution.rule}: operator {shown(name)} is unknown, must be of {graph.name}; see "
                "app models show"
            )
    if len(names) < 2 or not any(names <= group for group in found[substitution.rule]):
        raise StrategyError(
            f"substitution {substitution.text}: these operators are no match, must be two or more of one type, alike "
            "but for their channels, with the same input; see app models show --substitutions"
        )
    return sorted(
        (graph.operator_by_name[name] for name in names), key=lambda one: graph.index_by_name[one.name]
    )
