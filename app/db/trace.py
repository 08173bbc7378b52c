"""The proposals of a search, as Parquet chunks beside the database and registered in it.

A search makes millions of proposals; a table row each would make the database slow for everything else. What was
added is on disk within a second, whether or not more is added: a killed search loses no more than that. Small
chunks become larger ones while the search goes on and when it ends (`app.db.chunks`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from app.db import chunks
from app.db.records import SearchOutcome, TraceKind
from app.db.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

FLUSH_INTERVAL_S = 0.5
FLUSH_ROWS = 1_000_000

Family = Literal["strided", "permuted", "copied", "listed"]


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """Proposals of one search in the order in which they were made; arrays of one length.

    `step` counts the proposals of a chain from 1. `operator` is an index into the graph's operators, the head of the
    group that changes, `configuration` the code of what was proposed for it (`ConfigurationEntry`). `simulated_ns`
    is the simulated step time, `bound_ns` the bound at which the simulation was stopped because that sufficed to
    reject; a negative number in either means that there is none, and one in both that a memory is exceeded.

    `checkpoint` says what the search was after these proposals, and `outcome` how far it came.
    """

    chain: npt.NDArray[np.integer[Any]]
    step: npt.NDArray[np.integer[Any]]
    operator: npt.NDArray[np.integer[Any]]
    configuration: npt.NDArray[np.integer[Any]]
    simulated_ns: npt.NDArray[np.integer[Any]]
    bound_ns: npt.NDArray[np.integer[Any]]
    accepted: npt.NDArray[np.bool_]
    checkpoint: str | None = None
    outcome: SearchOutcome | None = None

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class ConfigurationEntry:
    """What a configuration code means: the degrees, and how to list the devices of the tasks.

    strided: `start`, `stride` (`search.placements.Strided`); permuted: `seed`; listed: `devices`; copied: from the
    configuration with the code `base`, along `axes` (`search.moves.copied`). Two codes may mean the same.
    """

    configuration: int
    family: Family
    device_count: int
    degrees: Sequence[int]
    start: int | None = None
    stride: int | None = None
    seed: int | None = None
    base: int | None = None
    axes: Sequence[int] | None = None
    devices: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class StartEntry:
    """One operator's configuration at the start of a chain: of every head, and of what does not follow its head."""

    chain: int
    start: str
    operator: int
    configuration: int


def proposal_schema() -> pa.Schema:
    """Return the columns of a chunk of proposals."""
    import pyarrow as pa

    fields: list[pa.Field[Any]] = [
        pa.field("search", pa.int32(), nullable=False),
        pa.field("chain", pa.int16(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("operator", pa.int32(), nullable=False),
        pa.field("configuration", pa.int64(), nullable=False),
        pa.field("simulated_ns", pa.int64()),
        pa.field("bound_ns", pa.int64()),
        pa.field("accepted", pa.bool_(), nullable=False),
    ]
    return pa.schema(fields)


def configuration_schema() -> pa.Schema:
    """Return the columns of a chunk of configuration codes."""
    import pyarrow as pa

    fields: list[pa.Field[Any]] = [
        pa.field("search", pa.int32(), nullable=False),
        pa.field("configuration", pa.int64(), nullable=False),
        pa.field("family", pa.string(), nullable=False),
        pa.field("device_count", pa.int32(), nullable=False),
        pa.field("degrees", pa.list_(pa.int32()), nullable=False),
        pa.field("start", pa.int32()),
        pa.field("stride", pa.int32()),
        pa.field("seed", pa.uint32()),
        pa.field("base", pa.int64()),
        pa.field("axes", pa.list_(pa.int32())),
        pa.field("devices", pa.list_(pa.int32())),
    ]
    return pa.schema(fields)


def start_schema() -> pa.Schema:
    """Return the columns of a chunk of starts."""
    import pyarrow as pa

    fields: list[pa.Field[Any]] = [
        pa.field("search", pa.int32(), nullable=False),
        pa.field("chain", pa.int16(), nullable=False),
        pa.field("start", pa.string(), nullable=False),
        pa.field("operator", pa.int32(), nullable=False),
        pa.field("configuration", pa.int64(), nullable=False),
    ]
    return pa.schema(fields)


class ProposalTrace:
    """Writes the trace of one search; a context manager that closes it. Any thread may call its methods."""

    def __init__(self, store: Store, search_id: int, groups: str | None = None) -> None:
        """Begin, or go on with, the trace of a stored search.

        `groups` says which operators follow which head, and is written beside the starts.

        Raises:
            DatabaseError: the trace's folder cannot be made.
        """
        self._store = store
        self._search_id = search_id
        self._groups = groups
        self._folder = chunks.trace_folder(store, search_id)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise chunks.unwritable(self._folder, error) from None
        chunks.recover(store, search_id)
        self._chunks = {kind: chunks.registered(store, search_id, kind) for kind in chunks.STEMS}
        # Merged already, but somebody who just read their names may be about to read them.
        self._replaced: list[Path] = []
        self._lock = threading.Lock()
        # One thread writes at a time, while others go on adding.
        self._writing = threading.Lock()
        self._batches: list[ProposalBatch] = []
        self._entries: list[ConfigurationEntry] = []
        self._starts: list[StartEntry] = []
        self._checkpoint: str | None = None
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_regularly, name="trace", daemon=True)
        self._flusher.start()

    def add(self, batch: ProposalBatch) -> None:
        """Append proposals; they are on disk within a second. The arrays must not be changed afterwards.

        Raises:
            DatabaseError: writing failed, now or since the last call.
        """
        with self._lock:
            self._raise_failure()
            self._batches.append(batch)
            full = sum(len(one) for one in self._batches) >= FLUSH_ROWS
        if full:
            self._flush()

    def add_entries(self, entries: Sequence[ConfigurationEntry]) -> None:
        """Say what configuration codes mean; they are on disk before the proposals that are added later.

        Raises:
            DatabaseError: writing failed since the last call.
        """
        with self._lock:
            self._raise_failure()
            self._entries += entries

    def add_starts(self, starts: Sequence[StartEntry]) -> None:
        """Say where chains begin.

        Raises:
            DatabaseError: writing failed since the last call.
        """
        with self._lock:
            self._raise_failure()
            self._starts += starts

    def close(self) -> None:
        """Write what is left, and make as few files of all as allowed. A second call does nothing.

        Raises:
            DatabaseError: writing failed, now or since the last call.
        """
        self._closing.set()
        self._flusher.join()
        with self._lock:
            self._raise_failure()
        self._flush()
        with self._writing:
            for kind in chunks.STEMS:
                for run in chunks.leftovers(self._chunks[kind]):
                    self._merge(kind, run)
            self._drop_replaced()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _flush_regularly(self) -> None:
        while not self._closing.wait(FLUSH_INTERVAL_S):
            try:
                self._flush()
            except Exception as error:  # raised to the caller by its next call
                with self._lock:
                    self._failure = error
                return

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
            self._write("configurations", _entry_table(self._search_id, entries))
            self._write(
                "starts", chunks.with_text(_start_table(self._search_id, starts), chunks.GROUPS, self._groups)
            )
            self._write_proposals(batches)

    def _write_proposals(self, batches: list[ProposalBatch]) -> None:
        for batch in batches:
            self._checkpoint = batch.checkpoint or self._checkpoint
        if any(len(batch) for batch in batches):
            table = _proposal_table(self._search_id, batches)
            self._write("proposals", chunks.with_text(table, chunks.CHECKPOINT, self._checkpoint))
        outcomes = [batch.outcome for batch in batches if batch.outcome is not None]
        if outcomes:
            self._store.update_search(self._search_id, outcomes[-1])

    def _write(self, kind: TraceKind, table: pa.Table) -> None:
        if not table.num_rows:
            return
        known = self._chunks[kind]
        number = known[-1].last + 1 if known else 1
        path = self._folder / chunks.chunk_name(chunks.STEMS[kind], number, number)
        chunks.write_file(path, kind, table)
        self._store.record_trace(self._search_id, kind, chunks.relative(self._store, path), table.num_rows)
        known.append(chunks.Chunk(number, number, path.name, table.num_rows))
        while newest := chunks.due(known):
            self._drop_replaced()
            self._merge(kind, newest)

    def _merge(self, kind: TraceKind, parts: list[chunks.Chunk]) -> None:
        known = self._chunks[kind]
        merged, files = chunks.merge(self._store, self._search_id, kind, parts)
        place = known.index(parts[0])
        known[place : place + len(parts)] = [merged]
        self._replaced += files

    def _drop_replaced(self) -> None:
        replaced, self._replaced = self._replaced, []
        for path in replaced:
            path.unlink(missing_ok=True)


def _proposal_table(search_id: int, batches: Sequence[ProposalBatch]) -> pa.Table:
    import pyarrow as pa

    schema = proposal_schema()

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(getattr(batch, name)) for batch in batches])

    chain, step = column("chain"), column("step")
    order = np.lexsort((step, chain))
    columns = [
        pa.array(np.full(len(order), search_id), type=schema.field("search").type),
        *(
            pa.array(values[order], type=schema.field(name).type)
            for name, values in (
                ("chain", chain),
                ("step", step),
                ("operator", column("operator")),
                ("configuration", column("configuration")),
            )
        ),
        *(
            pa.array(values, mask=values < 0, type=pa.int64())
            for values in (column("simulated_ns")[order], column("bound_ns")[order])
        ),
        pa.array(column("accepted")[order], type=pa.bool_()),
    ]
    return pa.table(columns, schema=schema)


def _entry_table(search_id: int, entries: Sequence[ConfigurationEntry]) -> pa.Table:
    import pyarrow as pa

    schema = configuration_schema()
    columns = [pa.array(np.full(len(entries), search_id), type=pa.int32())]
    columns += [
        pa.array([getattr(entry, field.name) for entry in entries], type=field.type)
        for field in schema
        if field.name != "search"
    ]
    return pa.table(columns, schema=schema)


def _start_table(search_id: int, starts: Sequence[StartEntry]) -> pa.Table:
    import pyarrow as pa

    schema = start_schema()
    columns = [pa.array(np.full(len(starts), search_id), type=pa.int32())]
    columns += [
        pa.array([getattr(start, field.name) for start in starts], type=field.type)
        for field in schema
        if field.name != "search"
    ]
    return pa.table(columns, schema=schema)
