"""The readers' lock of a trace folder: chunks are merged only while nobody reads any.

A reader shares the lock from before it asks which chunks are registered until it needs their files no more; whoever
merges chunks must have it alone. So the files that a reader was told of stay until it ends, and nobody waits for a
reader: chunks that somebody reads stay as they are, and are merged later (`app.db.chunks.merge_ended`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from app.db.engine import Database
from app.db.records import TraceRecord
from graph import locks

if TYPE_CHECKING:
    from app.db.store_runs import RunStore

LOCK = "readers.lock"
"""The file in a trace folder that is locked; it is empty, and stays."""


@contextmanager
def reading(store: RunStore) -> Iterator[list[TraceRecord]]:
    """Yield the registered chunks, of one moment, in the order of their paths. Their files stay until the end.

    Raises:
        DatabaseError: the database cannot be read.
    """
    with ExitStack() as stack:
        locked: set[Path] = set()
        folders = {store.database.trace_folder}
        while True:
            # A folder that is not there holds nothing; where it comes meanwhile, it is locked before it is asked again.
            for folder in sorted(folder for folder in folders - locked if folder.is_dir()):
                stack.enter_context(shared(folder))
                locked.add(folder)
            traces = store.traces()
            folders = _folders(store.database, traces)
            if folders <= locked:
                break
        yield traces


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Hold the lock of a trace folder together with other readers.

    Where it cannot be had, it is read without: on a file system without locks nobody can have it alone either, so
    nothing is merged there.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locks.shared(folder / LOCK))
        yield


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Yield whether nobody reads chunks in a trace folder; who begins to waits until the end."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.exclusive(folder / LOCK, timeout_s=0))
        except OSError:
            yield False
            return
        yield True


def _folders(database: Database, traces: Iterable[TraceRecord]) -> set[Path]:
    """Return the trace folders that chunks are in: others than the database's own, too, if its file was copied."""
    # The paths come out of the database, which others may write to: no folder but one that is called like these.
    names = {posixpath.normpath(trace.path).partition("/")[0] for trace in traces}
    folders = {database.trace_root / name for name in names if name.endswith(".traces")}
    return {folder for folder in folders if folder.is_dir()}
