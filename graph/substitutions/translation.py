"""Translates between operators of networks' graphs and the operators of terms.

A rule of matrices holds of tensors of more dims, too: its dims are groups of neighbouring dims (a concatenation along
one is along the first of its group), and leading dims that all tensors have may be a batch, for each of whose elements
it holds. A `Reading` says which dims are which. It may also read a value transposed, as a linear layer reads its
weight, and several values as joined, as an operator of more than two joins some of them.

No proof uses what `relu` computes, `conv` at which stride, or `scale` by how much: they are functions of elements, a
linear function of images and kernels, a linear function of elements. So `relu` stands for any pointwise operator of
one operand, `conv` for any convolution of one group, `scale` for a product with any number, the same in all places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from graph.operators import Argument, Slot, TensorSpec
from graph.rules.common import positive, slots_in
from graph.rules.pointwise_targets import POINTWISE
from graph.substitutions.terms import VARIABLE, Attribute, Term, subterms

Arguments = tuple[tuple[str, Argument], ...]
SymbolMeaning = tuple[str, Arguments]
"""The target and the arguments, without its tensors, of the operator that a kind stands for."""
_BINARY = {"add": "aten.add.Tensor", "multiply": "aten.mul.Tensor"}
_SCALES = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"})
PERMUTATION = "aten.permute.default"
CONVOLUTION = "aten.conv2d.default"
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("linear", "mm", "bmm", "matmul"))
TARGETS: Mapping[str, frozenset[str]] = {
    "matmul": _PRODUCTS,
    "linear": frozenset({"aten.linear.default", "aten.addmm.default"}),
    "add_bias": frozenset({"aten.add.Tensor"}),
    "conv": frozenset({CONVOLUTION}),
    "add": frozenset({_BINARY["add"]}),
    "multiply": frozenset({_BINARY["multiply"]}),
    "relu": POINTWISE,
    "scale": _SCALES,
    "transpose": frozenset({PERMUTATION}),
    "flatten": frozenset({"aten.view.default"}),
    "unflatten": frozenset({"aten.view.default"}),
    "concat": frozenset({"aten.cat.default"}),
    "split": frozenset({"aten.split_with_sizes.default", "aten.slice.Tensor"}),
}
"""The operators of graphs that each kind of term may be."""
FACTORS = ("a", "b")
"""The extents that make a product, in every rule."""
SAME = "soapstone.same"
"""The target of a draft whose output is its input: none is executed, readers read the input."""


class AnyOperator(Protocol):
    """An operator of a graph, or one under construction."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def arguments(self) -> Arguments: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """Values as a term has them: one, or several of one form, joined along a dim of the term.

    layout: how many dims of the tensor are batch, then how many each dim of the term stands for, as the term has them.
    transposed: the tensor's two groups of dims are the other way round.
    """

    names: tuple[str, ...]
    layout: tuple[int, ...]
    transposed: bool = False
    dim: int = 0

    def place(self, dim: int) -> int:
        """Return the first of the tensor's dims that a dim of the term stands for."""
        if not self.transposed:
            return sum(self.layout[: 1 + dim])
        return self.layout[0] + (self.layout[2] if dim == 0 else 0)

    def of(self, *names: str) -> Reading:
        """Return other values, read in the same way."""
        return replace(self, names=names, dim=self.dim if len(names) > 1 else 0)

    def flipped(self) -> Reading:
        """Return what the transposed term reads."""
        batch, first, second = self.layout
        return replace(self, layout=(batch, second, first), transposed=not self.transposed, dim=self._other)

    @property
    def _other(self) -> int:
        """The dim along which the transposed term reads several values as joined."""
        return 1 - self.dim if len(self.names) > 1 else 0


@dataclass(frozen=True, slots=True)
class Decomposition:
    """One way in which values are the result of a term's operator: what its operands read, and what it uses."""

    operands: tuple[Reading, ...]
    operators: frozenset[str]
    symbol: SymbolMeaning | None = None
    extents: tuple[tuple[str, tuple[int, ...]], ...] = ()


class ProducedValues:
    """The operators of a graph, or of a part of it, by what they make."""

    def __init__(self, operators: Iterator[AnyOperator], specs: Mapping[str, TensorSpec]) -> None:
        self.operators = {operator.name: operator for operator in operators}
        self.specs = specs
        self.producer = {
            output: (operator, position)
            for operator in self.operators.values()
            for position, output in enumerate(operator.outputs)
        }

    def blocks(self, reading: Reading) -> tuple[tuple[int, ...], ...]:
        """Return the sizes that each dim of a term stands for."""
        shape = self.specs[reading.names[0]].shape
        dims = range(len(reading.layout) - 1)
        sizes = [list(shape[reading.place(dim) :][: reading.layout[1 + dim]]) for dim in dims]
        for name in reading.names[1:]:
            sizes[reading.dim][0] += self.specs[name].shape[reading.place(reading.dim)]
        return tuple(map(tuple, sizes))

    def may_be(self, term: Term, name: str) -> bool:
        """Return whether a value may be that of `term`, by the operators that make it and what they read."""
        if name not in self.producer:
            return False
        operator, _ = self.producer[name]
        if (
            term.kind != "transpose"
            and operator.target == PERMUTATION
            and self.may_be(term, operator.inputs[0])
        ):
            return True
        return operator.target in TARGETS[term.kind] and all(
            operand.kind in (VARIABLE, "transpose")
            or term.kind == operand.kind == "concat"
            or any(self.may_be(operand, read) for read in operator.inputs)
            for operand in term.operands
        )

    def steps(self, term: Term, reading: Reading) -> Iterator[Decomposition]:
        """Iterate over the ways in which what is read is the result of the operator of `term`."""
        if term.kind == "transpose" and reading.transposed:
            yield Decomposition((reading.flipped(),), frozenset())
            return
        if term.kind == "concat" and len(reading.names) > 1:
            yield from self._joined(term.attributes[0], reading, frozenset())
            return
        made = [self.producer.get(name) for name in reading.names]
        nodes = [one[0] for one in made if one is not None]
        if len(nodes) < len(made):
            return
        used = frozenset(node.name for node in nodes)
        if term.kind != "transpose":
            for before in _before_transposition(nodes, reading):
                for step in self.steps(term, before):
                    yield replace(step, operators=step.operators | used)
        match term.kind:
            case "relu" | "scale":
                yield from _unary(term.kind, nodes, reading, used)
            case "add" | "multiply":
                yield from self._binary(_BINARY[term.kind], nodes, reading, used)
            case "split":
                yield from self._split(term.attributes, nodes[0], reading, used)
            case "transpose":
                for before in _before_transposition(nodes, reading):
                    yield Decomposition((before.flipped(),), used)
            case _ if len(nodes) == 1 and not reading.transposed:
                yield from self._single(term, nodes[0], reading, used)

    def _single(
        self, term: Term, node: AnyOperator, reading: Reading, used: frozenset[str]
    ) -> Iterator[Decomposition]:
        match term.kind:
            case "concat":
                dim = term.attributes[0]
                if node.target == "aten.cat.default":
                    along = positive(dict(node.arguments)["dim"], len(self.specs[reading.names[0]].shape))
                    if along == reading.place(int(dim)):
                        yield from self._joined(dim, replace(reading.of(*node.inputs), dim=int(dim)), used)
            case "matmul" | "linear":
                yield from self._product(term.kind, node, reading, used)
            case "add_bias":
                yield from self._biased(node, reading, used)
            case "conv":
                yield from _convolution(node, reading, used)
            case "flatten" | "unflatten":
                yield from self._viewed(term, node, reading, used)

    def _joined(self, dim: Attribute, reading: Reading, used: frozenset[str]) -> Iterator[Decomposition]:
        if reading.dim == dim:
            for count in range(1, len(reading.names)):
                halves = reading.of(*reading.names[:count]), reading.of(*reading.names[count:])
                yield Decomposition(halves, used)

    def _binary(
        self, target: str, nodes: list[AnyOperator], reading: Reading, used: frozenset[str]
    ) -> Iterator[Decomposition]:
        pairs = []
        for node, name in zip(nodes, reading.names, strict=True):
            given = dict(node.arguments)
            if node.target != target or given.get("alpha", 1) != 1 or len(node.inputs) != 2:
                return
            if any(self.specs[operand] != self.specs[name] for operand in node.inputs):
                return
            pairs.append(node.inputs)
        first, second = (reading.of(*names) for names in zip(*pairs, strict=True))
        yield Decomposition((first, second), used)
        if first != second:
            yield Decomposition((second, first), used)

    def _split(
        self, attributes: tuple[Attribute, ...], node: AnyOperator, reading: Reading, used: frozenset[str]
    ) -> Iterator[Decomposition]:
        dim, half, extent = int(attributes[0]), attributes[1], str(attributes[2])
        place = reading.place(dim)
        if len(used) > 1 or (len(reading.names) > 1 and reading.dim != dim):
            return
        given = dict(node.arguments)
        whole = self.specs[node.inputs[0]].shape if node.inputs else ()
        if node.target == "aten.split_with_sizes.default":
            first = node.outputs.index(reading.names[0])
            last = first + len(reading.names)
            if node.outputs[first:last] != reading.names:
                return
            sizes = given["split_sizes"]
            start, stop = sum(sizes[:first]), sum(sizes[:last])
        elif node.target == "aten.slice.Tensor" and given["step"] == 1:
            start = positive(given["start"] or 0, whole[positive(given["dim"], len(whole))])
            stop = start + self.specs[reading.names[0]].shape[place]
        else:
            return
        if positive(given["dim"], len(whole)) != place or (start == 0) == (stop == whole[place]):
            return
        if (start == 0) == (half == 0):
            rest = self.blocks(reading)[dim][1:]
            yield Decomposition(
                (reading.of(node.inputs[0]),), used, None, ((extent, (stop if half == 0 else start, *rest)),)
            )

    def _product(
        self, kind: str, node: AnyOperator, reading: Reading, used: frozenset[str]
    ) -> Iterator[Decomposition]:
        batch, *groups, columns = reading.layout
        rows = sum(groups)
        if columns != 1:
            return
        given = dict(node.arguments)
        if node.target == "aten.linear.default":
            biased = given["bias"] is not None
            if batch == 0 and biased == (kind == "linear"):
                x, weight, *biases = node.inputs
                operands = (Reading((x,), (0, *groups, 1)), Reading((weight,), (0, 1, 1), transposed=True))
                yield Decomposition((*operands, *(Reading((name,), (0, 1)) for name in biases)), used)
        elif kind == "matmul" and node.target in _PRODUCTS:
            shapes = [self.specs[name].shape for name in node.inputs]
            ranks = tuple(map(len, shapes))
            if (ranks == (batch + 2, batch + 2) and shapes[0][:batch] == shapes[1][:batch]) or (
                batch,
                ranks,
            ) == (0, (rows + 1, 2)):
                x, weight = node.inputs
                yield Decomposition(
                    (Reading((x,), (batch, *groups, 1)), Reading((weight,), (batch, 1, 1))), used
                )
        elif kind == "linear" and node.target == "aten.addmm.default" and batch == 0:
            bias, x, weight = node.inputs
            if (given["alpha"], given["beta"], len(self.specs[bias].shape), rows) == (1, 1, 1, 1):
                operands = (Reading((x,), (0, 1, 1)), Reading((weight,), (0, 1, 1)))
                yield Decomposition((*operands, Reading((bias,), (0, 1))), used)

    def _biased(self, node: AnyOperator, reading: Reading, used: frozenset[str]) -> Iterator[Decomposition]:
        if node.target != "aten.add.Tensor" or dict(node.arguments)["alpha"] != 1 or len(node.inputs) != 2:
            return
        shape = self.specs[reading.names[0]].shape
        for x, bias in (node.inputs, node.inputs[::-1]):
            if (
                self.specs[x].shape == shape
                and self.specs[bias].shape == shape[-1:]
                and len(shape) > 1
                and (reading.layout[0], reading.layout[-1]) == (0, 1)
            ):
                yield Decomposition((reading.of(x), Reading((bias,), (0, 1))), used)

    def _viewed(
        self, term: Term, node: AnyOperator, reading: Reading, used: frozenset[str]
    ) -> Iterator[Decomposition]:
        if node.target != "aten.view.default":
            return
        shape = self.specs[node.inputs[0]].shape
        batch, last = reading.layout[0], reading.layout[-1]
        blocks = self.blocks(reading)
        first = len(shape) - batch - last
        options: list[tuple[int, ...]] = [(batch, first, last)]
        # Of what is joined, the first factor is a sum.
        is_factored = term.kind == "unflatten" and all(part.kind != "concat" for part in subterms(term))
        if term.kind == "flatten":
            options = [(batch, count, first - count, last) for count in range(1, first)]
        for layout in options:
            operand = Reading((node.inputs[0],), layout)
            if min(layout[1:]) < 1 or shape[:batch] != self.specs[reading.names[0]].shape[:batch]:
                continue
            given = self.blocks(operand)
            if given[-1] == blocks[-1] and prod(map(prod, given)) == prod(map(prod, blocks)):
                factors = zip(FACTORS, blocks[:2], strict=True) if is_factored else ()
                yield Decomposition((operand,), used, extents=tuple(factors))


def _before_transposition(nodes: list[AnyOperator], reading: Reading) -> Iterator[Reading]:
    """Iterate over what is read before operators that exchange two groups of dims, as the same term has it."""
    if len(reading.layout) != 3:
        return
    batch, *groups = reading.layout
    first, second = reversed(groups) if reading.transposed else groups
    # The dims of the result by where they come from: those of the second group stand first there.
    order = (*range(batch), *range(batch + second, batch + second + first), *range(batch, batch + second))
    if all(node.target == PERMUTATION and dict(node.arguments)["dims"] == order for node in nodes):
        names = tuple(node.inputs[0] for node in nodes)
        yield replace(reading, names=names, transposed=not reading.transposed)


def _unary(
    kind: str, nodes: list[AnyOperator], reading: Reading, used: frozenset[str]
) -> Iterator[Decomposition]:
    symbols = {_symbol(kind, node) for node in nodes}
    symbol = symbols.pop()
    if symbol is not None and not symbols:
        yield Decomposition((reading.of(*(node.inputs[0] for node in nodes)),), used, symbol)


def _symbol(kind: str, node: AnyOperator) -> SymbolMeaning | None:
    """Return what a pointwise operator of one operand computes; None of any other operator."""
    is_scale = node.target in _SCALES and all(
        isinstance(value, (Slot, int, float)) or value is None for _, value in node.arguments
    )
    if len(node.inputs) != 1 or len(node.outputs) != 1 or len(_slots(node)) != 1:
        return None
    if node.target not in POINTWISE if kind == "relu" else not is_scale:
        return None
    return node.target, node.arguments


def _slots(node: AnyOperator) -> list[int]:
    return [slot for _, value in node.arguments for slot in slots_in(value)]


def _convolution(node: AnyOperator, reading: Reading, used: frozenset[str]) -> Iterator[Decomposition]:
    given = dict(node.arguments)
    if node.target == CONVOLUTION and given["groups"] == 1 and given["bias"] is None:
        operands = (Reading((name,), (0, 1, 1, 1, 1)) for name in node.inputs)
        if reading.layout == (0, 1, 1, 1, 1):
            yield Decomposition(tuple(operands), used, (node.target, node.arguments))
