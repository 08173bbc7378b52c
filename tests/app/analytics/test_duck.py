"""DuckDB sees all that is stored, and changes none of it, over every backend."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest

from app.analytics.duck import connect
from app.analytics.views import VIEWS
from app.db.records import LinkCostRecord, LinkFitRecord, SearchOutcome
from app.db.schema import open_database
from app.db.store import Store
from app.db.trace import ConfigurationName, ProposalTrace
from graph.errors import DatabaseError
from tests.app.db import samples
from tests.app.db.samples import Scene
from tests.app.db.test_trace import batch


def query(store: Store, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of one query over the store."""
    connection = connect(store.database)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_views_of_an_empty_database_are_empty_and_typed(store: Store) -> None:
    connection = connect(store.database)
    for name in [*VIEWS, "proposals", "proposal_configurations"]:
        assert connection.execute(f"SELECT * FROM {name}").fetchall() == []
    types = dict(connection.execute("SELECT column_name, column_type FROM (DESCRIBE proposals)").fetchall())
    connection.close()
    assert types["simulated_ns"] == types["configuration"] == "BIGINT"
    assert (types["chain"], types["accepted"]) == ("SMALLINT", "BOOLEAN")


def test_costs_come_with_their_names(store: Store) -> None:
    kind, environment = (
        store.put_device_kind(samples.device_kind()),
        store.put_environment(samples.environment()),
    )
    store.put_op_costs(kind, environment, [samples.op_cost(3, time_s=0.1)])
    store.put_link_costs(kind, environment, [LinkCostRecord("p2p", 2, 1024, 1e-4, 2e-4, (1e-4,))])
    store.put_link_fits(kind, environment, [LinkFitRecord("p2p", 2, 9e-5, 3e9, 1.5)])
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
        (*names, "p2p", 2, 1024, 1e-4, 2e-4, 1, 9e-5, 3e9, 1.5)
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


def test_proposals_are_those_of_the_chunks_that_are_there(store: Store) -> None:
    searches = [store.start_search(Scene.stored(store).search()) for _ in range(2)]
    for search in searches:
        for first in (0, 10):
            with ProposalTrace(store, search) as trace:
                trace.name_configurations([ConfigurationName(first, 1, "{}")])
                trace.add(batch(first, 10))
    counts = (
        "SELECT search, count(*), sum(step), count(simulated_ns), count(*) FILTER (accepted) FROM proposals"
    )
    whole = f"{counts} GROUP BY search ORDER BY search"
    # Of steps 0 to 19, those divisible by 3 were cut (7), those divisible by 5 accepted (4).
    assert query(store, whole) == [(search, 20, 190, 13, 4) for search in searches]
    assert query(store, "SELECT count(*) FROM proposal_configurations") == [(4,)]
    first_chunk = next(trace for trace in store.traces(search_id=searches[0]) if trace.kind == "proposals")
    (store.database.trace_root / first_chunk.path).unlink()
    assert query(store, whole) == [(searches[0], 10, 145, 7, 2), (searches[1], 20, 190, 13, 4)]
    assert query(store, "SELECT path FROM traces WHERE NOT present") == [(first_chunk.path,)]


def test_store_is_attached_read_only(store: Store) -> None:
    store.put_graph(samples.graph())
    connection = connect(store.database)
    with pytest.raises(duckdb.Error, match=r"(?i)read-only"):
        connection.execute("DELETE FROM store.graphs")
    connection.close()
    assert store.table_counts()["graphs"] == 1


def test_what_is_written_later_is_seen(store: Store, database_url: str) -> None:
    connection = connect(store.database)
    assert connection.execute("SELECT count(*) FROM strategies").fetchall() == [(0,)]
    connection.close()
    scene = Scene.stored(store)
    store.put_strategy(samples.strategy(scene.graph_id, 0))
    assert query(store, "SELECT count(*) FROM strategies") == [(1,)]


def test_names_with_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100 % here; --"
    folder.mkdir()
    with Store.open(folder / "o'clock.sqlite") as store:
        search = store.start_search(Scene.stored(store).search())
        with ProposalTrace(store, search) as trace:
            trace.add(batch(0, 3))
        assert query(store, "SELECT count(*) FROM proposals") == [(3,)]


def test_missing_extension_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = open_database(tmp_path / "x.sqlite")
    monkeypatch.setattr(duckdb, "__version__", "0.0.1")
    with pytest.raises(
        DatabaseError, match=r"pip install duckdb-extension-sqlite-scanner==0\.0\.1"
    ) as raised:
        connect(database)
    assert "\n" not in str(raised.value)
