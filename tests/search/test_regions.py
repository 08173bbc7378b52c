"""Overlaps of index sets, against their intersections one by one; distinct codes, against sorting."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.axes import operand_regions
from graph.intervals import IndexSet, count, intersect, intersect_regions, normalize, volume
from graph.operators import OperatorGraph
from search.simulate import regions
from search.simulate.regions import MOST_CODES, MOST_PAIRS, Regions, common_elements, distinct
from search.space.baselines import random_strategy
from tests.search.builders import branches, unrolled


@st.composite
def index_sets(draw: st.DrawFn) -> IndexSet:
    starts = draw(st.lists(st.integers(0, 40), max_size=6))
    return normalize([(start, start + draw(st.integers(0, 5))) for start in starts])


@given(st.lists(index_sets(), min_size=1, max_size=5), st.lists(index_sets(), min_size=1, max_size=5))
def test_common_elements_are_those_of_the_intersections(left: list[IndexSet], right: list[IndexSet]) -> None:
    expected = [[count(intersect(mine, theirs)) for theirs in right] for mine in left]
    assert common_elements(left, right).tolist() == expected


@pytest.mark.parametrize("possible", [1, 2, 7, 100, MOST_CODES, MOST_CODES + 1])
@pytest.mark.parametrize("seed", range(5))
def test_distinct_codes_are_those_that_sorting_finds(possible: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(possible, size=50)
    for found, expected in zip(distinct(codes, possible), np.unique(codes, return_inverse=True), strict=True):
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("most_pairs", [0, MOST_PAIRS])
@pytest.mark.parametrize("make", [branches, unrolled])
def test_overlaps_are_the_regions_in_common(
    make: Callable[[], OperatorGraph], most_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "MOST_PAIRS", most_pairs)
    graph, rng = make(), np.random.default_rng(1)
    for _ in range(10):
        strategy, store = random_strategy(graph, 12, rng), Regions()
        for name, (index, output) in graph.producer.items():
            made, degrees = graph.operators[index].space, strategy.configurations[index].degrees
            source = store.side(store.port(made.axes, made.outputs[output]), degrees)
            theirs = operand_regions(made.axes, made.outputs[output], degrees)[:: degrees[-1]]
            for reader, slot in graph.readers[name]:
                read, split = graph.operators[reader].space, strategy.configurations[reader].degrees
                side = store.side(store.port(read.axes, read.inputs[slot]), split)
                mine = operand_regions(read.axes, read.inputs[slot], split)
                found = store.overlaps(side, source, degrees[-1])
                for row, task in enumerate(np.unique(side.row, return_index=True)[1].tolist()):
                    common = [intersect_regions(region, mine[task]) for region in theirs]
                    expected = [
                        (group, volume(region)) for group, region in enumerate(common) if region is not None
                    ]
                    here = slice(found.pointers[row], found.pointers[row + 1])
                    pairs = zip(found.group[here].tolist(), found.elements[here].tolist(), strict=True)
                    assert list(pairs) == expected
