"""Terms executed by torch, part by part: the oracle of graph/substitutions, with gradients.

A parallel tensor is its degrees and a part for each index of each of them. Nothing here is shared with what found the
rules: relu is relu, a convolution is torch's, and a part is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from graph.substitutions.terms import VARIABLE, Term, type_of
from graph.substitutions.types import TensorType
from scripts.substitutions.terms import atoms

Index = tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """The parts of a tensor, by their index in each degree."""

    degrees: tuple[str, ...]
    of: dict[Index, Tensor]


def sizes_for(types: Mapping[str, TensorType], degrees: Mapping[str, int], seed: int) -> dict[str, int]:
    """Return sizes that all degrees divide; images and kernels have small ones of their own."""
    names = sorted({name for type_ in types.values() for extent in type_.dims for name in atoms(extent)})
    used = {degree for type_ in types.values() for degree in type_.degrees}
    unit = 1
    for degree, size in degrees.items():
        unit *= size if degree in used or degree in degrees else 1
    spatial = {"h": 4, "v": 3, "r": 3, "t": 3 if seed % 2 else 1}
    return {
        **degrees,
        **{name: spatial.get(name, unit * (1 + (seed + place) % 3)) for place, name in enumerate(names)},
    }


def leaves(
    types: Mapping[str, TensorType], sizes: Mapping[str, int], seed: int, *, whole: bool
) -> dict[str, Parts]:
    """Return variables that need gradients: whole numbers from -3 to 3, or normal ones."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, type_ in types.items():
        shape = type_.shape(sizes)[len(type_.degrees) :]
        parts = {}
        for index in product(*(range(sizes[degree]) for degree in type_.degrees)):
            if whole:
                part = torch.randint(-3, 4, shape, generator=generator).double()
            else:
                part = torch.randn(shape, generator=generator, dtype=torch.float64)
            parts[index] = part.requires_grad_()
        found[name] = Parts(type_.degrees, parts)
    return found


def execute(
    term: Term,
    values: Mapping[str, Parts],
    types: Mapping[str, TensorType],
    sizes: Mapping[str, int],
    memo: dict[Term, Parts] | None = None,
) -> Parts:
    """Return the parts of the value of `term`; with `memo`, of equal terms once."""
    if term.kind == VARIABLE:
        return values[term.name]
    if memo is not None:
        if term not in memo:
            memo[term] = _executed(term, values, types, sizes, memo)
        return memo[term]
    return _executed(term, values, types, sizes, memo)


def _executed(
    term: Term,
    values: Mapping[str, Parts],
    types: Mapping[str, TensorType],
    sizes: Mapping[str, int],
    memo: dict[Term, Parts] | None,
) -> Parts:
    operands = [execute(operand, values, types, sizes, memo) for operand in term.operands]
    first = operands[0]
    if term.kind in ("partition", "replicate"):
        return _spread(term, first, sizes)
    if term.kind in ("combine", "reduce"):
        return _gathered(term, first, sizes)
    assert all(operand.degrees == first.degrees for operand in operands)
    result = type_of(term, types)
    left = result.dims[int(term.attributes[0])].size(sizes) if term.kind == "split" else 0
    shape = result.shape(sizes)[len(result.degrees) :]
    parts = {
        index: _local(term, [operand.of[index] for operand in operands], left, shape) for index in first.of
    }
    return Parts(first.degrees, parts)


def _spread(term: Term, operand: Parts, sizes: Mapping[str, int]) -> Parts:
    degree = str(term.attributes[-1])
    degrees = tuple(sorted((*operand.degrees, degree)))
    place = degrees.index(degree)
    parts = {}
    for index, part in operand.of.items():
        if term.kind == "partition":
            pieces = part.chunk(sizes[degree], int(term.attributes[0]))
        else:
            pieces = (part,) * sizes[degree]
        for number, piece in enumerate(pieces):
            parts[(*index[:place], number, *index[place:])] = piece
    return Parts(degrees, parts)


def _gathered(term: Term, operand: Parts, sizes: Mapping[str, int]) -> Parts:
    degree = str(term.attributes[-1])
    place = operand.degrees.index(degree)
    groups: dict[Index, list[Tensor]] = {}
    for index in sorted(operand.of):
        groups.setdefault((*index[:place], *index[place + 1 :]), []).append(operand.of[index])
    join = torch.cat if term.kind == "combine" else None
    return Parts(
        operand.degrees[:place] + operand.degrees[place + 1 :],
        {
            index: join(parts, int(term.attributes[0])) if join else torch.stack(parts).sum(0)
            for index, parts in groups.items()
        },
    )


def _local(term: Term, x: list[Tensor], left: int, shape: tuple[int, ...]) -> Tensor:
    match term.kind:
        case "matmul":
            return x[0] @ x[1]
        case "matmul_relu":
            return nn.functional.relu(x[0] @ x[1])
        case "linear":
            return nn.functional.linear(x[0], x[1].T, x[2])
        case "linear_relu":
            return nn.functional.relu(nn.functional.linear(x[0], x[1].T, x[2]))
        case "add_bias":
            return x[0] + x[1]
        case "conv":
            return nn.functional.conv2d(x[0], x[1], padding=(x[1].shape[2] // 2, x[1].shape[3] // 2))
        case "conv_relu":
            return nn.functional.relu(
                nn.functional.conv2d(x[0], x[1], padding=(x[1].shape[2] // 2, x[1].shape[3] // 2))
            )
        case "add_along" | "multiply_along":
            vector = x[1].reshape([-1 if dim == term.attributes[0] else 1 for dim in range(x[0].dim())])
            return x[0] + vector if term.kind == "add_along" else x[0] * vector
        case "batch_norm":
            # Torch's gives its statistics no gradients: the mean is taken off before, the deviation is in the weight.
            ones = torch.ones_like(x[1])
            centered = x[0] + x[1].reshape(-1, 1, 1)
            return nn.functional.batch_norm(centered, 0 * ones, ones, x[2] * x[3], x[4], eps=0.0)
        case "add":
            return x[0] + x[1]
        case "multiply":
            return x[0] * x[1]
        case "relu":
            return nn.functional.relu(x[0])
        case "scale":
            return 5 * x[0]
        case "softmax":
            return nn.functional.softmax(x[0], -1)
        case "transpose":
            return x[0].T
        case "flatten" | "unflatten":
            return x[0].reshape(shape)
        case "concat":
            return torch.cat(x, int(term.attributes[0]))
        case "split":
            dim, half, _ = term.attributes
            start = 0 if half == 0 else x[0].shape[int(dim)] - left
            return x[0].narrow(int(dim), start, left)
        case kind:
            raise AssertionError(f"{kind} has no execution")


def agree(
    source: tuple[Term, ...],
    target: tuple[Term, ...],
    types: Mapping[str, TensorType],
    degrees: Mapping[str, int],
    seed: int,
    *,
    whole: bool,
) -> bool:
    """Return whether both graphs have equal outputs and equal gradients: to the bit for whole numbers."""
    sizes = sizes_for(types, degrees, seed)
    results = []
    for side in (source, target):
        values = leaves(types, sizes, seed, whole=whole)
        outputs = [execute(term, values, types, sizes) for term in side]
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros((), dtype=torch.float64)
        for output in outputs:
            for index in sorted(output.of):
                part = output.of[index]
                weight = torch.randint(-3, 4, part.shape, generator=generator).double()
                loss = loss + (part * weight).sum()
        inputs = [part for value in values.values() for part in value.of.values()]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        results.append(([output.of[index] for output in outputs for index in sorted(output.of)], gradients))
    pairs = [pair for first, second in zip(*results, strict=True) for pair in zip(first, second, strict=True)]
    if any(first.shape != second.shape for first, second in pairs):
        return False
    if whole:
        return all(torch.equal(first, second) for first, second in pairs)
    return all(torch.allclose(first, second, rtol=1e-9, atol=1e-9) for first, second in pairs)
