"""Run one checked query and give its rows out in batches: every error is one line, and time can be limited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from app.analytics.guard import Kind, check_query
from graph.errors import UsageError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

T = TypeVar("T")

BATCH_ROWS = 50_000
_INTERRUPT_INTERVAL_S = 0.05
_ATTEMPTS = 10


@dataclass(frozen=True)
class Answer:
    """The rows of a query, once. `schema` has a name of its own for each column: a second `x` is `x_1`.

    Iterating `batches` runs the query on; it raises UsageError where the query fails or takes too long.
    """

    kind: Kind
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


class _Caller:
    """Calls what blocks in a thread of its own and waits for it: a signal, or the limit, then ends it at once."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, limit_s: float | None) -> None:
        self._connection = connection
        self._limit_s = limit_s
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="query")

    def call(self, function: Callable[[], T]) -> T:
        """Return what the function returns.

        Raises:
            UsageError: the limit is over.
            KeyboardInterrupt, SystemExit: a signal came.
        """
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        future = self._thread.submit(function)
        try:
            wait([future], timeout=left_s)
        except BaseException:
            self._end(future)
            raise
        if not future.done():
            self._end(future)
            raise UsageError(
                f"query: took longer than {self._limit_s:g} s, must end within --timeout; allow more or ask for less"
            )
        return future.result()

    def close(self) -> None:
        """End the thread: the connection may be closed afterwards."""
        self._thread.shutdown()

    def _end(self, future: Future[T]) -> None:
        # Again and again, since an interrupt that comes between two steps of a query is forgotten.
        while not future.done():
            self._connection.interrupt()
            wait([future], timeout=_INTERRUPT_INTERVAL_S)


@contextmanager
def answer(
    connection: duckdb.DuckDBPyConnection, sql: str, *, limit_s: float | None = None
) -> Iterator[Answer]:
    """Check a query, start it on a locked connection, and give its answer.

    Args:
        connection: of `app.analytics.duck.connect`.
        sql: one SELECT, or EXPLAIN of one.
        limit_s: seconds from now after which it is given up; None: never.

    Raises:
        UsageError: the query may not run, is wrong, or takes too long.
        KeyboardInterrupt: the user interrupted it.
    """
    import pyarrow as pa

    kind = check_query(connection, sql)
    caller = _Caller(connection, limit_s)
    try:
        with _one_line(connection, sql, caller):
            reader = caller.call(lambda: connection.execute(sql).to_arrow_reader(BATCH_ROWS))
        schema = pa.schema(
            [
                field.with_name(name)
                for field, name in zip(reader.schema, _distinct(reader.schema.names), strict=True)
            ]
        )

        def batches() -> Iterator[pa.RecordBatch]:
            while True:
                with _one_line(connection, sql, caller):
                    batch = caller.call(lambda: next(reader, None))
                if batch is None:
                    return
                yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

        yield Answer(kind, schema, batches())
    finally:
        caller.close()


@contextmanager
def _one_line(connection: duckdb.DuckDBPyConnection, sql: str, caller: _Caller) -> Iterator[None]:
    """Turn DuckDB's errors, and Arrow's about DuckDB's, into one line each."""
    import duckdb

    try:
        yield
    except (duckdb.Error, OSError, ValueError) as error:
        text = _own_words(connection, sql, caller, str(error))
        # Binder errors show the place in a picture of several lines.
        reason = " ".join(text.split("LINE ", 1)[0].split()).removeprefix("Invalid Error: ")
        raise UsageError(f"query: {reason or type(error).__name__}; correct it") from None


def _own_words(connection: duckdb.DuckDBPyConnection, sql: str, caller: _Caller, text: str) -> str:
    """Return what failed: a query's own threads are interrupted then, and DuckDB at times reports that alone.

    (DuckDB's pull request 25902.) The query is run again to learn the reason, under the same limit.
    """
    import duckdb

    def run() -> None:
        for _ in connection.execute(sql).to_arrow_reader(BATCH_ROWS):
            pass

    for _ in range(_ATTEMPTS):
        if "INTERRUPT Error" not in text:
            break
        try:
            caller.call(run)
        except (duckdb.Error, OSError, ValueError) as error:
            text = str(error)
        else:
            break
    return text


def _distinct(names: list[str]) -> list[str]:
    """Return the names, each once: those that are there already get a number."""
    found: list[str] = []
    for name in names:
        number, candidate = 0, name
        while candidate in found or (number and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return found
