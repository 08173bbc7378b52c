"""The collector is left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from search.parallel.gc_pause import frozen_heap, rare_collection


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    yield before
    gc.set_threshold(*before)
    if frozen:
        gc.freeze()


def test_collector_looks_seldom_and_then_as_before(thresholds: tuple[int, int, int]) -> None:
    with rare_collection():
        seldom = gc.get_threshold()
        assert seldom[0] > thresholds[0]
        with rare_collection():
            assert gc.get_threshold() == seldom
        assert gc.get_threshold() == seldom
    assert gc.get_threshold() == thresholds


def test_collector_is_as_before_after_an_error(thresholds: tuple[int, int, int]) -> None:
    with suppress(KeyError), rare_collection():
        raise KeyError
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_a_collector_that_looks_more_seldom_stays_so(thresholds: tuple[int, int, int], first: int) -> None:
    gc.set_threshold(first, *thresholds[1:])
    with rare_collection():
        assert gc.get_threshold()[0] == first
    assert gc.get_threshold() == (first, *thresholds[1:])


def test_a_walk_leaves_alone_what_is_there_and_looks_seldom(thresholds: tuple[int, int, int]) -> None:
    with suppress(KeyError), frozen_heap():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > thresholds[0]
        raise KeyError
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
