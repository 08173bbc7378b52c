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
from search.space.enumerated_space import all_degrees
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


@pytest.mark.parametrize("make", [branches, unrolled])
def test_degrees_that_an_operand_follows_alike_give_every_task_the_same_region(
    make: Callable[[], OperatorGraph],
) -> None:
    graph, regions = make(), Regions()
    alike = 0
    for operator in graph.operators:
        axes = operator.space.axes
        for operand in (*operator.space.inputs, *operator.space.outputs):
            port = regions.port(axes, operand)
            met: dict[object, set[object]] = {}
            every = all_degrees(operator, 8)
            for degrees in every:
                met.setdefault(regions.followed_degrees(port, degrees), set()).add(
                    operand_regions(axes, operand, degrees)
                )
            assert all(len(of_tasks) == 1 for of_tasks in met.values())
            alike += len(every) - len(met)
    assert alike


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
    regions = Regions()
    # All on one device, which needs each region once.
    devices = regions.write([0] * 200)
    ports = [write_side(regions, made, replicas), devices, write_side(regions, read, 1), devices]
    assert [pieces for _, pieces in written(regions, ports, 1)] == [
        [
            (group * replicas, 4 * elements)
            for group, theirs in enumerate(itertools.product(*made))
            if (elements := common_elements(mine, theirs))
        ]
        for mine in dict.fromkeys(itertools.product(*read))
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_devices_share_the_pieces_of_a_region_unless_each_chooses_among_replicas(replicas: int) -> None:
    regions, halves, everything, elsewhere = Regions(), [((0, 4),), ((4, 8),)], ((0, 8),), ((20, 24),)
    made, all_of_it = write_side(regions, [halves], replicas), write_side(regions, [[everything]], 2)
    nothing = write_side(regions, [[elsewhere]], 2)
    # Parts on devices 0 and 1, their replicas on 1 and 0; devices 0 and 1 read everything, 2 and 3 what nobody makes,
    # 2 and 3 everything.
    sources = regions.write([0, 1] if replicas == 1 else [0, 1, 1, 0])
    first, second = regions.write([0, 1]), regions.write([2, 3])
    assemblies = written(regions, [made, sources, all_of_it, first, nothing, second, all_of_it, second], 4)
    own = [[0, 1], [0, 1]] if replicas == 1 else [[0, 3], [1, 2]]
    expected = [*own, [], [], *([[0, 1]] * 2 if replicas == 1 else [[0, 2]] * 2)]
    assert [[task for task, _ in pieces] for _, pieces in assemblies] == expected
    assert [size for _, pieces in assemblies for _, size in pieces] == [16] * 8
    places = [first_piece for first_piece, pieces in assemblies if pieces]
    assert len(set(places)) == (1 if replicas == 1 else 4)


def written(regions: Regions, ports: list[int], devices: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Write a value's fragment; return of each assembly where its pieces begin, and their source tasks and bytes."""
    arena, no_links = np.zeros(1 << 15, np.int64), (np.zeros(0, np.int64), np.zeros((2, 0), np.int64))
    unmeasured, pairs = (np.zeros((0, 2), np.int64), np.zeros((0, 2))), devices**2
    links = ExchangeLinks(
        np.zeros(devices, np.int64),
        np.zeros(pairs),
        np.ones(pairs),
        *unmeasured,
        np.zeros(pairs + 1, np.int64),
        *no_links,
    )
    listed = CollectiveList(
        np.zeros((8, 7), np.int64),
        np.zeros(99, np.int64),
        np.zeros(2, np.int64),
        np.zeros(6, np.int64),
        np.zeros(devices, np.int64),
    )
    state = np.zeros(3, np.int64)
    values = ValueSources(regions.words.items, regions.common_K3, links, 4, 0)
    write_values(arena, values, np.array([ports]), listed, np.zeros(1, np.int64), state)
    assert state[0] > 0
    assert state[1] == 1
    header = arena[:VALUE_WORDS].view(VALUE)[0]
    readers_at = VALUE_WORDS + ASSEMBLY_WORDS * (header.assemblies + 1)
    sizes_at = readers_at + (READER_WORDS + 1) * header.readers + header.readings + header.sources
    pieces_at = sizes_at + header.sizes
    sizes = arena[sizes_at:pieces_at].tolist()
    source_tasks = arena[pieces_at:].view(np.int32)[: header.listed].tolist()
    found = []
    for one in arena[VALUE_WORDS:readers_at].view(ASSEMBLY)[:-1]:
        first, first_size, count = int(one.first_piece), int(one.first_size), int(one.pieces)
        of_one = zip(source_tasks[first : first + count], sizes[first_size : first_size + count], strict=True)
        found.append((first, list(of_one)))
    return found


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
