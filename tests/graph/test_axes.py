"""Regions from axes against enumeration of all points, and refinement."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.axes import (
    REPLICA_AXIS,
    Axis,
    AxisKind,
    DimFactor,
    IterationSpace,
    along,
    coordinates,
    dim_indexes,
    followed_axes,
    operand_regions,
    partial_axes,
    refinable,
    refine,
    task_points,
    tasks,
    whole,
)
from graph.intervals import IndexSet, count


def _members(indexes: IndexSet) -> list[int]:
    return [index for start, stop in indexes for index in range(start, stop)]


@st.composite
def factors(draw: st.DrawFn) -> tuple[DimFactor, tuple[int, int]]:
    """A factor and a part of its axis."""
    low = draw(st.integers(0, 5))
    interval = (low, low + draw(st.integers(1, 4)))
    if draw(st.booleans()):
        size = draw(st.integers(1, 6))
        start = draw(st.integers(0, size - 1))
        return DimFactor(size, None, start, 1, draw(st.integers(1, size - start))), interval
    stride = draw(st.integers(1, 3))
    # Windows overlap or touch, as those of convolutions with their slack do.
    extent = draw(st.integers(stride, 5))
    return DimFactor(draw(st.integers(1, 12)), 0, draw(st.integers(-3, 3)), stride, extent), interval


@given(st.lists(factors(), min_size=1, max_size=3))
def test_dim_indexes_is_what_enumeration_touches(listed: list[tuple[DimFactor, tuple[int, int]]]) -> None:
    dim = tuple(
        DimFactor(f.size, None if f.axis is None else position, f.start, f.stride, f.extent)
        for position, (f, _) in enumerate(listed)
    )
    points = [interval for _, interval in listed]
    touched = []
    for factor, (low, high) in zip(dim, points, strict=True):
        positions = (
            range(factor.start, factor.start + factor.extent)
            if factor.axis is None
            else {
                point * factor.stride + factor.start + offset
                for point in range(low, high)
                for offset in range(factor.extent)
            }
        )
        touched.append(sorted(position for position in positions if 0 <= position < factor.size))
    expected = []
    for combination in itertools.product(*touched):
        index = 0
        for factor, position in zip(dim, combination, strict=True):
            index = index * factor.size + position
        expected.append(index)
    assert _members(dim_indexes(dim, points)) == expected


def _space() -> IterationSpace:
    """A linear layer whose inputs are (batch, sequence) in one dim."""
    axes = (
        Axis("sample", 6, AxisKind.SAMPLE),
        Axis("channel", 8, AxisKind.PARAMETER),
        Axis("in", 4, AxisKind.REDUCTION),
        REPLICA_AXIS,
    )
    return IterationSpace(
        axes,
        ((along(0, 6), along(2, 4)), (along(1, 8), along(2, 4)), (along(1, 8),)),
        ((along(0, 6), along(1, 8)),),
    )


def test_outputs_that_lack_an_axis_are_partial_sums_over_it() -> None:
    space = _space()
    assert partial_axes(space, 0) == (2,)
    assert followed_axes(space.inputs[1]) == {1, 2}


def test_tasks_are_in_row_major_order_and_replicas_share_a_region() -> None:
    degrees = (2, 1, 2, 2)
    assert tasks(degrees) == 8
    assert coordinates(degrees)[:3] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0)]
    space = _space()
    assert task_points(space, degrees, (1, 0, 1, 1)) == ((3, 6), (0, 8), (2, 4), (0, 1))
    regions = operand_regions(space.axes, space.inputs[0], degrees)
    assert regions[0] == regions[1] == (((0, 3),), ((0, 2),))
    assert regions[6] == (((3, 6),), ((2, 4),))


@pytest.mark.parametrize("sizes", [[2, 3], [3, 2], [1, 6]])
@pytest.mark.parametrize("channels", [[2, 4], [2, 2, 2]])
def test_refined_axes_cover_the_same_tensors(sizes: list[int], channels: list[int]) -> None:
    space = _space()
    assert refinable(space) == {0, 1, 2}
    refined = refine(space, {0: sizes, 1: channels})
    assert prod(axis.size for axis in refined.axes[:-1]) == prod(axis.size for axis in space.axes[:-1])
    assert refined.axes[-1] == REPLICA_AXIS
    assert [axis.kind for axis in refined.axes[:2]] == [AxisKind.SAMPLE, AxisKind.ATTRIBUTE]
    ones = (1,) * len(refined.axes)
    for before, after in zip(
        (*space.inputs, *space.outputs), (*refined.inputs, *refined.outputs), strict=True
    ):
        assert operand_regions(space.axes, before, (1, 1, 1, 1)) == operand_regions(refined.axes, after, ones)


def test_a_split_of_an_inner_factor_is_several_intervals() -> None:
    refined = refine(_space(), {1: [2, 4]})
    regions = operand_regions(refined.axes, refined.inputs[2], (1, 1, 2, 1, 1))
    assert regions == ((((0, 2), (4, 6)),), (((2, 4), (6, 8)),))


def test_windows_are_not_refinable() -> None:
    axes = (Axis("height", 6, AxisKind.ATTRIBUTE), REPLICA_AXIS)
    window = (DimFactor(12, 0, -1, 2, 3),)
    space = IterationSpace(axes, ((window,),), ((along(0, 6),),))
    assert refinable(space) == frozenset()
    assert count(dim_indexes(window, [(0, 3)])) == 6
    assert window[0].unclipped((0, 3)) == (-1, 6)
    assert dim_indexes(whole(5), []) == ((0, 5),)


def test_factors_longer_or_shorter_than_their_axis_are_not_refinable() -> None:
    axes = (Axis("sample", 4, AxisKind.SAMPLE), Axis("length", 6, AxisKind.ATTRIBUTE), REPLICA_AXIS)
    sliced = ((DimFactor(4, 0),), (DimFactor(8, 1),))
    padded = ((DimFactor(4, 0),), (DimFactor(5, 1),))
    for operand in (sliced, padded):
        space = IterationSpace(axes, (operand,), ((along(0, 4), along(1, 6)),))
        assert refinable(space) == {0}
