"""Which rules a network is offered, and in which direction: those that can make a graph cheaper, without what follows.

A direction can make a graph cheaper where, for some extents, the other side has no more operators, operations or bytes
and fewer of one of them. It follows from others where they lead from its source to what is as cheap. An operator of one
value twice (add(x, x), concat(x, x)) is in none: networks do not have that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

from graph.substitutions.terms import VARIABLE, Attribute, Term, subterms, type_of
from graph.substitutions.translation import TARGETS
from graph.substitutions.types import Extent, IllTypedTerm, TensorType, factors
from scripts.substitutions.enumeration import Side
from scripts.substitutions.terms import COMMUTATIVE, INFERENCE, atoms, operators, substitute, variables

FORWARDS, BACKWARDS = "forwards", "backwards"
SIZES = (3, 32)
"""Extents that are tried: a dim is short beside another one, or long."""
MOST_SETTINGS = 64
MOST_TERMS = 60
"""Graphs that are reached from a source, at most, to see whether a direction follows from others."""
_VIEWS = frozenset({"transpose", "flatten", "unflatten", "split"})
Cost = tuple[int, int, int]


@dataclass(frozen=True)
class Direction:
    """One direction of a rule: its name, both sides, the types of variables."""

    name: str
    direction: str
    source: Side
    target: Side
    types: Mapping[str, TensorType]

    @cached_property
    def settings(self) -> tuple[dict[str, int], ...]:
        """Return sizes of all atoms, in which some are short and some are long."""
        named = sorted({name for type_ in self.types.values() for dim in type_.dims for name in atoms(dim)})
        every = product(SIZES, repeat=len(named))
        return tuple(dict(zip(named, sizes, strict=True)) for sizes in islice(every, MOST_SETTINGS))

    @cached_property
    def cheaper(self) -> tuple[tuple[dict[str, int], Cost], ...]:
        """Return the settings in which the target is cheaper, each with the target's cost."""
        found = []
        for sizes in self.settings:
            before, after = (cost(side, self.types, sizes) for side in (self.source, self.target))
            if after != before and all(new <= old for new, old in zip(after, before, strict=True)):
                found.append((sizes, after))
        return tuple(found)

    @property
    def outline(self) -> tuple[object, ...]:
        """Return the kinds of both sides, in order: an instance has those of the rule that it is one of."""
        return tuple(
            (term_number, part.kind)
            for term_number, term in enumerate((*self.source, *self.target))
            for part in subterms(term)
        )

    @property
    def generality(self) -> tuple[object, ...]:
        """Return what orders directions so that each comes after those that it may be an instance of."""
        dims = [dim for type_ in self.types.values() for dim in type_.dims]
        extents = {name for dim in dims for name in atoms(dim)}
        return (
            -len(self.types),
            len(dims),
            sum(len(list(atoms(dim))) for dim in dims),
            -len(extents),
            self.name,
        )

    @property
    def size(self) -> tuple[object, ...]:
        """Return what orders directions so that each comes after those that it may follow from."""
        return len(operators(*self.source)), len(operators(*self.target)), self.generality


def cost(side: Side, types: Mapping[str, TensorType], sizes: Mapping[str, int]) -> Cost:
    """Return the operators of a graph, their operations, and the elements that they read and write."""
    operations = moved = 0
    parts = {part for term in side for part in subterms(term) if part.kind != VARIABLE}
    for part in parts:
        shapes = [type_of(operand, types).shape(sizes) for operand in part.operands]
        result = type_of(part, types).shape(sizes)
        counts = [_elements(shape) for shape in (*shapes, result)]
        if part.kind in _VIEWS:
            continue
        moved += sum(counts)
        if part.kind in ("matmul", "linear"):
            operations += 2 * counts[-1] * shapes[0][-1] + (counts[-1] if part.kind == "linear" else 0)
        elif part.kind == "conv":
            operations += 2 * counts[-1] * _elements(shapes[1][1:])
        elif part.kind != "concat":
            operations += counts[-1]
    return len(operators(*side)), operations, moved


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def offered(rules: Sequence[tuple[str, Side, Side, Mapping[str, TensorType]]]) -> dict[str, list[str]]:
    """Return the directions that are offered, by the names of their rules."""
    directions = []
    for name, source, target, types in rules:
        kinds = {part.kind for term in (*source, *target) for part in subterms(term)} - {VARIABLE}
        if not kinds <= TARGETS.keys() - INFERENCE or any(type_.degrees for type_ in types.values()):
            continue
        for direction, first, second in ((FORWARDS, source, target), (BACKWARDS, target, source)):
            doubled = any(
                len(set(part.operands)) < len(part.operands)
                for term in (*source, *target)
                for part in subterms(term)
            )
            if (
                not doubled
                and all(term.kind != VARIABLE for term in first)
                and set(variables(*second)) <= set(variables(*first))
            ):
                directions.append(Direction(name, direction, first, second, types))
    alike: dict[object, list[Direction]] = {}
    for candidate in sorted(directions, key=lambda one: one.generality):
        forms = candidate, _of_any_pointwise(candidate)
        if not any(_is_instance(form, alike.get(form.outline, ())) for form in forms):
            alike.setdefault(candidate.outline, []).append(candidate)
    kept: list[Direction] = []
    for candidate in sorted((one for general in alike.values() for one in general), key=lambda one: one.size):
        if candidate.cheaper and not _follows(candidate, kept):
            kept.append(candidate)
    found: dict[str, list[str]] = {}
    for one in kept:
        found.setdefault(one.name, []).append(one.direction)
    return {name: sorted(both) for name, both in found.items()}


def _of_any_pointwise(direction: Direction) -> Direction:
    """Return the direction with `relu`, which stands for any pointwise operator, in place of `scale`, which is one."""
    sides = direction.source, direction.target
    if any(part.kind == "relu" for side in sides for term in side for part in subterms(term)):
        return direction
    source, target = (tuple(map(_unscaled, side)) for side in sides)
    return replace(direction, source=source, target=target)


def _unscaled(term: Term) -> Term:
    operands = tuple(map(_unscaled, term.operands))
    return Term("relu", (), operands) if term.kind == "scale" else replace(term, operands=operands)


def _is_instance(direction: Direction, general: Sequence[Direction]) -> bool:
    """Return whether a rule that says it of more variables or extents says the same in this direction."""
    memo: dict[Term, TensorType] = {}
    return any(
        tuple(map(match.filled, rule.target)) == direction.target
        for rule in general
        for match in _matches(rule, direction.source, direction.types, memo)
    )


def _follows(direction: Direction, kept: Sequence[Direction]) -> bool:
    """Return whether what is kept leads from the source to a graph that costs no more than the target."""
    source = tuple(map(_turned_first, direction.source))
    seen, queue = {source}, [source]
    for side in queue:
        for other in _rewritten(side, direction.types, kept):
            if other in seen:
                continue
            if all(
                all(new <= old for new, old in zip(cost(other, direction.types, sizes), wanted, strict=True))
                for sizes, wanted in direction.cheaper
            ):
                return True
            seen.add(other)
            queue.append(other)
        if len(seen) > MOST_TERMS:
            break
    return False


def _turned_first(term: Term) -> Term:
    """Return the term with transposes before pointwise operators of variables, where matching reads them too."""
    operands = tuple(map(_turned_first, term.operands))
    if term.kind == "transpose" and operands[0].kind in ("relu", "scale"):
        (inner,) = operands[0].operands
        if inner.kind == VARIABLE:
            return replace(operands[0], operands=(replace(term, operands=(inner,)),))
    return replace(term, operands=operands)


def _rewritten(side: Side, types: Mapping[str, TensorType], kept: Sequence[Direction]) -> Iterator[Side]:
    """Iterate over the graphs that one of the directions makes of a graph."""
    memo: dict[Term, TensorType] = {}
    parts = list(dict.fromkeys(part for term in side for part in subterms(term) if part.kind != VARIABLE))
    for rule in kept:
        places = [(part,) for part in parts] if len(rule.source) == 1 else [side, side[::-1]]
        for place in places:
            if len(place) != len(rule.source):
                continue
            for match in _matches(rule, place, types, memo):
                results = [match.filled(term) for term in rule.target]
                if None in results:
                    continue
                values = {old: new for old, new in zip(place, results, strict=True) if new is not None}
                if len(rule.source) == 1:
                    other = tuple(substitute(term, values) for term in side)
                else:
                    other = tuple(values[term] for term in side)
                try:
                    if all(
                        type_of(new, types, memo) == type_of(old, types, memo)
                        for new, old in zip(other, side, strict=True)
                    ):
                        yield other
                except IllTypedTerm:
                    continue


@dataclass(frozen=True)
class _Match:
    """What the variables and the extents of a rule stand for."""

    terms: Mapping[str, Term]
    extents: Mapping[str, tuple[Extent, ...]]

    def filled(self, term: Term) -> Term | None:
        """Return the term with what its variables and extents stand for; None where an extent stands for several."""
        if term.kind == VARIABLE:
            return self.terms[term.name]
        attributes: list[Attribute] = list(term.attributes)
        if term.kind == "split":
            text = _attribute(str(term.attributes[2]), self.extents)
            if text is None:
                return None
            attributes[2] = text
        operands = []
        for operand in term.operands:
            other = self.filled(operand)
            if other is None:
                return None
            operands.append(other)
        return Term(term.kind, tuple(attributes), tuple(operands))


def _attribute(text: str, extents: Mapping[str, tuple[Extent, ...]]) -> str | None:
    """Return the extent that an attribute of a rule stands for."""
    pieces = []
    for name in text.split("+"):
        if name not in extents:
            return None
        pieces.append(str(extents[name][0]))
    return "+".join(pieces)


def _matches(
    rule: Direction, place: Side, types: Mapping[str, TensorType], memo: dict[Term, TensorType]
) -> Iterator[_Match]:
    bindings: list[dict[str, Term]] = [{}]
    for pattern, term in zip(rule.source, place, strict=True):
        bindings = [after for before in bindings for after in _bound(pattern, term, before)]
    for terms in bindings:
        options: list[dict[str, tuple[Extent, ...]]] = [{}]
        for name, term in terms.items():
            given = type_of(term, types, memo)
            options = [after for before in options for after in _fits(rule.types[name], given, before)]
        for extents in options:
            if all(
                _attribute(str(part.attributes[2]), extents) == other
                for pattern, term in zip(rule.source, place, strict=True)
                for part, other in _splits(pattern, term, terms)
            ):
                yield _Match(terms, extents)


def _bound(pattern: Term, term: Term, bound: dict[str, Term]) -> Iterator[dict[str, Term]]:
    if pattern.kind == VARIABLE:
        if bound.get(pattern.name, term) == term:
            yield {**bound, pattern.name: term}
        return
    attributes = slice(0, 2) if pattern.kind == "split" else slice(None)
    if pattern.kind != term.kind or pattern.attributes[attributes] != term.attributes[attributes]:
        return
    orders = [term.operands, term.operands[::-1]] if pattern.kind in COMMUTATIVE else [term.operands]
    for operands in orders:
        found = [bound]
        for inner, operand in zip(pattern.operands, operands, strict=True):
            found = [after for before in found for after in _bound(inner, operand, before)]
        yield from found


def _splits(pattern: Term, term: Term, terms: Mapping[str, Term]) -> Iterator[tuple[Term, Attribute]]:
    """Iterate over the splits of a pattern, each with where the term that it matches divides."""
    if pattern.kind == VARIABLE:
        return
    if pattern.kind == "split":
        yield pattern, term.attributes[2]
    orders = [term.operands, term.operands[::-1]] if pattern.kind in COMMUTATIVE else [term.operands]
    for operands in orders:
        if all(
            any(True for _ in _bound(inner, operand, dict(terms)))
            for inner, operand in zip(pattern.operands, operands, strict=True)
        ):
            for inner, operand in zip(pattern.operands, operands, strict=True):
                yield from _splits(inner, operand, terms)
            return


def _fits(
    wanted: TensorType, given: TensorType, before: Mapping[str, tuple[Extent, ...]]
) -> Iterator[dict[str, tuple[Extent, ...]]]:
    """Iterate over what extents stand for where a type is an instance of a rule's; one of its dims may be several."""
    more = len(given.dims) - len(wanted.dims)
    if more < 0:
        return
    for wide in range(len(wanted.dims) if more else 1):
        extents = dict(before)
        groups = [
            given.dims[place + more * (place > wide) : place + 1 + more * (place >= wide)]
            for place in range(len(wanted.dims))
        ]
        if all(_dims_fit(dim, group, extents) for dim, group in zip(wanted.dims, groups, strict=True)):
            yield extents


def _dims_fit(wanted: Extent, given: tuple[Extent, ...], extents: dict[str, tuple[Extent, ...]]) -> bool:
    if len(wanted.pieces) == 1:
        options = [(wanted.pieces[0], given)]
    elif len(wanted.pieces) == len(given[0].pieces):
        options = [
            (piece, (Extent((own,)), *given[1:]))
            for piece, own in zip(wanted.pieces, given[0].pieces, strict=True)
        ]
    else:
        return False
    for piece, own in options:
        if piece.kind == "atom":
            if extents.setdefault(piece.name, own) != own:
                return False
        elif len(own) != 1 or not _product_fits(piece.of, own[0], extents):
            return False
    return True


def _product_fits(wanted: tuple[Extent, ...], given: Extent, extents: dict[str, tuple[Extent, ...]]) -> bool:
    try:
        parts = factors(given)
    except IllTypedTerm:
        return False
    return all(
        len(inner.pieces) == 1
        and inner.pieces[0].kind == "atom"
        and extents.setdefault(inner.pieces[0].name, (own,)) == (own,)
        for inner, own in zip(wanted, parts, strict=True)
    )
