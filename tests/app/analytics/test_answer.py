"""The rows of a query, and the reason where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from app.analytics.answer import answer
from app.analytics.duck import connect
from app.db.store import Store
from graph.errors import UsageError

LATE = "SELECT CASE WHEN x < 3000000 THEN x ELSE error('late') END AS y FROM range(4000000) AS t(x)"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with Store.open(tmp_path / "test.sqlite") as store:
        database = store.database
    with connect(database) as connection:
        yield connection


def interrupted_rows(connection: duckdb.DuckDBPyConnection, sql: str) -> int:
    """Count the rows of a query that is interrupted, not by who asked, after its first batch."""
    found = answer(connection, sql)
    count = next(found.batches).num_rows
    connection.interrupt()
    return count + sum(batch.num_rows for batch in found.batches)


def test_failure_is_named_though_the_query_was_interrupted(connection: duckdb.DuckDBPyConnection) -> None:
    """DuckDB interrupts the threads of a query that fails, and may report that in place of the reason."""
    with pytest.raises(UsageError, match="late"):
        interrupted_rows(connection, LATE)
