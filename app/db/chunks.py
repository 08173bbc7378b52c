"""The Parquet files of a trace: their names, how they are merged, and how a killed search's are repaired.

A chunk is written under a temporary name, renamed, and then registered: whoever finds it in `traces` finds it
whole. Its name says which flushes it holds: `chunk-000007` the seventh, `chunk-000001-000016` the first sixteen,
merged. Chunks are merged only while nobody reads (`app.db.reading`): the merged one is registered, and its parts are
forgotten, in one transaction; then they are deleted. So a file that is not registered explains itself: see `recover`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.db.chunk_files import CHECKPOINT, GROUPS, read_table, read_text, row_count, write_file
from app.db.columns import view
from app.db.engine import Database, begins_as_sqlite, sqlite_files
from app.db.failures import damaged_chunk, unwritable
from app.db.reading import alone, shared
from app.db.records import TraceKind, TraceRecord
from graph.errors import DatabaseError

if TYPE_CHECKING:
    import pyarrow as pa

    from app.db.store_runs import RunStore

STEMS: dict[TraceKind, str] = {"starts": "starts", "configurations": "configurations", "proposals": "chunk"}
"""How the files of a kind are called, in the order in which one search writes them."""

LARGEST_ROWS = 2_000_000
"""Chunks are not merged beyond this: about 20 MB on disk, some 100 MB in memory while they are."""


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """The file of a chunk that holds the flushes `first` to `last`."""

    first: int
    last: int
    name: str
    rows: int = 0

    @property
    def is_merged(self) -> bool:
        """Whether it holds several flushes."""
        return self.first != self.last

    def covers(self, other: Chunk) -> bool:
        """Return whether it holds all flushes of the other."""
        return self.first <= other.first and other.last <= self.last


def chunk_name(stem: str, first: int, last: int) -> str:
    """Return the file name of a chunk."""
    numbers = f"{first:06d}" if first == last else f"{first:06d}-{last:06d}"
    return f"{stem}-{numbers}.parquet"


def chunk_of(stem: str, name: str, rows: int = 0) -> Chunk | None:
    """Return the chunk of a file name, or None for a name of another stem."""
    match = re.fullmatch(rf"{stem}-([0-9]{{1,18}})(?:-([0-9]{{1,18}}))?\.parquet", name)
    return None if match is None else Chunk(int(match[1]), int(match[2] or match[1]), name, rows)


def trace_folder(store: RunStore, search_id: int) -> Path:
    """Return the folder of a search's chunks; it need not exist."""
    return store.database.trace_folder / f"search-{search_id}"


def begin_folder(store: RunStore, search_id: int) -> Path:
    """Return the folder of a search that begins or goes on, and make it where it is missing.

    Raises:
        DatabaseError: it cannot be made, leads elsewhere, or has files although nothing of the search is registered.
    """
    folder = trace_folder(store, search_id)
    check_no_link(store.database, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not store.traces(search_id=search_id):
            _check_empty(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    return folder


def check_next_folder(store: RunStore) -> None:
    """Check that a search that begins now finds no other database's trace where its own will be.

    Raises:
        DatabaseError: a folder of a later search than this database has is not empty.
    """
    newest = max((search.id for search in store.searches(limit=1)), default=0)
    _check_empty(trace_folder(store, newest + 1))


def _check_empty(folder: Path) -> None:
    # What is there is of a database that is gone, or of another copy of this one.
    if any(folder.glob("*.parquet")):
        raise DatabaseError(
            f"trace folder {folder}: has the trace of another database, must be empty; move it away, or use "
            "another database file"
        )


def owns_traces(database: Database) -> bool:
    """Return whether no other database has the same trace folder, so that unregistered files may be deleted from it.

    Databases that differ in their suffix alone, such as one and its copy, have one folder, and so have those of which a
    link leads to the other's.
    """
    if database.trace_folder.is_symlink():
        return False
    if database.url.get_backend_name() != "sqlite":
        return True
    own = Path(str(database.url.database))
    try:
        return not any(
            other.stem == own.stem and other not in sqlite_files(own) and begins_as_sqlite(other)
            for other in own.parent.iterdir()
        )
    except OSError:
        return False


def check_no_link(database: Database, folder: Path) -> None:
    """Check that neither a folder of traces nor all of them together are behind a link, which may lead anywhere.

    Raises:
        DatabaseError: one is.
    """
    for path in (database.trace_folder, folder):
        if path.is_symlink():
            raise DatabaseError(
                f"trace folder {path}: is a link, must be a folder; put the folder itself there"
            )


def registered(store: RunStore, search_id: int, kind: TraceKind) -> list[Chunk]:
    """Return the registered chunks of one kind in the order in which they were written."""
    return sorted(chunks_of(store.traces(search_id=search_id), kind))


def chunks_of(traces: Sequence[TraceRecord], kind: TraceKind) -> list[Chunk]:
    """Return the registered chunks of one kind."""
    named = ((trace, trace.path.rpartition("/")[2]) for trace in traces if trace.kind == kind)
    chunks = [chunk_of(STEMS[kind], name, trace.rows) for trace, name in named]
    return [chunk for chunk in chunks if chunk is not None]


def whole_run(folder: Path, registered: Sequence[Chunk]) -> list[Path]:
    """Return the files of registered chunks, which must hold all flushes from the first to the last.

    Raises:
        DamagedDataError: flushes between two of them are registered nowhere.
    """
    before = 0
    for chunk in registered:
        if chunk.first != before + 1:
            raise damaged_chunk(
                folder / chunk.name, f"follows flush {before}, must follow flush {chunk.first - 1}"
            )
        before = chunk.last
    return [folder / chunk.name for chunk in registered]


def chunk_file(database: Database, trace: TraceRecord) -> Path | None:
    """Return a registered chunk's file, or None where there is none in a trace folder beside the database.

    The path comes out of the database, which others may write to: it must not lead to another file.
    """
    root = database.trace_root.resolve()
    try:
        file = (root / trace.path).resolve()
        is_file = file.suffix == ".parquet" and file.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, links in a circle, a null byte
        return None
    inside = file.is_relative_to(root) and file.relative_to(root).parts[:1]
    return file if is_file and inside and inside[0].endswith(".traces") else None


def relative(store: RunStore, path: Path) -> str:
    """Return a chunk's registered path, relative to the trace root."""
    return path.relative_to(store.database.trace_root).as_posix()


def merge(store: RunStore, search_id: int, kind: TraceKind, chunks: Sequence[Chunk]) -> None:
    """Merge the `mergeable` runs of chunks of one kind, unless somebody reads.

    Nobody else may write to the trace meanwhile, see `recover`.

    Raises:
        DatabaseError: a chunk cannot be read, or a file cannot be written or deleted.
    """
    runs = mergeable(chunks)
    if runs:
        with alone(store.database.trace_folder) as unread:
            for run in runs if unread else ():
                _merge_run(store, search_id, kind, run)


def merge_ended(store: RunStore) -> None:
    """Merge the chunks of searches that were killed, or that ended while somebody read.

    What cannot be read or written stays as it is: whoever reads it is told.

    Raises:
        DatabaseError: the database cannot be read.
    """
    unmerged = store.unmerged_searches()
    if not unmerged or not owns_traces(store.database):
        return
    with alone(store.database.trace_folder) as unread:
        for search_id in unmerged if unread else ():
            folder = trace_folder(store, search_id)
            # Asked once more: whoever resumes a search shares the lock before it looks at the trace.
            if folder.is_symlink() or not folder.is_dir() or store.search(search_id).status == "running":
                continue
            with suppress(DatabaseError):
                for kind in STEMS:
                    for run in mergeable(registered(store, search_id, kind)):
                        _merge_run(store, search_id, kind, run)


def mergeable(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the neighbours that are to become one chunk each: as few and as large as `LARGEST_ROWS` allows."""
    runs: list[list[Chunk]] = []
    rows = 0
    for chunk in chunks:
        rows += chunk.rows
        if runs and chunk.first == runs[-1][-1].last + 1 and rows <= LARGEST_ROWS:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
            rows = chunk.rows
    return [run for run in runs if len(run) > 1]


def _merge_run(store: RunStore, search_id: int, kind: TraceKind, run: Sequence[Chunk]) -> None:
    """Make one chunk of several neighbours. Proposals are sorted by chain and step: so they are small."""
    import pyarrow as pa

    folder = trace_folder(store, search_id)
    paths = [folder / chunk.name for chunk in run]
    texts = {
        key: text.encode() for key in (CHECKPOINT, GROUPS) if (text := read_text(paths[-1], key)) is not None
    }
    tables = [read_table(path, kind) for path in paths]
    # A search that an older Soapstone began has chunks without the columns that came later: NULL.
    ordered = _by_chain(tables) if kind == "proposals" else tables
    table = pa.concat_tables(ordered, promote_options="default")
    if texts:
        table = table.replace_schema_metadata(texts)
    path = folder / chunk_name(STEMS[kind], run[0].first, run[-1].last)
    write_file(path, kind, table)
    parts = [relative(store, part) for part in paths]
    store.replace_traces(search_id, kind, parts, relative(store, path), table.num_rows)
    try:
        for part in paths:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None


def _by_chain(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Return the tables' rows chain by chain. Each is sorted by chain and step, and has later steps than the last."""
    chains = [view(table["chain"]) for table in tables]
    slices = []
    for number in np.unique(np.concatenate(chains)).tolist():
        for table, chain in zip(tables, chains, strict=True):
            first, last = np.searchsorted(chain, [number, number + 1]).tolist()
            slices.append(table.slice(first, last - first))
    return slices


def recover(store: RunStore, search_id: int) -> None:
    """Repair the trace of a search that was killed.

    A chunk that was written but not registered is registered. Deleted are files that were not written to their end, and
    parts of a chunk that is registered. Nobody else may write to the trace meanwhile: the search must be this
    process's (`RunStore.end_orphans`, `resume_search`).

    Raises:
        DatabaseError: a file cannot be deleted.
    """
    folder = trace_folder(store, search_id)
    if not folder.is_dir() or folder.is_symlink() or not owns_traces(store.database):
        return
    import psutil

    # Waits for a process that began to merge it before the search became this one's.
    with shared(folder.parent):
        try:
            for path in folder.glob("*.tmp"):
                number = path.stem.rpartition(".")[2]
                # Who goes on with this search at the same moment may be writing already.
                if (
                    re.fullmatch("[0-9]{1,9}", number)
                    and path.is_file()
                    and not psutil.pid_exists(int(number))
                ):
                    path.unlink(missing_ok=True)
            for kind in STEMS:
                _recover_kind(store, search_id, kind, folder)
        except OSError as error:
            raise unwritable(folder, error) from None


def _recover_kind(store: RunStore, search_id: int, kind: TraceKind, folder: Path) -> None:
    chunks = registered(store, search_id, kind)
    names = {chunk.name for chunk in chunks}
    files = [chunk_of(STEMS[kind], path.name) for path in folder.iterdir() if path.is_file()]
    for chunk in sorted(chunk for chunk in files if chunk is not None and chunk.name not in names):
        path = folder / chunk.name
        parts = [other for other in chunks if chunk.covers(other)]
        rows = row_count(path, kind)
        # A machine that lost its power may have lost the registration of a merged chunk, but not the deletion of parts.
        lost = any(not (folder / part.name).is_file() for part in parts)
        last = max((other.last for other in chunks), default=0)
        if rows is not None and not chunk.is_merged and chunk.first == last + 1:
            store.record_traces(search_id, [TraceRecord(search_id, kind, relative(store, path), rows)])
            chunks.append(chunk)
        elif rows is not None and lost:
            old = [relative(store, folder / part.name) for part in parts]
            store.replace_traces(search_id, kind, old, relative(store, path), rows)
            chunks = [other for other in chunks if other not in parts] + [chunk]
        elif all((folder / other.name).is_file() for other in chunks if other.covers(chunk)):
            path.unlink(missing_ok=True)
