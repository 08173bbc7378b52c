"""Chains in processes of their own: the same walks, costs asked for once, and good ends whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from graph.calls import LocalCall
from graph.errors import CostError, RuntimeFailure
from graph.operators import OperatorGraph
from search.algorithms import chain_pool, chain_worker, mcmc, proposal_log
from search.algorithms.chain import Chain, SearchOptions
from search.algorithms.mcmc import SearchResult, search
from search.algorithms.proposal_log import Observer
from search.cost.cost_table import CostTable, OperatorCost, UpdateCost
from search.parallel import fork
from search.problem import Problem
from tests.search.builders import MadeUpCosts, branches, devices, local_calls, unrolled
from tests.search.test_mcmc import TRAINING, Record

WAIT_S = 60.0
LONG = 10**8

pytestmark = pytest.mark.skipif(not fork.can_fork(), reason="more than one process walks on Linux alone")


@dataclass
class Started:
    """Numbers of the processes that a search started."""

    numbers: list[int] = field(default_factory=list)

    def left(self) -> list[int]:
        """Those that have not ended, or that nobody asked how."""
        return [number for number in self.numbers if psutil.pid_exists(number)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Looks on while processes are started, which is after a first turn; each turn is of one proposal."""
    found = Started()

    def fork_and_tell(serve: Any) -> fork.ForkedProcess:
        forked = fork.fork(serve)
        found.numbers.append(forked.number)
        return forked

    monkeypatch.setattr(chain_pool, "fork", fork_and_tell)
    monkeypatch.setattr(mcmc, "WORKERS_PAY_S", -1.0)
    monkeypatch.setattr(mcmc, "TURN", 1)
    monkeypatch.setattr(chain_worker, "TURN_S", 0.0)
    # Batches of few proposals, so that there are many.
    monkeypatch.setattr(proposal_log, "BATCH", 20)
    return found


def run(
    graph: OperatorGraph,
    workers: int,
    options: SearchOptions,
    observer: Observer | None = None,
    costs: MadeUpCosts | None = None,
    **more: Any,
) -> SearchResult:
    return search(
        Problem(
            graph,
            devices(4, contention=0.3),
            CostTable(costs if costs is not None else MadeUpCosts()),
            TRAINING,
            local_calls=local_calls,
        ),
        options,
        observer=observer,
        workers=workers,
        **more,
    )


def rows(record: Record) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Return all that was recorded of every proposal, by chain and step; of a chain they come in order."""
    found: dict[tuple[int, int], tuple[Any, ...]] = {}
    for batch in record.batches:
        for place, key in enumerate(zip(batch.chain.tolist(), batch.step.tolist(), strict=True)):
            assert key[1] == 1 or (key[0], key[1] - 1) in found
            assert key not in found
            found[key] = (
                int(batch.operator[place]),
                batch.configurations[place],
                batch.origin[place],
                int(batch.simulated_ns[place]),
                int(batch.bound_ns[place]),
                bool(batch.accepted[place]),
                batch.others.get(place, ()),
            )
    return found


CASES = {
    "program": SearchOptions(proposals=300, chains=5, seed=9),
    "fifo": SearchOptions(proposals=200, chains=3, seed=1, order="fifo"),
}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_workers_makes_the_same_proposals(started: Started, name: str) -> None:
    """And asks for each cost once; known strategies are among the starts."""
    graph, options = unrolled(), CASES[name]
    known = [run(graph, 1, SearchOptions(proposals=60, chains=1, seed=5)).strategy]
    records = {workers: Record() for workers in (1, 2, 3)}
    costs = {workers: MadeUpCosts() for workers in records}
    results = {
        workers: run(graph, workers, options, record, costs[workers], known=known)
        for workers, record in records.items()
    }
    assert len(started.numbers) == 2 + 3
    assert started.left() == []
    one, of_one = results[1], rows(records[1])
    for workers in (2, 3):
        assert results[workers].strategy == one.strategy
        assert results[workers].chains == one.chains
        assert (results[workers].proposals, results[workers].accepted) == (one.proposals, one.accepted)
        assert rows(records[workers]) == of_one
        assert records[workers].starts == records[1].starts
        assert len(costs[workers].asked) == len(set(costs[workers].asked))
        assert set(costs[workers].asked) == set(costs[1].asked)
    assert one.proposals == len(of_one)


def test_every_checkpoint_is_after_all_that_is_recorded(started: Started) -> None:
    """Of each chain, of whichever process the batch is."""
    record = Record()
    run(branches(), 3, SearchOptions(proposals=300, chains=4, seed=3), record)
    assert started.numbers
    made = dict.fromkeys(range(4), 0)
    for batch in record.batches:
        for number, step in zip(batch.chain.tolist(), batch.step.tolist(), strict=True):
            made[number] = step
        assert batch.snapshots is not None
        assert {was.number: was.proposals for was in batch.snapshots} == made


def test_a_process_without_chains_gets_one(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of five chains a process has three, which walk slowly until one of them has another process."""
    graph, options = branches(), SearchOptions(proposals=1200, chains=5, seed=4)
    record, expected = Record(), Record()
    one = run(graph, 1, options, expected)
    step = Chain.step

    def has_moved() -> bool:
        return any(len(list(tmp_path.glob(f"{number}-*"))) > 1 for number in range(5))

    def slow_step(walking: Chain, *arguments: Any) -> None:
        if walking.number % 2 == 0 and walking.proposals > 1 and not has_moved():
            (tmp_path / f"{walking.number}-{os.getpid()}").touch()
            time.sleep(0.02)
        step(walking, *arguments)

    monkeypatch.setattr(Chain, "step", slow_step)
    monkeypatch.setattr(chain_pool, "MOVING_PAYS_S", 0.0)
    two = run(graph, 2, options, record)
    assert has_moved()
    assert two.chains == one.chains
    assert rows(record) == rows(expected)


def test_few_proposals_start_no_process(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcmc, "WORKERS_PAY_S", 1e6)
    run(branches(), 2, SearchOptions(proposals=50, chains=2))
    run(branches(), 2, SearchOptions(proposals=LONG, chains=2, time_limit_s=0.2))
    monkeypatch.setattr(mcmc, "WORKERS_PAY_S", -1.0)
    run(branches(), 2, SearchOptions(proposals=50, chains=1))
    assert started.numbers == []


def test_a_time_limit_ends_all_processes(started: Started) -> None:
    # The limit counts from the beginning: before anything is walked, kernels are loaded, here by another search.
    run(branches(), 1, SearchOptions(proposals=2, chains=1))
    record = Record()
    result = run(branches(), 2, SearchOptions(proposals=LONG, chains=3, time_limit_s=2.0), record)
    assert len(started.numbers) == 2
    assert started.left() == []
    assert not result.interrupted
    assert result.proposals == len(rows(record)) < LONG


class Ending(Record):
    """An observer that does something once so many proposals are told."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self.action = action

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        super().progress(proposals, accepted, best_s)
        if proposals >= 300 and self.action is not None:
            action, self.action = self.action, None
            action()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_processes_and_keeps_the_best(started: Started, number: signal.Signals) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    record = Ending(lambda: signal.raise_signal(number))
    before = signal.signal(number, interrupt)
    try:
        result = run(branches(), 2, SearchOptions(proposals=LONG, chains=3, seed=1), record)
    finally:
        signal.signal(number, before)
    assert len(started.numbers) == 2
    assert started.left() == []
    assert result.interrupted
    assert 300 <= result.proposals == len(rows(record)) < LONG
    assert result.accepted == sum(record.column("accepted"))
    fitting = [time_ns for time_ns in record.column("simulated_ns") if time_ns >= 0]
    first_ns = min(round(each.initial_s * 1e9) for each in result.chains)
    assert round(result.step_time_s * 1e9) == min([first_ns, *fitting])


def test_an_interrupt_while_a_cost_is_measured_keeps_all_proposals(started: Started) -> None:
    """Also those of the turn in which it was asked for; the one that needed it is made again by a resumed search."""

    class Interrupted(MadeUpCosts):
        def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
            if started.numbers:
                raise KeyboardInterrupt
            return super().resolve(calls, kind_name)

    graph, options = branches(), SearchOptions(proposals=60, chains=3, seed=1)
    record, whole = Record(), Record()
    result = run(graph, 2, options, record, Interrupted())
    assert started.left() == []
    assert result.interrupted
    snapshots = record.batches[-1].snapshots
    assert snapshots is not None
    assert sum(was.proposals for was in snapshots) == result.proposals == len(rows(record))
    run(graph, 1, options, whole)
    assert rows(record).items() <= rows(whole).items()
    generators = {
        (was.number, was.proposals): was.generator for each in whole.batches for was in each.snapshots or ()
    }
    for was in snapshots:
        assert generators.get((was.number, was.proposals), was.generator) == was.generator


def test_what_ends_the_search_otherwise_is_raised_after_all_is_recorded(started: Started) -> None:
    def leave() -> None:
        raise SystemExit(143)

    record = Ending(leave)
    with pytest.raises(SystemExit):
        run(branches(), 2, SearchOptions(proposals=LONG, chains=3, seed=1), record)
    assert started.left() == []
    snapshots = record.batches[-1].snapshots
    assert snapshots is not None
    assert sum(was.proposals for was in snapshots) == len(rows(record))
    assert len(rows(record)) >= 300


def test_a_killed_process_ends_the_search_in_one_line(started: Started) -> None:
    record = Ending(lambda: os.kill(started.numbers[1], signal.SIGKILL))
    with pytest.raises(RuntimeFailure, match=r"worker 1 of 2 \(process \d+\) was ended by signal SIGKILL"):
        run(branches(), 2, SearchOptions(proposals=LONG, chains=3, seed=1), record)
    assert started.left() == []
    assert len(rows(record)) >= 200


def test_a_cost_that_is_missing_in_a_process_is_named(started: Started) -> None:
    class Sparse(MadeUpCosts):
        def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
            found = super().resolve(calls, kind_name)
            return [None for _ in found] if started.numbers else found

    with pytest.raises(CostError, match="not measured on made-up"):
        run(branches(), 2, SearchOptions(proposals=LONG, chains=3, seed=1), Record(), Sparse())
    assert started.left() == []


def test_a_mistake_of_ours_in_a_process_is_not_hidden(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Chain.step

    def stumble(walking: Chain, *arguments: Any) -> None:
        if walking.number == 2 and walking.proposals == 9:
            raise ZeroDivisionError("of the test")
        step(walking, *arguments)

    monkeypatch.setattr(Chain, "step", stumble)
    with pytest.raises(ZeroDivisionError, match="of the test") as raised:
        run(branches(), 2, SearchOptions(proposals=LONG, chains=3, seed=1))
    assert "in stumble" in str(raised.value.__cause__)
    assert started.left() == []


def test_nobody_walks_while_a_cost_is_measured(started: Started) -> None:
    """A measurement on this machine takes longer beside others."""

    class Measuring(MadeUpCosts):
        def __init__(self) -> None:
            super().__init__()
            self.walked: list[list[str]] = []

        def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
            if len(started.numbers) == 2:
                until = time.monotonic() + WAIT_S
                # A process is told to stop; it does as soon as it is where it can.
                while not self._one_stands() and time.monotonic() < until:
                    time.sleep(0.001)
                self.walked.append([psutil.Process(number).status() for number in started.numbers])
            return super().resolve(calls, kind_name)

        def _one_stands(self) -> bool:
            return any(psutil.Process(number).status() == "stopped" for number in started.numbers)

        def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
            return super().update_cost(optimizer, dtype, kind_name)

    options = SearchOptions(proposals=200, chains=4, seed=1)
    costs = Measuring()
    found = run(branches(), 2, options, costs=costs)
    assert costs.walked
    assert all(statuses.count("stopped") == 1 for statuses in costs.walked)
    assert found.chains == run(branches(), 1, options).chains


KILLED = """
import sys
from search.algorithms import chain_pool, mcmc
from search.algorithms.chain import SearchOptions
from search.algorithms.mcmc import search
from search.cost.cost_table import CostTable
from search.problem import Problem
from tests.search.builders import MadeUpCosts, branches, devices, local_calls
from tests.search.test_mcmc import TRAINING
mcmc.WORKERS_PAY_S = -1.0
forked_by = chain_pool.fork
def fork(serve):
    forked = forked_by(serve)
    print(forked.number, flush=True)
    return forked
chain_pool.fork = fork
problem = Problem(branches(), devices(4), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls)
search(problem, SearchOptions(proposals=10**9, chains=3), workers=2)
"""


def test_no_process_outlives_a_search_that_is_killed() -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    )
    try:
        assert killed.stdout is not None
        walking = [psutil.Process(int(killed.stdout.readline())) for _ in range(2)]
        assert all(one.ppid() == killed.pid for one in walking)
    finally:
        killed.kill()
        killed.wait()
    _, left = psutil.wait_procs(walking, timeout=WAIT_S)
    assert left == []
    killed.stdout.close()


STOPPED = """
import ctypes, os, signal, time
from types import SimpleNamespace
from search.parallel import fork
system = ctypes.CDLL(None)
def late(*arguments):
    time.sleep(0.5)
    return system.prctl(*arguments)
fork.ctypes = SimpleNamespace(CDLL=lambda name: SimpleNamespace(prctl=late))
forked = fork.fork(lambda connection: connection.recv())
os.kill(forked.number, signal.SIGSTOP)
print(forked.number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_stopped_at_once_does_not_outlive_its_search() -> None:
    """However late it comes to say that it ends with it."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    ) as killed:
        assert killed.stdout is not None
        number = int(killed.stdout.readline())
        assert killed.wait() == -signal.SIGKILL
    left = [psutil.Process(number)] if psutil.pid_exists(number) else []
    try:
        assert psutil.wait_procs(left, timeout=WAIT_S)[1] == []
    finally:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(mcmc, "WORKERS_PAY_S", -1.0)
    monkeypatch.setattr(os, "fork", refuse)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(
        Exception, match=r"cannot be started \(Resource temporarily unavailable\).*--workers 1"
    ):
        run(branches(), 2, SearchOptions(proposals=LONG, chains=3, seed=1))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_what_is_shared_with_a_process_stays_out_of_its_reach(tmp_path: Path) -> None:
    """It has no file of the one that it was copied from, and no interrupt of it."""
    with (tmp_path / "open").open("w") as file:

        def serve(pipe: Any) -> None:
            held = sorted(int(name) for name in os.listdir("/proc/self/fd"))
            alike = [number for number in held if number > 2 and number != pipe.fileno()]
            names = [os.readlink(f"/proc/self/fd/{number}") for number in alike if _is_open(number)]
            pipe.send((names, signal.getsignal(signal.SIGINT) == signal.SIG_IGN, file.fileno() in held))
            pipe.recv()

        forked = fork.fork(serve)
        names, ignores, has_file = forked.connection.recv()
        os.kill(forked.number, signal.SIGINT)
        os.kill(forked.number, signal.SIGTERM)
        forked.connection.send("go")
        assert forked.wait() == "exited with code 0"
        forked.connection.close()
    assert (names, ignores, has_file) == ([], True, False)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False  # of the listing itself
    return True
