"""Files that commands write: as a whole or not at all, and never over a database's files."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.db.engine import LOG_SUFFIXES, Database, begins_as_sqlite, sqlite_files
from app.db.failures import full, is_full
from graph.errors import UsageError

# Entries of a folder called *.traces that is one of Soapstone's.
_IN_TRACES = ("search-*", "executions")


def checked_target(path: Path, database: Database, name: str) -> Path:
    """Return the path to write: not that of a stored file, nor of anything but a file. `name` is what an error calls
    it.

    What is stored is any database with its logs, and any folder of traces, whether opened here or not. Ask before the
    work of which the result is to be written.

    Raises:
        UsageError: it belongs to a database, is something else than a file, or cannot be written.
    """
    try:
        target = path.resolve()
        if _is_of_a_database(target, database):
            raise UsageError(f"{name} {path}: belongs to a database, must be another file; choose another")
        if target.exists() and not target.is_file():
            raise UsageError(f"{name} {path}: is no regular file, must be one; choose another")
        if target.exists() and not os.access(target, os.W_OK):
            raise UsageError(f"{name} {path}: is write-protected, must be writable; choose another")
        if not target.parent.is_dir():
            raise UsageError(
                f"{name} {path}: folder {target.parent} does not exist, must exist; make it first"
            )
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, links in a circle
        raise _unwritable(name, path, error) from None
    return target


@contextmanager
def replacing(target: Path, name: str) -> Iterator[Path]:
    """Yield a temporary file beside the target, which takes its place at the end.

    Raises:
        UsageError: it cannot be written.
        StorageFullError: the disk is full.
    """
    temporary = target.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.soapstone.tmp")
    try:
        try:
            yield temporary
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
        finally:
            with suppress(OSError):
                temporary.unlink()
    except OSError as error:
        if is_full(error):
            raise full(f"{name} {target}", error) from error
        raise _unwritable(name, target, error) from error


def _unwritable(name: str, path: Path, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(f"{name} {path}: cannot be written ({reason}), must be; choose another path")


def _is_of_a_database(target: Path, database: Database) -> bool:
    """Return whether a resolved path is that of a database, of its logs, or of a trace, or another name of one."""
    traces = database.trace_folder.resolve()
    own: list[Path] = []
    if database.url.get_backend_name() == "sqlite":
        own = sqlite_files(Path(str(database.url.database)).resolve())
    # As a file system that does not tell cases apart sees them.
    if str(target).casefold() in {str(path).casefold() for path in own} or target.is_relative_to(traces):
        return True
    if any(map(_is_trace_folder, target.parents)):
        return True
    logged = [target.name.removesuffix(suffix) for suffix in LOG_SUFFIXES if target.name.endswith(suffix)]
    if any(map(begins_as_sqlite, (target, *(target.parent / name for name in logged)))):
        return True
    # A hard link is another name of the same file.
    return (
        target.is_file()
        and target.stat().st_nlink > 1
        and any(path.is_file() and target.samefile(path) for path in (*own, *traces.rglob("*")))
    )


def _is_trace_folder(folder: Path) -> bool:
    return folder.name.casefold().endswith(".traces") and any(
        any(folder.glob(pattern)) for pattern in _IN_TRACES
    )
