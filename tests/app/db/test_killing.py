"""kill -9 at any moment of a search: the database is whole, the trace is read, and hardly anything is lost."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from app.db.engine import resolve_url
from app.db.store import Store
from app.services.trace.replay import TraceReader
from graph.strategy import Strategy
from search.algorithms import mcmc
from search.algorithms.chain import TURN
from tests.app.db.killed import DEVICES, MOST, options, search_until_killed
from tests.app.walks import Key, begin, rows, walk
from tests.search.builders import branches, random_anywhere

WAIT_S = 240.0
LOST_S = 1.0
MORE = 50

CASES = [
    pytest.param(backend, seed, marks=() if backend == "sqlite" and seed < 1 else pytest.mark.slow)
    for backend, count in (("sqlite", 20), ("postgresql", 5))
    for seed in range(count)
]


@pytest.mark.parametrize(("database_url", "seed"), CASES, indirect=["database_url"])
def test_a_killed_search_loses_at_most_a_second_and_goes_on(database_url: str, seed: int) -> None:
    context = multiprocessing.get_context("spawn")
    search_id, count = context.RawValue("q", 0), context.RawValue("q", 0)
    made_s = context.RawArray("d", MOST)
    process = context.Process(target=search_until_killed, args=(database_url, seed, search_id, count, made_s))
    process.start()
    deadline = time.monotonic() + WAIT_S
    while not count.value and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count.value, "it made no proposal"
    # From before anything is written until small chunks are merged.
    time.sleep(float(np.random.default_rng(seed).uniform(0, 3)))
    process.kill()
    process.join()
    number, made = search_id.value, count.value

    check_integrity(database_url)
    with Store.open(database_url) as store:
        assert store.search(number).status == "interrupted"
        kept = rows(store, number) if TraceReader(store, number).last_step(0) else {}
        assert len(kept) <= made + 1  # killed between a proposal and its count
        if len(kept) < made:
            assert made_s[made - 1] - made_s[len(kept)] <= LOST_S
        resume_and_compare(store, number, seed, kept)


def check_integrity(url: str) -> None:
    """Fail unless the database is whole, in SQLite's own opinion, or answers."""
    if url.startswith("sqlite"):
        with sqlite3.connect(str(resolve_url(url).database)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
        return
    engine = sa.create_engine(resolve_url(url))
    with engine.connect() as connected:
        assert connected.execute(sa.text("SELECT count(*) FROM searches")).scalar() == 1
    engine.dispose()


def resume_and_compare(store: Store, number: int, seed: int, kept: dict[Key, tuple[Any, ...]]) -> None:
    """Go on for some proposals; those of every chain are those of a search that was never killed."""
    graph = branches()
    known = [random_anywhere(graph, DEVICES, np.random.default_rng(seed))]
    before = {chain.number: chain.proposals for chain in TraceReader(store, number).snapshots()}
    repeated = len(kept) - sum(before.values())
    assert repeated >= 0
    resumed = walk_on(store, store.resume_search(number).id, seed, known, repeated + MORE, resumed=True)
    assert resumed.interrupted
    found = rows(store, number)
    assert len(found) >= len(kept)
    assert kept.items() <= found.items()
    # Chains take turns anew after a halt, so that others may be further there: go as far in all.
    longest = max(chain.proposals for chain in resumed.chains)
    turns = -(-longest // TURN)
    whole = begin(store, options(seed))
    walk_on(store, whole, seed, known, turns * TURN * len(resumed.chains))
    assert found.items() <= rows(store, whole).items()


def walk_on(
    store: Store, number: int, seed: int, known: list[Strategy], most: int, *, resumed: bool = False
) -> mcmc.SearchResult:
    """Make so many proposals, then interrupt the search."""
    return walk(
        store, number, branches(), DEVICES, options(seed), known=known, resumed=resumed, interrupt=after(most)
    )


def after(most: int) -> Callable[[int], None]:
    """Return what interrupts a search at the proposal after so many."""

    def interrupt(count: int) -> None:
        if count > most:
            raise KeyboardInterrupt

    return interrupt
