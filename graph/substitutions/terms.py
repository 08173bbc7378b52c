"""Terms: operators applied to variables, with the type of each term.

Text: `matmul(x, concat[1](w, v))`. Attributes in brackets are dims, names of degrees ("k") and of factors ("s"), and
for `split[d,i,left]` the half and the extent of the first one. An operator on parallel tensors works on each part by
itself, so all its operands have the same degrees. `partition[d,k]` divides dim d into parts of a degree k that the
tensor does not have yet, `combine[d,k]` joins them, `replicate[k]` makes k equal parts, `reduce[k]` adds them up.
`add_along[d](x, b)` and `multiply_along[d](x, g)` have a vector for dim d; `batch_norm(x, n, s, g, b)` is that of
inference, (x + n) s g + b by channel, of the negated running mean n and the reciprocal standard deviation s.
`softmax(x)` is that of each row of a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from graph.errors import GraphError
from graph.substitutions.types import (
    Extent,
    IllTypedTerm,
    TensorType,
    factors,
    multiple,
    product,
    share,
    total,
)

Attribute = int | str
VARIABLE = "variable"
SPATIAL = ("h", "v", "r", "t")
"""The extents of an image and of a kernel, which have these names, so that neither is taken for the other."""


@dataclass(frozen=True, slots=True)
class Term:
    """A variable, whose name is its one attribute, or an operator with its attributes and operands."""

    kind: str
    attributes: tuple[Attribute, ...]
    operands: tuple[Term, ...] = ()

    def __str__(self) -> str:
        if self.kind == VARIABLE:
            return str(self.attributes[0])
        attributes = f"[{','.join(map(str, self.attributes))}]" if self.attributes else ""
        return f"{self.kind}{attributes}({', '.join(map(str, self.operands))})"

    @property
    def name(self) -> str:
        """Return the name of a variable."""
        return str(self.attributes[0])


def variable(name: str) -> Term:
    """Return the variable of that name."""
    return Term(VARIABLE, (name,))


def subterms(term: Term) -> Iterator[Term]:
    """Iterate over `term` and all terms within it, operands first; equal ones come again."""
    for operand in term.operands:
        yield from subterms(operand)
    yield term


def parse(text: str) -> Term:
    """Return the term that `text` writes."""
    term, rest = _parse(text, text)
    if rest.strip():
        raise GraphError(f"term {text!r}: {rest.strip()!r} follows its end, nothing must; correct the rule")
    return term


def _parse(text: str, whole: str) -> tuple[Term, str]:
    match = re.match(r"\s*([a-z_]\w*)(?:\[([^\]]*)\])?\s*(\(?)", text)
    if match is None:
        raise GraphError(f"term {whole!r}: {text!r} must begin with a name; correct the rule")
    name, inside, opened = match.groups()
    rest = text[match.end() :]
    if not opened:
        return variable(name), rest
    attributes = tuple(
        int(part) if part.strip().isdigit() else part.strip() for part in (inside or "").split(",") if part
    )
    operands: list[Term] = []
    while True:
        operand, rest = _parse(rest, whole)
        operands.append(operand)
        rest = rest.lstrip()
        if rest[:1] == ")":
            return Term(name, attributes, tuple(operands)), rest[1:]
        if rest[:1] != ",":
            raise GraphError(f"term {whole!r}: {rest!r} must begin with ',' or ')'; correct the rule")
        rest = rest[1:]


def type_of(
    term: Term, types: Mapping[str, TensorType], memo: dict[Term, TensorType] | None = None
) -> TensorType:
    """Return the type of `term` where its variables have `types`.

    Raises:
        IllTypedTerm: an operator does not fit its operands.
    """
    memo = {} if memo is None else memo
    known = memo.get(term)
    if known is None:
        if term.kind == VARIABLE:
            known = types[term.name]
        else:
            known = applied(
                term.kind, term.attributes, [type_of(operand, types, memo) for operand in term.operands]
            )
        memo[term] = known
    return known


def applied(kind: str, attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    """Return the type of an operator's result.

    Raises:
        IllTypedTerm: it does not fit its operands.
    """
    arity, rule = OPERATORS[kind]
    _require(len(operands) == arity, kind, f"{arity} operands")
    _require(
        all(operand.degrees == operands[0].degrees for operand in operands), kind, "operands of equal degrees"
    )
    return rule(attributes, operands)


def _require(holds: bool, kind: str, what: str) -> None:  # noqa: FBT001
    if not holds:
        raise IllTypedTerm(f"{kind}: must have {what}; correct the term")


def _dim(attributes: tuple[Attribute, ...], operand: TensorType, kind: str) -> int:
    dim = attributes[0]
    _require(isinstance(dim, int) and dim < len(operand.dims), kind, "a dim of its operand")
    return int(dim)


def _product(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, w = operands[:2]
    _require(
        len(x.dims) >= 2 and len(w.dims) == 2 and x.dims[-1] == w.dims[0],
        "matmul",
        "a last dim that is the first one of a weight of two dims",
    )
    if len(operands) == 3:
        _require(operands[2].dims == (w.dims[1],), "linear", "a bias as long as its result")
    return x.with_dim(len(x.dims) - 1, w.dims[1])


def _add_bias(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, b = operands
    _require(len(x.dims) == 2 and b.dims == (x.dims[1],), "add_bias", "a matrix, a bias as long as its rows")
    return x


def _conv(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, w = operands
    _require(
        len(x.dims) == len(w.dims) == 4
        and x.dims[1] == w.dims[1]
        and (*map(str, x.dims[2:]), *map(str, w.dims[2:])) == SPATIAL,
        "conv",
        "images h, v and kernels r, t of equal channels",
    )
    return x.with_dim(1, w.dims[0])


def _along(attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, vector = operands
    dim = _dim(attributes, x, "operator along a dim")
    _require(vector.dims == (x.dims[dim],), "operator along a dim", "a vector as long as that dim")
    return x


def _batch_norm(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, *vectors = operands
    _require(
        len(x.dims) == 4 and all(vector.dims == (x.dims[1],) for vector in vectors),
        "batch_norm",
        "images, and vectors with an element for each channel",
    )
    return x


def _elementwise(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    _require(
        all(operand == operands[0] for operand in operands), "elementwise operator", "operands of one shape"
    )
    return operands[0]


def _softmax(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    _require(len(operands[0].dims) == 2, "softmax", "two dims, rows of classes")
    return operands[0]


def _transpose(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    _require(len(operands[0].dims) == 2, "transpose", "two dims")
    return TensorType(operands[0].dims[::-1], operands[0].degrees)


def _flatten(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    _require(len(operands[0].dims) == 3, "flatten", "three dims")
    first, second, third = operands[0].dims
    return TensorType((product(first, second), third), operands[0].degrees)


def _unflatten(_attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    _require(len(operands[0].dims) == 2, "unflatten", "two dims")
    return TensorType((*factors(operands[0].dims[0]), operands[0].dims[1]), operands[0].degrees)


def _concat(attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, y = operands
    dim = _dim(attributes, x, "concat")
    _require(
        len(x.dims) == len(y.dims) and y.with_dim(dim, x.dims[dim]) == x, "concat", "the same other dims"
    )
    return x.with_dim(dim, total(x.dims[dim], y.dims[dim]))


def _split(attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x = operands[0]
    dim = _dim(attributes, x, "split")
    pieces = x.dims[dim].pieces
    for count in range(1, len(pieces)):
        halves = Extent(pieces[:count]), Extent(pieces[count:])
        if str(halves[0]) == attributes[2]:
            return x.with_dim(dim, halves[int(attributes[1])])
    raise IllTypedTerm(
        f"split: dim {dim} is {x.dims[dim]}, must begin with {attributes[2]}; correct the term"
    )


def _partition(attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, degree = operands[0], str(attributes[1])
    dim = _dim(attributes, x, "partition")
    _require(degree not in x.degrees, "partition", "a degree that its operand has not")
    return TensorType(x.with_dim(dim, share(x.dims[dim], degree)).dims, tuple(sorted({*x.degrees, degree})))


def _without(operand: TensorType, degree: Attribute, kind: str) -> tuple[str, ...]:
    _require(degree in operand.degrees, kind, "a degree that its operand has")
    return tuple(other for other in operand.degrees if other != degree)


def _combine(attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, degree = operands[0], str(attributes[1])
    dim = _dim(attributes, x, "combine")
    return TensorType(x.with_dim(dim, multiple(x.dims[dim], degree)).dims, _without(x, degree, "combine"))


def _replicate(attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    x, degree = operands[0], str(attributes[0])
    _require(degree not in x.degrees, "replicate", "a degree that its operand has not")
    return TensorType(x.dims, tuple(sorted({*x.degrees, degree})))


def _reduce(attributes: tuple[Attribute, ...], operands: list[TensorType]) -> TensorType:
    return TensorType(operands[0].dims, _without(operands[0], attributes[0], "reduce"))


TypeRule = Callable[[tuple[Attribute, ...], list[TensorType]], TensorType]

OPERATORS: dict[str, tuple[int, TypeRule]] = {
    "matmul": (2, _product),
    "matmul_relu": (2, _product),
    "linear": (3, _product),
    "linear_relu": (3, _product),
    "add_bias": (2, _add_bias),
    "conv": (2, _conv),
    "conv_relu": (2, _conv),
    "add_along": (2, _along),
    "multiply_along": (2, _along),
    "batch_norm": (5, _batch_norm),
    "add": (2, _elementwise),
    "multiply": (2, _elementwise),
    "relu": (1, _elementwise),
    "scale": (1, _elementwise),
    "softmax": (1, _softmax),
    "transpose": (1, _transpose),
    "flatten": (1, _flatten),
    "unflatten": (1, _unflatten),
    "concat": (2, _concat),
    "split": (1, _split),
    "partition": (1, _partition),
    "combine": (1, _combine),
    "replicate": (1, _replicate),
    "reduce": (1, _reduce),
}
"""The number of operands and the type of the result of every operator."""
