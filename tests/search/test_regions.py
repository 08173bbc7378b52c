"""Overlaps of index sets, against their intersections one by one; distinct codes, against sorting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.intervals import IndexSet, count, intersect, normalize
from search.regions import MOST_CODES, common_elements, distinct


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
    for found, expected in zip(
        distinct(codes, possible), np.unique(codes, return_index=True, return_inverse=True), strict=True
    ):
        assert found.tolist() == expected.tolist()
