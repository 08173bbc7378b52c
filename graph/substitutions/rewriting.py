"""Rewrites a graph by substitutions: where a rule matches, and the graph after it.

Operators that stay keep their names, and so do values that stay: what a rewritten graph's step trains and renews is
what the module holds, under its own names.

Source: TASO (SOSP 2019), Unity (OSDI 2022) section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graph.errors import StrategyError
from graph.importing.building import DraftOperator, DraftValue, GraphBuilder
from graph.importing.finishing import finished
from graph.operators import Operator, OperatorGraph, ValueKind
from graph.substitutions.fusing import FUSING
from graph.substitutions.merging import MERGING
from graph.substitutions.reordering import REORDERING
from graph.substitutions.rewriting_rule import RewritingRule
from graph.substitutions.splitting import SPLITTING
from graph.substitutions.substitution import Substitution
from graph.substitutions.translation import SAME
from graph.texts import meant, shown

RULES: Mapping[str, RewritingRule] = {**MERGING, **REORDERING, **SPLITTING, **FUSING}
"""By name, in the order in which `every_substitution` applies them."""

WITHOUT_COMPILER = tuple(name for name in RULES if name not in FUSING)
"""The rules whose operators are executed as they are, which takes no compiler."""
WITH_COMPILER = tuple(FUSING)


def matches(graph: OperatorGraph, rules: Sequence[str] = WITHOUT_COMPILER) -> tuple[Substitution, ...]:
    """Return all substitutions by some rules that a graph allows, each with as many operators as can be.

    Some may exclude others.
    """
    return tuple(
        Substitution(name, tuple(operator.name for operator in group))
        for name in rules
        for group in RULES[name].matches(graph)
    )


def needs_compiler(substitutions: Iterable[Substitution]) -> bool:
    """Return whether some of the operators that substitutions make are compiled where they are executed."""
    return any(substitution.rule in FUSING for substitution in substitutions)


def compatible(graph: OperatorGraph, substitutions: Iterable[Substitution]) -> bool:
    """Return whether matches of a graph can be applied together: none takes an operator that another one has.

    Nor may one wait for what comes after another that waits for it.
    """
    try:
        _applied(graph, tuple(substitutions))
    except StrategyError:
        return False
    return True


def every_substitution(
    graph: OperatorGraph, rules: Sequence[str] = WITHOUT_COMPILER
) -> tuple[Substitution, ...]:
    """Return as many substitutions by some rules as can be applied to a graph together, in the order of the rules."""
    disjoint: list[Substitution] = []
    taken: set[str] = set()
    for substitution in matches(graph, rules):
        if taken.isdisjoint(substitution.operators):
            disjoint.append(substitution)
            taken.update(substitution.operators)
    if compatible(graph, disjoint):
        return tuple(disjoint)
    chosen: list[Substitution] = []
    for substitution in disjoint:
        if compatible(graph, [*chosen, substitution]):
            chosen.append(substitution)
    return tuple(chosen)


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
    return finished(
        _applied(graph, substitutions),
        inputs=graph.inputs,
        loss=graph.loss,
        updates=graph.buffer_updates,
        aliases=graph.aliases,
        batch_norm=graph.batch_norm,
        substitutions=tuple(sorted(substitutions)),
        made_as_imported=tuple(value.name for value in graph.values if value.kind is ValueKind.OPERATOR),
    )


def _applied(graph: OperatorGraph, substitutions: Sequence[Substitution]) -> GraphBuilder:
    """Return the operators and values of a graph with substitutions applied.

    Raises:
        StrategyError: as `rewritten`.
    """
    found = {
        name: [frozenset(group) for group in _names(RULES[name].matches(graph))]
        for name in {substitution.rule for substitution in substitutions}.intersection(RULES)
    }
    builder = GraphBuilder(
        graph.name,
        {value.name: DraftValue(value.spec, value.kind, value.requires_gradient) for value in graph.values},
    )
    taken: set[str] = set()
    # What stands in place of some stands, if nothing asks for more, where the first of them was.
    drafts: list[tuple[int, DraftOperator]] = []
    for substitution in substitutions:
        operators = _operators(graph, substitution, found)
        for operator in operators:
            if operator.name in taken:
                raise StrategyError(
                    f"substitution {substitution.text}: {operator.name} is in another one already, must be in one "
                    "alone; correct the strategy"
                )
            taken.add(operator.name)
        place = graph.index_by_name[operators[0].name]
        drafts += [(place, draft) for draft in RULES[substitution.rule].rewrite(builder, graph, operators)]
    drafts += [
        (
            index,
            DraftOperator(
                operator.name, operator.target, operator.arguments, operator.inputs, operator.outputs
            ),
        )
        for index, operator in enumerate(graph.operators)
        if operator.name not in taken
    ]
    builder.operators = _ordered(_without_same(sorted(drafts, key=lambda draft: draft[0])))
    made = {value for draft in builder.operators for value in draft.outputs}
    builder.values = {
        name: value
        for name, value in builder.values.items()
        if value.kind is not ValueKind.OPERATOR or name in made
    }
    return builder


def _without_same(drafts: Sequence[tuple[int, DraftOperator]]) -> list[tuple[int, DraftOperator]]:
    """Return operators without those whose output is their input: readers of the one read the other."""
    same = {draft.outputs[0]: draft.inputs[0] for _, draft in drafts if draft.target == SAME}

    def source(name: str) -> str:
        while name in same:
            name = same[name]
        return name

    return [
        (place, replace(draft, inputs=tuple(map(source, draft.inputs))))
        for place, draft in drafts
        if draft.target != SAME
    ]


def _ordered(drafts: Sequence[tuple[int, DraftOperator]]) -> list[DraftOperator]:
    """Return operators, each after those whose values it reads, and else by their places.

    Raises:
        StrategyError: some wait for each other.
    """
    producer = {value: number for number, (_, draft) in enumerate(drafts) for value in draft.outputs}
    waits: list[set[int]] = [
        {producer[value] for value in draft.inputs if value in producer} for _, draft in drafts
    ]
    readers: list[list[int]] = [[] for _ in drafts]
    for number, before in enumerate(waits):
        for other in before:
            readers[other].append(number)
    ready = [number for number, before in enumerate(waits) if not before]
    heapq.heapify(ready)
    ordered = []
    while ready:
        number = heapq.heappop(ready)
        ordered.append(drafts[number][1])
        for reader in readers[number]:
            waits[reader].discard(number)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(drafts):
        stuck = next(draft.name for (_, draft), before in zip(drafts, waits, strict=True) if before)
        raise StrategyError(
            f"substitutions: {stuck} waits for itself once all are applied, must not; leave one of them out"
        )
    return ordered


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
            f"substitution {shown(substitution.rule)}: is unknown, must be one of {', '.join(MERGING)} or a rule of "
            "the file with rules; "
            f"{meant(substitution.rule, tuple(RULES), 'correct the strategy')}"
        )
    names = frozenset(substitution.operators)
    for name in substitution.operators:
        if name not in graph.operator_by_name:
            raise StrategyError(
                f"substitution {substitution.rule}: operator {shown(name)} is unknown, must be of {graph.name}; see "
                "app models show"
            )
    rule = RULES[substitution.rule]
    groups = found[substitution.rule]
    part = rule.divisible and len(names) > 1 and any(names < group for group in groups)
    if not part and names not in groups:
        raise StrategyError(
            f"substitution {substitution.text}: these operators are no match, must be {rule.wanted}; see app models "
            "show --substitutions"
        )
    return sorted(
        (graph.operator_by_name[name] for name in names), key=lambda one: graph.index_by_name[one.name]
    )
