"""Matrix products: their sizes, whatever the operator, and products of sizes between those of networks.

Networks have few sizes of products, far from each other, and every split and batch size makes new ones. Measuring a
sample of what lies between gives estimates (`profiler.estimate`) near neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import floor, log2, prod

import numpy as np

from graph.calls import LocalCall
from graph.operators import TensorSpec
from graph.rules import bytes_moved, flops

LINEAR = "aten.linear.default"
PRODUCTS = (LINEAR, "aten.mm.default", "aten.bmm.default")
# Sizes of layers and their parts are mostly multiples of a power of two: as many are drawn from in a doubling.
STEPS = 8
# Draws that exceed the largest product of their kind are drawn again, at most so often for each wanted one.
TRIES = 20


def products_between(calls: Iterable[LocalCall], count: int, seed: int) -> list[LocalCall]:
    """Return about `count` products that are none of `calls`, of sizes between theirs, all different.

    Products are alike where all but their sizes is the same; each kind has the share that it has of the calls. Sizes
    are drawn evenly on a logarithmic scale between the kind's smallest and largest, each dim by itself, from eight a
    doubling; the arithmetic and the bytes are at most those of the kind's largest. A kind that has one call only, or
    sizes too few to draw from, gives fewer.
    """
    kinds: dict[tuple[object, ...], list[LocalCall]] = {}
    for call in sorted(calls, key=lambda product: product.digest):
        if call.target in PRODUCTS:
            kinds.setdefault(_kind(call), []).append(call)
    total = sum(map(len, kinds.values()))
    measured = {call.digest for of_kind in kinds.values() for call in of_kind}
    drawn: dict[str, LocalCall] = {}
    rng = np.random.default_rng(seed)
    for of_kind in kinds.values():
        share = round(count * len(of_kind) / total)
        most = max(map(flops, of_kind)), max(map(bytes_moved, of_kind))
        bounds = [(min(dims), max(dims)) for dims in zip(*map(sizes, of_kind), strict=True)]
        count_drawn = 0
        for _ in range(TRIES * share):
            if count_drawn == share:
                break
            product = resized(of_kind[0], [_draw(low, high, rng) for low, high in bounds])
            if (
                product.digest in measured
                or product.digest in drawn
                or flops(product) > most[0]
                or bytes_moved(product) > most[1]
            ):
                continue
            drawn[product.digest] = product
            count_drawn += 1
    return list(drawn.values())


def _kind(call: LocalCall) -> tuple[object, ...]:
    operands = tuple((spec.dtype, len(spec.shape)) for spec in (*call.inputs, *call.outputs))
    return (call.target, call.arguments, operands, call.gradients)


def _draw(low: int, high: int, rng: np.random.Generator) -> int:
    size = float(2.0 ** rng.uniform(log2(low), log2(high)))
    step = max(1, (1 << floor(log2(size))) // STEPS)
    return min(high, max(low, round(size / step) * step))


def sizes(call: LocalCall) -> tuple[int, ...]:
    """Return the sizes of a product: leading dims, rows (of aten.linear, leading dims are rows), inner, columns."""
    last = call.inputs[0].shape[-1]
    return (*call.inputs[0].shape[:-1], last, call.outputs[0].shape[-1])


def matrices(call: LocalCall) -> tuple[int, int, int, int]:
    """Return of a product how many pairs of matrices are multiplied, and their rows, inner size and columns."""
    *leading, inner, columns = sizes(call)
    if call.target == LINEAR:
        return 1, prod(leading), inner, columns
    return prod(leading[:-1]), leading[-1], inner, columns


def resized(call: LocalCall, sizes: Sequence[int]) -> LocalCall:
    """Return the product like `call` that has these sizes, in the order of `sizes`."""
    *leading, inner, columns = sizes
    linear = call.target == LINEAR
    second = (columns, inner) if linear else (*leading[:-1], inner, columns)
    shapes = [(*leading, inner), second, (columns,)][: len(call.inputs)]
    return replace(
        call,
        inputs=tuple(TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, call.inputs, strict=True)),
        outputs=(TensorSpec((*leading, columns), call.outputs[0].dtype),),
    )
