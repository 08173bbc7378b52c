"""`from app import open_database`: the database in a notebook, by DuckDB's SQL and pandas frames."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from app.analytics.catalog import CATALOG
from app.analytics.duck import connect
from app.analytics.guard import check_query
from app.db import schema
from app.db.engine import Database
from graph.errors import UsageError

if TYPE_CHECKING:
    import duckdb
    import pandas as pd


class Analysis:
    """The database and its traces, read only; a context manager that closes them.

    It sees the database as it is when a query runs, and the proposals that were on disk when it was opened. Their files
    stay until it is closed: read what a query answers before.

    Example:
        with open_database() as database:
            frame = database.frame("executions")
    """

    def __init__(self, database: Database) -> None:
        """Connect; connections of `database` are closed, and may not be used meanwhile.

        Raises:
            DatabaseError: DuckDB cannot read the database.
        """
        self._opened = ExitStack()
        self.connection: duckdb.DuckDBPyConnection = self._opened.enter_context(connect(database))
        """The DuckDB connection itself: locked (no other files, no settings), the database attached read-only."""

    @property
    def views(self) -> list[str]:
        """Names of the views; docs/database.md and `app query --views` describe them."""
        return list(CATALOG)

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return a query's answer as DuckDB's relation: shown as a table; `.df()`, `.arrow()`, `.fetchall()`.

        Args:
            query: one SELECT over the views, as `app query` takes it; an EXPLAIN is given to `connection`.

        Raises:
            UsageError: the query may not run, or is wrong.
        """
        import duckdb

        if check_query(self.connection, query) != "select":
            raise UsageError("query: is EXPLAIN, must be SELECT here; use connection.execute")
        try:
            return self.connection.sql(query)
        except duckdb.Error as error:
            reason = " ".join(str(error).split("LINE ", 1)[0].split())
            raise UsageError(f"query: {reason}; correct it") from None

    def frame(self, query: str) -> pd.DataFrame:
        """Return a view by its name, or a query's answer, as a frame.

        Raises:
            UsageError: there is no such view, the query may not run, or is wrong.
        """
        name = query.strip()
        if name.isidentifier():
            if name.lower() not in CATALOG:
                raise UsageError(
                    f"view {name}: is not known, must be one of {', '.join(CATALOG)}; choose one or give a SELECT"
                )
            query = f"SELECT * FROM {name}"
        return self.sql(query).df()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_database(database: str | os.PathLike[str] | None = None) -> Analysis:
    """Open the database and its traces for analysis, read only.

    Args:
        database: path of a SQLite file, or a URL; None: SOAPSTONE_DATABASE_URL, else the file in the user's data
            folder.

    Raises:
        DatabaseError: it cannot be opened or read, or its schema is older or newer than this code.
    """
    opened = schema.open_database(database, to_read=True)
    try:
        return Analysis(opened)
    finally:
        opened.dispose()
