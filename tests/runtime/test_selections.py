"""Reading, writing and adding to regions, against plain indexing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graph.intervals import IndexSet, Region, full, normalize, relative_region, shape
from runtime.instructions.region_assembly import Recipe, assemble
from runtime.instructions.selections import Selection, selection_of

CPU = torch.device("cpu")


def index_sets(size: int) -> st.SearchStrategy[IndexSet]:
    """Non-empty index sets of a dim."""
    chosen = st.sets(st.integers(0, size - 1), min_size=1)
    return chosen.map(lambda indexes: normalize([(index, index + 1) for index in indexes]))


@st.composite
def nested_regions(draw: Any) -> tuple[Region, Region]:
    """A region and one inside it."""
    outer, inner = [], []
    for _ in range(draw(st.integers(0, 3))):
        indexes = draw(index_sets(6))
        points = [point for start, stop in indexes for point in range(start, stop)]
        chosen = draw(st.sets(st.sampled_from(points), min_size=1))
        outer.append(indexes)
        inner.append(normalize([(point, point + 1) for point in chosen]))
    return tuple(outer), tuple(inner)


def mesh(region: Region, within: Region) -> tuple[torch.Tensor, ...]:
    """Open index tensors of `region` inside a dense tensor of `within`."""
    points = [
        [point for start, stop in indexes for point in range(start, stop)]
        for indexes in relative_region(region, within)
    ]
    grids = torch.meshgrid(*[torch.tensor(p) for p in points], indexing="ij") if points else ()
    return tuple(grids)


def numbered(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel(), dtype=torch.float64).reshape(sizes)


@given(regions=nested_regions())
def test_take_equals_indexing(regions: tuple[Region, Region]) -> None:
    outer, inner = regions
    tensor = numbered(shape(outer))
    expected = tensor[mesh(inner, outer)] if inner else tensor
    assert torch.equal(Selection(inner, outer, CPU).take(tensor), expected)


@given(regions=nested_regions())
def test_put_and_add_change_the_region_alone(regions: tuple[Region, Region]) -> None:
    outer, inner = regions
    selection = Selection(inner, outer, CPU)
    part = numbered(shape(inner)) + 100
    for change, factor in ((selection.put, 0.0), (selection.add, 1.0)):
        tensor = numbered(shape(outer))
        expected = tensor.clone()
        if inner:
            expected[mesh(inner, outer)] = factor * expected[mesh(inner, outer)] + part
        else:
            expected = factor * expected + part
        change(tensor, part)
        assert torch.equal(tensor, expected)


def test_single_intervals_are_views() -> None:
    selection = selection_of((((1, 3),), full(4)), (5, 4), CPU)
    tensor = numbered((5, 4))
    assert selection.is_view
    assert selection.take(tensor).data_ptr() == tensor[1:].data_ptr()


@pytest.mark.parametrize("cuts", [((0, 2), (2, 5)), ((0, 1), (1, 4), (4, 5))])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("copies", [1, 2])
def test_assembly_of_tiles_and_partial_sums(
    cuts: tuple[tuple[int, int], ...], dims: tuple[int, ...], copies: int
) -> None:
    """Tiles cut along some dims, each `copies` times as partial sums: value, and gradient of every part."""
    whole: Region = (full(5), full(5))
    choices = [cuts if dim in dims else ((0, 5),) for dim in range(2)]
    regions = [tuple((cut,) for cut in tile) for tile in itertools.product(*choices)] * copies
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(shape(region), generator=generator, dtype=torch.float64).requires_grad_()
        for region in regions
    ]
    result = assemble(Recipe(whole, regions, CPU), [Selection(r, r, CPU) for r in regions], parts)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for region, part in zip(regions, parts, strict=True):
        expected[mesh(region, whole)] += part.detach()
    assert torch.allclose(result, expected)
    weights = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    for region, gradient in zip(regions, torch.autograd.grad(result, parts, weights), strict=True):
        assert torch.equal(gradient, weights[mesh(region, whole)])


@given(regions=nested_regions())
def test_gradient_of_a_part_fills_the_rest_with_zeros(regions: tuple[Region, Region]) -> None:
    outer, inner = regions
    source = numbered(shape(outer)).requires_grad_()
    twice = [source, source]
    selections = [Selection(inner, outer, CPU)] * 2
    result = assemble(Recipe(inner, [inner, inner], CPU), selections, twice)
    (gradient,) = torch.autograd.grad(result.sum(), source)
    expected = torch.zeros(shape(outer), dtype=torch.float64)
    expected[mesh(inner, outer) if inner else ...] = 2
    assert torch.equal(gradient, expected)
