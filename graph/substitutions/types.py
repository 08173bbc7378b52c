"""Types of terms: the extents of a tensor's dims, written in symbols, and the degrees that it is parallel in.

A parallel tensor is a family of parts, one for each index of each degree, and all parts have the extents of its type.
An extent is a sum of pieces, since a concatenation must be divided again where it was joined. A piece is an atom
("o"), a share of an extent ("o/k"), a multiple ("o*k") or the extent of two dims that became one ("a.b").
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from graph.errors import GraphError


class IllTypedTerm(GraphError):
    """An operator is applied to tensors that do not fit."""


@dataclass(frozen=True, slots=True)
class Summand:
    """A summand of an extent: `kind` is atom, share, multiple or product."""

    kind: str
    name: str  # of the atom, or of the degree
    of: tuple[Extent, ...] = ()

    def __str__(self) -> str:
        if self.kind == "atom":
            return self.name
        texts = [f"({extent})" if len(extent.pieces) > 1 else str(extent) for extent in self.of]
        return ".".join(texts) if self.kind == "product" else f"{texts[0]}{_SIGNS[self.kind]}{self.name}"


_SIGNS = {"share": "/", "multiple": "*"}


@dataclass(frozen=True, slots=True)
class Extent:
    """The number of elements along one dim, as a sum of pieces in their order."""

    pieces: tuple[Summand, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.pieces))

    def size(self, sizes: Mapping[str, int]) -> int:
        """Return the number of elements for `sizes` of atoms and degrees."""
        return sum(_piece_size(piece, sizes) for piece in self.pieces)


def _piece_size(piece: Summand, sizes: Mapping[str, int]) -> int:
    if piece.kind == "atom":
        return sizes[piece.name]
    inner = [extent.size(sizes) for extent in piece.of]
    if piece.kind == "product":
        return math.prod(inner)
    if piece.kind == "multiple":
        return inner[0] * sizes[piece.name]
    if inner[0] % sizes[piece.name]:
        raise IllTypedTerm(f"extent {piece}: {inner[0]} elements are not divisible by {sizes[piece.name]}")
    return inner[0] // sizes[piece.name]


def atom(name: str) -> Extent:
    """Return the extent of one symbol."""
    return Extent((Summand("atom", name),))


def total(first: Extent, second: Extent) -> Extent:
    """Return the extent of a concatenation."""
    return Extent(first.pieces + second.pieces)


def share(extent: Extent, degree: str) -> Extent:
    """Return the extent of one part of `degree` equal parts."""
    only = extent.pieces[0]
    if len(extent.pieces) == 1 and only.kind == "multiple" and only.name == degree:
        return only.of[0]
    if len(extent.pieces) == 1 and only.kind == "product":
        return product(share(only.of[0], degree), only.of[1])
    _once(extent, "share", degree)
    return Extent((Summand("share", degree, (extent,)),))


def _once(extent: Extent, kind: str, degree: str) -> None:
    """Refuse a share of a share in one degree, and a multiple of a multiple: what they mean is another degree."""
    for piece in extent.pieces:
        if piece.kind == kind and piece.name == degree:
            raise IllTypedTerm(f"extent {extent}: is a {kind} in degree {degree} already; use another degree")
        for inner in piece.of:
            _once(inner, kind, degree)


def multiple(extent: Extent, degree: str) -> Extent:
    """Return the extent of `degree` equal parts together."""
    only = extent.pieces[0]
    if len(extent.pieces) == 1 and only.kind == "share" and only.name == degree:
        return only.of[0]
    if len(extent.pieces) == 1 and only.kind == "product":
        return product(multiple(only.of[0], degree), only.of[1])
    _once(extent, "multiple", degree)
    return Extent((Summand("multiple", degree, (extent,)),))


def product(first: Extent, second: Extent) -> Extent:
    """Return the extent of two dims that became one, row by row: what adds up in the first, adds up in all."""
    return Extent(tuple(Summand("product", "", (Extent((piece,)), second)) for piece in first.pieces))


def factors(extent: Extent) -> tuple[Extent, Extent]:
    """Return the extents of the two dims that `extent` was made of."""
    if any(piece.kind != "product" for piece in extent.pieces):
        raise IllTypedTerm(f"extent {extent}: must be made of two dims; flatten makes such a one")
    seconds = {piece.of[1] for piece in extent.pieces}
    if len(seconds) != 1:
        raise IllTypedTerm(f"extent {extent}: its pieces must have one second dim")
    firsts = tuple(piece for whole in extent.pieces for piece in whole.of[0].pieces)
    return Extent(firsts), seconds.pop()


def parse_extent(text: str) -> Extent:
    """Return the extent of a variable that is written as a sum of atoms and of products of two atoms."""
    pieces: list[Summand] = []
    for part in text.split("+"):
        names = part.split(".")
        if len(names) > 2 or not all(re.fullmatch(r"[a-z]\w*", name) for name in names):
            raise GraphError(f"extent {text!r}: must be a sum of names or of name.name; correct the rule")
        whole = atom(names[0]) if len(names) == 1 else product(atom(names[0]), atom(names[1]))
        pieces += whole.pieces
    return Extent(tuple(pieces))


@dataclass(frozen=True, slots=True)
class TensorType:
    """The extents of a tensor, of a part where it is parallel, and its degrees in alphabetical order."""

    dims: tuple[Extent, ...]
    degrees: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(map(str, self.dims)) + "".join(f"@{degree}" for degree in self.degrees)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of all degrees, then of all dims."""
        return (
            *(sizes[degree] for degree in self.degrees),
            *(extent.size(sizes) for extent in self.dims),
        )

    def with_dim(self, dim: int, extent: Extent) -> TensorType:
        """Return this type with another extent of `dim`."""
        return TensorType((*self.dims[:dim], extent, *self.dims[dim + 1 :]), self.degrees)


def parse_type(text: str) -> TensorType:
    """Return the type that `str` writes, of a variable."""
    dims, *degrees = text.split("@")
    return TensorType(tuple(map(parse_extent, dims.split(","))), tuple(degrees))
