"""Whoever reads a trace while it is written and merged reads what was there when it began: all of it, and once."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from app import open_database
from app.analytics.duck import connect
from app.db import chunks, models, owners
from app.db import trace as trace_module
from app.db.reading import LOCK, alone, reading, shared
from app.db.schema import open_database as open_plain
from app.db.store import Store
from app.db.trace import ProposalTrace
from app.services.database import query
from app.services.report.data import Filter, read_report_data
from app.services.trace.replay import TraceReader
from graph.errors import UsageError
from tests.app.db.merging import ROWS, add, write_and_merge, write_then_merge
from tests.app.db.samples import Scene
from tests.processes import start_process

WAIT_S = 240.0
STEPS = "SELECT search, step FROM proposals ORDER BY search, step"

Steps = dict[int, list[int]]


def started(url: str) -> int:
    """Return a search that is running in no process, for others to write its trace."""
    with Store.open(url) as store:
        search_id = store.start_search(Scene.stored(store).search())
        store.halt_search(search_id, "interrupted")
    return search_id


def files(folder: Path) -> set[str]:
    """Return the files of all traces, asking no database: that would take DuckDB's locks on it away."""
    return {path.relative_to(folder).as_posix() for path in folder.glob("**/search-*/*")}


def unregistered(url: str) -> set[str]:
    """Return the files of all traces that are not registered; traces of killed searches are put in order first."""
    with Store.open(url) as store:
        root = store.database.trace_root
        known = {(root / trace.path).resolve() for trace in store.traces()}
        return {path.name for path in root.glob("*.traces/search-*/*") if path.resolve() not in known}


@contextlib.contextmanager
def written(url: str, search_id: int, batches: int) -> Iterator[Callable[[], None]]:
    """Write a trace in another process; give what makes it merge all its chunks, and waits until it has."""
    here, there = Pipe()
    process = start_process(write_then_merge, url, search_id, batches, there)

    def merge() -> None:
        here.send("merge")
        assert receive(here) == "merged"

    assert receive(here) == "written"
    yield merge
    here.send("end")
    process.join(WAIT_S)
    assert process.exitcode == 0


def receive(here: Connection) -> Any:
    assert here.poll(WAIT_S), "the other process says nothing"
    return here.recv()


def test_what_a_reader_was_told_of_stays_until_it_ends(database_url: str, tmp_path: Path) -> None:
    """And no longer."""
    search_id = started(database_url)
    everything = [(search_id, step) for step in range(5 * ROWS)]
    with written(database_url, search_id, 5) as merge:
        parts = files(tmp_path)
        assert len(parts) == 11, "five of proposals, five of configurations, one of starts"
        database = open_plain(database_url)
        with connect(database) as connection:
            merge()
            assert files(tmp_path) == parts
            assert connection.execute(STEPS).fetchall() == everything
        database.dispose()
    # The next command merges what its search could not.
    assert unregistered(database_url) == set()
    assert len(files(tmp_path)) == 3
    assert queried(database_url, tmp_path) == {search_id: [step for _, step in everything]}


def queried(url: str, _folder: Path) -> Steps:
    return query.with_answer(
        url, STEPS, lambda answer: by_search(row for batch in answer.batches for row in batch.to_pylist())
    )


def queried_twice(url: str, _folder: Path) -> Steps:
    database = open_plain(url)
    with connect(database) as connection:
        first = connection.execute(STEPS).fetchall()
        assert connection.execute(STEPS).fetchall() == first
        # Registered in one transaction with the proposals.
        unknown = "SELECT count(*) FROM proposals ANTI JOIN proposal_devices USING (search, configuration)"
        assert connection.execute(unknown).fetchall() == [(0,)]
    database.dispose()
    return by_search({"search": search, "step": step} for search, step in first)


def exported(url: str, folder: Path) -> Steps:
    query.export(url, STEPS, "parquet", folder / "steps.parquet")
    return by_search(parquet.read_table(folder / "steps.parquet").to_pylist())


def reported(url: str, _folder: Path) -> Steps:
    database = open_plain(url)
    curves = read_report_data(database, Filter()).curves
    database.dispose()
    return {curve.id: list(range(curve.made[-1])) for curve in curves}


def rebuilt(url: str, _folder: Path) -> Steps:
    """As `app strategy rebuild` reads: proposals, and what all their configurations mean."""
    found: Steps = {}
    with Store.open(url) as store, reading(store) as traces:
        for search_id in {trace.search_id for trace in traces}:
            reader = TraceReader(store, search_id)
            steps = list(range(reader.last_step(0) + 1))
            # Those of the last proposals: what they mean may have been registered in this moment.
            assert sorted(reader.decode(steps[-2 * ROWS :])) == steps[-2 * ROWS :]
            assert reader.best() == (0, 0)
            found[search_id] = steps
    return found


def framed(url: str, _folder: Path) -> Steps:
    with open_database(url) as database:
        return by_search(database.frame(STEPS).to_dict("records"))


def by_search(rows: Any) -> Steps:
    found: Steps = {}
    for row in rows:
        found.setdefault(row["search"], []).append(row["step"])
    return found


@pytest.mark.parametrize(
    ("database_url", "rounds"),
    [
        ("sqlite", 1),
        ("postgresql", 1),
        pytest.param("sqlite", 12, marks=pytest.mark.slow),
        pytest.param("postgresql", 12, marks=pytest.mark.slow),
    ],
    indirect=["database_url"],
)
def test_every_answer_is_a_prefix_while_searches_merge(
    database_url: str, rounds: int, tmp_path: Path
) -> None:
    """Of each search the first so many proposals, no fewer than were registered when the reader began."""
    searches = [started(database_url) for _ in range(2)]
    counts = [RawValue("q", 0) for _ in searches]
    stop = RawValue("b", 0)
    processes = [
        start_process(write_and_merge, database_url, search_id, search_id, count, stop)
        for search_id, count in zip(searches, counts, strict=True)
    ]
    try:
        while not all(count.value for count in counts):
            assert all(process.is_alive() for process in processes)
            time.sleep(0.01)
        for _ in range(rounds):
            for read in (queried, queried_twice, exported, reported, rebuilt, framed):
                least = [count.value for count in counts]
                found = read(database_url, tmp_path)
                for search_id, count in zip(searches, least, strict=True):
                    steps = found[search_id]
                    assert steps == list(range(len(steps))), read.__name__
                    assert len(steps) >= count, read.__name__
    finally:
        stop.value = 1
        for process in processes:
            process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    last = queried(database_url, tmp_path)
    assert {search_id: len(steps) for search_id, steps in last.items()} == dict(
        zip(searches, (count.value for count in counts), strict=True)
    )
    assert unregistered(database_url) == set()


@pytest.mark.parametrize(
    ("database_url", "seed"),
    [
        pytest.param(backend, seed, marks=() if seed < 1 and backend == "sqlite" else pytest.mark.slow)
        for backend in ("sqlite", "postgresql")
        for seed in range(5)
    ],
    indirect=["database_url"],
)
def test_killed_writers_leave_nothing_for_ever(database_url: str, seed: int, tmp_path: Path) -> None:
    """Also where somebody read all the while, so that nothing could be deleted."""
    rng = np.random.default_rng(seed)
    search_id = started(database_url)
    database = open_plain(database_url)
    registered = 0
    with contextlib.ExitStack() as stack:
        for number in range(3):
            count = RawValue("q", 0)
            stop = RawValue("b", 0)
            process = start_process(write_and_merge, database_url, search_id, seed + number, count, stop)
            while not count.value:
                assert process.is_alive(), "it ended without a proposal"
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0, 1)))
            assert process.is_alive()
            process.kill()
            process.join(WAIT_S)
            registered = count.value
            if number == 0:
                stack.enter_context(connect(database))
        kept = len(files(tmp_path))
    database.dispose()
    found = queried(database_url, tmp_path)
    assert found[search_id] == list(range(len(found[search_id])))
    assert registered <= len(found[search_id]) <= registered + ROWS
    assert unregistered(database_url) == set()
    assert len(files(tmp_path)) < kept


def test_parts_stay_where_the_chunk_that_holds_them_is_gone(store: Store) -> None:
    """As from a copy that was made at another moment: they may be all that there is."""
    search_id = store.start_search(Scene.stored(store).search())
    with pytest.MonkeyPatch.context() as patch, ProposalTrace(store, search_id) as trace:
        patch.setattr(trace_module, "FLUSH_ROWS", 1)
        add(trace, 0)
        add(trace, ROWS)
        folder = chunks.trace_folder(store, search_id)
        left = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(left) == 4, "two of proposals, two of configurations"
    for path in folder.iterdir():
        path.unlink()
    for path, content in left.items():
        path.write_bytes(content)
    chunks.recover(store, search_id)
    assert set(folder.iterdir()) == set(left)


def test_nobody_goes_on_with_a_search_while_it_is_put_in_order(store: Store) -> None:
    """What its new process has written and not registered yet would be taken for a leftover."""
    search_id = store.start_search(Scene.stored(store).search())
    dead = json.dumps({**json.loads(owners.this_process()), "pid": 2**22 + 1})
    mended = []

    def mend(number: int) -> None:
        mended.append(number)
        assert store.end_orphans() == []
        with pytest.raises(UsageError, match="is running"):
            store.resume_search(number)

    assert store.end_orphans(mend) == []
    with store.write() as connection:
        connection.execute(models.searches.update().values(owner=dead))
    assert store.end_orphans(mend) == mended == [search_id]
    assert store.resume_search(search_id).status == "interrupted"


def test_a_folder_that_cannot_be_locked_is_read_and_keeps_all(tmp_path: Path) -> None:
    folder = tmp_path / "x.traces"
    (folder / LOCK).mkdir(parents=True)
    with shared(folder), alone(folder) as unread:
        assert not unread
    with alone(folder) as unread:
        assert not unread


def test_readers_share_the_lock_and_the_last_gives_it_up(tmp_path: Path) -> None:
    with shared(tmp_path):
        with shared(tmp_path), alone(tmp_path) as unread:
            assert not unread
        with alone(tmp_path) as unread:
            assert not unread
    with alone(tmp_path) as unread:
        assert unread


def test_chunks_of_the_original_stay_while_a_copy_is_read(tmp_path: Path) -> None:
    """A copy of a database's file alone leads to the traces beside the original."""
    url, copy = str(tmp_path / "first.sqlite"), str(tmp_path / "second.sqlite")
    search_id = started(url)
    with written(url, search_id, 3) as merge:
        with (
            contextlib.closing(sqlite3.connect(url)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        database = open_plain(copy)
        with connect(database) as connection:
            merge()
            assert connection.execute("SELECT count(*) FROM proposals").fetchall() == [(3 * ROWS,)]
        database.dispose()
        queried(copy, tmp_path)
    with Store.open(copy):
        assert len(files(tmp_path)) == 7, "not a copy's to merge"
    assert unregistered(url) == set()
    assert len(files(tmp_path)) == 3
