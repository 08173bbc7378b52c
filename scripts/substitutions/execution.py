"""Executes terms on integers modulo a prime, so that sums in any order are equal to the bit.

relu is x(x + 1) + 1, as in TASO: a polynomial loses nothing of its argument, where the real relu of integers would
make many terms equal by accident. A parallel tensor is an array with one leading axis for each of its degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from graph.substitutions.terms import VARIABLE, Attribute, Term, applied
from graph.substitutions.types import IllTypedTerm, TensorType
from scripts.substitutions.terms import atoms, variables

PRIME = 1_000_003
Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor: its type and its elements."""

    type: TensorType
    array: Array


@dataclass(frozen=True)
class RandomInputs:
    """Sizes of degrees and a seed; extents of atoms and values of variables and factors follow from their names."""

    degrees: Mapping[str, int]
    seed: int

    def sizes(self, *types: TensorType) -> dict[str, int]:
        """Return the sizes of all atoms of `types`, which all degrees divide, and of the degrees.

        The spatial atoms h, v, r and t of images and kernels are divided by none: kernels of odd extents keep the
        extents of an image under a padding of half a kernel.
        """
        unit = int(np.prod(list(self.degrees.values()), dtype=int))
        sizes = dict(self.degrees)
        for name in sorted({name for type_ in types for extent in type_.dims for name in atoms(extent)}):
            draw = crc32(f"{self.seed} {name}".encode())
            if name in "hvrt":
                sizes[name] = 3 if name in "rt" else 2 + draw % 2
            else:
                sizes[name] = unit * (1 + draw % 3)
        return sizes

    def value(self, name: str, type_: TensorType, sizes: Mapping[str, int]) -> TensorValue:
        """Return the value of a variable."""
        generator = np.random.default_rng([self.seed, crc32(name.encode())])
        return TensorValue(type_, generator.integers(0, PRIME, type_.shape(sizes), dtype=np.int64))


def factor(name: Attribute) -> int:
    """Return the value of a factor of `scale`."""
    return 3 + crc32(str(name).encode()) % 1000


def execute(
    terms: tuple[Term, ...],
    types: Mapping[str, TensorType],
    setting: RandomInputs,
    sizes: Mapping[str, int] | None = None,
) -> list[TensorValue]:
    """Return the values of `terms`; those of their variables follow from the setting and their names."""
    chosen = setting.sizes(*types.values()) if sizes is None else sizes
    memo = {Term(VARIABLE, (name,)): setting.value(name, types[name], chosen) for name in variables(*terms)}
    return [_value(term, memo, chosen) for term in terms]


def _value(term: Term, memo: dict[Term, TensorValue], sizes: Mapping[str, int]) -> TensorValue:
    if term not in memo:
        operands = [_value(operand, memo, sizes) for operand in term.operands]
        memo[term] = apply(term.kind, term.attributes, operands, sizes)
    return memo[term]


def apply(
    kind: str, attributes: tuple[Attribute, ...], operands: list[TensorValue], sizes: Mapping[str, int]
) -> TensorValue:
    """Return the result of one operator.

    Raises:
        IllTypedTerm: it does not fit its operands.
    """
    type_ = applied(kind, attributes, [operand.type for operand in operands])
    array = EXECUTIONS[kind](attributes, operands, sizes)
    if array.shape != type_.shape(sizes):
        raise IllTypedTerm(f"{kind}: its result has shape {array.shape}, its type says {type_.shape(sizes)}")
    return TensorValue(type_, array)


def _relu(x: Array) -> Array:
    return (x * ((x + 1) % PRIME) + 1) % PRIME


def _softmax(x: Array) -> Array:
    """Return, for each element, a number of it and of all its row: integers have no exponentials."""
    of_rows: Array = (x * x % PRIME).sum(-1, keepdims=True) % PRIME
    return _relu(x) * of_rows % PRIME


def _matmul(x: Array, w: Array) -> Array:
    rows = x.reshape(*w.shape[:-2], -1, w.shape[-2])
    product: Array = np.matmul(rows, w) % PRIME
    return product.reshape(*x.shape[:-1], w.shape[-1])


def _conv(x: TensorValue, w: TensorValue) -> Array:
    """Return the convolution of stride 1 with a padding of half a kernel, written as shifted products."""
    kernel = w.array.shape[-2:]
    pads = [(0, 0)] * (x.array.ndim - 2) + [(extent // 2, extent // 2) for extent in kernel]
    padded = np.pad(x.array, pads)
    height, width = x.array.shape[-2:]
    result: Array | int = 0
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            window = padded[..., row : row + height, column : column + width]
            weight = w.array[..., row, column]
            moved = np.moveaxis(window, -3, -1)  # n, h, w, c
            flat = moved.reshape(*weight.shape[:-2], -1, weight.shape[-1])
            product = np.matmul(flat, np.swapaxes(weight, -1, -2)) % PRIME
            result = result + product.reshape(*moved.shape[:-1], weight.shape[-2])
    return np.moveaxis(np.asarray(result) % PRIME, -1, -3)


def _bias(x: Array, b: Array) -> Array:
    return (x + b[..., None, :]) % PRIME


def _along(attributes: tuple[Attribute, ...], operands: list[TensorValue]) -> tuple[Array, Array]:
    """Return a tensor, and a vector for one of its dims with as many axes, of one element each in the others."""
    x, vector = operands
    dims = len(x.type.dims)
    shape = [1] * dims
    shape[int(attributes[0])] = vector.array.shape[-1]
    return x.array, vector.array.reshape(*vector.array.shape[:-1], *shape)


def _add_along(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], _sizes: Mapping[str, int]
) -> Array:
    x, vector = _along(attributes, operands)
    return (x + vector) % PRIME


def _multiply_along(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], _sizes: Mapping[str, int]
) -> Array:
    x, vector = _along(attributes, operands)
    return x * vector % PRIME


def _batch_norm(
    _attributes: tuple[Attribute, ...], operands: list[TensorValue], _sizes: Mapping[str, int]
) -> Array:
    images = operands[0]
    shift, scale, weight, bias = (_along((1,), [images, vector])[1] for vector in operands[1:])
    return ((images.array + shift) * scale % PRIME * weight + bias) % PRIME


def _axis(value: TensorValue, dim: Attribute) -> int:
    return len(value.type.degrees) + int(dim)


def _concat(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], _sizes: Mapping[str, int]
) -> Array:
    return np.concatenate([operand.array for operand in operands], _axis(operands[0], attributes[0]))


def _split(attributes: tuple[Attribute, ...], operands: list[TensorValue], sizes: Mapping[str, int]) -> Array:
    dim, half, _ = attributes
    left = applied("split", (dim, 0, attributes[2]), [operands[0].type]).dims[int(dim)].size(sizes)
    return np.split(operands[0].array, [left], _axis(operands[0], dim))[int(half)]


def _partition(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], sizes: Mapping[str, int]
) -> Array:
    x, (dim, degree) = operands[0], attributes
    axis, parts = _axis(x, dim), sizes[str(degree)]
    shape = x.array.shape
    divided = x.array.reshape(*shape[:axis], parts, shape[axis] // parts, *shape[axis + 1 :])
    return np.moveaxis(divided, axis, sorted({*x.type.degrees, str(degree)}).index(str(degree)))


def _combine(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], _sizes: Mapping[str, int]
) -> Array:
    x, (dim, degree) = operands[0], attributes
    axis = _axis(x, dim) - 1
    moved = np.moveaxis(x.array, x.type.degrees.index(str(degree)), axis)
    shape = moved.shape
    return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _replicate(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], sizes: Mapping[str, int]
) -> Array:
    x, degree = operands[0], str(attributes[0])
    place = sorted({*x.type.degrees, degree}).index(degree)
    return np.repeat(np.expand_dims(x.array, place), sizes[degree], place)


def _reduce(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], _sizes: Mapping[str, int]
) -> Array:
    x = operands[0]
    return np.asarray(x.array.sum(x.type.degrees.index(str(attributes[0])))) % PRIME


def _flatten(
    _attributes: tuple[Attribute, ...], operands: list[TensorValue], _sizes: Mapping[str, int]
) -> Array:
    array = operands[0].array
    return array.reshape(*array.shape[:-3], array.shape[-3] * array.shape[-2], array.shape[-1])


def _unflatten(
    attributes: tuple[Attribute, ...], operands: list[TensorValue], sizes: Mapping[str, int]
) -> Array:
    shape = applied("unflatten", attributes, [operands[0].type]).shape(sizes)
    return operands[0].array.reshape(shape)


Execution = Callable[[tuple[Attribute, ...], list[TensorValue], Mapping[str, int]], Array]

EXECUTIONS: dict[str, Execution] = {
    "matmul": lambda _a, o, _s: _matmul(o[0].array, o[1].array),
    "matmul_relu": lambda _a, o, _s: _relu(_matmul(o[0].array, o[1].array)),
    "linear": lambda _a, o, _s: _linear(o),
    "linear_relu": lambda _a, o, _s: _relu(_linear(o)),
    "add_bias": lambda _a, o, _s: _bias(o[0].array, o[1].array),
    "conv": lambda _a, o, _s: _conv(o[0], o[1]),
    "conv_relu": lambda _a, o, _s: _relu(_conv(o[0], o[1])),
    "add_along": _add_along,
    "multiply_along": _multiply_along,
    "batch_norm": _batch_norm,
    "add": lambda _a, o, _s: (o[0].array + o[1].array) % PRIME,
    "multiply": lambda _a, o, _s: o[0].array * o[1].array % PRIME,
    "relu": lambda _a, o, _s: _relu(o[0].array),
    "scale": lambda a, o, _s: o[0].array * factor(a[0]) % PRIME,
    "softmax": lambda _a, o, _s: _softmax(o[0].array),
    "transpose": lambda _a, o, _s: np.swapaxes(o[0].array, -1, -2),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "concat": _concat,
    "split": _split,
    "partition": _partition,
    "combine": _combine,
    "replicate": _replicate,
    "reduce": _reduce,
}


def _linear(operands: list[TensorValue]) -> Array:
    product = _matmul(operands[0].array, operands[1].array)
    bias = operands[2].array
    spread = bias.reshape(*bias.shape[:-1], *[1] * (product.ndim - bias.ndim), bias.shape[-1])
    return (product + spread) % PRIME
