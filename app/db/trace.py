"""The proposals of a search, as Parquet chunks beside the database and registered in it.

A search makes millions of proposals; a table row each would make the database slow for everything else. A
chunk is written under a temporary name, renamed, and then registered, so that whoever finds it in `traces`
finds it whole. What was added is on disk within a second, whether or not more is added: a killed search loses
no more than that.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from app.db.records import TraceKind
from app.db.store import Store
from graph.errors import DatabaseError

if TYPE_CHECKING:
    import pyarrow as pa

FLUSH_INTERVAL_S = 1.0
FLUSH_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """Proposals of one search in the order in which they were made; arrays of one length.

    `step` counts the proposals of a chain. `operator` is an index into the graph's operators, `configuration`
    the code of what was proposed for it. `simulated_ns` is the simulated step time, `bound_ns` the lower bound
    at which the simulation was stopped because it sufficed to reject; a negative number in either means that
    there is none.
    """

    chain: npt.NDArray[np.integer[Any]]
    step: npt.NDArray[np.integer[Any]]
    operator: npt.NDArray[np.integer[Any]]
    configuration: npt.NDArray[np.integer[Any]]
    simulated_ns: npt.NDArray[np.integer[Any]]
    bound_ns: npt.NDArray[np.integer[Any]]
    accepted: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class ConfigurationName:
    """What a configuration code of one operator means, as canonical JSON."""

    operator: int
    configuration: int
    document: str


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
    """Return the columns of a chunk of configuration names."""
    import pyarrow as pa

    fields: list[pa.Field[Any]] = [
        pa.field("search", pa.int32(), nullable=False),
        pa.field("operator", pa.int32(), nullable=False),
        pa.field("configuration", pa.int64(), nullable=False),
        pa.field("document", pa.string(), nullable=False),
    ]
    return pa.schema(fields)


class ProposalTrace:
    """Writes the trace of one search; a context manager that closes it. Any thread may call its methods."""

    def __init__(self, store: Store, search_id: int) -> None:
        """Begin, or go on with, the trace of a stored search.

        Raises:
            DatabaseError: the trace's folder cannot be made.
        """
        self._store = store
        self._search_id = search_id
        self._folder = store.database.trace_folder / f"search-{search_id}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        self._lock = threading.Lock()
        self._batches: list[ProposalBatch] = []
        self._waiting_rows = 0
        self._names: list[ConfigurationName] = []
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
            self._waiting_rows += len(batch)
            if self._waiting_rows >= FLUSH_ROWS:
                self._flush()

    def name_configurations(self, names: list[ConfigurationName]) -> None:
        """Say what configuration codes mean; they are on disk before the proposals that are added later.

        Raises:
            DatabaseError: writing failed since the last call.
        """
        with self._lock:
            self._raise_failure()
            self._names += names

    def close(self) -> None:
        """Write what is left. A second call does nothing.

        Raises:
            DatabaseError: writing failed, now or since the last call.
        """
        self._closing.set()
        self._flusher.join()
        with self._lock:
            self._raise_failure()
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _flush_regularly(self) -> None:
        while not self._closing.wait(FLUSH_INTERVAL_S):
            with self._lock:
                try:
                    self._flush()
                except Exception as error:  # raised to the caller by its next call
                    self._failure = error
                    return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _flush(self) -> None:
        import pyarrow as pa

        if self._names:
            names, self._names = self._names, []
            rows = [{"search": self._search_id, **asdict(name)} for name in names]
            self._write("configurations", pa.Table.from_pylist(rows, schema=configuration_schema()))
        if self._waiting_rows:
            batches, self._batches, self._waiting_rows = self._batches, [], 0
            schema = proposal_schema()
            self._write(
                "proposals",
                pa.concat_tables([_proposal_table(self._search_id, batch, schema) for batch in batches]),
            )

    def _write(self, kind: TraceKind, table: pa.Table) -> None:
        from pyarrow import parquet

        stem = "chunk" if kind == "proposals" else kind
        path = self._folder / f"{stem}-{_next_number(self._folder, stem):06d}.parquet"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                parquet.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        relative = path.relative_to(self._store.database.trace_root).as_posix()
        self._store.record_trace(self._search_id, kind, relative, table.num_rows)


def _proposal_table(search_id: int, batch: ProposalBatch, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = [
        pa.array(np.full(len(batch), search_id), type=schema.field("search").type),
        *(
            pa.array(getattr(batch, name), type=schema.field(name).type)
            for name in ("chain", "step", "operator", "configuration")
        ),
        *(
            pa.array(values, mask=values < 0, type=pa.int64())
            for values in (np.asarray(batch.simulated_ns), np.asarray(batch.bound_ns))
        ),
        pa.array(batch.accepted, type=pa.bool_()),
    ]
    return pa.table(columns, schema=schema)


def _next_number(folder: Path, stem: str) -> int:
    """Return one more than the largest chunk number: a resumed search goes on after its first run's chunks."""
    numbers = [
        int(match[1])
        for path in folder.iterdir()
        if (match := re.fullmatch(rf"{stem}-(\d+)\.parquet", path.name)) is not None
    ]
    return max(numbers, default=0) + 1


def _unwritable(folder: Path, error: OSError) -> DatabaseError:
    return DatabaseError(
        f"trace folder {folder}: cannot be written ({error.strerror}); check its permissions and its space"
    )
