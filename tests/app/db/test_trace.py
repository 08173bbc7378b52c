"""The trace of a search: what was added is found again, in order, also after an interruption."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from app.db import trace as trace_module
from app.db.records import TraceKind
from app.db.store import Store
from app.db.trace import ConfigurationName, ProposalBatch, ProposalTrace, proposal_schema
from graph.errors import DatabaseError
from tests.app.db.samples import Scene


def batch(first_step: int, count: int, *, chain: int = 0) -> ProposalBatch:
    """Return proposals of which every third was cut at its bound."""
    step = np.arange(first_step, first_step + count)
    cut = step % 3 == 0
    return ProposalBatch(
        chain=np.full(count, chain, dtype=np.int16),
        step=step,
        operator=(step % 121).astype(np.int32),
        configuration=step * 2**40,
        simulated_ns=np.where(cut, -1, step * 1000),
        bound_ns=np.where(cut, step * 500, -1),
        accepted=step % 5 == 0,
    )


def read(store: Store, search_id: int, kind: str = "proposals") -> pa.Table:
    """Return all registered rows of a search, in the order of the chunks."""
    root = store.database.trace_root
    chunks = [trace for trace in store.traces(search_id=search_id) if trace.kind == kind]
    tables = [parquet.read_table(root / chunk.path) for chunk in chunks]
    assert [table.num_rows for table in tables] == [chunk.rows for chunk in chunks]
    return pa.concat_tables(tables)


def test_trace_round_trip(store: Store) -> None:
    search = store.start_search(Scene.stored(store).search())
    with ProposalTrace(store, search) as trace:
        trace.name_configurations(
            [ConfigurationName(0, 0, "{}"), ConfigurationName(1, 2**40, '{"sample":2}')]
        )
        trace.add(batch(0, 1000))
        trace.add(batch(1000, 0))
        trace.add(batch(1000, 7))
    trace.close()
    table = read(store, search)
    assert table.schema.equals(proposal_schema())
    columns = table.to_pydict()
    assert columns["step"] == list(range(1007))
    assert columns["search"] == [search] * 1007
    assert columns["configuration"] == [step * 2**40 for step in range(1007)]
    assert columns["simulated_ns"] == [None if step % 3 == 0 else step * 1000 for step in range(1007)]
    assert columns["bound_ns"] == [step * 500 if step % 3 == 0 else None for step in range(1007)]
    assert columns["accepted"] == [step % 5 == 0 for step in range(1007)]
    assert read(store, search, "configurations").to_pylist()[1] == {
        "search": search,
        "operator": 1,
        "configuration": 2**40,
        "document": '{"sample":2}',
    }
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
    assert len(store.traces()) == 3


def test_proposals_are_on_disk_without_another_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "FLUSH_INTERVAL_S", 0.01)
    written = threading.Event()
    record_trace = store.record_trace

    def record_and_tell(search_id: int, kind: TraceKind, path: str, rows: int) -> int:
        number = record_trace(search_id, kind, path, rows)
        written.set()
        return number

    monkeypatch.setattr(store, "record_trace", record_and_tell)
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
    assert [chunk.rows for chunk in store.traces()] == [10, 10, 5]


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
