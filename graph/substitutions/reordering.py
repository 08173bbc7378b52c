"""Proven rules, applied to networks' graphs: operators in another order, of other shapes, or none.

Which rules are offered, and in which direction, the rule file says (`scripts/substitutions/offering.py`): those that
can make a graph cheaper and do not follow from others. A match is one only where it makes this graph cheaper: no more
operators, operations or bytes, and fewer of one of them.

Source: TASO (SOSP 2019) sections 2 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, permutations

from graph.calls import LocalCall
from graph.importing.building import DraftOperator, DraftValue, GraphBuilder
from graph.operators import FLOATING, Operator, OperatorGraph
from graph.rules import backward_flops, bytes_moved, flops
from graph.substitutions.building import TermBuilder
from graph.substitutions.rewriting_rule import RewritingRule
from graph.substitutions.rules import Rule, offered_rules
from graph.substitutions.terms import VARIABLE, Term, type_of
from graph.substitutions.translation import SAME, AnyOperator, ProducedValues, Reading, SymbolMeaning
from graph.substitutions.types import TensorType

_CACHE = "substitutions.reordering"
Cost = tuple[int, float, int]
Extents = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Match:
    """What a rule's variables, symbols and extents stand for, and the operators that are its source."""

    readings: Mapping[str, Reading] = field(default_factory=dict)
    symbols: Mapping[str, SymbolMeaning] = field(default_factory=dict)
    extents: Extents = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule in one direction."""

    rule: Rule
    source: tuple[Term, ...]
    target: tuple[Term, ...]

    @property
    def text(self) -> str:
        """The direction in words."""
        return f"{' ; '.join(map(str, self.source))} = {' ; '.join(map(str, self.target))}"


@cache
def directions() -> Mapping[str, Applied]:
    """Return the directions that are offered, by their names: that of the rule, with "-back" for the backward one."""
    found = {}
    for rule, direction in offered_rules():
        forwards = direction == "forwards"
        sides = (rule.source, rule.target) if forwards else (rule.target, rule.source)
        found[rule.name if forwards else f"{rule.name}-back"] = Applied(rule, *sides)
    return found


def _bound(network: ProducedValues, term: Term, reading: Reading, match: Match) -> Iterator[Match]:
    """Iterate over the matches by which what is read is the value of `term`."""
    if term.kind == VARIABLE:
        if match.readings.get(term.name, reading) == reading:
            yield replace(match, readings={**match.readings, term.name: reading})
        return
    for step in network.steps(term, reading):
        key = f"{term.kind}{list(term.attributes)}" if term.kind == "scale" else term.kind
        if step.symbol is not None and match.symbols.get(key, step.symbol) != step.symbol:
            continue
        if any(match.extents.get(name, sizes) != sizes for name, sizes in step.extents):
            continue
        after = replace(
            match,
            symbols=match.symbols if step.symbol is None else {**match.symbols, key: step.symbol},
            extents={**match.extents, **dict(step.extents)},
            operators=match.operators | step.operators,
        )
        found = [after]
        for operand, read in zip(term.operands, step.operands, strict=True):
            found = [more for one in found for more in _bound(network, operand, read, one)]
        yield from found


def _layouts(rank: int, dims: int) -> Iterator[tuple[int, ...]]:
    """Iterate over the layouts of a tensor of `rank` dims, read as a term of `dims`."""
    for cuts in combinations(range(1, rank + 1), dims):
        if cuts[-1] != rank:
            continue
        starts = (0, *cuts[:-1])
        sizes = [stop - start for start, stop in zip(starts, cuts, strict=True)]
        for batch in range(sizes[0]):
            yield (batch, sizes[0] - batch, *sizes[1:])


def _matches_at(network: ProducedValues, rule: Applied, roots: Sequence[str]) -> Iterator[Match]:
    """Iterate over the matches of a rule whose outputs are `roots`, in this order."""
    types = rule.rule.types
    root_dims = [len(type_of(term, types).dims) for term in rule.source]
    found = [Match(roots=tuple(roots))]
    for term, name, dims in zip(rule.source, roots, root_dims, strict=True):
        found = [
            after
            for before in found
            for layout in _layouts(len(network.specs[name].shape), dims)
            for after in _bound(network, term, Reading((name,), layout), before)
        ]
    for match in found:
        read = {name for reading in match.readings.values() for name in reading.names}
        if any(not read.isdisjoint(network.operators[name].outputs) for name in match.operators):
            continue  # what the operators read is there after them, what they make between them is not
        batches = {reading.layout[0] for reading in match.readings.values()}
        dtypes = {network.specs[name].dtype for name in (*read, *roots)}
        extents = _fitted(network, match, types)
        if extents is not None and len(batches) == 1 and len(dtypes) == 1 and dtypes <= FLOATING:
            yield replace(match, extents=extents)


def _fitted(network: ProducedValues, match: Match, types: Mapping[str, TensorType]) -> Extents | None:
    """Return what all extents stand for; None where a value is not of its variable's type."""
    extents = dict(match.extents)
    waiting = [
        (dim, sizes)
        for name, reading in match.readings.items()
        for dim, sizes in zip(types[name].dims, network.blocks(reading), strict=True)
    ]
    while waiting:
        rest = []
        for dim, sizes in waiting:
            unknown = [piece.name for piece in dim.pieces if piece.name not in extents]
            if any(piece.kind != "atom" for piece in dim.pieces):
                # A product is of the dims that a view puts together, whatever they are.
                if extents.setdefault(str(dim), sizes) != sizes:
                    return None
            elif len(unknown) > 1:
                rest.append((dim, sizes))
            else:
                known = [extents[piece.name] for piece in dim.pieces if piece.name in extents]
                if any(one[1:] != sizes[1:] for one in known):
                    return None
                remainder = sizes[0] - sum(one[0] for one in known)
                if (remainder > 0) != bool(unknown) or remainder < 0:
                    return None
                if unknown:
                    extents[unknown[0]] = (remainder, *sizes[1:])
        if len(rest) == len(waiting):
            return None
        waiting = rest
    return extents


def _cost(nodes: Sequence[AnyOperator], values: Mapping[str, DraftValue]) -> Cost:
    """Return operators, operations forward and backward, and the bytes of the forward."""
    operations, moved = 0.0, 0
    nodes = [node for node in nodes if node.target != SAME]
    for node in nodes:
        differentiated = any(values[name].requires_gradient for name in node.outputs)
        call = LocalCall(
            node.target,
            node.arguments,
            tuple(values[name].spec for name in node.inputs),
            tuple(values[name].spec for name in node.outputs),
            tuple(differentiated and values[name].requires_gradient for name in node.inputs),
        )
        operations += flops(call) + backward_flops(call)
        moved += bytes_moved(call)
    return len(nodes), operations, moved


def _built(
    rule: Applied, match: Match, network: ProducedValues, builder: GraphBuilder
) -> list[DraftOperator] | None:
    """Return the operators of the rule's other side; None where they make values of other shapes."""
    name = "+".join(operator for operator in network.operators if operator in match.operators)
    terms = TermBuilder(builder, name, match.readings, match.symbols, match.extents)
    return terms.operators(rule.target, match.roots)


def _is_closed(graph: OperatorGraph, match: Match, kept: frozenset[str]) -> bool:
    """Return whether all outputs that nobody but the match's operators may miss stay: those that others read."""
    if kept.intersection(match.roots):
        return False
    index = graph.index_by_name
    for name in match.operators:
        for output in graph.operator_by_name[name].outputs:
            readers = {graph.operators[reader].name for reader, _ in graph.consumers[output]}
            if output not in match.roots and (output in kept or not readers <= match.operators):
                return False
    if len(match.roots) == 1:
        return True
    first = min(map(index.__getitem__, match.operators))
    return all(
        graph.producer.get(name, (-1, 0))[0] < first
        for reading in match.readings.values()
        for name in reading.names
    )


def _roots(graph: OperatorGraph, network: ProducedValues, rule: Applied) -> Iterator[tuple[str, ...]]:
    """Iterate over values that may be the outputs of a rule's source; of two, the second is made beside the first."""
    for operator in graph.operators:
        for output in operator.outputs:
            if not network.may_be(rule.source[0], output):
                continue
            if len(rule.source) == 1:
                yield (output,)
                continue
            beside = [operator] + [
                graph.operators[reader] for name in operator.inputs for reader, _ in graph.consumers[name]
            ]
            others = dict.fromkeys(name for other in beside for name in other.outputs)
            yield from (
                (output, other)
                for other in others
                if other != output and network.may_be(rule.source[1], other)
            )


def _cheaper(
    rule: Applied, match: Match, network: ProducedValues, values: Mapping[str, DraftValue]
) -> Cost | None:
    """Return what the rule's other side costs here; None where it is not cheaper, or cannot be built."""
    builder = GraphBuilder("", dict(values))
    drafts = _built(rule, match, network, builder)
    if drafts is None:
        return None
    before = _cost([network.operators[name] for name in match.operators], values)
    after = _cost(drafts, builder.values)
    dominated = all(new <= old for new, old in zip(after, before, strict=True))
    return after if dominated and after != before else None


def _found(graph: OperatorGraph) -> dict[str, list[tuple[Operator, ...]]]:
    """Return the groups of operators that each rule can be applied to, by name; none in two of one rule."""
    cached: dict[str, list[tuple[Operator, ...]]] | None = graph._cache.get(_CACHE)
    if cached is not None:
        return cached
    network = ProducedValues(iter(graph.operators), {value.name: value.spec for value in graph.values})
    values = {
        value.name: DraftValue(value.spec, value.kind, value.requires_gradient) for value in graph.values
    }
    kept = frozenset(
        (
            graph.loss,
            *(name for _, name in graph.buffer_updates),
            *(name for pair in graph.aliases for name in pair),
        )
    )
    best: dict[frozenset[str], tuple[Cost, str]] = {}
    for name, rule in directions().items():
        for roots in _roots(graph, network, rule):
            for match in _matches_at(network, rule, roots):
                if not _is_closed(graph, match, kept):
                    continue
                after = _cheaper(rule, match, network, values)
                if after is None:
                    continue
                if (after, name) < best.get(match.operators, (after, "~")):
                    best[match.operators] = after, name
                break
    found: dict[str, list[tuple[Operator, ...]]] = {name: [] for name in directions()}
    taken: dict[str, set[str]] = {name: set() for name in directions()}
    index = graph.index_by_name
    for operators, (_, name) in sorted(
        best.items(), key=lambda item: sorted(map(index.__getitem__, item[0]))
    ):
        if taken[name].isdisjoint(operators):
            taken[name] |= operators
            ordered = sorted(operators, key=index.__getitem__)
            found[name].append(tuple(graph.operator_by_name[one] for one in ordered))
    graph._cache[_CACHE] = found
    return found


def _rule(name: str) -> RewritingRule:
    """Return a direction as a rule that rewrites networks' graphs."""
    rule = directions()[name]

    def matches(graph: OperatorGraph) -> list[tuple[Operator, ...]]:
        return _found(graph)[name]

    def rewrite(
        builder: GraphBuilder, _graph: OperatorGraph, operators: Sequence[Operator]
    ) -> list[DraftOperator]:
        network = ProducedValues(
            iter(operators), {name: value.spec for name, value in builder.values.items()}
        )
        read = {name for operator in operators for name in operator.inputs}
        wanted = frozenset(operator.name for operator in operators)
        outputs = sorted((name for operator in operators for name in operator.outputs), key=read.__contains__)
        for roots in permutations(outputs, len(rule.source)):
            for match in _matches_at(network, rule, roots):
                if match.operators == wanted and _cheaper(rule, match, network, builder.values):
                    drafts = _built(rule, match, network, builder)
                    if drafts is not None:
                        return drafts
        raise AssertionError(f"rule {name}: matches {', '.join(sorted(wanted))} no more")

    return RewritingRule(f"operators of the form {rule.text}", _sides(rule), matches, rewrite)


def _sides(rule: Applied) -> tuple[str, str]:
    return " ; ".join(map(str, rule.source)), " ; ".join(map(str, rule.target))


REORDERING: Mapping[str, RewritingRule] = {name: _rule(name) for name in directions()}
"""By name, all directions that are offered."""
