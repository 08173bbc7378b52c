"""Questions to terms and types that finding and proving rules has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from graph.substitutions.terms import VARIABLE, Term, subterms, type_of
from graph.substitutions.types import Extent, TensorType

COMMUTATIVE = frozenset({"add", "multiply"})
PARALLEL = frozenset({"partition", "combine", "replicate", "reduce"})
INFERENCE = frozenset({"batch_norm"})
"""Operators that a step of training has in another form: it normalizes by the statistics of its own batch."""


def variables(*terms: Term) -> list[str]:
    """Return the names of all variables, by first occurrence."""
    found = (part.name for term in terms for part in subterms(term) if part.kind == VARIABLE)
    return list(dict.fromkeys(found))


def operators(*terms: Term) -> set[Term]:
    """Return the different operators of a graph; both halves of a split are outputs of one."""
    found = {part for term in terms for part in subterms(term) if part.kind != VARIABLE}
    return {
        Term("split", (part.attributes[0], part.attributes[2]), part.operands)
        if part.kind == "split"
        else part
        for part in found
    }


def substitute(term: Term, values: Mapping[Term, Term]) -> Term:
    """Return `term` with each term that is a key of `values`, largest first, in its value's place."""
    if term in values:
        return values[term]
    if not term.operands:
        return term
    operands = tuple(substitute(operand, values) for operand in term.operands)
    return term if operands == term.operands else Term(term.kind, term.attributes, operands)


def conditions(terms: Iterable[Term], types: Mapping[str, TensorType]) -> tuple[str, ...]:
    """Return the divisibilities that the partitions of `terms` need, such as "k divides a"."""
    found: set[str] = set()
    for term in terms:
        for part in subterms(term):
            if part.kind == "partition":
                extent = type_of(part.operands[0], types).dims[int(part.attributes[0])]
                found.add(f"{part.attributes[1]} divides {extent}")
    return tuple(sorted(found))


def atoms(extent: Extent) -> Iterator[str]:
    """Iterate over the names of the atoms of `extent`, in their order."""
    for piece in extent.pieces:
        if piece.kind == "atom":
            yield piece.name
        for inner in piece.of:
            yield from atoms(inner)
