"""DuckDB over the store: the database attached read-only, the traces as Parquet, both behind one set of views.

The extension that reads SQLite or PostgreSQL is loaded from an installed package, never from the network.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from app.analytics.views import EMPTY_CONFIGURATIONS, EMPTY_PROPOSALS, VIEWS
from app.db.engine import Database
from app.db.records import TraceKind, TraceRecord
from app.db.store import Store
from graph.errors import DatabaseError

if TYPE_CHECKING:
    import duckdb


def connect(database: Database) -> duckdb.DuckDBPyConnection:
    """Return an in-memory DuckDB with an opened database attached read-only as `store`, and the views.

    Views: `op_costs`, `link_costs`, `searches`, `strategies`, `simulations`, `executions`, `traces`,
    `proposals`, `proposal_configurations`, `predicted_vs_measured`, `best_per_model` (`app.analytics.views`).
    The proposals are those registered by now; a registered chunk that is no longer there is left out, and
    `traces.present` says so. Close the connection when done.

    Idle connections of `database` are closed first, and none may be used until the DuckDB connection is
    closed: DuckDB brings its own SQLite, and closing a file through one copy of SQLite drops the locks that
    another copy in the same process holds on it (sqlite.org, "How To Corrupt An SQLite Database File", 2.2.1).

    Raises:
        DatabaseError: the extension is not installed, or DuckDB cannot read the database.
    """
    import duckdb

    traces = Store(database).traces()
    database.dispose()
    connection = duckdb.connect(
        ":memory:", config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )
    try:
        _attach(connection, database)
        _create_trace_views(connection, database, traces)
        for name, query in VIEWS.items():
            connection.execute(f"CREATE VIEW {name} AS {query}")
    except duckdb.Error as error:
        connection.close()
        reason = str(error).splitlines()[0]
        if password := database.url.password:
            reason = reason.replace(str(password), "***")
        raise DatabaseError(
            f"database {database.name}: DuckDB cannot read it ({reason}); check the database"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _attach(connection: duckdb.DuckDBPyConnection, database: Database) -> None:
    if database.url.get_backend_name() == "sqlite":
        backend, target = "sqlite", str(database.url.database)
    else:
        backend = "postgres"
        target = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    connection.execute(f"LOAD {_quoted(str(_extension_file(backend)))}")
    connection.execute(f"ATTACH {_quoted(target)} AS store (TYPE {backend}, READ_ONLY)")


def _create_trace_views(
    connection: duckdb.DuckDBPyConnection, database: Database, traces: list[TraceRecord]
) -> None:
    present = [trace for trace in traces if (database.trace_root / trace.path).is_file()]
    connection.execute("CREATE TABLE present_chunks (path VARCHAR)")
    if present:
        connection.executemany("INSERT INTO present_chunks VALUES (?)", [[trace.path] for trace in present])
    views: list[tuple[str, TraceKind, str]] = [
        ("proposals", "proposals", EMPTY_PROPOSALS),
        ("proposal_configurations", "configurations", EMPTY_CONFIGURATIONS),
    ]
    for name, kind, query in views:
        paths = [_quoted(str(database.trace_root / trace.path)) for trace in present if trace.kind == kind]
        if paths:
            query = f"SELECT * FROM read_parquet([{', '.join(paths)}])"
        connection.execute(f"CREATE VIEW {name} AS {query}")


def _extension_file(backend: str) -> Path:
    """Return the file of the extension that fits the installed DuckDB."""
    import duckdb

    package = f"duckdb_extension_{backend}_scanner"
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        file = Path(folder, "extensions", f"v{duckdb.__version__}", f"{backend}_scanner.duckdb_extension")
        if file.is_file():
            return file
    distribution = package.replace("_", "-")
    raise DatabaseError(
        f"DuckDB {duckdb.__version__}: {distribution} is not installed in that version, must be; "
        f"run pip install {distribution}=={duckdb.__version__}"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
