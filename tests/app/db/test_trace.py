"""The trace of a search: what was added is found again, in order, also after an interruption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from app.db import chunk_files, chunks, models, owners
from app.db import trace as trace_module
from app.db.records import SearchOutcome, TraceKind
from app.db.rows import (
    TRACE_COLUMNS,
    ConfigurationEntry,
    Others,
    ProposalRows,
    StartEntry,
    schema_of,
)
from app.db.store import Store
from app.db.trace import ProposalTrace
from graph.errors import DatabaseError
from tests.app.db.samples import Scene


def batch(first_step: int, count: int, *, chain: int = 0) -> ProposalRows:
    """Return proposals of which every third was cut at its bound, and every seventh changes further operators."""
    step = np.arange(first_step, first_step + count)
    cut = step % 3 == 0
    return ProposalRows(
        chain=np.full(count, chain, dtype=np.int16),
        step=step,
        operator=(step % 121).astype(np.int32),
        configuration=step * 2**40,
        simulated_ns=np.where(cut, -1, step * 1000),
        bound_ns=np.where(cut, step * 500, -1),
        accepted=step % 5 == 0,
        others=others(step),
    )


def others(steps: np.ndarray[Any, np.dtype[np.int64]]) -> Others:
    """Return what `further` gives to proposals of these steps, not in the order of the operators."""
    rows = [
        (place, operator, code)
        for place, step in enumerate(steps.tolist())
        if step % 7 == 0
        for operator, code in zip(*further(step), strict=True)
    ]
    return Others(*np.array(rows[::-1], np.int64).reshape(-1, 3).T)


def further(step: int) -> tuple[list[int], list[int]]:
    """Return the further operators that a proposal of `batch` changes, and their codes."""
    operators = list(range(1, 3 + step % 2))
    return operators, [step * 2**33 + operator for operator in operators]


def read(store: Store, search_id: int, kind: str = "proposals") -> pa.Table:
    """Return all registered rows of a search, in the order of the chunks."""
    root = store.database.trace_root
    found = [trace for trace in store.traces(search_id=search_id) if trace.kind == kind]
    tables = [parquet.read_table(root / chunk.path) for chunk in found]
    assert [table.num_rows for table in tables] == [chunk.rows for chunk in found]
    return pa.concat_tables([table.replace_schema_metadata() for table in tables])


def files(store: Store, search_id: int) -> list[str]:
    """Return the names of a search's files, registered or not."""
    return sorted(path.name for path in chunks.trace_folder(store, search_id).iterdir())


def names(store: Store, search_id: int, kind: TraceKind = "proposals") -> list[str]:
    """Return the names of the registered chunks."""
    return [chunk.name for chunk in chunks.registered(store, search_id, kind)]


def test_trace_round_trip(store: Store) -> None:
    search = store.start_search(Scene.stored(store).search())
    with ProposalTrace(store, search) as trace:
        trace.add_entries(
            [
                ConfigurationEntry(0, "strided", 2, (2, 1), start=1, stride=1),
                ConfigurationEntry(1, "permuted", 2, (2, 1), seed=2**32 - 1),
                ConfigurationEntry(2, "copied", 2, (1, 2), base=1, axes=(-1, 0)),
                ConfigurationEntry(2**40, "listed", 2, (2, 1), devices=(1, 1)),
            ]
        )
        trace.add_starts([StartEntry(0, "data_parallel", 7, 0), StartEntry(1, "random", 7, 2**40)])
        trace.add(batch(0, 1000))
        trace.add(batch(1000, 0))
        trace.add(batch(1000, 7))
    trace.close()
    table = read(store, search)
    for kind in TRACE_COLUMNS:
        assert {field.name: field.type for field in read(store, search, kind).schema} == {
            field.name: field.type for field in schema_of(kind)
        }
    columns = table.to_pydict()
    assert columns["step"] == list(range(1007))
    assert columns["search"] == [search] * 1007
    assert columns["configuration"] == [step * 2**40 for step in range(1007)]
    assert columns["simulated_ns"] == [None if step % 3 == 0 else step * 1000 for step in range(1007)]
    assert columns["bound_ns"] == [step * 500 if step % 3 == 0 else None for step in range(1007)]
    assert columns["accepted"] == [step % 5 == 0 for step in range(1007)]
    for place, name in enumerate(("other_operators", "other_configurations")):
        assert columns[name] == [further(step)[place] if step % 7 == 0 else None for step in range(1007)]
    nothing = dict.fromkeys(("start", "stride", "seed", "base", "axes", "devices"))
    common = {"search": search, "device_count": 2, **nothing}
    assert read(store, search, "configurations").to_pylist() == [
        {**common, "configuration": 0, "family": "strided", "degrees": [2, 1], "start": 1, "stride": 1},
        {**common, "configuration": 1, "family": "permuted", "degrees": [2, 1], "seed": 2**32 - 1},
        {**common, "configuration": 2, "family": "copied", "degrees": [1, 2], "base": 1, "axes": [-1, 0]},
        {**common, "configuration": 2**40, "family": "listed", "degrees": [2, 1], "devices": [1, 1]},
    ]
    assert read(store, search, "starts").to_pylist() == [
        {"search": search, "chain": 0, "start": "data_parallel", "operator": 7, "configuration": 0},
        {"search": search, "chain": 1, "start": "random", "operator": 7, "configuration": 2**40},
    ]
    path = store.search(search).trace_path
    assert path is not None
    assert (store.database.trace_root / path).is_dir()


def test_trace_lies_beside_the_database(tmp_path: Path) -> None:
    with Store.open(tmp_path / "costs.sqlite") as store:
        search = store.start_search(Scene.stored(store).search())
        with ProposalTrace(store, search) as trace:
            trace.add(batch(0, 1))
        assert [chunk.path for chunk in store.traces()] == [
            f"costs.traces/search-{search}/chunk-000001.parquet"
        ]
    assert sorted(path.name for path in (tmp_path / "costs.traces" / f"search-{search}").iterdir()) == [
        "chunk-000001.parquet"
    ]


def test_resumed_trace_goes_on_after_the_last_chunk(store: Store) -> None:
    search = store.start_search(Scene.stored(store).search())
    for first in range(0, 60, 20):
        with ProposalTrace(store, search) as trace:
            trace.add(batch(first, 20))
    assert read(store, search)["step"].to_pylist() == list(range(60))
    # One chunk again whenever it ends.
    assert files(store, search) == names(store, search) == ["chunk-000001-000003.parquet"]


def test_proposals_are_on_disk_without_another_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "FLUSH_INTERVAL_S", 0.01)
    written = threading.Event()
    record_traces = store.record_traces

    def record_and_tell(*arguments: Any) -> None:
        record_traces(*arguments)
        written.set()

    monkeypatch.setattr(store, "record_traces", record_and_tell)
    search = store.start_search(Scene.stored(store).search())
    trace = ProposalTrace(store, search)
    trace.add(batch(0, 5))
    assert written.wait(60)
    assert read(store, search).num_rows == 5
    trace.close()
    assert len(store.traces()) == 1


def test_full_buffer_is_written_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "FLUSH_INTERVAL_S", 3600.0)
    monkeypatch.setattr(trace_module, "FLUSH_ROWS", 10)
    search = store.start_search(Scene.stored(store).search())
    with ProposalTrace(store, search) as trace:
        for first in range(0, 25, 5):
            trace.add(batch(first, 5))
        assert [chunk.rows for chunk in store.traces()] == [10, 10]
    assert [chunk.rows for chunk in store.traces()] == [25]


def test_trace_without_a_folder_is_one_line(tmp_path: Path) -> None:
    with Store.open(tmp_path / "x.sqlite") as store:
        (tmp_path / "x.traces").write_text("in the way")
        with pytest.raises(DatabaseError, match=r"x\.traces.*cannot be written") as raised:
            ProposalTrace(store, 1)
        assert "\n" not in str(raised.value)


def test_failure_to_write_reaches_the_caller(tmp_path: Path) -> None:
    with Store.open(tmp_path / "x.sqlite") as store:
        trace = ProposalTrace(store, 99)
        trace.add(batch(0, 5))
        with pytest.raises(DatabaseError, match="FOREIGN KEY"):
            trace.close()
        trace.close()


def test_chunks_become_larger_while_a_search_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are never more than a few small ones, and two chains are in order within each."""
    monkeypatch.setattr(trace_module, "FLUSH_INTERVAL_S", 3600.0)
    monkeypatch.setattr(trace_module, "FLUSH_ROWS", 1)
    monkeypatch.setattr(trace_module, "MOST_SMALL", 6)
    search = store.start_search(Scene.stored(store).search())
    with ProposalTrace(store, search) as trace:
        for number in range(14):
            trace.add(batch(10 * (number // 2), 10, chain=number % 2))
        assert names(store, search) == [
            "chunk-000001-000006.parquet",
            "chunk-000007-000012.parquet",
            "chunk-000013.parquet",
            "chunk-000014.parquet",
        ]
    assert files(store, search) == names(store, search) == ["chunk-000001-000014.parquet"]
    table = read(store, search).to_pydict()
    assert table["chain"] == [0] * 70 + [1] * 70
    assert table["step"] == [*range(70), *range(70)]
    changed = [further(step)[0] if step % 7 == 0 else None for step in range(70)]
    assert table["other_operators"] == changed * 2


def test_large_chunks_are_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "FLUSH_ROWS", 1)
    monkeypatch.setattr(chunks, "LARGEST_ROWS", 25)
    monkeypatch.setattr(trace_module, "MOST_SMALL", 3)
    search = store.start_search(Scene.stored(store).search())
    with ProposalTrace(store, search) as trace:
        for number in range(5):
            trace.add(batch(10 * number, 10))
    assert [chunk.rows for chunk in chunks.registered(store, search, "proposals")] == [20, 20, 10]
    assert files(store, search) == names(store, search)


@given(
    flushes=st.lists(st.tuples(st.integers(1, 45), st.booleans()), min_size=1, max_size=80),
    most_small=st.integers(2, 4),
)
def test_only_neighbours_become_one(flushes: list[tuple[int, bool]], most_small: int) -> None:
    """Also where somebody read when a merge was due, or chunks are too large together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "LARGEST_ROWS", 40)
        written: list[chunks.Chunk] = []
        for number, (count, is_read) in enumerate(flushes, 1):
            written.append(chunks.Chunk(number, number, chunks.chunk_name("chunk", number, number), count))
            small = [chunk for chunk in written if not chunk.is_merged]
            if len(small) >= most_small and not is_read:
                merge(written, small)
        merge(written, written)
        assert [chunk.first for chunk in written] == [1, *(chunk.last + 1 for chunk in written[:-1])]
        assert written[-1].last == len(flushes)
        assert sum(chunk.rows for chunk in written) == sum(count for count, _ in flushes)
        assert all(chunk.rows <= 40 or not chunk.is_merged for chunk in written)


def merge(written: list[chunks.Chunk], some: list[chunks.Chunk]) -> None:
    """Replace the neighbours among some of the chunks by merged ones."""
    for run in chunks.mergeable(some):
        place = written.index(run[0])
        assert written[place : place + len(run)] == run
        first, last = run[0].first, run[-1].last
        name = chunks.chunk_name("chunk", first, last)
        written[place : place + len(run)] = [chunks.Chunk(first, last, name, sum(one.rows for one in run))]


def test_the_newest_checkpoint_and_outcome_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the chunks are merged, and when the last proposals came without one."""
    monkeypatch.setattr(trace_module, "FLUSH_ROWS", 1)
    search = store.start_search(Scene.stored(store).search())
    with ProposalTrace(store, search) as trace:
        for number in range(3):
            outcome = SearchOutcome(number, 0, 2.0, 1.0)
            trace.add(replace(batch(10 * number, 10), checkpoint=partial(str, [number]), outcome=outcome))
        assert store.search(search).proposals == 2
        trace.add(batch(30, 10))
    (chunk,) = names(store, search)
    assert chunk_files.read_text(chunks.trace_folder(store, search) / chunk, chunk_files.CHECKPOINT) == "[2]"
    assert store.search(search).best_time_s == 1.0


def killed(store: Store, monkeypatch: pytest.MonkeyPatch, *, chunk_count: int) -> int:
    """Return a search with chunks of ten proposals that are not merged, as if its process were gone."""
    search = store.start_search(Scene.stored(store).search())
    with monkeypatch.context() as patch:
        patch.setattr(trace_module, "FLUSH_ROWS", 1)
        patch.setattr(chunks, "mergeable", lambda _chunks: [])
        with ProposalTrace(store, search) as trace:
            for number in range(chunk_count):
                trace.add(batch(10 * number, 10))
    return search


def forget(store: Store, search: int, path: str) -> None:
    """Take a chunk out of the database, not off the disk."""
    folder = chunks.trace_folder(store, search)
    with store.write() as connection:
        table = models.traces
        connection.execute(table.delete().where(table.c.path == chunks.relative(store, folder / path)))


def test_a_chunk_written_but_not_registered_is_adopted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    search = killed(store, monkeypatch, chunk_count=3)
    forget(store, search, "chunk-000003.parquet")
    chunks.recover(store, search)
    assert read(store, search)["step"].to_pylist() == list(range(30))
    chunks.recover(store, search)
    assert files(store, search) == names(store, search)


def test_what_was_not_written_to_its_end_is_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    search = killed(store, monkeypatch, chunk_count=2)
    folder = chunks.trace_folder(store, search)
    whole = (folder / "chunk-000002.parquet").read_bytes()
    (folder / "chunk-000003.parquet").write_bytes(whole[: len(whole) // 2])
    # Of a process that cannot be there, and of one that is.
    (folder / f"chunk-000004.{2**22 + 1}.tmp").write_bytes(b"x")
    (folder / f"chunk-000004.{os.getpid()}.tmp").write_bytes(b"x")
    chunks.recover(store, search)
    assert files(store, search) == [*names(store, search)[:2], f"chunk-000004.{os.getpid()}.tmp"]
    assert read(store, search)["step"].to_pylist() == list(range(20))


def test_a_signal_while_a_chunk_is_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    table = schema_of("proposals").empty_table()
    with pytest.raises(KeyboardInterrupt):
        chunk_files.write_file(tmp_path / "chunk-000001.parquet", "proposals", table)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["written", "registered", "lost"])
def test_a_kill_while_chunks_are_merged_loses_and_doubles_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between file and registration; between registration and deletion; and after a loss of power in both."""
    search = killed(store, monkeypatch, chunk_count=3)
    parts = chunks.registered(store, search, "proposals")
    folder = chunks.trace_folder(store, search)
    contents = {part.name: (folder / part.name).read_bytes() for part in parts}
    with monkeypatch.context() as patch:
        if moment != "registered":
            patch.setattr(store, "replace_traces", lambda *_arguments: None)
        chunks.merge(store, search, "proposals", parts)
    for name, content in contents.items() if moment != "lost" else ():
        (folder / name).write_bytes(content)
    chunks.recover(store, search)
    assert read(store, search)["step"].to_pylist() == list(range(30))
    expected = list(contents) if moment == "written" else ["chunk-000001-000003.parquet"]
    assert files(store, search) == names(store, search) == expected


def test_a_search_whose_process_is_gone_is_put_in_order_at_the_next_open(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(database_url) as store:
        search = killed(store, monkeypatch, chunk_count=2)
        forget(store, search, "chunk-000002.parquet")
        with Store.open(database_url) as other:
            assert other.search(search).status == "running", "its process lives: this one"
            assert len(names(other, search)) == 1
        with store.write() as connection:
            table = models.searches
            connection.execute(table.update().where(table.c.id == search).values(owner=gone()))
    with Store.open(database_url) as store:
        found = store.search(search)
        assert (found.status, found.finished_at) == ("interrupted", found.alive_at)
        assert files(store, search) == names(store, search) == ["chunk-000001-000002.parquet"]
        assert read(store, search)["step"].to_pylist() == list(range(20))


def test_a_damaged_trace_of_a_killed_search_ends_no_command_that_does_not_read_it(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(database_url) as store:
        damaged, whole = (killed(store, monkeypatch, chunk_count=2) for _ in range(2))
        for search in (damaged, whole):
            store.halt_search(search, "interrupted")
        (chunks.trace_folder(store, damaged) / "chunk-000002.parquet").write_bytes(b"")
    with Store.open(database_url) as store:
        assert names(store, damaged) == ["chunk-000001.parquet", "chunk-000002.parquet"]
        assert names(store, whole) == ["chunk-000001-000002.parquet"]


def gone() -> str:
    """Return the owner of a process of this machine that has ended."""
    return json.dumps({**json.loads(owners.this_process()), "pid": 2**22 + 1})


def test_writing_and_merging_imports_no_pandas(tmp_path: Path) -> None:
    """It takes as long to import as a hundred chunks to write."""
    program = f"""
import sys
from app.db.rows import ConfigurationEntry, StartEntry
from app.db.store import Store
from app.db.trace import ProposalTrace
from tests.app.db.samples import Scene
from tests.app.db.test_trace import batch
with Store.open({str(tmp_path / "x.sqlite")!r}) as store:
    search = store.start_search(Scene.stored(store).search())
    for first in (0, 20):
        with ProposalTrace(store, search) as trace:
            trace.add_entries([ConfigurationEntry(first, "strided", 2, (2, 1), start=0, stride=1)])
            trace.add_starts([StartEntry(0, "random", 7, first)])
            trace.add(batch(first, 20))
    assert [one.rows for one in store.traces()] == [40, 2, 2]
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_new_search_takes_no_file_of_another_database_for_its_own(tmp_path: Path) -> None:
    """A copy of a database has the folder of its traces, too, where they differ in their suffix alone."""
    with Store.open(tmp_path / "a.db") as store:
        search = store.start_search(Scene.stored(store).search())
        with ProposalTrace(store, search) as trace:
            trace.add(batch(0, 5))
        before = files(store, search)
    with Store.open(tmp_path / "a.copy") as copy:
        other = copy.start_search(Scene.stored(copy).search())
        assert other == search
        with pytest.raises(DatabaseError, match="has the trace of another database"):
            ProposalTrace(copy, other)
        chunks.recover(copy, other)
        assert copy.traces(search_id=other) == []
    with Store.open(tmp_path / "a.db") as store:
        assert files(store, search) == before
        assert read(store, search)["step"].to_pylist() == list(range(5))


def test_files_behind_a_link_are_left_alone(tmp_path: Path) -> None:
    """A shared database may bring a link to the traces of the user's own."""
    with Store.open(tmp_path / "mine.db") as store:
        search = store.start_search(Scene.stored(store).search())
        with ProposalTrace(store, search) as trace:
            trace.add(batch(0, 5))
        folder = chunks.trace_folder(store, search)
        merged = folder / "chunk-000001-000016.parquet"
        merged.write_bytes((folder / "chunk-000001.parquet").read_bytes())
    (tmp_path / "shared").mkdir()
    with Store.open(tmp_path / "shared" / "theirs.db") as theirs:
        other = theirs.start_search(Scene.stored(theirs).search())
        link = chunks.trace_folder(theirs, other)
        link.parent.mkdir()
        link.symlink_to(folder)
        chunks.recover(theirs, other)
        assert merged.is_file()
        with pytest.raises(DatabaseError, match="is a link"):
            ProposalTrace(theirs, other)
