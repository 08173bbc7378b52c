"""Reading chunks while searches merge them: what a reader was told of stays there until it has read it.

How parts of merged chunks are kept from being deleted is in `app.db.readers`. Those that had to stay are deleted later:
when their search merges again, when it is put in order (`app.db.chunks.recover`), or by a reader of any search, which
finds them when it begins and deletes them when it ends, if it is the last.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from app.db import chunks, readers
from app.db.engine import Database
from app.db.records import TraceRecord

if TYPE_CHECKING:
    from app.db.store_runs import RunStore


@contextmanager
def reading(store: RunStore) -> Iterator[list[TraceRecord]]:
    """Give the registered chunks, of one moment, in the order of their paths. Their files stay until the end.

    Raises:
        DatabaseError: the database cannot be read.
    """
    own = store.database.trace_folder
    left: list[Path] = []
    try:
        with ExitStack() as locks:
            traces = _locked_traces(store, locks)
            left = _replaced(store, traces)
            yield traces
    finally:
        if left:
            # Another user's may not be ours to delete.
            with suppress(OSError):
                readers.delete_unread(own, left)


def _locked_traces(store: RunStore, locks: ExitStack) -> list[TraceRecord]:
    """Return the registered chunks as they are after the folders that they are in were locked."""
    locked: set[Path] = set()
    folders = {store.database.trace_folder}
    while True:
        # A folder that is not there holds nothing; where it comes meanwhile, it is locked before it is asked again.
        for folder in sorted(folder for folder in folders - locked if folder.is_dir()):
            locks.enter_context(readers.shared(folder))
            locked.add(folder)
        traces = store.traces()
        folders = _folders(store.database, traces)
        if folders <= locked:
            return traces


def _folders(database: Database, traces: Iterable[TraceRecord]) -> set[Path]:
    """Return the trace folders that chunks are in: others than the database's own, too, if its file was copied."""
    # The paths come out of the database, which others may write to: no folder but one that is called like these.
    names = {posixpath.normpath(trace.path).partition("/")[0] for trace in traces}
    folders = {database.trace_root / name for name in names if name.endswith(".traces")}
    return {folder for folder in folders if folder.is_dir()}


def _replaced(store: RunStore, traces: Iterable[TraceRecord]) -> list[Path]:
    """Return the files that merging left: not registered, and their rows in a registered chunk beside them."""
    found: list[Path] = []
    if not chunks.may_delete(store.database):
        return found
    by_search = sorted(traces, key=lambda trace: trace.search_id)
    for search_id, of_search in groupby(by_search, key=lambda trace: trace.search_id):
        folder = chunks.trace_folder(store, search_id)
        try:
            there = set() if folder.is_symlink() else set(os.listdir(folder))
        except OSError:
            continue
        prefix = f"{chunks.relative(store, folder)}/"
        own = [trace for trace in of_search if trace.path.startswith(prefix)]
        unknown = there - {trace.path.removeprefix(prefix) for trace in own}
        for kind, stem in chunks.STEMS.items() if unknown else ():
            whole = [chunk for chunk in chunks.chunks_of(own, kind) if chunk.name in there]
            parts = [chunk for name in unknown if (chunk := chunks.chunk_of(stem, name)) is not None]
            found += [folder / part.name for part in parts if any(one.covers(part) for one in whole)]
    return found
