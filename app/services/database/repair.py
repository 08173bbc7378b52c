"""Repair: all sound rows and files of a damaged database in a new one (`app db check --repair`).

The old database is not written to. Rows keep their numbers, so whatever names one (a strategy in a script, a trace's
folder) means the same in the new one.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from app.db import models, schema
from app.db.engine import Database, connect_engines, migration_engine, resolve_url
from app.db.failures import database_failure, unwritable
from app.db.recordings import FOLDER
from app.db.records import utc_now
from app.services.database.check import Findings, Row, check
from graph.errors import DatabaseError, UsageError

BATCH_ROWS = 1000
# Of PostgreSQL's: any number that nobody else is likely to lock in the same database.
_ADVISORY_LOCK = 0x52455041


@dataclass(frozen=True, slots=True)
class Repaired:
    """The contents of a new database: number of rows by table, and of files."""

    name: str
    rows: dict[str, int]
    chunks: int
    recordings: int


def repair(database: str | None, new: str) -> tuple[Findings, Repaired]:
    """Save all sound rows and files of a database into a new one; return the findings, and the numbers of both.

    Where that fails, nothing of the new one stays.

    Raises:
        UsageError: the new one is there already, or the old one is not.
        DatabaseError: the old one cannot be opened, or the new one cannot be written.
    """
    target = connect_engines(resolve_url(new))
    target.dispose()
    _check_new(target)
    with _filled(target) as made:
        try:
            schema.create_tables(made.url)
        except DatabaseError as error:
            # Under the name that was asked for: the other one is soon gone.
            raise type(error)(str(error).replace(made.name, target.name)) from None
        engine = migration_engine(made.url)
        try:
            with engine.begin() as connection:
                writer = _Writer(connection, made, target.name)
                findings = check(database, writer.take)
                writer.finish()
                recordings = _copied(findings.recordings, made.trace_folder / FOLDER)
        except exc.DBAPIError as error:
            raise database_failure(target.name, error) from None
        except OSError as error:
            raise unwritable(target.trace_folder, error) from None
        finally:
            engine.dispose()
    return findings, Repaired(target.name, dict(writer.written), writer.files, recordings)


class _Writer:
    """Writes rows into a new database, in the order in which they come, and files of traces beside it."""

    def __init__(self, connection: sa.Connection, target: Database, name: str) -> None:
        self.written: Counter[str] = Counter()
        self.files = 0
        self._connection = connection
        self._target = target
        self._name = name
        self._table: sa.Table | None = None
        self._rows: list[Row] = []

    def take(self, table: sa.Table, row: Row, file: Path | None) -> None:
        """Write a row; of a chunk its file, too."""
        if table is not self._table or len(self._rows) >= BATCH_ROWS:
            self._flush()
            self._table = table
        self._rows.append(self._moved(table, row, file))

    def finish(self) -> None:
        """Write the last rows; PostgreSQL numbers the next rows after these."""
        self._flush()
        if self._connection.dialect.name == "postgresql":
            for table in models.metadata.sorted_tables:
                highest = sa.select(sa.func.max(table.c.id)).scalar_subquery()
                sequence = sa.func.pg_get_serial_sequence(table.name, "id")
                filled = sa.select(table.c.id).exists()
                self._connection.execute(sa.select(sa.func.setval(sequence, highest)).where(filled))

    def _flush(self) -> None:
        if self._table is None or not self._rows:
            return
        try:
            if not self._inserted(self._table, self._rows):
                # A damaged index let two rows have one name: the first stays.
                for row in self._rows:
                    self._inserted(self._table, [row])
        except exc.DBAPIError as error:
            # Of the new database: what the old one's reader says of its own must not name it.
            raise database_failure(self._name, _first(error)) from None
        self._rows = []

    def _inserted(self, table: sa.Table, rows: list[Row]) -> bool:
        try:
            with self._connection.begin_nested():
                self._connection.execute(table.insert(), rows)
        except exc.IntegrityError:
            return False
        self.written[table.name] += len(rows)
        return True

    def _moved(self, table: sa.Table, row: Row, file: Path | None) -> Row:
        """Return a row for the new database: traces lie beside it, and nothing runs."""
        changed: dict[str, Any] = {}
        folder = self._target.trace_folder
        if table is models.traces and file is not None:
            search_folder = folder / f"search-{row['search_id']}"
            search_folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, search_folder / file.name)
            self.files += 1
            changed["path"] = (search_folder / file.name).relative_to(self._target.trace_root).as_posix()
        if table is models.searches and row["trace_path"] is not None:
            search_folder = folder / f"search-{row['id']}"
            changed["trace_path"] = search_folder.relative_to(self._target.trace_root).as_posix()
        if row.get("status") == "running":
            changed |= {"status": "interrupted", "finished_at": row["alive_at"] or utc_now()}
        return row | changed


def _first(error: exc.DBAPIError) -> exc.DBAPIError:
    """Return the error that came first: a full disk ends SQLite's transaction, with its savepoints."""
    while isinstance(error.__context__, exc.DBAPIError):
        error = error.__context__
    return error


def _check_new(target: Database) -> None:
    """Check that there is nothing yet where the new database is to be."""
    trace_folder = target.trace_folder
    has_traces = trace_folder.is_dir() and any(trace_folder.iterdir())
    if target.url.get_backend_name() == "sqlite":
        file = Path(str(target.url.database))
        named = [
            path for path in (file, Path(f"{file}-wal"), Path(f"{file}-journal")) if os.path.lexists(path)
        ]
        if named:
            raise _there_already(named[0])
    elif schema.status(target.url.render_as_string(hide_password=False))[0] is not None:
        raise UsageError(f"--repair: database {target.name} is not empty, must be; make a new one")
    if has_traces or (trace_folder.exists() and not trace_folder.is_dir()):
        raise UsageError(f"--repair: {trace_folder} is there already, must be new; choose another name")


@contextmanager
def _filled(target: Database) -> Iterator[Database]:
    """Yield an empty database that becomes the target at the end; where that fails, nothing of it stays.

    One of SQLite is made in a folder of its own and moved: a name that was chosen is never that of half a database,
    however a repair ends. One of PostgreSQL is the target itself.
    """
    if target.url.get_backend_name() != "sqlite":
        with _locked(target):
            _check_new(target)  # a repair that has just ended may have filled it
            with _emptied_on_failure(target):
                yield target
        return
    file = Path(str(target.url.database))
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{file.name}-", suffix=".repairing", dir=file.parent))
    except OSError as error:
        raise unwritable(file.parent, error) from None
    try:
        made = connect_engines(resolve_url(str(folder / file.name)))
        made.dispose()
        yield made
        _move(made, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(made: Database, target: Database) -> None:
    """Move a database of SQLite to its place, its traces first: onto another's, which is not empty, that fails."""
    file = Path(str(target.url.database))
    if os.path.lexists(file):
        raise _there_already(file)
    try:
        if made.trace_folder.exists():
            made.trace_folder.rename(target.trace_folder)
        Path(str(made.url.database)).rename(file)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise _there_already(target.trace_folder) from None
        raise unwritable(file.parent, error) from None


def _there_already(path: Path) -> UsageError:
    return UsageError(f"--repair: {path} is there already, must be a new file; choose another name")


@contextmanager
def _locked(target: Database) -> Iterator[None]:
    """Let no other repair into a database of PostgreSQL's.

    Raises:
        UsageError: one is writing into it.
    """
    try:
        with target.write_engine.connect() as connection:
            if not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(_ADVISORY_LOCK))):
                raise UsageError(
                    f"--repair: another repair is writing into database {target.name}, must be alone; name another one"
                )
            connection.rollback()  # the lock is the connection's, not the transaction's
            yield
    finally:
        target.dispose()  # a pool would keep the connection, and the lock


@contextmanager
def _emptied_on_failure(target: Database) -> Iterator[None]:
    """Remove the tables and traces of a new database of PostgreSQL's if it is not finished."""
    try:
        yield
    except BaseException:
        shutil.rmtree(target.trace_folder, ignore_errors=True)
        models.metadata.drop_all(target.write_engine)
        with target.write_engine.begin() as connection:
            connection.execute(sa.text("DROP TABLE IF EXISTS alembic_version"))
        target.dispose()
        raise


def _copied(files: list[Path], folder: Path) -> int:
    if files:
        folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return len(files)
