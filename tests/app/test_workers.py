"""Searches by several processes: the same trace, the same answers, resumed as any other, and nobody left behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from app.db.records import DEEPEST_COPY, OpCostRecord
from app.db.store import Store
from app.services.costs.machine import describe
from app.services.costs.operator_costs import DatabaseCosts, OnMiss, cost_key_record
from app.services.trace import recorder as recording
from graph.calls import CostPhase
from graph.errors import RuntimeFailure
from graph.rules import flops
from graph.rules.least import LeastWork
from profiler.devices import available_devices
from search.algorithms import chain_pool, chain_worker, mcmc, proposal_log
from search.algorithms.chain import SearchOptions
from search.algorithms.moves import MoveShares
from search.parallel import fork
from search.parallel.copies import Copies
from tests.app.conftest import Command
from tests.app.walks import begin, read, rows, walk
from tests.profiler.examples import matrix_product
from tests.quick import seeds
from tests.search.builders import random_anywhere, unrolled

DEVICES = 6
FAR = MoveShares(alike=0.3, sharing=0.2, spread=0.3)
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(not fork.can_fork(), reason="more than one process walks on Linux alone")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "x.sqlite") as opened:
        yield opened


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes are started after the first proposals, hand chains on when they can, and tell of few at a time."""
    numbers: list[int] = []

    def fork_and_tell(serve: Any) -> fork.ForkedProcess:
        forked = fork.fork(serve)
        numbers.append(forked.number)
        return forked

    monkeypatch.setattr(chain_pool, "fork", fork_and_tell)
    monkeypatch.setattr(mcmc, "WORKERS_PAY_S", -1.0)
    monkeypatch.setattr(mcmc, "TURN", 3)
    monkeypatch.setattr(chain_worker, "TURN_S", 0.0)
    monkeypatch.setattr(chain_pool, "MOVING_PAYS_S", 0.0)
    monkeypatch.setattr(proposal_log, "BATCH", 7)
    return numbers


def interrupt_at(number: int) -> Callable[[int], None]:
    came = False

    def interrupt(made: int) -> None:
        nonlocal came
        if made >= number and not came:
            came = True
            raise KeyboardInterrupt

    return interrupt


def depths(store: Store, search_id: int) -> list[int]:
    """Return how deep a copy every configuration of a search's trace is."""
    table = read(store, search_id, "configurations").to_pydict()
    base = dict(zip(table["configuration"], table["base"], strict=True))
    assert len(base) == len(table["configuration"]), "a code means two things"

    def depth(code: int) -> int:
        return 0 if base[code] is None else 1 + depth(base[code])

    return [depth(code) for code in base]


def test_the_trace_is_the_same_for_any_number_of_workers(
    store: Store, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where codes are forgotten, copies of copies are cut, and chains go from one process to another."""
    monkeypatch.setattr(recording, "MOST_KNOWN", 20)
    graph = unrolled()
    odd = random_anywhere(graph, DEVICES, np.random.default_rng(1))
    options = SearchOptions(proposals=400, chains=5, seed=1, beta=3, shares=FAR)
    searches = {workers: begin(store, options) for workers in (1, 2, 3)}
    found = {
        workers: walk(store, search_id, graph, DEVICES, options, known=[odd], workers=workers)
        for workers, search_id in searches.items()
    }
    assert len(at_once) == 2 + 3
    expected = rows(store, searches[1])
    for workers in (2, 3):
        assert found[workers].chains == found[1].chains
        assert rows(store, searches[workers]) == expected
        assert max(depths(store, searches[workers])) == DEEPEST_COPY


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_an_interrupted_search_goes_on_with_another_number_of_workers(
    store: Store, at_once: list[int], seed: int
) -> None:
    """Interrupted, then one of its processes killed, then to its end."""
    graph = unrolled()
    odd = random_anywhere(graph, DEVICES, np.random.default_rng(seed))
    options = SearchOptions(proposals=1200, chains=4, seed=seed, beta=20, shares=FAR)
    whole, stopped = begin(store, options), begin(store, options)
    expected = walk(store, whole, graph, DEVICES, options, known=[odd])

    first, second = sorted(np.random.default_rng(seed).integers(20, 600, 2).tolist())
    result = walk(store, stopped, graph, DEVICES, options, known=[odd], workers=2, told=interrupt_at(first))
    assert result.interrupted
    assert len(rows(store, stopped)) == result.proposals >= first

    def kill(made: int) -> None:
        if made >= second and len(at_once) == 5:
            os.kill(at_once[-1], signal.SIGKILL)

    with pytest.raises(RuntimeFailure, match="was ended by signal SIGKILL"):
        walk(store, stopped, graph, DEVICES, options, known=[odd], resumed=True, workers=3, told=kill)
    assert len(rows(store, stopped)) >= result.proposals
    result = walk(store, stopped, graph, DEVICES, options, known=[odd], resumed=True, workers=2)

    assert not result.interrupted
    assert rows(store, stopped) == rows(store, whole)
    assert (result.strategy, result.step_time_s) == (expected.strategy, expected.step_time_s)
    assert result.chains == expected.chains
    assert not any(psutil.pid_exists(number) for number in at_once)


def test_what_a_copy_gives_out_is_kept_as_if_it_had_been_asked_here(tmp_path: Path) -> None:
    """A prediction names the costs that it rests on, and how wrong estimates are."""
    known = [matrix_product(size, size, size) for size in (64, 128, 256, 512, 1024)]
    calls = [known[0], matrix_product(96, 96, 96), matrix_product(200, 300, 100)]
    with Store.open(tmp_path / "costs.sqlite") as store:
        machine = describe(store, [available_devices("cpu")[0]])
        group = machine.groups[0]
        phases: tuple[tuple[CostPhase, float], ...] = (("forward", 1e10), ("backward", 5e9))
        records = [
            OpCostRecord(cost_key_record(call), phase, *(flops(call) / rate,) * 3)
            for call in known
            for phase, rate in phases
        ]
        store.put_op_costs(group.kind_id, group.environment_id, records)

        def source(on_miss: OnMiss = "estimate", **more: Any) -> DatabaseCosts:
            return DatabaseCosts(store, group.kind, group.kind_id, group.environment_id, on_miss, **more)

        asked, copied, copy = source(), source(), source()
        assert copied.copies()
        assert copy.copies()
        assert copy.resolve(calls, group.kind.name) == asked.resolve(calls, group.kind.name)
        copied.take(copy.given())
        digests = [call.digest for call in calls]
        assert copied.used_costs(digests) == asked.used_costs(digests)
        assert copied.estimate_errors == asked.estimate_errors
        assert len(asked.used_costs(digests)) == 3
        # What is measured is measured by one process alone, and may be faster than all that was.
        measuring = source("measure", measure=lambda _calls: None)
        assert not measuring.copies()
        work = LeastWork(1e9, 10**6)
        assert measuring.least_s(calls[1], "forward", work, group.kind.name) == 0.0
        # A copy has no database.
        on_misses: tuple[OnMiss, ...] = ("estimate", "fail")
        for on_miss in on_misses:
            bounded = source(on_miss)
            assert bounded.copies()
            shares: Copies[None, float] = Copies(
                lambda *_: bounded.least_s(calls[1], "forward", work, group.kind.name),  # noqa: B023
                2,
            )
            with shares:
                here, there = shares.ask(None)
            assert here == there > 0


SEARCH = ("search", "--model", "mlp", "--preset", "small", "--topology", "p100-cluster", "--devices", "4")


@pytest.mark.slow
def test_a_command_finds_the_same_with_any_number_of_workers(command: Command, at_once: list[int]) -> None:
    arguments = (*SEARCH, "--fresh", "--json", "--proposals", "200", "--chains", "3")
    one, two = (command(*arguments, "--workers", count).document for count in ("1", "2"))
    assert len(at_once) == 2
    for document in (one, two):
        for own in ("search", "seconds", "algorithms"):
            del document[own]
    assert two == one


@pytest.mark.slow
def test_a_search_by_several_processes_that_is_killed_leaves_none(database: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", *SEARCH, "--proposals", "1000000000", "--workers", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + WAIT_S
        while len(walking := psutil.Process(process.pid).children()) < 2 or not list(
            database.parent.glob("*.traces/search-1/chunk-*.parquet")
        ):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(walking, timeout=WAIT_S)
    assert left == []
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


@pytest.mark.slow
def test_a_process_that_somebody_kills_is_one_line(database: Path) -> None:
    """And the search goes on by --resume."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", *SEARCH, "--proposals", "1000000000", "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + WAIT_S
        # The first proves the lower bound.
        while len(children := psutil.Process(process.pid).children()) < 3:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        children[1].kill()
        output, errors = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert (process.returncode, output) == (1, "")
    assert "error: search: worker 0 of 2" in errors.splitlines()[-1]
    assert "was ended by signal SIGKILL" in errors.splitlines()[-1]
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT status FROM searches").fetchall() == [("failed",)]
    connection.close()
