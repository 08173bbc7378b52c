"""DuckDB sees all that is stored, and changes none of it, over every backend."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from app.analytics.catalog import CATALOG
from app.analytics.duck import connect
from app.db.records import LinkCostRecord, LinkFitRecord, SearchOutcome, TraceRecord
from app.db.rows import (
    TRACE_COLUMNS,
    ConfigurationEntry,
    ProposalRows,
    StartEntry,
    schema_of,
)
from app.db.schema import open_database
from app.db.store import Store
from app.db.trace import ProposalTrace
from graph.canonical import canonical_json
from graph.errors import DatabaseError
from tests.app.db import samples
from tests.app.db.samples import Scene


def proposals(first_step: int, count: int) -> ProposalRows:
    """Return proposals of one chain: cut where the step is divisible by 3, accepted where it is by 5."""
    step = np.arange(first_step, first_step + count)
    cut = step % 3 == 0
    return ProposalRows(
        chain=np.zeros(count, dtype=np.int16),
        step=step,
        operator=step % 7,
        configuration=step % 11,
        simulated_ns=np.where(cut, -1, 10**6 + step),
        bound_ns=np.where(cut, 10**7, -1),
        accepted=step % 5 == 0,
    )


def query(store: Store, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of one query over the store."""
    with connect(store.database) as connection:
        return connection.execute(sql).fetchall()


def test_views_are_those_of_the_catalog_and_empty_in_an_empty_database(store: Store) -> None:
    with connect(store.database) as connection:
        listed = connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
        assert sorted(name for (name,) in listed) == sorted(CATALOG)
        for name, view in CATALOG.items():
            found = connection.execute(f"SELECT * FROM {name}")
            assert [column[0] for column in found.description or ()] == list(view.columns), name
            assert found.fetchall() == []


def test_columns_of_the_traces_are_those_of_the_chunks(store: Store) -> None:
    """So that a view without a chunk has the types of one with chunks."""
    connection = duckdb.connect()
    for kind, columns in TRACE_COLUMNS.items():
        connection.register("chunk", schema_of(kind).empty_table())
        types = connection.execute("SELECT column_name, column_type FROM (DESCRIBE chunk)").fetchall()
        assert dict(types) == columns
    connection.close()


def test_costs_come_with_their_names(store: Store) -> None:
    kind, environment = (
        store.put_device_kind(samples.device_kind()),
        store.put_environment(samples.environment()),
    )
    store.put_op_costs(kind, environment, [samples.op_cost(3, time_s=0.1)])
    store.put_link_costs(kind, environment, [LinkCostRecord("p2p", 2, 1024, 1e-4, 2e-4, (1e-4,))])
    store.put_link_fits(kind, environment, [LinkFitRecord("p2p", 2, 9e-5, 3e9, 1.5, residual=0.04)])
    names = ("cpu", samples.environment().fingerprint)
    rows = query(
        store,
        "SELECT device_kind, environment, target, phase, minimum_s, flops, samples_s::DOUBLE[], measured_at"
        " FROM op_costs",
    )
    at = samples.moment(0).replace(tzinfo=None)
    assert rows == [(*names, "aten.mm", "forward", 0.1, 54, [0.1, 0.1 * 1.5, 0.2], at)]
    assert isinstance(rows[0][-1], datetime)
    assert query(store, "SELECT * EXCLUDE (measured_at, samples_s) FROM link_costs") == [
        (*names, "p2p", 2, 1024, 1e-4, 2e-4, 1, 9e-5, 3e9, 1.5, 0.04)
    ]


def test_runs_come_with_their_names(store: Store) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 0))
    search = store.start_search(scene.search())
    store.finish_search(search, "finished", SearchOutcome(9, 3, 2.0, 0.5, strategy))
    store.put_simulation(scene.simulation(strategy, 0.5, search_id=search))
    store.finish_execution(store.start_execution(scene.execution(strategy)), [1.0, 2.0, 3.0])
    digest = samples.strategy(scene.graph_id, 0).digest
    names = ("inception", digest, "search", "local", 8)
    run = "model, strategy, source, topology, batch_size"
    assert query(
        store, f"SELECT {run}, step_time_s, throughput_samples_per_s, feasible FROM simulations"
    ) == [(*names, 0.5, 16.0, True)]
    assert query(store, f"SELECT {run}, status, median_s, throughput_samples_per_s FROM executions") == [
        (*names, "finished", 2.0, 4.0)
    ]
    assert query(store, "SELECT model, topology, gain, best_strategy, seed FROM searches") == [
        ("inception", "local", 4.0, digest, 2**62)
    ]
    assert query(store, "SELECT digest, model, source FROM strategies") == [(digest, "inception", "search")]


def traced(store: Store, *first_steps: int) -> int:
    """Store a search with a trace of ten proposals from each of `first_steps`."""
    search = store.start_search(Scene.stored(store).search())
    with ProposalTrace(store, search) as trace:
        trace.add_entries([ConfigurationEntry(3, "strided", 2, (2, 1), start=0, stride=1)])
        trace.add_starts([StartEntry(0, "data-parallel", 5, 3)])
        for first in first_steps:
            trace.add(proposals(first, 10))
    return search


def test_proposals_come_with_their_configurations_and_starts(store: Store) -> None:
    searches = [traced(store, 0, 10), traced(store, 0)]
    # Of steps 0 to 19, those divisible by 3 were cut (7), those divisible by 5 accepted (4).
    assert query(
        store,
        "SELECT search, count(*), sum(step), count(simulated_ns), count(*) FILTER (accepted) FROM proposals"
        " GROUP BY search ORDER BY search",
    ) == [(searches[0], 20, 190, 13, 4), (searches[1], 10, 45, 6, 2)]
    assert query(store, "SELECT search, family, degrees, stride, devices FROM proposal_configurations") == [
        (search, "strided", [2, 1], 1, None) for search in searches
    ]
    assert query(store, "SELECT DISTINCT chain, start, operator, configuration FROM proposal_starts") == [
        (0, "data-parallel", 5, 3)
    ]


def test_chunks_that_are_gone_or_damaged_do_not_hide_the_rest(store: Store) -> None:
    gone, damaged, other, whole = (traced(store, first) for first in (0, 10, 20, 30))
    chunk_of = {trace.search_id: trace.path for trace in store.traces() if trace.kind == "proposals"}
    (store.database.trace_root / chunk_of[gone]).unlink()
    (store.database.trace_root / chunk_of[damaged]).write_bytes(b"PAR1 and nothing else")
    parquet.write_table(pa.table({"column": [1]}), store.database.trace_root / chunk_of[other])
    assert query(store, "SELECT DISTINCT search FROM proposals") == [(whole,)]
    missing = query(store, "SELECT path FROM traces WHERE NOT present ORDER BY path")
    assert missing == sorted((chunk_of[search],) for search in (gone, damaged, other))


def test_registered_paths_cannot_lead_elsewhere(store: Store, tmp_path: Path) -> None:
    """Others may write to a shared database, and a path in it is only a text."""
    search = traced(store, 0)
    elsewhere = tmp_path / "elsewhere" / "chunk-000001.parquet"
    elsewhere.parent.mkdir()
    (chunk,) = (trace for trace in store.traces() if trace.kind == "proposals")
    shutil.copy(store.database.trace_root / chunk.path, elsewhere)
    link = store.database.trace_folder / "link.parquet"
    link.symlink_to(elsewhere)
    root = store.database.trace_root
    paths = [
        str(elsewhere),
        os.path.relpath(elsewhere, root),
        f"{store.database.trace_folder.name}/../{os.path.relpath(elsewhere, root)}",
        link.relative_to(root).as_posix(),
    ]
    store.record_traces(search, [TraceRecord(search, "proposals", path, 10) for path in paths])
    assert query(store, "SELECT count(*) FROM proposals") == [(10,)]
    assert query(store, "SELECT count(*) FROM traces WHERE NOT present") == [(len(paths),)]


def test_operators_are_numbered_as_in_proposals(store: Store) -> None:
    operators = [
        {
            "name": "conv",
            "target": "aten.conv2d.default",
            "axes": [["sample", 8, "sample"], ["replica", 1, "replica"]],
        },
        {"name": "loss", "target": "aten.mean.default", "axes": [["replica", 1, "replica"]]},
    ]
    graph = replace(samples.graph(), document=canonical_json({"operators": operators}))
    store.put_graph(graph)
    assert query(store, "SELECT model, position, operator, axes FROM operators ORDER BY position") == [
        ("inception", 0, "conv", ["sample", "replica"]),
        ("inception", 1, "loss", ["replica"]),
    ]


def test_moments_are_utc(store: Store) -> None:
    store.put_environment(samples.environment())
    old = query(store, "SELECT created_at < now() FROM environments")
    zone = query(store, "SELECT current_setting('TimeZone')")
    assert (old, zone) == ([(True,)], [("UTC",)])


def test_store_is_attached_read_only(store: Store) -> None:
    store.put_graph(samples.graph())
    with connect(store.database) as connection, pytest.raises(duckdb.Error, match=r"(?i)read-only"):
        connection.execute("DELETE FROM store.graphs")
    assert store.table_counts()["graphs"] == 1


def test_what_is_written_later_is_seen(store: Store, database_url: str) -> None:
    with connect(store.database) as connection:
        assert connection.execute("SELECT count(*) FROM strategies").fetchall() == [(0,)]
    scene = Scene.stored(store)
    store.put_strategy(samples.strategy(scene.graph_id, 0))
    assert query(store, "SELECT count(*) FROM strategies") == [(1,)]


def test_names_with_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100 % here; --"
    folder.mkdir()
    with Store.open(folder / "o'clock.sqlite") as store:
        traced(store, 0)
        assert query(store, "SELECT count(*) FROM proposals") == [(10,)]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_password_is_not_shown(store: Store) -> None:
    """DuckDB shows what it has attached, and by which text."""
    with_password = replace(store.database, url=store.database.url.set(password="sesame's \\"))
    with connect(with_password) as connection:
        shown = connection.execute("SELECT * FROM duckdb_databases()").fetchall()
        assert connection.execute("SELECT count(*) FROM graphs").fetchall() == [(0,)]
    assert "sesame" not in str(shown)


def test_missing_extension_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = open_database(tmp_path / "x.sqlite")
    monkeypatch.setattr(duckdb, "__version__", "0.0.1")
    with (
        pytest.raises(DatabaseError, match=r"pip install duckdb-extension-sqlite-scanner==0\.0\.1") as raised,
        connect(database),
    ):
        pass
    assert "\n" not in str(raised.value)
