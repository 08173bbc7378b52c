"""Regions of operands, and what the pieces of a value are of, against index sets one by one."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.axes import operand_regions
from graph.intervals import IndexSet, count, intersect, normalize
from graph.operators import OperatorGraph
from search.kernels.collective_list import CollectiveList
from search.kernels.fragment_writing import ValueSources, write_values
from search.kernels.fragments import (
    ASSEMBLY,
    ASSEMBLY_WORDS,
    READER_WORDS,
    VALUE,
    VALUE_WORDS,
)
from search.kernels.records import ExchangeLinks
from search.simulate.regions import Regions
from search.space.baselines import random_strategy
from tests.search.builders import branches, unrolled


@pytest.mark.parametrize("make", [branches, unrolled])
def test_regions_of_tasks_are_those_of_the_operand(make: Callable[[], OperatorGraph]) -> None:
    graph, rng, regions = make(), np.random.default_rng(1), Regions()
    for _ in range(10):
        strategy = random_strategy(graph, 12, rng)
        for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
            axes, degrees = operator.space.axes, configuration.degrees
            for operand in (*operator.space.inputs, *operator.space.outputs):
                numbers = regions.numbers(regions.port(axes, operand), degrees).tolist()
                expected = operand_regions(axes, operand, degrees)
                assert tuple(regions.region(number) for number in numbers) == expected
                assert [regions.number(region) for region in expected] == numbers


@st.composite
def index_sets(draw: st.DrawFn) -> IndexSet:
    starts = draw(st.lists(st.integers(0, 40), max_size=6))
    return normalize([(start, start + draw(st.integers(0, 5))) for start in starts])


def sides(dims: int) -> st.SearchStrategy[list[list[IndexSet]]]:
    """Return the index sets of the parts of every dim."""
    return st.lists(st.lists(index_sets(), min_size=1, max_size=4), min_size=dims, max_size=dims)


@given(st.data(), st.integers(0, 3), st.integers(1, 2))
def test_pieces_are_what_two_regions_have_in_common(data: st.DataObject, dims: int, replicas: int) -> None:
    made, read = data.draw(sides(dims)), data.draw(sides(dims))
    regions, arena = Regions(), np.zeros(1 << 15, np.int64)
    # All on one device, which needs each region once.
    devices = regions.write([0] * 200)
    ports = [write_side(regions, made, replicas), devices, write_side(regions, read, 1), devices]
    unmeasured = np.zeros((0, 2), np.int64), np.zeros((0, 2))
    no_links = np.zeros(2, np.int64), np.zeros(0, np.int64), np.zeros((2, 0), np.int64)
    nowhere = ExchangeLinks(np.zeros(1, np.int64), np.zeros(1), np.ones(1), *unmeasured, *no_links)
    sources = ValueSources(regions.words.items, regions.common_K3, nowhere, 4, 0)
    listed = CollectiveList(np.zeros((1, 7), np.int64), *(np.zeros(2, np.int64) for _ in range(4)))
    state = np.zeros(3, np.int64)
    write_values(arena, sources, np.array([ports]), listed, np.zeros(1, np.int64), state)
    header = arena[:VALUE_WORDS].view(VALUE)[0]
    readers_at = VALUE_WORDS + ASSEMBLY_WORDS * (header.assemblies + 1)
    assemblies = arena[VALUE_WORDS:readers_at].view(ASSEMBLY)[:-1]
    sizes_at = readers_at + (READER_WORDS + 1) * header.readers + header.readings + header.sources
    pieces_at = sizes_at + header.sizes
    sizes = arena[sizes_at:pieces_at].tolist()
    sources = arena[pieces_at:].view(np.int32)[: header.listed].tolist()
    found = [
        list(
            zip(
                sources[one.first_piece : one.first_piece + one.pieces],
                sizes[one.first_size : one.first_size + one.pieces],
                strict=True,
            )
        )
        for one in assemblies
    ]
    assert state[0] > 0
    assert state[1] == 1
    assert found == [
        [
            (group * replicas, 4 * elements)
            for group, theirs in enumerate(itertools.product(*made))
            if (elements := common_elements(mine, theirs))
        ]
        for mine in dict.fromkeys(itertools.product(*read))
    ]


def write_side(regions: Regions, parts_of_dims: Sequence[Sequence[IndexSet]], replicas: int) -> int:
    """Write an operand of which each dim follows an axis of its own; return where its side is."""
    degrees = [*(len(parts) for parts in parts_of_dims), replicas]
    words = [int(np.prod(degrees)), replicas, len(parts_of_dims)]
    for dim, parts in enumerate(parts_of_dims):
        at = {one: regions.write([count(one), len(one), *itertools.chain(*one)]) for one in parts}
        words += [regions.write([at[one] for one in parts]), 1, int(np.prod(degrees[dim + 1 :])), len(parts)]
    return regions.write(words)


def common_elements(mine: Sequence[IndexSet], theirs: Sequence[IndexSet]) -> int:
    elements = 1
    for left, right in zip(mine, theirs, strict=True):
        elements *= count(intersect(left, right))
    return elements
