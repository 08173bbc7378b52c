"""The Parquet files of a trace: their names, how they are written, merged, and put right after a kill.

A chunk is written under a temporary name, renamed, and then registered: whoever finds it in `traces` finds it
whole. Its name says which flushes it holds: `chunk-000007` the seventh, `chunk-000001-000016` the first sixteen,
merged. A merged chunk is registered, and its parts are forgotten, in one transaction; only then they are deleted,
once nobody reads them (`app.db.readers`). So a file that is not registered explains itself: see `recover`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.db import owners, readers
from app.db.chunk_files import CHECKPOINT, GROUPS, read_table, read_text, row_count, write_file
from app.db.columns import view
from app.db.engine import Database, begins_as_sqlite, with_logs
from app.db.failures import damaged_chunk, unwritable
from app.db.records import TraceKind, TraceRecord
from graph.errors import DatabaseError

if TYPE_CHECKING:
    import pyarrow as pa

    from app.db.store_runs import RunStore

STEMS: dict[TraceKind, str] = {"starts": "starts", "configurations": "configurations", "proposals": "chunk"}
"""How the files of a kind are called, in the order in which one search writes them."""

FAN_IN = 16
"""So many chunks of one size become one of the next size."""

LARGEST_ROWS = 2_000_000
"""Chunks are not merged beyond this: about 20 MB on disk, some 100 MB in memory while they are."""


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """A chunk's file, by the flushes that it holds: `first` to `last`."""

    first: int
    last: int
    name: str
    rows: int = 0

    @property
    def level(self) -> int:
        """How often its rows were merged, at least: 16 flushes once, 256 twice."""
        level, size = 0, self.last - self.first + 1
        while size >= FAN_IN:
            level, size = level + 1, size // FAN_IN
        return level

    def covers(self, other: Chunk) -> bool:
        """Return whether it holds all that the other does."""
        return self.first <= other.first and other.last <= self.last


def chunk_name(stem: str, first: int, last: int) -> str:
    """Return the file name of a chunk."""
    numbers = f"{first:06d}" if first == last else f"{first:06d}-{last:06d}"
    return f"{stem}-{numbers}.parquet"


def chunk_of(stem: str, name: str, rows: int = 0) -> Chunk | None:
    """Return the chunk that a file name means, or None if it is not one of that stem."""
    match = re.fullmatch(rf"{stem}-([0-9]{{1,18}})(?:-([0-9]{{1,18}}))?\.parquet", name)
    return None if match is None else Chunk(int(match[1]), int(match[2] or match[1]), name, rows)


def trace_folder(store: RunStore, search_id: int) -> Path:
    """Return the folder of a search's chunks; it need not exist."""
    return store.database.trace_folder / f"search-{search_id}"


def begin_folder(store: RunStore, search_id: int) -> Path:
    """Return the folder of a search that begins or goes on, made where it is not there.

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
    newest = max((one.id for one in store.searches(limit=1)), default=0)
    _check_empty(trace_folder(store, newest + 1))


def _check_empty(folder: Path) -> None:
    # What is there is of a database that is gone, or of another copy of this one.
    if any(folder.glob("*.parquet")):
        raise DatabaseError(
            f"trace folder {folder}: has the trace of another database, must be empty; move it away, or use "
            "another database file"
        )


def may_delete(database: Database) -> bool:
    """Return whether what is not registered may be deleted from traces: no other database has them, too.

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
            other.stem == own.stem and other not in with_logs(own) and begins_as_sqlite(other)
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
    """Return the chunks of one kind among registered ones."""
    named = ((trace, trace.path.rpartition("/")[2]) for trace in traces if trace.kind == kind)
    found = [chunk_of(STEMS[kind], name, trace.rows) for trace, name in named]
    return [chunk for chunk in found if chunk is not None]


def whole_run(folder: Path, registered: Sequence[Chunk]) -> list[Path]:
    """Return the files of registered chunks in order, none of them missing among them.

    Raises:
        DamagedDataError: what was written between two of them is registered nowhere.
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
    """Return a chunk's path as it is registered."""
    return path.relative_to(store.database.trace_root).as_posix()


def merge(
    store: RunStore, search_id: int, kind: TraceKind, parts: Sequence[Chunk]
) -> tuple[Chunk, list[Path]]:
    """Make one chunk of several neighbours; return it, and the files of those, which may be read still.

    Proposals are sorted by chain and step: so they are small, and a chain is read without the others.
    """
    import pyarrow as pa

    folder = trace_folder(store, search_id)
    paths = [folder / part.name for part in parts]
    texts = {
        key: text.encode() for key in (CHECKPOINT, GROUPS) if (text := read_text(paths[-1], key)) is not None
    }
    tables = [read_table(path, kind) for path in paths]
    # A search that an older Soapstone began has chunks without the columns that came later: NULL.
    parts_in_order = _by_chain(tables) if kind == "proposals" else tables
    table = pa.concat_tables(parts_in_order, promote_options="default")
    if texts:
        table = table.replace_schema_metadata(texts)
    path = folder / chunk_name(STEMS[kind], parts[0].first, parts[-1].last)
    write_file(path, kind, table)
    old = [relative(store, part) for part in paths]
    store.replace_traces(search_id, kind, old, relative(store, path), table.num_rows)
    return Chunk(parts[0].first, parts[-1].last, path.name, table.num_rows), paths


def _by_chain(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Return the tables' rows chain by chain. Each is sorted by chain and step, and has later steps than the last."""
    chains = [view(table["chain"]) for table in tables]
    found = []
    for number in np.unique(np.concatenate(chains)).tolist():
        for table, chain in zip(tables, chains, strict=True):
            first, last = np.searchsorted(chain, [number, number + 1]).tolist()
            found.append(table.slice(first, last - first))
    return found


def due(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the newest neighbours that are to become one, while a search runs; none if there are too few.

    A row is so written once for each power of FAN_IN in the number of flushes, and there are never more than some
    FAN_IN chunks of each size.
    """
    if not chunks:
        return []
    newest = list(chunks[-FAN_IN:])
    # Others of this size before a larger one (left by a kill, or too large together) are no neighbours of these.
    alike = all(chunk.level == chunks[-1].level and chunk.rows < LARGEST_ROWS for chunk in newest)
    together = sum(chunk.rows for chunk in newest) <= LARGEST_ROWS
    return newest if len(newest) == FAN_IN and alike and together else []


def leftovers(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the neighbours that are to become one each when a search has ended: as few and as large as allowed."""
    runs: list[list[Chunk]] = []
    rows = 0
    for chunk in chunks:
        if runs and rows + chunk.rows <= LARGEST_ROWS:
            runs[-1].append(chunk)
            rows += chunk.rows
        else:
            runs.append([chunk])
            rows = chunk.rows
    return [run for run in runs if len(run) > 1]


def recover(store: RunStore, search_id: int) -> None:
    """Put the trace of a search in order that was killed.

    What was written but not registered is registered; what is registered in another chunk, and what was not
    written to its end, is deleted (the former stays while somebody reads: a later reader deletes it). Nobody may
    write to the trace meanwhile: the search must be this process's (`RunStore.end_orphans`, `resume_search`).

    Raises:
        DatabaseError: a file cannot be deleted.
    """
    folder = trace_folder(store, search_id)
    if not folder.is_dir() or folder.is_symlink() or not may_delete(store.database):
        return
    try:
        for path in folder.glob("*.tmp"):
            number = path.stem.rpartition(".")[2]
            # Who goes on with this search at the same moment may be writing already.
            if re.fullmatch("[0-9]{1,9}", number) and path.is_file() and not owners.is_alive(int(number)):
                path.unlink(missing_ok=True)
        for kind in STEMS:
            _recover_kind(store, search_id, kind, folder)
    except OSError as error:
        raise unwritable(folder, error) from None


def _recover_kind(store: RunStore, search_id: int, kind: TraceKind, folder: Path) -> None:
    known = registered(store, search_id, kind)
    names = {chunk.name for chunk in known}
    files = [chunk_of(STEMS[kind], path.name) for path in folder.iterdir() if path.is_file()]
    replaced: list[Path] = []
    for chunk in sorted(chunk for chunk in files if chunk is not None and chunk.name not in names):
        path = folder / chunk.name
        parts = [other for other in known if chunk.covers(other)]
        rows = row_count(path, kind)
        # A machine that lost its power may have lost the registration, too, but not the file.
        lost = any(not (folder / part.name).is_file() for part in parts)
        last = max((other.last for other in known), default=0)
        if rows is not None and chunk.first == chunk.last == last + 1:
            store.record_trace(search_id, kind, relative(store, path), rows)
            known.append(chunk)
        elif rows is not None and lost:
            old = [relative(store, folder / part.name) for part in parts]
            store.replace_traces(search_id, kind, old, relative(store, path), rows)
            known = [other for other in known if other not in parts] + [chunk]
        elif any(other.covers(chunk) for other in known):
            replaced.append(path)
        else:
            path.unlink(missing_ok=True)
    readers.delete_unread(store.database.trace_folder, replaced)
