"""Builds operators of networks' graphs whose values are those of terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from graph.importing.building import DraftOperator, GraphBuilder, Ref
from graph.operators import Argument, Slot, TensorSpec
from graph.rules.windows import repeat, window_reaches
from graph.substitutions.terms import VARIABLE, Term
from graph.substitutions.translation import FACTORS, SAME, Reading, SymbolMeaning

_TARGETS = {"add": "aten.add.Tensor", "multiply": "aten.mul.Tensor"}


class _NotBuilt(Exception):
    """A term has no operators in this translation, for the values that its variables stand for."""


class TermBuilder:
    """Makes operators for terms; equal terms are one, transposed and joined values are made where they are read.

    Args:
        builder: has the values that are read; gets those that are made.
        name: of the operator that makes the first output, and what the names of the others begin with.
        readings: what variables stand for.
        symbols: what `relu`, `scale` and `conv` stand for.
        extents: the sizes that extents stand for.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        name: str,
        readings: Mapping[str, Reading],
        symbols: Mapping[str, SymbolMeaning],
        extents: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._builder = builder
        self._name = name
        self._readings = readings
        self._symbols = symbols
        self._extents = extents
        self._made: dict[object, Reading] = {}
        self._drafts: list[DraftOperator] = []

    def operators(self, terms: Sequence[Term], outputs: Sequence[str]) -> list[DraftOperator] | None:
        """Return operators that make `outputs`, of which each is the value of a term.

        An output that is another value has an operator `SAME`. None where a value would have another shape or dtype,
        or another gradient.
        """
        try:
            names = [self._plain(self._value(term)) for term in terms]
        except _NotBuilt:
            return None
        values = self._builder.values
        made = {name for draft in self._drafts for name in draft.outputs}
        renamed: dict[str, str] = {}
        for name, output in zip(names, outputs, strict=True):
            new, old = values[name], values[output]
            if (new.spec, new.requires_gradient) != (old.spec, old.requires_gradient):
                return None
            if name in made and name not in renamed:
                renamed[name] = output
            else:
                same = DraftOperator(f"{self._name}.{output}", SAME, (("self", Slot(0)),), (name,), (output,))
                self._drafts.append(same)
        for draft in self._drafts:
            if draft.outputs[0] in renamed and draft.outputs[0] == names[0]:
                draft.name = self._name
            draft.inputs = tuple(renamed.get(name, name) for name in draft.inputs)
            draft.outputs = tuple(renamed.get(name, name) for name in draft.outputs)
        for name in renamed:
            del values[name]
        return self._drafts

    def _emit(
        self, kind: str, target: str, arguments: Mapping[str, Argument], *specs: TensorSpec
    ) -> tuple[str, ...]:
        names = self._builder.add(f"{self._name}.{kind}", target, arguments, specs)
        self._drafts.append(self._builder.operators.pop())
        return names

    def _spec(self, name: str) -> TensorSpec:
        return self._builder.spec(name)

    def _value(self, term: Term) -> Reading:
        if term.kind == VARIABLE:
            return self._readings[term.name]
        if term not in self._made:
            self._made[term] = self._applied(term)
        return self._made[term]

    def _applied(self, term: Term) -> Reading:
        operands = [self._value(operand) for operand in term.operands]
        match term.kind:
            case "transpose":
                return operands[0].flipped()
            case "concat":
                return self._concat(int(term.attributes[0]), *operands)
            case "relu" | "scale":
                key = f"{term.kind}{list(term.attributes)}" if term.kind == "scale" else term.kind
                return self._symbol(term.kind, key, [self._single(operands[0])])
            case "add" | "multiply":
                return self._elementwise(term.kind, *map(self._single, operands))
            case "split":
                return self._split(term, self._single(operands[0]))
            case "matmul" | "linear":
                return self._product(*operands)
            case "add_bias":
                x = self._plain_reading(operands[0])
                given = {"self": Ref(x.names[0]), "other": Ref(self._plain(operands[1])), "alpha": 1}
                return x.of(*self._emit("add", _TARGETS["add"], given, self._spec(x.names[0])))
            case "conv":
                return self._symbol("conv", "conv", [self._plain_reading(operand) for operand in operands])
            case _:
                return self._viewed(term, self._plain_reading(operands[0]))

    def _single(self, reading: Reading) -> Reading:
        """Return a reading of one value: joined, if it is of several."""
        if len(reading.names) == 1:
            return reading
        specs = [self._spec(name) for name in reading.names]
        dim = reading.place(reading.dim)
        shape = list(specs[0].shape)
        shape[dim] = sum(spec.shape[dim] for spec in specs)
        given = {"tensors": tuple(map(Ref, reading.names)), "dim": dim}
        return reading.of(
            *self._emit("cat", "aten.cat.default", given, TensorSpec(tuple(shape), specs[0].dtype))
        )

    def _plain_reading(self, reading: Reading) -> Reading:
        """Return a reading of one value that is not transposed."""
        reading = self._single(reading)
        if not reading.transposed:
            return reading
        batch, first, second = reading.layout
        # The tensor has the second group of dims first.
        dims = (
            *range(batch),
            *range(batch + second, batch + second + first),
            *range(batch, batch + second),
        )
        spec = self._spec(reading.names[0])
        shape = tuple(spec.shape[dim] for dim in dims)
        given = {"self": Ref(reading.names[0]), "dims": dims}
        names = self._emit("permute", "aten.permute.default", given, TensorSpec(shape, spec.dtype))
        return Reading(names, reading.layout)

    def _plain(self, reading: Reading) -> str:
        return self._plain_reading(reading).names[0]

    def _alike(self, first: Reading, second: Reading) -> tuple[Reading, Reading]:
        """Return readings of which both are transposed or none."""
        if first.transposed == second.transposed:
            return first, second
        return self._plain_reading(first), self._plain_reading(second)

    def _concat(self, dim: int, first: Reading, second: Reading) -> Reading:
        both = (
            one if len(one.names) == 1 or one.dim == dim else self._single(one) for one in (first, second)
        )
        first, second = self._alike(*both)
        if first.layout != second.layout:
            raise _NotBuilt
        return replace(first, names=first.names + second.names, dim=dim)

    def _symbol(self, kind: str, key: str, operands: Sequence[Reading]) -> Reading:
        target, arguments = self._symbols[key]
        names = [operand.names[0] for operand in operands]
        given = {
            name: Ref(names[value.index]) if isinstance(value, Slot) else value for name, value in arguments
        }
        spec = self._spec(names[0])
        if kind == "conv":
            spec = _convolved(given, spec, self._spec(names[1]))
        return operands[0].of(*self._emit(target.split(".")[1], target, given, spec))

    def _elementwise(self, kind: str, first: Reading, second: Reading) -> Reading:
        first, second = self._alike(first, second)
        specs = [self._spec(one.names[0]) for one in (first, second)]
        if specs[0] != specs[1] or first.layout != second.layout:
            raise _NotBuilt
        given = {"self": Ref(first.names[0]), "other": Ref(second.names[0])}
        scaled = {"alpha": 1} if kind == "add" else {}
        return first.of(*self._emit(kind, _TARGETS[kind], given | scaled, specs[0]))

    def _split(self, term: Term, reading: Reading) -> Reading:
        dim, half, extent = term.attributes
        place = reading.place(int(dim))
        key = ("split", dim, extent, reading)
        if key not in self._made:
            spec = self._spec(reading.names[0])
            pieces = str(extent).split("+")
            if any(piece not in self._extents for piece in pieces):
                raise _NotBuilt
            left = sum(self._extents[piece][0] for piece in pieces)
            sizes = (left, spec.shape[place] - left)
            if sizes[1] <= 0:
                raise _NotBuilt
            specs = [
                TensorSpec((*spec.shape[:place], size, *spec.shape[place + 1 :]), spec.dtype)
                for size in sizes
            ]
            given = {"self": Ref(reading.names[0]), "split_sizes": sizes, "dim": place}
            names = self._emit("split", "aten.split_with_sizes.default", given, *specs)
            self._made[key] = replace(reading, names=names)
        return reading.of(self._made[key].names[int(half)])

    def _product(self, x: Reading, weight: Reading, bias: Reading | None = None) -> Reading:
        x, weight = self._plain_reading(x), self._single(weight)
        batch, *groups, inner = x.layout
        rows = sum(groups)
        if inner != 1 or weight.layout[1:] != (1, 1) or weight.layout[0] != batch:
            raise _NotBuilt
        biases = None if bias is None else Ref(self._plain(bias))
        if weight.transposed and batch:
            weight = self._plain_reading(weight)
        shape = self._spec(x.names[0]).shape
        columns = self._spec(weight.names[0]).shape[weight.place(1)]
        spec = TensorSpec((*shape[:-1], columns), self._spec(x.names[0]).dtype)
        given: dict[str, Argument]
        if bias is not None and not weight.transposed:
            # A linear layer has the weight's columns first.
            weight = self._plain_reading(weight.flipped()).flipped()
        if weight.transposed:
            target = "aten.linear.default"
            given = {"input": Ref(x.names[0]), "weight": Ref(weight.names[0]), "bias": biases}
        elif batch == 0 and rows > 1:
            target = "aten.matmul.default"
            given = {"self": Ref(x.names[0]), "other": Ref(weight.names[0])}
        else:
            target = {0: "aten.mm.default", 1: "aten.bmm.default"}.get(batch, "aten.matmul.default")
            second = "other" if target == "aten.matmul.default" else "mat2"
            given = {"self": Ref(x.names[0]), second: Ref(weight.names[0])}
        if batch and rows != 1:
            raise _NotBuilt
        return x.of(*self._emit(target.split(".")[1], target, given, spec))

    def _viewed(self, term: Term, reading: Reading) -> Reading:
        """Return a reading whose first two dims are one, or one that was made of two are two."""
        spec = self._spec(reading.names[0])
        batch, last = reading.layout[0], reading.layout[-1]
        shape = spec.shape
        inner = shape[batch : len(shape) - last]
        groups: list[tuple[int, ...]]
        if term.kind == "flatten":
            groups = [(prod(inner),)]
        else:
            groups = [self._extents.get(name, ()) for name in FACTORS]
            if not all(groups) or prod(map(prod, groups)) != prod(inner):
                raise _NotBuilt
        size = (*shape[:batch], *(one for group in groups for one in group), *shape[len(shape) - last :])
        names = self._emit(
            "view",
            "aten.view.default",
            {"self": Ref(reading.names[0]), "size": size},
            TensorSpec(size, spec.dtype),
        )
        return Reading(names, (batch, *map(len, groups), last))


def _convolved(given: Mapping[str, Argument], image: TensorSpec, kernel: TensorSpec) -> TensorSpec:
    """Return the spec of a convolution's result."""
    stride = repeat(given["stride"], 2)
    reaches = window_reaches(kernel.shape[2:], given["dilation"], 2)
    padding = given["padding"]
    if isinstance(padding, str):
        totals = [reach - 1 if padding == "same" else 0 for reach in reaches]
    else:
        totals = [2 * size for size in repeat(padding, 2)]
    sizes = [
        (size + total - reach) // step + 1
        for size, total, reach, step in zip(image.shape[2:], totals, reaches, stride, strict=True)
    ]
    return TensorSpec((image.shape[0], kernel.shape[0], *sizes), image.dtype)
