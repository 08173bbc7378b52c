"""Index sets and regions against plain Python sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from graph import intervals
from graph.intervals import IndexSet

SIZE = 24
index_sets = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=4).map(
    intervals.normalize
)


def _members(indexes: IndexSet) -> list[int]:
    return [index for start, stop in indexes for index in range(start, stop)]


def _is_canonical(indexes: IndexSet) -> bool:
    bounds = [bound for interval in indexes for bound in interval]
    return all(low < high for low, high in itertools.pairwise(bounds))


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=5))
def test_normalize_is_the_union(pieces: list[tuple[int, int]]) -> None:
    union = intervals.normalize(pieces)
    assert _is_canonical(union)
    assert _members(union) == sorted({index for start, stop in pieces for index in range(start, stop)})
    assert intervals.count(union) == len(_members(union))


@given(index_sets, index_sets)
def test_intersect(left: IndexSet, right: IndexSet) -> None:
    common = intervals.intersect(left, right)
    assert _is_canonical(common)
    assert _members(common) == sorted(set(_members(left)) & set(_members(right)))


@given(index_sets, index_sets)
def test_product_is_mixed_radix(outer: IndexSet, inner: IndexSet) -> None:
    product = intervals.product(outer, inner, SIZE)
    assert _is_canonical(product)
    assert _members(product) == [o * SIZE + i for o in _members(outer) for i in _members(inner)]


@given(index_sets, index_sets)
def test_positions_are_places_in_the_dense_enumeration(some: IndexSet, within: IndexSet) -> None:
    indexes = intervals.intersect(some, within)
    order = _members(within)
    assert _members(intervals.positions(indexes, within)) == [
        order.index(index) for index in _members(indexes)
    ]


@given(st.integers(1, 40), st.integers(1, 12))
def test_parts_cover_and_differ_by_at_most_one(size: int, degree: int) -> None:
    pieces = [intervals.part(size, degree, index) for index in range(degree)]
    assert [index for start, stop in pieces for index in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.tuples(index_sets, index_sets), st.tuples(index_sets, index_sets))
def test_regions_are_products(left: tuple[IndexSet, ...], right: tuple[IndexSet, ...]) -> None:
    def points(region: tuple[IndexSet, ...]) -> set[tuple[int, ...]]:
        return set(itertools.product(*(_members(indexes) for indexes in region)))

    assert intervals.volume(left) == len(points(left))
    common = intervals.intersect_regions(left, right)
    assert (points(common) if common is not None else set()) == points(left) & points(right)
    if common is not None:
        assert intervals.shape(intervals.relative_region(common, left)) == intervals.shape(common)


def test_a_scalar_has_one_element() -> None:
    assert intervals.volume(()) == 1
    assert intervals.full_region(()) == ()
    assert intervals.full_region((3, 0)) == (((0, 3),), ())
