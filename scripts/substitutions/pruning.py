"""Prunes candidates: by common subgraphs, and by renaming of variables, extents, degrees and factors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from graph.errors import GraphError
from graph.substitutions.terms import VARIABLE, Term, parse, subterms, type_of, variable
from graph.substitutions.types import IllTypedTerm, TensorType, parse_type
from scripts.substitutions.enumeration import Side, SidePair
from scripts.substitutions.execution import RandomInputs, execute
from scripts.substitutions.terms import COMMUTATIVE, substitute, variables

SETTINGS = (RandomInputs({"k": 2, "m": 3}, 11), RandomInputs({"k": 3, "m": 2}, 12))
"""What candidates are confirmed on: other extents, degrees and values than those they were found on."""
MANY = 2
"""Commutative operators up to which all orders are compared; above, some rules stay twice, in two orders."""
Types = Mapping[str, TensorType]
_FREE = "abcdefgijlnopquwxyz"
_RESERVED = frozenset({"h", "v", "r", "t"})


@dataclass(frozen=True)
class Candidate:
    """Two graphs that seem to be equal, and the types of their variables."""

    source: Side
    target: Side
    types: dict[str, TensorType]

    def holds(self, settings: tuple[RandomInputs, ...] = SETTINGS) -> bool:
        """Return whether both graphs have equal types and values in all settings."""
        try:
            for setting in settings:
                values = execute((*self.source, *self.target), self.types, setting)
                half = len(self.source)
                for first, second in zip(values[:half], values[half:], strict=True):
                    if first.type != second.type or not (first.array == second.array).all():
                        return False
        except IllTypedTerm:
            return False
        return True


def read_candidate(source: str, target: str, types: Mapping[str, str]) -> Candidate:
    """Return the candidate of two sides, terms with semicolons between them, and the types of its variables."""
    sides = [tuple(map(parse, side.split(";"))) for side in (source, target)]
    return Candidate(sides[0], sides[1], {name: parse_type(text) for name, text in types.items()})


def generalized(candidate: Candidate) -> Candidate | None:
    """Return the candidate without what both sides have in common, or None where nothing is left.

    Below: an operator that both sides contain becomes a variable, where the sides are equal still. Above: an operator
    that both sides end with goes, where all operands but one are equal.
    """
    current = candidate
    while True:
        if any(first == second for first, second in zip(current.source, current.target, strict=True)):
            return None
        smaller = _without_top(current) or _without_common(current)
        if smaller is None:
            return current
        current = smaller


def _without_top(candidate: Candidate) -> Candidate | None:
    if len(candidate.source) != 1:
        return None
    first, second = candidate.source[0], candidate.target[0]
    if (first.kind, first.attributes) != (second.kind, second.attributes) or first.kind == VARIABLE:
        return None
    different = [pair for pair in zip(first.operands, second.operands, strict=True) if pair[0] != pair[1]]
    if len(different) != 1:
        return None
    smaller = _restricted((different[0][0],), (different[0][1],), candidate.types)
    return smaller if smaller.holds(SETTINGS[:1]) else None


def _without_common(candidate: Candidate) -> Candidate | None:
    sides = [
        {part for term in side for part in subterms(term) if part.kind != VARIABLE}
        for side in (candidate.source, candidate.target)
    ]
    for part in sorted(sides[0] & sides[1], key=lambda part: (-len(str(part)), str(part))):
        name = f"new{len(candidate.types)}"
        try:
            parse_type(str(type_ := type_of(part, candidate.types)))
        except GraphError:
            type_ = _opaque(type_of(part, candidate.types), len(candidate.types))
        source, target = (
            tuple(substitute(term, {part: variable(name)}) for term in side)
            for side in (candidate.source, candidate.target)
        )
        smaller = _restricted(source, target, {**candidate.types, name: type_})
        if smaller.holds(SETTINGS[:1]):
            return smaller
    return None


def _opaque(type_: TensorType, number: int) -> TensorType:
    """Return the type with an atom in place of each extent that a file could not name."""
    texts = []
    for index, extent in enumerate(type_.dims):
        try:
            parse_type(str(extent))
            texts.append(str(extent))
        except GraphError:
            texts.append(f"dim{number}_{index}")
    return parse_type(",".join(texts) + "".join(f"@{degree}" for degree in type_.degrees))


def _restricted(source: Side, target: Side, types: Types) -> Candidate:
    return Candidate(source, target, {name: types[name] for name in variables(*source, *target)})


def _orders(term: Term) -> Iterator[Term]:
    """Iterate over `term` with the operands of commutative operators in all orders."""
    for operands in product(*(list(_orders(operand)) for operand in term.operands)):
        yield Term(term.kind, term.attributes, operands)
        if term.kind in COMMUTATIVE and operands[0] != operands[1]:
            yield Term(term.kind, term.attributes, operands[::-1])


def _sorted(term: Term) -> Term:
    """Return `term` with the operands of commutative operators in the order of their texts without names."""
    operands = tuple(map(_sorted, term.operands))
    if term.kind in COMMUTATIVE:
        operands = tuple(sorted(operands, key=lambda operand: re.sub(r"\b(x|new)?\w\b", "", str(operand))))
    return Term(term.kind, term.attributes, operands)


def _arrangements(term: Term, *, all_orders: bool) -> list[Term]:
    return list(_orders(term)) if all_orders else [_sorted(term)]


def canonical(candidate: Candidate) -> Candidate:
    """Return the first, in the order of their texts, of all candidates that are equal but for names and order."""
    sides: list[SidePair] = []
    for source, target in ((candidate.source, candidate.target), (candidate.target, candidate.source)):
        if set(variables(*target)) <= set(variables(*source)) or not (
            set(variables(*source)) <= set(variables(*target))
        ):
            sides += {(source, target), (source[::-1], target[::-1])}
    options = []
    for source, target in sides:
        kinds = [part.kind for term in (*source, *target) for part in subterms(term)]
        few = sum(kind in COMMUTATIVE for kind in kinds) <= MANY
        for terms in product(*(_arrangements(term, all_orders=few) for term in (*source, *target))):
            options.append(_renamed(terms, candidate.types))
    (terms, types) = min(options, key=lambda option: (list(map(str, option[0])), str(sorted(option[1]))))
    half = len(candidate.source)
    return Candidate(terms[:half], terms[half:], types)


def _renamed(terms: Side, types: Types) -> tuple[Side, dict[str, TensorType]]:
    names = {name: f"x{index}" for index, name in enumerate(variables(*terms), 1)}
    symbols: dict[str, str] = {}
    fresh = iter(_FREE)
    for name in names:
        for symbol in re.findall(r"[a-z]\w*", str(types[name]).split("@")[0]):
            if symbol not in symbols:
                symbols[symbol] = symbol if symbol in _RESERVED else next(fresh)
    degrees = iter("km")
    for part in (part for term in terms for part in subterms(term)):
        if (
            part.kind in ("partition", "combine", "replicate", "reduce")
            and part.attributes[-1] not in symbols
        ):
            symbols[str(part.attributes[-1])] = next(degrees)
    for name in names:
        for degree in types[name].degrees:
            if degree not in symbols:
                symbols[degree] = next(degrees)

    def replaced(text: str) -> str:
        return re.sub(r"[a-z]\w*", lambda match: symbols.get(match[0], match[0]), text)

    def renamed(term: Term) -> Term:
        if term.kind == VARIABLE:
            return variable(names[term.name])
        attributes = tuple(
            replaced(value) if isinstance(value, str) and term.kind != "scale" else value
            for value in term.attributes
        )
        return Term(term.kind, attributes, tuple(map(renamed, term.operands)))

    chosen = {}
    for old, new in names.items():
        dims, *parallel = str(types[old]).split("@")
        chosen[new] = parse_type("@".join([replaced(dims), *sorted(map(replaced, parallel))]))
    return tuple(map(renamed, terms)), chosen
