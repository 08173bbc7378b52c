"""The proposals of a search, as Parquet chunks beside the database and registered in it.

A search makes millions of proposals; a table row each would make the database slow for everything else. What was
added is on disk within a second, whether or not more is added: a killed search loses no more than that. Chunks are
merged when the search ends, and every `MOST_SMALL` flushes before (`app.db.chunks`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from app.db import chunk_files, chunks
from app.db.records import SearchOutcome, TraceKind, TraceRecord
from app.db.rows import (
    EntryRow,
    ProposalRows,
    StartEntry,
    configuration_table,
    proposal_table,
    start_table,
)
from app.db.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

# Whoever is killed loses no more than what was proposed in this time, and in what it takes to write.
FLUSH_INTERVAL_S = 0.7
FLUSH_ROWS = 1_000_000
# Smaller chunks are compressed when they are merged.
COMPRESSED_ROWS = 4096
# While a search runs, so many small chunks of a kind become one: an hour's would be 10,000 files.
MOST_SMALL = 256


class ProposalTrace:
    """Writer of one search's trace; a context manager that closes it. Any thread may call its methods."""

    def __init__(self, store: Store, search_id: int, groups: str | None = None) -> None:
        """Begin, or go on with, the trace of a stored search.

        `groups` says which operators follow which head, and is written beside the starts.

        Raises:
            DatabaseError: the trace's folder cannot be made.
        """
        self._store = store
        self._search_id = search_id
        self._groups = groups
        self._folder = chunks.begin_folder(store, search_id)
        chunks.recover(store, search_id)
        self._chunks = {kind: chunks.registered(store, search_id, kind) for kind in chunks.STEMS}
        self._lock = threading.Lock()
        # One thread writes at a time, while others go on adding.
        self._writing = threading.Lock()
        self._batches: list[ProposalRows] = []
        self._entries: list[EntryRow] = []
        self._starts: list[StartEntry] = []
        self._checkpoint: Callable[[], str] | None = None
        self._failure: Exception | None = None
        self._closing = False
        # When what was added must be written; None while there is nothing.
        self._due: float | None = None
        self._changed = threading.Condition(self._lock)
        self._added_at = time.monotonic()
        self._flusher = threading.Thread(target=self._flush_regularly, name="trace", daemon=True)
        self._flusher.start()

    def add(self, batch: ProposalRows) -> None:
        """Append proposals; they are on disk within a second. The arrays must not be changed afterwards.

        Raises:
            DatabaseError: writing failed, now or since the last call.
        """
        with self._lock:
            self._raise_failure()
            # Since the last call: so old are the first of these proposals.
            self._write_by(self._added_at + FLUSH_INTERVAL_S)
            self._added_at = time.monotonic()
            self._batches.append(batch)
            full = sum(map(len, self._batches)) >= FLUSH_ROWS
        if full:
            self._flush()

    def add_entries(self, entries: Sequence[EntryRow]) -> None:
        """Append the configurations of codes; they are on disk before the proposals that are added later.

        Raises:
            DatabaseError: writing failed since the last call.
        """
        with self._lock:
            self._raise_failure()
            self._write_by(time.monotonic() + FLUSH_INTERVAL_S)
            self._entries += entries

    def add_starts(self, starts: Sequence[StartEntry]) -> None:
        """Append the starts of chains.

        Raises:
            DatabaseError: writing failed since the last call.
        """
        with self._lock:
            self._raise_failure()
            self._write_by(time.monotonic() + FLUSH_INTERVAL_S)
            self._starts += starts

    def close(self) -> None:
        """Write the rest, and merge all chunks unless somebody reads. A second call does nothing.

        Raises:
            DatabaseError: writing failed, now or since the last call.
        """
        with self._lock:
            self._closing = True
            self._changed.notify()
        try:
            self._flusher.join()
        except BaseException:
            self._flusher.join()  # the process may end after a signal, but not in the middle of a file
            raise
        with self._lock:
            self._raise_failure()
        self._flush()
        with self._writing:
            for kind in chunks.STEMS:
                self._merge(kind, self._chunks[kind])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _flush_regularly(self) -> None:
        while self._wait_until_due():
            try:
                self._flush()
            except Exception as error:  # raised to the caller by its next call
                with self._lock:
                    self._failure = error
                return

    def _wait_until_due(self) -> bool:
        """Wait until rows must be written, and return True; return False when the trace is being closed."""
        with self._lock:
            while not self._closing:
                left_s = None if self._due is None else self._due - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return True
                self._changed.wait(left_s)
        return False

    def _write_by(self, due: float) -> None:
        if self._due is None or due < self._due:
            self._due = due
            self._changed.notify()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _flush(self) -> None:
        with self._writing:
            with self._lock:
                entries, self._entries = self._entries, []
                starts, self._starts = self._starts, []
                batches, self._batches = self._batches, []
                self._due = None
            for batch in batches:
                self._checkpoint = batch.checkpoint or self._checkpoint
            count = sum(len(batch) for batch in batches)
            new = [
                self._write("configurations", entries, configuration_table),
                self._write("starts", starts, self._start_table),
                self._write("proposals", batches if count else [], self._proposal_table),
            ]
            outcomes = [batch.outcome for batch in batches if batch.outcome is not None]
            self._register(
                [record for record in new if record is not None], outcomes[-1] if outcomes else None
            )

    def _write(
        self, kind: TraceKind, rows: Sequence[Any], table_of: Callable[[int, Sequence[Any]], pa.Table]
    ) -> TraceRecord | None:
        """Write a chunk; return its record, or None where there are no rows."""
        if not rows:
            return None
        written = self._chunks[kind]
        number = written[-1].last + 1 if written else 1
        path = self._folder / chunks.chunk_name(chunks.STEMS[kind], number, number)
        table = table_of(self._search_id, rows)
        compressed = self._closing or table.num_rows >= COMPRESSED_ROWS
        chunk_files.write_file(path, kind, table, compressed=compressed)
        return TraceRecord(self._search_id, kind, chunks.relative(self._store, path), table.num_rows)

    def _register(self, new: Sequence[TraceRecord], outcome: SearchOutcome | None) -> None:
        self._store.record_traces(self._search_id, new, outcome)
        for trace in new:
            chunk_list = self._chunks[trace.kind]
            chunk_list += chunks.chunks_of([trace], trace.kind)
            small = [chunk for chunk in chunk_list if not chunk.is_merged]
            if len(small) >= MOST_SMALL:
                self._merge(trace.kind, small)

    def _merge(self, kind: TraceKind, neighbours: Sequence[chunks.Chunk]) -> None:
        chunks.merge(self._store, self._search_id, kind, neighbours)
        self._chunks[kind] = chunks.registered(self._store, self._search_id, kind)

    def _proposal_table(self, search_id: int, batches: Sequence[ProposalRows]) -> pa.Table:
        text = None if self._checkpoint is None else self._checkpoint()
        return chunk_files.with_text(proposal_table(search_id, batches), chunk_files.CHECKPOINT, text)

    def _start_table(self, search_id: int, starts: Sequence[StartEntry]) -> pa.Table:
        return chunk_files.with_text(start_table(search_id, starts), chunk_files.GROUPS, self._groups)
