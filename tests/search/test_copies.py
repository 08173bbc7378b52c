"""Copies of a process that share work: every share once, what they keep, and how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from graph.errors import CostError, RuntimeFailure
from graph.training import Training
from search.algorithms import optcnn as module
from search.algorithms import registry
from search.algorithms.algorithm import AlgorithmContext
from search.algorithms.chain import SearchOptions
from search.algorithms.optcnn import default_tables, least_additive, optcnn, small_tables
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts
from search.parallel.copies import Copies
from search.problem import Problem
from tests.search.builders import MadeUpCosts, branches, devices, local_calls


class Counting:
    """Answers with what it has been asked, and in which process."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, share: int, shares: int, request: int) -> tuple[int, int, list[int], int]:
        self.asked.append(request)
        return share, shares, self.asked, os.getpid()


@pytest.mark.parametrize("count", [1, 3])
def test_each_share_is_answered_by_a_process_that_keeps_what_it_made(count: int) -> None:
    with Copies(Counting(), count) as copies:
        first, second = copies.ask(7), copies.ask(8)
    assert [(share, shares) for share, shares, _, _ in first] == [(share, count) for share in range(count)]
    assert [asked for _, _, asked, _ in second] == [[7, 8]] * count
    numbers = [number for _, _, _, number in second]
    assert numbers[0] == os.getpid()
    assert len(set(numbers)) == count
    for number in numbers[1:]:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Yield a list; processes whose numbers it has must be gone at the end."""
    numbers: list[int] = []
    yield numbers
    assert numbers
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_a_copy_that_is_killed_is_one_line(ended: list[int]) -> None:
    with Copies(Counting(), 3) as copies:
        ended += [number for *_, number in copies.ask(1)][1:]
        os.kill(ended[0], signal.SIGKILL)
        with pytest.raises(RuntimeFailure, match=r"^search: worker process \d+ .*must work until the end.*$"):
            copies.ask(2)


def test_what_a_copy_raises_is_raised(ended: list[int]) -> None:
    def answer(share: int, shares: int, request: str) -> int:
        if request == "raise" and share == shares - 1:
            raise CostError("costs: none of a call, must be one; profile it")
        return os.getpid()

    with Copies(answer, 2) as copies:
        ended.append(copies.ask("work")[1])
        with pytest.raises(CostError, match="none of a call"):
            copies.ask("raise")


def problem(costs: MadeUpCosts | None = None) -> Problem:
    table = CostTable(MadeUpCosts(1e-7) if costs is None else costs)
    return Problem(branches(), devices(48), table, Training(4), LinkCosts(), local_calls)


def test_any_number_of_workers_finds_the_same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = default_tables(problem())
    least, most_pairs = least_additive(alone), alone.pair_count // 3
    small = small_tables(problem(), most_pairs)
    assert small is not None
    for limit in ("MOST_LISTED_ALONE", "MOST_PAIRS_ALONE"):
        monkeypatch.setattr(module, limit, 0)
    shared = default_tables(problem(), workers=3)
    assert shared.space == alone.space
    costs = [
        [
            tables.own_ns(group, number)
            for group, of in enumerate(tables.space.choices)
            for number in range(len(of))
        ]
        for tables in (alone, shared)
    ]
    assert costs[0] == costs[1]
    assert least_additive(shared, workers=3) == least
    shared_small = small_tables(problem(), most_pairs, workers=2)
    assert shared_small is not None
    assert shared_small.space == small.space


def test_workers_find_no_costs_that_only_one_process_may_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up costs do not say that a copy finds the same: they may be measured."""

    def refused(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("search.parallel.copies.fork", refused)
    for limit in ("MOST_LISTED_ALONE", "MOST_PAIRS_ALONE"):
        monkeypatch.setattr(module, limit, 0)
    one = problem()
    assert not one.costs.copies()
    context = AlgorithmContext(SearchOptions(proposals=1), workers=3)
    assert registry.run(("optcnn",), one, context)[0].strategy == optcnn(problem()).strategy
