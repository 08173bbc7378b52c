"""Views: reshaping, permuting, expanding. They only rewrite how dims are products of axes.

The importer writes every reshaping (view, flatten, unsqueeze, ...) as aten.view.default and every exchange of dims as
aten.permute.default.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod

from graph.axes import AxisKind, Dim, DimFactor, IterationSpace, whole
from graph.rules.base import Signature
from graph.rules.common import BaseRule, SpaceBuilder, activation_dims, dim_name, whole_space
from graph.rules.generic import PointwiseRule


class ViewRule(BaseRule):
    """No elements are computed."""

    is_view = True
    computes_nothing = True
    inherits_names = True


def segments(left: Sequence[int], right: Sequence[int]) -> list[tuple[range, range]]:
    """Return the shortest runs of dims, of both shapes, whose products agree; dims of one may stand anywhere."""
    result = []
    i = j = 0
    while i < len(left) or j < len(right):
        start_i, start_j = i, j
        product_left = product_right = 1
        while True:
            if product_left <= product_right and i < len(left):
                product_left *= left[i]
                i += 1
            elif j < len(right):
                product_right *= right[j]
                j += 1
            elif i < len(left):
                product_left *= left[i]
                i += 1
            if product_left == product_right:
                break
        result.append((range(start_i, i), range(start_j, j)))
    return result


def strides(sizes: Sequence[int]) -> list[int]:
    """Return the stride of each dim of a dense shape, the innermost's being one."""
    return [prod(sizes[position + 1 :]) for position in range(len(sizes))]


def common_factors(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """Return sizes, outermost first, of which the dims of both shapes are products; None where none exist."""
    total = prod(left)
    bounds = sorted({1, total, *strides(left), *strides(right)}, reverse=True)
    sizes = []
    for larger, smaller in itertools.pairwise(bounds):
        if larger % smaller:
            return None
        sizes.append(larger // smaller)
    return sizes


class ReshapeRule(ViewRule):
    """aten.view: both shapes are products of common axes; where sizes do not factor, those dims stay whole."""

    sized = "size"

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name the dims that do not factor."""
        shape, result = signature.inputs[0].shape, signature.outputs[0].shape
        if 0 in shape:
            return None
        for left, right in segments(shape, result):
            mine, theirs = [shape[dim] for dim in left], [result[dim] for dim in right]
            if common_factors(mine, theirs) is None:
                return f"dims {mine} and {theirs} are no products of common factors, they stay whole"
        return None

    def space(self, signature: Signature) -> IterationSpace:
        """Return the common factors of both shapes as axes."""
        shape, result = signature.inputs[0].shape, signature.outputs[0].shape
        if 0 in shape:
            return whole_space(signature)
        builder = SpaceBuilder()
        inputs: list[Dim] = [whole(size) for size in shape]
        outputs: list[Dim] = [whole(size) for size in result]
        for left, right in segments(shape, result):
            sizes = common_factors([shape[dim] for dim in left], [result[dim] for dim in right])
            if sizes is None:
                continue
            names = _factor_names(left, right, len(shape), len(result), len(sizes))
            factors = [
                builder.add(
                    name, size, AxisKind.SAMPLE if left.start == 0 and position == 0 else AxisKind.ATTRIBUTE
                )
                for position, (name, size) in enumerate(zip(names, sizes, strict=True))
            ]
            _distribute(inputs, shape, left, factors)
            _distribute(outputs, result, right, factors)
        return builder.space([tuple(inputs)], [tuple(outputs)])


def _factor_names(left: range, right: range, rank: int, result_rank: int, count: int) -> list[str]:
    """Name factors after the dims of the side that has one for each, else after the first input dim."""
    if left.start == 0 and right.start == 0 and count == 1:
        return ["sample"]
    if len(left) == count:
        return [dim_name(rank, dim) for dim in left]
    if len(right) == count:
        return [dim_name(result_rank, dim) for dim in right]
    base = dim_name(rank, min(left.start, rank - 1)) if rank else "sample"
    return [base] + [f"{base}_inner"] * (count - 1)


def _distribute(dims: list[Dim], shape: Sequence[int], run: range, factors: Sequence[Dim]) -> None:
    """Give each dim of a run the factors whose product is its size."""
    position = 0
    for dim in run:
        size = 1
        taken: list[DimFactor] = []
        while size < shape[dim]:
            factor = factors[position]
            size *= factor[0].size
            taken.extend(factor)
            position += 1
        if taken:
            dims[dim] = tuple(taken)


class PermuteRule(ViewRule):
    """aten.permute(self, dims)."""

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a dim."""
        builder = SpaceBuilder()
        dims = activation_dims(builder, signature.inputs[0].shape)
        order = signature.argument("dims")
        return builder.space([tuple(dims)], [tuple(dims[dim] for dim in order)])


class ExpandRule(ViewRule):
    """aten.expand(self, size): dims of one are repeated."""

    sized = "size"
    # Repeated input dims are whole.
    space = PointwiseRule.space


RULES: Mapping[str, BaseRule] = {
    "aten.view.default": ReshapeRule(),
    "aten.permute.default": PermuteRule(),
    "aten.expand.default": ExpandRule(),
}
