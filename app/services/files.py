"""Files that commands write: never over what is stored, and as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.db.engine import Database
from graph.errors import UsageError


def checked_target(path: Path, database: Database, name: str) -> Path:
    """Return where to write: not over what is stored, nor over what is no file. `name` is what an error calls it.

    Raises:
        UsageError: it belongs to the database, is something else than a file, or its folder is not there.
    """
    target = path.resolve()
    own = Path(str(database.url.database)).resolve() if database.url.get_backend_name() == "sqlite" else None
    is_database = own is not None and target.parent == own.parent and target.name.startswith(own.name)
    if is_database or target.is_relative_to(database.trace_folder.resolve()):
        raise UsageError(f"{name} {path}: belongs to the database, must be another file; choose another")
    if target.exists() and not target.is_file():
        raise UsageError(f"{name} {path}: is no regular file, must be one; choose another")
    if not target.parent.is_dir():
        raise UsageError(f"{name} {path}: folder {target.parent} does not exist, must exist; make it first")
    return target


@contextmanager
def replacing(target: Path, name: str) -> Iterator[Path]:
    """Give a temporary file beside the target, which takes its place at the end.

    Raises:
        UsageError: it cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            yield temporary
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{name} {target}: cannot be written ({error.strerror or error}), must be; choose another path"
        ) from error
