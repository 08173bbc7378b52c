"""DuckDB over the store: the database attached read-only, the traces as Parquet, both behind one set of views.

A connection is locked before anyone gets it: no file but the registered traces can be opened, no extension
loaded, no setting changed, no variable of the calling program read as a table. The lock has one gap, which
`app.analytics.guard` closes for SQL that is not ours: the functions of the extension that reads SQLite or
PostgreSQL open files and servers by themselves. That extension is loaded from an installed package, never from
the network.
"""

from __future__ import annotations

import importlib.util
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.analytics.decoding import MACROS
from app.analytics.views import TRACE_VIEWS, VIEWS
from app.db.chunks import chunk_file
from app.db.engine import FILE_NAME, Database, read_only_uri
from app.db.failures import damaged, database_failure, is_damage
from app.db.reading import reading
from app.db.recordings import FOLDER, SCHEDULING
from app.db.records import TraceKind, TraceRecord
from app.db.rows import ADDED_COLUMNS, TRACE_COLUMNS
from app.db.store import Store
from graph.errors import DatabaseError, DatabaseFailure

if TYPE_CHECKING:
    import duckdb
    import sqlalchemy as sa

# The signature of the extension is not checked, for which DuckDB would read all of its file at each connection: it is
# installed beside DuckDB itself, and after it no other can be loaded.
_CONFIGURATION: dict[str, Any] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_unsigned_extensions": True,
}


@dataclass(frozen=True, slots=True)
class DuckResources:
    """The memory that DuckDB may fill, and the folder for data beyond it, which DuckDB makes and removes.

    None: four fifths of the machine's memory, and a folder among the temporary ones.
    """

    memory_bytes: int | None = None
    spill: Path | None = None


@contextmanager
def connect(
    database: Database, resources: DuckResources = DuckResources()
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a locked in-memory DuckDB with an opened database attached read-only as `store`, and the views.

    The views are those of `app.analytics.catalog`. The proposals are those registered by now, also while searches go
    on: their files stay until the end (`app.db.reading`). A registered chunk that is not there by now, or is not in
    a trace folder beside the database, is left out, and `traces.present` says so. Moments are UTC.

    Idle connections of `database` are closed first, and none may be used until the end: DuckDB brings its own SQLite,
    and closing a file through one copy of SQLite drops the locks that another copy in the same process holds on it
    (sqlite.org, "How To Corrupt An SQLite Database File", 2.2.1). Where the file cannot be written to, DuckDB gets a
    copy of it: a file with a write-ahead log it opens only where it may make that log.

    Raises:
        DatabaseError: the extension is not installed, or DuckDB cannot read the database.
    """
    with reading(Store(database)) as traces, _attachable(database, resources) as file:
        database.dispose()
        connection = _connected(database, file, traces, resources)
        try:
            yield connection
        except _duckdb_error() as error:
            # All SQL that gets here is ours, and fits what is stored as it was written; `answer` has its own errors.
            if is_damage(error) or _is_about_values(error):
                raise damaged(database.name, error) from None
            raise database_failure(database.name, error) from None
        except UnicodeDecodeError as error:  # DuckDB hands on what SQLite holds
            raise damaged(database.name, error) from None
        finally:
            connection.close()


@contextmanager
def _attachable(database: Database, resources: DuckResources) -> Iterator[str]:
    """Yield the name of the SQLite file that DuckDB attaches: the database, or a copy where it cannot be written to."""
    if not database.is_read_only:
        yield str(database.url.database)
        return
    # In the folder that whoever ends a query's process removes.
    folder = resources.spill or spill_folder()
    copy = folder / FILE_NAME
    try:
        try:
            folder.mkdir(parents=True)
            source = read_only_uri(Path(str(database.url.database)))
            with (
                closing(sqlite3.connect(source, uri=True)) as original,
                closing(sqlite3.connect(copy)) as target,
            ):
                original.backup(target)
        except (OSError, sqlite3.Error) as error:
            raise database_failure(database.name, error) from None
        yield str(copy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _connected(
    database: Database, file: str, traces: list[TraceRecord], resources: DuckResources
) -> duckdb.DuckDBPyConnection:
    """Return a locked connection with the database attached and the views made."""
    import duckdb

    connection = duckdb.connect(":memory:", config=_CONFIGURATION)
    try:
        # First: where Python is interactive, DuckDB draws the progress of what takes seconds on stdout, beside JSON.
        connection.execute("SET enable_progress_bar = false")
        connection.execute("SET allow_persistent_secrets = false")
        _attach(connection, database, file)
        files = _create_trace_views(connection, database, traces)
        _create_recordings(connection, database)
        for signature, body in MACROS.items():
            connection.execute(f"CREATE MACRO {signature} AS {body}")
        for name, query in VIEWS.items():
            connection.execute(f"CREATE VIEW {name} AS {query}")
        _lock(connection, files, resources)
    except duckdb.Error as error:
        connection.close()
        reason = str(error).splitlines()[0]
        if password := database.url.password:
            reason = reason.replace(str(password), "***")
        if is_damage(error):
            raise database_failure(database.name, error) from None
        raise DatabaseFailure(
            f"database {database.name}: DuckDB cannot read it ({reason}); check the database"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def as_text(name: str | None) -> str | None:
    """Return a name as text for DuckDB; the bytes of an argument may be no text, and then no view is called so."""
    return None if name is None else name.encode(errors="backslashreplace").decode()


def spill_folder() -> Path:
    """Return a new folder's path for data that does not fit into memory."""
    return Path(tempfile.gettempdir(), f"soapstone-query-{uuid.uuid4().hex}")


def _lock(connection: duckdb.DuckDBPyConnection, files: list[Path], resources: DuckResources) -> None:
    """Allow nothing but to read `files`, and to use `resources`."""
    spill = resources.spill or spill_folder()
    limit = resources.memory_bytes
    for setting in (
        *(() if limit is None else (f"memory_limit = '{limit}B'",)),
        "TimeZone = 'UTC'",
        "python_enable_replacements = false",
        f"temp_directory = {_quoted(str(spill))}",
        f"allowed_paths = [{', '.join(_quoted(str(file)) for file in files)}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


def _attach(connection: duckdb.DuckDBPyConnection, database: Database, file: str) -> None:
    url = database.url
    if url.get_backend_name() == "sqlite":
        connection.execute(f"LOAD {_quoted(str(_extension_file('sqlite')))}")
        connection.execute(f"ATTACH {_quoted(file)} AS store (TYPE sqlite, READ_ONLY)")
        return
    connection.execute(f"LOAD {_quoted(str(_extension_file('postgres')))}")
    keywords, password = _keywords(url)
    # The password apart from the rest, since DuckDB shows what is attached by the text that attached it. And a
    # secret of our own even without one: DuckDB would look for one in the user's folder.
    secret = "TYPE postgres" + ("" if password is None else f", PASSWORD {_quoted(password)}")
    connection.execute(f"CREATE TEMPORARY SECRET store ({secret})")
    connection.execute(f"ATTACH {_quoted(keywords)} AS store (TYPE postgres, READ_ONLY, SECRET store)")


def _keywords(url: sa.URL) -> tuple[str, str | None]:
    """Return a PostgreSQL URL as the keywords and values of libpq, and its password, which is not among them."""
    named: dict[str, object] = {
        "dbname": url.database,
        "host": url.host,
        "port": url.port,
        "user": url.username,
        "password": url.password,
    }
    # Several hosts are several values of one key.
    for key, value in url.query.items():
        named[key] = value if isinstance(value, str) else ",".join(value)
    password = named.pop("password")
    escaped = {
        key: str(value).replace("\\", "\\\\").replace("'", "\\'")
        for key, value in named.items()
        if value is not None
    }
    text = " ".join(f"{key}='{value}'" for key, value in escaped.items())
    return text, None if password is None else str(password)


def _create_trace_views(
    connection: duckdb.DuckDBPyConnection, database: Database, traces: list[TraceRecord]
) -> list[Path]:
    """Create the views of the traces; return the files that they read."""
    files = {trace.path: file for trace in traces if (file := chunk_file(database, trace)) is not None}
    for name, kind in TRACE_VIEWS.items():
        paths = [trace.path for trace in traces if trace.kind == kind and trace.path in files]
        try:
            _create_trace_view(connection, name, kind, [files[path] for path in paths])
        except _duckdb_error():
            # A file that was damaged, or of a Soapstone that wrote other columns, must not hide the rest.
            for path in paths:
                if not _has_columns(connection, files[path], kind):
                    del files[path]
            left = [files[path] for path in paths if path in files]
            _create_trace_view(connection, name, kind, left)
    connection.execute("CREATE TABLE present_chunks (path VARCHAR)")
    if files:
        # No parameters: DuckDB would import pandas for them, and lose an interrupt that comes meanwhile.
        connection.execute(
            f"INSERT INTO present_chunks VALUES {', '.join(f'({_quoted(path)})' for path in files)}"
        )
    return list(files.values())


def _create_trace_view(
    connection: duckdb.DuckDBPyConnection, name: str, kind: TraceKind, files: list[Path]
) -> None:
    columns = TRACE_COLUMNS[kind]
    if files:
        older = _older(connection, kind, files)
        newer = [file for file in files if str(file) not in older]
        parts = []
        if newer:
            parts.append(f"SELECT {', '.join(columns)} FROM read_parquet({_listed(newer)})")
        if older:
            added = {column: f"NULL::{columns[column]} AS {column}" for column in ADDED_COLUMNS[kind]}
            selected = ", ".join(added.get(column, column) for column in columns)
            parts.append(f"SELECT {selected} FROM read_parquet({_listed(sorted(older))})")
        query = " UNION ALL ".join(parts)
    else:
        nothing = ", ".join(f"NULL::{type_} AS {column}" for column, type_ in columns.items())
        query = f"SELECT {nothing} WHERE false"
    connection.execute(f"CREATE VIEW {name} AS {query}")


def _create_recordings(connection: duckdb.DuckDBPyConnection, database: Database) -> None:
    """Create the table of recorded steps' schedules from the recordings' files; a damaged file is left out."""
    connection.execute("CREATE TABLE recordings (name VARCHAR, scheduling VARCHAR)")
    folder = database.trace_folder / FOLDER
    files = [] if folder.is_symlink() else sorted(folder.glob("execution-*.parquet"))
    try:
        _read_recordings(connection, files)
    except _duckdb_error():
        for file in files:
            with suppress(_duckdb_error()):
                _read_recordings(connection, [file])


def _read_recordings(connection: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
    if files:
        connection.execute(
            "INSERT INTO recordings SELECT parse_filename(file_name), decode(value) "
            f"FROM parquet_kv_metadata({_listed(files)}) WHERE key = '{SCHEDULING}'::BLOB"
        )


def _older(connection: duckdb.DuckDBPyConnection, kind: TraceKind, files: list[Path]) -> set[str]:
    """Return the names of the files that lack columns that came later."""
    if kind not in ADDED_COLUMNS:
        return set()
    column = ADDED_COLUMNS[kind][0]
    rows = connection.execute(
        f"SELECT file_name FROM parquet_schema({_listed(files)}) GROUP BY file_name "
        f"HAVING NOT bool_or(name = '{column}')"
    ).fetchall()
    return {name for (name,) in rows}


def _listed(files: Iterable[Path | str]) -> str:
    return f"[{', '.join(_quoted(str(file)) for file in files)}]"


def _has_columns(connection: duckdb.DuckDBPyConnection, file: Path, kind: TraceKind) -> bool:
    try:
        rows = connection.execute(f"SELECT name FROM parquet_schema({_listed([file])})").fetchall()
        connection.execute(f"DESCRIBE SELECT * FROM read_parquet({_listed([file])})").fetchall()
    except (_duckdb_error(), UnicodeError):
        return False
    return set(TRACE_COLUMNS[kind]) - set(ADDED_COLUMNS.get(kind, ())) <= {name for (name,) in rows}


def _duckdb_error() -> type[Exception]:
    import duckdb

    return duckdb.Error


def _is_about_values(error: Exception) -> bool:
    """Return whether DuckDB could not take a value for what its column holds: a number, a moment, JSON."""
    import duckdb

    return isinstance(error, duckdb.DataError | duckdb.InvalidInputException)


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
