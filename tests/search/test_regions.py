"""Overlaps of index sets, against their intersections one by one."""

from hypothesis import given
from hypothesis import strategies as st

from graph.intervals import IndexSet, count, intersect, normalize
from search.regions import common_elements


@st.composite
def index_sets(draw: st.DrawFn) -> IndexSet:
    starts = draw(st.lists(st.integers(0, 40), max_size=6))
    return normalize([(start, start + draw(st.integers(0, 5))) for start in starts])


@given(st.lists(index_sets(), min_size=1, max_size=5), st.lists(index_sets(), min_size=1, max_size=5))
def test_common_elements_are_those_of_the_intersections(left: list[IndexSet], right: list[IndexSet]) -> None:
    expected = [[count(intersect(mine, theirs)) for theirs in right] for mine in left]
    assert common_elements(left, right).tolist() == expected
