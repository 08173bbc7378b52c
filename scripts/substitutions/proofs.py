"""Proves rules by Z3 from instances of the properties of operators.

Operators are uninterpreted functions, one for each kind, attributes and type of operands. Instances are the well-typed
ones that rewriting reaches from both sides of a rule, a bounded number of them; they have no quantifiers, so Z3 decides
at once whether the sides are equal, and which instances suffice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import z3

from graph.substitutions.terms import VARIABLE, Attribute, Term, subterms, type_of
from graph.substitutions.types import IllTypedTerm, TensorType
from scripts.substitutions.properties import PROPERTIES, Property
from scripts.substitutions.terms import substitute, variables

TERMS = 150
"""Terms that are rewritten, of each side: proofs of the packaged rules need far fewer."""

Types = Mapping[str, TensorType]
Instance = tuple[str, Term, Term]


def _match(pattern: Term, term: Term, bound: dict[str, Term], named: dict[str, Attribute]) -> bool:
    if pattern.kind == VARIABLE:
        return bound.setdefault(pattern.name, term) == term
    if pattern.kind != term.kind:
        return False
    for wanted, given in zip(pattern.attributes, term.attributes, strict=True):
        if wanted != given if isinstance(wanted, int) else named.setdefault(wanted, given) != given:
            return False
    return all(
        _match(inner, operand, bound, named)
        for inner, operand in zip(pattern.operands, term.operands, strict=True)
    )


def _filled(pattern: Term, bound: Mapping[str, Term], named: Mapping[str, Attribute]) -> Term:
    if pattern.kind == VARIABLE:
        return bound[pattern.name]
    attributes = tuple(value if isinstance(value, int) else named[value] for value in pattern.attributes)
    return Term(pattern.kind, attributes, tuple(_filled(part, bound, named) for part in pattern.operands))


def _names(pattern: Term) -> set[Attribute]:
    return {value for part in subterms(pattern) if part.kind != VARIABLE for value in part.attributes}


_DIRECTED: dict[str, list[tuple[Property, Term, Term]]] = {}
for _one in PROPERTIES:
    for _from, _to in ((_one.left, _one.right), (_one.right, _one.left)):
        unbound = {name for name in _names(_to) - _names(_from) if isinstance(name, str)}
        if _from.kind != VARIABLE and set(variables(_to)) <= set(variables(_from)) and not unbound:
            _DIRECTED.setdefault(_from.kind, []).append((_one, _from, _to))


def instances(term: Term, types: Types, memo: dict[Term, TensorType]) -> Iterator[tuple[str, Term]]:
    """Iterate over the terms that one property makes of `term` at its root."""
    for rule, left, right in _DIRECTED.get(term.kind, ()):
        bound: dict[str, Term] = {}
        named: dict[str, Attribute] = {}
        if not _match(left, term, bound, named):
            continue
        other = _filled(right, bound, named)
        try:
            equal = type_of(other, types, memo) == type_of(term, types, memo)
        except IllTypedTerm:
            continue
        if equal and other != term:
            yield rule.name, other


def reachable(start: Term, types: Types, limit: int = TERMS) -> set[Instance]:
    """Return the instances by which up to `limit` terms are reached from `start`."""
    memo: dict[Term, TensorType] = {}
    seen, queue, found = {start}, [start], set()
    for term in queue:
        if len(seen) >= limit:
            break
        for part in dict.fromkeys(subterms(term)):
            for name, other in instances(part, types, memo):
                found.add((name, part, other))
                whole = substitute(term, {part: other})
                if whole not in seen:
                    try:
                        type_of(whole, types, memo)
                    except IllTypedTerm:
                        continue
                    seen.add(whole)
                    queue.append(whole)
    return found


def prove(source: Term, target: Term, types: Types, limit: int = TERMS) -> list[str] | None:
    """Return the names of the properties from which `source` is `target`, or None where Z3 has no proof."""
    memo: dict[Term, TensorType] = {}
    if type_of(source, types, memo) != type_of(target, types, memo):
        return None
    known = reachable(source, types, limit) | reachable(target, types, limit)
    context = z3.Context()
    solver = z3.SolverFor("QF_UF", ctx=context)
    solver.set(unsat_core=True)
    sort = z3.DeclareSort("Tensor", ctx=context)
    constants: dict[Term, z3.ExprRef] = {}

    def encoded(term: Term) -> z3.ExprRef:
        if term not in constants:
            if term.kind == VARIABLE:
                constants[term] = z3.Const(term.name, sort)
            else:
                given = ";".join(str(type_of(operand, types, memo)) for operand in term.operands)
                name = f"{term.kind}{list(term.attributes)}({given})"
                function = z3.Function(name, *[sort] * (len(term.operands) + 1))
                constants[term] = function(*map(encoded, term.operands))
        return constants[term]

    labels = {}
    for index, (name, left, right) in enumerate(sorted(known, key=str)):
        label = f"instance {index}"
        labels[label] = name
        solver.assert_and_track(encoded(left) == encoded(right), label)
    solver.add(encoded(source) != encoded(target))
    if solver.check() != z3.unsat:
        return None
    return sorted({labels[str(label)] for label in solver.unsat_core()})
