"""Errors of drivers and of the file system, as errors of Soapstone's: which are damage, and which a full disk.

Every message ends with what to do. `Connection` is that of sqlite3, but for one thing: where a damaged file makes
SQLite say something that is no UTF-8, sqlite3 raises `UnicodeDecodeError`, which nobody expects of a database.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from graph.errors import DamagedDataError, DatabaseFailure, StorageFullError

CHECK = "run: app db check"
"""The advice about damage, which names the command that lists the rows to be saved."""

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions that reading a malformed document raises."""

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Result codes of SQLite, and states of PostgreSQL: https://sqlite.org/rescode.html, PostgreSQL's appendix A.
_SQLITE_ERROR, _SQLITE_CORRUPT, _SQLITE_FULL = 1, 11, 13
_SQLITE_LOCKED = (5, 6)
_DAMAGED_STATES = ("XX000", "XX001", "XX002")
_MISSING_STATES = ("42P01", "42703")
_FULL_STATE = "53100"
# Of quotas and limits of file sizes SQLite says no more than that writing failed: IOERR_WRITE, IOERR_SHMSIZE.
_SQLITE_UNWRITTEN = (778, 4874)
_SQLITE_SAYS = "database disk image is malformed"
_SCANNER_SAYS = "Mismatch Type Error: Invalid type in column"
_LONGEST_REASON = 200


class Connection(sqlite3.Connection):
    """A connection to SQLite whose errors are all `sqlite3.Error`."""

    def cursor(self, factory: Any = None) -> Any:
        """Return a cursor of the same kind."""
        return super().cursor(factory or _Cursor)

    def execute(self, *arguments: Any) -> Any:
        """Return a cursor of the same kind that executes a statement; sqlite3's own short cut would not use it."""
        return self.cursor().execute(*arguments)


def _with_text_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of sqlite3's cursor that raises `sqlite3.DatabaseError` for a text that is no UTF-8."""

    @wraps(method)
    def named(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except UnicodeDecodeError:
            raise sqlite3.DatabaseError("malformed: a text is no UTF-8") from None

    return named


class _Cursor(sqlite3.Cursor):
    execute = _with_text_errors(sqlite3.Cursor.execute)
    executemany = _with_text_errors(sqlite3.Cursor.executemany)
    fetchone = _with_text_errors(sqlite3.Cursor.fetchone)
    fetchmany = _with_text_errors(sqlite3.Cursor.fetchmany)
    fetchall = _with_text_errors(sqlite3.Cursor.fetchall)


def one_line(error: BaseException) -> str:
    """Return the reason in a driver's error, without SQL, parameters and line breaks."""
    cause = getattr(error, "orig", None) or error
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def is_damage(error: BaseException) -> bool:
    """Return whether a driver's error says that what is stored is damaged: all SQL here fits the schema."""
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", None)
        if code is None:
            return any(word in str(cause) for word in ("malformed", "Could not decode"))
        return code & 0xFF in (_SQLITE_CORRUPT, _SQLITE_ERROR)
    # DuckDB has a SQLite of its own, and gives its words alone: of a file, and of a value that its column cannot hold.
    return any(words in str(cause) for words in (_SQLITE_SAYS, _SCANNER_SAYS)) or getattr(
        cause, "sqlstate", None
    ) in (
        *_DAMAGED_STATES,
        *_MISSING_STATES,
    )


def is_full(error: BaseException) -> bool:
    """Return whether an error of a driver or of the file system says that there is no space left."""
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", 0)
        return code & 0xFF == _SQLITE_FULL or code in _SQLITE_UNWRITTEN
    if isinstance(cause, OSError):
        return cause.errno in _FULL_ERRNOS
    return getattr(cause, "sqlstate", None) == _FULL_STATE


def is_locked(error: BaseException) -> bool:
    """Return whether an error of SQLite says that another process has the lock that is wanted."""
    cause = getattr(error, "orig", None) or error
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_LOCKED


def database_failure(name: str, error: BaseException) -> DatabaseFailure:
    """Return the error of ours for a driver's error; `name` is the database's."""
    if is_full(error):
        return full(f"database {name}", error)
    if is_damage(error):
        return damaged(name, error)
    if is_locked(error):
        return DatabaseFailure(
            f"database {name}: another process writes to it, must let go of it in between; wait for that process, or "
            "end it"
        )
    return DatabaseFailure(f"database {name}: operation failed ({one_line(error)}); check the database")


def damaged(name: str, error: BaseException) -> DamagedDataError:
    """Return the error for a driver's error that shows damage; `name` is the database's."""
    return DamagedDataError(f"database {name}: is damaged ({one_line(error)}), must be whole; {CHECK}")


def full(where: str, error: BaseException) -> StorageFullError:
    """Return the error for a full disk or quota."""
    reason = error.strerror if isinstance(error, OSError) else one_line(error)
    return StorageFullError(
        f"{where}: the disk or a quota is full ({reason}), must have room; make some, and run it again"
    )


def row_name(database: str, table: str, number: object, column: str | None = None) -> str:
    """Return the name of a row, or of one of its columns, in messages."""
    return f"database {database}: table {table}, row {number}" + (f", column {column}" if column else "")


def damaged_row(where: str, reason: str) -> DamagedDataError:
    """Return the error for a row that is not as it was written."""
    return DamagedDataError(f"{where}: {reason}, must be as it was written; {CHECK}")


@contextmanager
def as_written(where: str) -> Iterator[None]:
    """Raise `DamagedDataError` for any error of interpreting a stored document; `where` names it."""
    try:
        yield
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DamagedDataError(
            f"{where}: cannot be understood ({reason}), must be as it was written; {CHECK}"
        ) from None


def damaged_chunk(path: Path, reason: str) -> DamagedDataError:
    """Return the error for a chunk that cannot be read, or holds rows that no search wrote."""
    return DamagedDataError(
        f"trace chunk {path}: {reason}, must be as it was written; restore it from a copy, or {CHECK}"
    )


def unwritable(folder: Path, error: OSError) -> DatabaseFailure:
    """Return the error for a trace folder that cannot be written."""
    if is_full(error):
        return full(f"trace folder {folder}", error)
    return DatabaseFailure(
        f"trace folder {folder}: cannot be written ({error.strerror}); check its permissions and its space"
    )
