"""Enumerates the graphs of a family, and finds graphs of equal values by their fingerprints.

A graph of one output is a term. Operands are minimal: no term of fewer operators has their value, since a graph with
another operand follows from the rule for that operand. A graph of two outputs is kept where the two share an operator.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from graph.substitutions.terms import OPERATORS, VARIABLE, Attribute, Term, subterms, variable
from graph.substitutions.types import Extent, IllTypedTerm, TensorType, parse_type
from scripts.substitutions.execution import RandomInputs, TensorValue, apply, execute
from scripts.substitutions.families import Choice, Family
from scripts.substitutions.terms import COMMUTATIVE, PARALLEL

Side = tuple[Term, ...]
SidePair = tuple[Side, Side]
Fingerprint = tuple[TensorType, bytes]


@dataclass(eq=False)
class EnumeratedTerm:
    """A term with its value, the numbers of its operators and of all terms in it, and the names of its variables."""

    term: Term
    value: TensorValue
    operators: frozenset[int]
    below: frozenset[int]
    names: frozenset[str]
    number: int
    minimal: bool = False


@dataclass
class Enumeration:
    """The terms of a family, by fingerprint."""

    family: Family
    setting: RandomInputs
    types: dict[str, TensorType]
    sizes: dict[str, int]
    nodes: list[EnumeratedTerm] = field(default_factory=list)
    classes: dict[Fingerprint, list[EnumeratedTerm]] = field(default_factory=lambda: defaultdict(list))
    operator_numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    graphs: int = 0

    def add(self, term: Term, value: TensorValue, operands: tuple[EnumeratedTerm, ...]) -> None:
        """Take in one term, whose operands are there already."""
        attributes = (term.attributes[0], term.attributes[2]) if term.kind == "split" else term.attributes
        key = (term.kind, attributes, tuple(node.number for node in operands))
        own = {self.operator_numbers.setdefault(key, len(self.operator_numbers))} if operands else set()
        number = len(self.nodes)
        node = EnumeratedTerm(
            term,
            value,
            frozenset(own).union(*(operand.operators for operand in operands)),
            frozenset({number}).union(*(operand.below for operand in operands)),
            frozenset(() if operands else {term.name}).union(*(operand.names for operand in operands)),
            number,
        )
        members = self.classes[fingerprint(value)]
        node.minimal = not members or len(members[0].operators) == len(node.operators)
        members.append(node)
        self.nodes.append(node)
        self.graphs += 1


def fingerprint(value: TensorValue) -> Fingerprint:
    """Return the type, with its degrees, and a digest of all elements."""
    return value.type, hashlib.blake2b(value.array.tobytes(), digest_size=12).digest()


def enumerate_family(family: Family) -> Enumeration:
    """Return all terms of the family, smallest first."""
    types = {name: parse_type(text) for name, text in family.variables.items()}
    setting = RandomInputs(family.degrees, 1)
    found = Enumeration(family, setting, types, setting.sizes(*types.values()))
    for name, value in zip(
        types, execute(tuple(map(variable, types)), types, setting, found.sizes), strict=True
    ):
        found.add(variable(name), value, ())
    for size in range(1, family.operators + 1):
        operands = [node for node in found.nodes if node.minimal or family.whole]
        for choice in family.choices:
            for nodes in _operands(choice, operands, size - 1):
                if family.whole and not _is_whole(choice[0], nodes):
                    continue
                for attributes in _attributes(choice, nodes[0].value.type):
                    _extend(found, choice[0], attributes, nodes)
    return found


def _is_whole(kind: str, nodes: tuple[EnumeratedTerm, ...]) -> bool:
    """Return whether a divided operand is a variable, a joined one a result, and no result is computed with again."""
    kinds = {node.term.kind for node in nodes}
    if kind in ("partition", "replicate"):
        return kinds == {VARIABLE}
    if kind in ("combine", "reduce"):
        return not kinds & {VARIABLE, *PARALLEL}
    return kinds <= {VARIABLE, "partition", "replicate"}


def _extend(
    found: Enumeration, kind: str, attributes: tuple[Attribute, ...], nodes: tuple[EnumeratedTerm, ...]
) -> None:
    try:
        value = apply(kind, attributes, [node.value for node in nodes], found.sizes)
    except IllTypedTerm:
        return
    found.add(Term(kind, attributes, tuple(node.term for node in nodes)), value, nodes)


def _attributes(choice: Choice, type_: TensorType) -> Iterator[tuple[Attribute, ...]]:
    kind, attributes = choice
    if kind != "split":
        yield attributes
    elif int(attributes[0]) < len(type_.dims):
        pieces = type_.dims[int(attributes[0])].pieces
        for count in range(1, len(pieces)):
            for half in (0, 1):
                yield (attributes[0], half, str(Extent(pieces[:count])))


def _operands(choice: Choice, nodes: list[EnumeratedTerm], size: int) -> Iterator[tuple[EnumeratedTerm, ...]]:
    """Iterate over operands that together have `size` operators and could fit `choice`."""
    kind = choice[0]
    arity = OPERATORS[kind][0]
    if arity == 1:
        yield from ((node,) for node in nodes if len(node.operators) == size)
        return
    seconds: dict[object, list[EnumeratedTerm]] = defaultdict(list)
    for node in nodes:
        seconds[_second_key(choice, node.value.type)].append(node)
    thirds: dict[object, list[EnumeratedTerm]] = defaultdict(list)
    for node in nodes if arity == 3 else ():
        if len(node.value.type.dims) == 1:
            thirds[node.value.type].append(node)
    for first in nodes:
        for second in seconds.get(_first_key(choice, first.value.type), ()):
            if kind in COMMUTATIVE and second.number < first.number:
                continue
            both = first.operators | second.operators
            if arity == 2 and len(both) == size:
                yield first, second
            elif arity == 3 and len(both) <= size:
                bias = TensorType((second.value.type.dims[-1],), second.value.type.degrees)
                for third in thirds.get(bias, ()):
                    if len(both | third.operators) == size:
                        yield first, second, third


def _first_key(choice: Choice, type_: TensorType) -> object:
    kind = choice[0]
    if kind in ("matmul", "matmul_relu", "linear", "linear_relu"):
        return type_.dims[-1], type_.degrees
    if kind in ("conv", "conv_relu"):
        return (type_.dims[1], type_.degrees) if len(type_.dims) == 4 else None
    if kind == "add_bias":
        return (type_.dims[-1:], type_.degrees) if len(type_.dims) == 2 else None
    return _second_key(choice, type_)


def _second_key(choice: Choice, type_: TensorType) -> object:
    kind, attributes = choice
    if kind in ("matmul", "matmul_relu", "linear", "linear_relu"):
        return (type_.dims[0], type_.degrees) if len(type_.dims) == 2 else "not a weight"
    if kind in ("conv", "conv_relu"):
        return (type_.dims[1], type_.degrees) if len(type_.dims) == 4 else "not a kernel"
    if kind == "add_bias":
        return (type_.dims, type_.degrees) if len(type_.dims) == 1 else "not a bias"
    if kind == "concat":
        dim = int(attributes[0])
        return (*type_.dims[:dim], "joined", *type_.dims[dim + 1 :]) if dim < len(type_.dims) else None
    return type_


def equal_graphs(found: Enumeration) -> Iterator[SidePair]:
    """Iterate over pairs of different graphs whose fingerprints are equal: candidates of rules."""
    for members in found.classes.values():
        for first, second in combinations(members, 2):
            if (first is members[0] or found.family.everything) and _is_about(found.family, (first, second)):
                yield (first.term,), (second.term,)
    if found.family.pairs:
        yield from _equal_pairs(found)


def _is_about(family: Family, nodes: Iterable[EnumeratedTerm]) -> bool:
    if not family.about:
        return True
    return any(part.kind in family.about for node in nodes for part in subterms(node.term))


def _equal_pairs(found: Enumeration) -> Iterator[SidePair]:
    """Iterate over pairs of graphs of two outputs, one at least of which shares an operator between them.

    Where both outputs read the same variables on either side, rules of one output do the same.
    """
    limit = found.family.pairs
    sharing: dict[int, list[EnumeratedTerm]] = defaultdict(list)
    for node in found.nodes:
        for operator in node.operators:
            sharing[operator].append(node)
    alternatives = {
        node.number: members for members in found.classes.values() if len(members) > 1 for node in members
    }
    seen: set[tuple[int, int]] = set()
    for nodes in sharing.values():
        for first, second in combinations([node for node in nodes if node.number in alternatives], 2):
            key = (first.number, second.number)
            if key in seen or len(first.operators | second.operators) > limit:
                continue
            seen.add(key)
            if first.number in second.below or second.number in first.below:
                continue
            found.graphs += 1
            yield from _counterparts(found, first, second, alternatives)


def _counterparts(
    found: Enumeration,
    first: EnumeratedTerm,
    second: EnumeratedTerm,
    alternatives: dict[int, list[EnumeratedTerm]],
) -> Iterator[SidePair]:
    for other in alternatives[first.number]:
        for another in alternatives[second.number]:
            if (
                other is not first
                and another is not second
                and (other.names != first.names or another.names != second.names)
                and len(other.operators | another.operators) <= found.family.pairs
                and _is_about(found.family, (first, second, other, another))
            ):
                yield (first.term, second.term), (other.term, another.term)
