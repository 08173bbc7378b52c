"""Sliding windows: how a dim of output positions reads its input, and the padding that a part needs.

A window's extent here includes the slack: the input positions at the end that no window reaches because the stride
skips them. With them a whole part touches the whole input, so that nothing is cut off before a kernel that ignores
those positions anyway; inner parts touch at most stride - 1 positions more than they need.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph.axes import AxisKind, Dim, DimFactor, whole
from graph.rules.base import TaskPart
from graph.rules.common import SpaceBuilder, axis_of

# Padding before and after, of one dim.
Padding = tuple[int, int]

SPATIAL_NAMES: dict[int, tuple[str, ...]] = {
    1: ("length",),
    2: ("height", "width"),
    3: ("depth", "height", "width"),
}


def repeat(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return one number for each of `count` dims, as torch reads an int or a list of one."""
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) if len(value) == count else tuple(value) * count


def window_reaches(kernel: Sequence[int], dilation: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """Return, for each spatial dim, the distance from a window's first to one past its last input."""
    return tuple((size - 1) * step + 1 for size, step in zip(kernel, repeat(dilation, spatial), strict=True))


def window_dim(
    builder: SpaceBuilder,
    name: str,
    size: int,
    positions: int,
    *,
    before: int,
    stride: int,
    reach: int,
    after: int,
) -> tuple[Dim, Dim]:
    """Add the axis of `positions` output positions; return the input dim (a window on it) and the output dim.

    `reach` is the window's (`window_reaches`).
    """
    slack = size + before + after - reach - (positions - 1) * stride
    output = builder.add(name, positions, AxisKind.ATTRIBUTE)
    axis = axis_of(output)
    if axis is None and before == 0 and after == 0:
        return whole(size), output
    return (DimFactor(size, axis, -before, stride if axis is not None else 1, reach + slack),), output


def local_padding(part: TaskPart, operand: int, dim: int) -> Padding:
    """Return how far a part's windows reach over the ends of a dim of an input."""
    factors = part.space.inputs[operand][dim]
    if len(factors) != 1:
        return 0, 0  # a product of identity factors: windows of one point, no padding
    factor = factors[0]
    low, high = factor.unclipped(part.points[factor.axis] if factor.axis is not None else (0, 1))
    inside = max(0, min(high, factor.size) - max(low, 0))
    before = min(max(-low, 0), high - low)
    return before, high - low - inside - before


def symmetric_padding(
    paddings: Sequence[Padding],
    sizes: Sequence[int],
    positions: Sequence[int],
    strides: Sequence[int],
    reaches: Sequence[int],
) -> tuple[int, ...] | None:
    """Return one number a dim where equal padding at both ends gives the same windows; None where it does not.

    Padding too much at the end is harmless as long as the stride keeps a further window from fitting. Windows that lie
    in the padding altogether read nothing; torch's kernels refuse such an input, so that it is padded beforehand.
    """
    for (before, _), size, count, stride, reach in zip(
        paddings, sizes, positions, strides, reaches, strict=True
    ):
        if size == 0 or size + 2 * before < reach or (size + 2 * before - reach) // stride + 1 != count:
            return None
    return tuple(before for before, _ in paddings)
