"""Copies of a process that share work: every share once, what they keep, and how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from graph.calls import LocalCall
from graph.errors import CostError, RuntimeFailure, UsageError
from graph.training import Training
from search.algorithms import optcnn as module
from search.algorithms import registry
from search.algorithms.algorithm import AlgorithmContext
from search.algorithms.chain import SearchOptions
from search.algorithms.joint import JointResult, search_jointly
from search.algorithms.moves import shares_for
from search.algorithms.optcnn import default_tables, least_additive, optcnn, small_tables
from search.algorithms.rewritings import Rewritings
from search.cost.cost_table import CostTable, OperatorCost
from search.cost.link_costs import LinkCosts
from search.parallel.copies import Copies
from search.parallel.fork import ForkedProcess, can_fork, fork
from search.problem import Problem
from search.tables import Tables
from tests.search.builders import MadeUpCosts, branches, devices, local_calls

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are copied on Linux alone")


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


def test_as_many_share_as_the_operating_system_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def one_alone(work: Callable[[Connection], None]) -> ForkedProcess:
        if started:
            raise UsageError(
                "search: a worker process cannot be started (no memory), must be; choose --workers 1"
            )
        process = fork(work)
        started.append(process.number)
        return process

    monkeypatch.setattr("search.parallel.copies.fork", one_alone)
    with Copies(Counting(), 4) as copies:
        assert [(share, shares) for share, shares, _, _ in copies.ask(1)] == [(0, 2), (1, 2)]


class RecordedCosts(MadeUpCosts):
    """Made-up costs that are the same in a copy. `given_out`: calls that this process or a copy of it asked for."""

    def __init__(self) -> None:
        super().__init__(1e-7)
        self.given_out: dict[str, None] = {}

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
        self.given_out.update(dict.fromkeys(call.digest for call in calls))
        return super().resolve(calls, kind_name)

    def copies(self) -> bool:
        return True

    def given(self) -> dict[str, None]:
        return self.given_out

    def take(self, given: dict[str, None]) -> None:
        self.given_out.update(given)


def problem(costs: MadeUpCosts | None = None) -> Problem:
    table = CostTable(RecordedCosts() if costs is None else costs)
    return Problem(branches(), devices(48), table, Training(4), LinkCosts(), local_calls)


def own_ns(tables: Tables) -> list[list[int]]:
    """Return the cost of every group under each of its choices."""
    return [
        [tables.own_ns(group, number) for number in range(len(choices))]
        for group, choices in enumerate(tables.space.choices)
    ]


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is to do, it is shared."""
    for limit in ("MOST_LISTED_ALONE", "MOST_PAIRS_ALONE"):
        monkeypatch.setattr(module, limit, 0)


@pytest.mark.usefixtures("without_limits")
def test_any_number_of_workers_finds_the_same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    known, learned = RecordedCosts(), RecordedCosts()
    alone, shared = default_tables(problem(known)), default_tables(problem(learned), workers=3)
    assert shared.space == alone.space

    def made_again(*_: object) -> int:
        raise AssertionError("a copy has found it")

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "longest_ns", made_again)
        learned_ns = own_ns(shared)
    assert learned_ns == own_ns(alone)
    least = least_additive(alone)
    assert least_additive(shared, workers=3) == least
    assert learned.given_out.keys() == known.given_out.keys()


@pytest.mark.usefixtures("without_limits")
def test_smaller_spaces_are_the_same_too() -> None:
    most_pairs = default_tables(problem()).pair_count // 3
    alone, shared = (small_tables(problem(), most_pairs, workers) for workers in (1, 2))
    assert alone is not None
    assert shared is not None
    assert shared.space == alone.space


@pytest.mark.usefixtures("without_limits")
def test_a_joint_search_finds_the_same_with_any_number_of_workers() -> None:
    def searched(workers: int) -> JointResult:
        of = Rewritings(problem(), 0, lambda _: None, shares_for(48))
        result = search_jointly(of, (), SearchOptions(proposals=20), workers=workers)
        return replace(result, seconds=0.0, chain=None)

    assert searched(3) == searched(1)


@pytest.mark.usefixtures("without_limits")
def test_workers_find_no_costs_that_only_one_process_may_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up costs do not say that a copy finds the same: they may be measured."""

    def refused(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("search.parallel.copies.fork", refused)
    one = problem(MadeUpCosts(1e-7))
    assert not one.costs.copies()
    context = AlgorithmContext(SearchOptions(proposals=1), workers=3)
    assert registry.run(("optcnn",), one, context)[0].strategy == optcnn(problem()).strategy
