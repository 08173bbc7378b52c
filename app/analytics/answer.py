"""Run one checked query and give its rows out in batches: every error is one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.analytics.guard import Kind, check_query
from app.db.failures import database_failure, is_damage
from graph.errors import QueryFailure, UsageError

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

BATCH_ROWS = 50_000
_ATTEMPTS = 10
# DuckDB's own limit, and an allocation that the operating system refuses; through Arrow as a text alone.
_OUT_OF_MEMORY = re.compile(
    r"Out of Memory Error|std::bad_alloc|[Ff]ailed to allocate|[Cc]annot allocate memory"
)


@dataclass(frozen=True)
class Answer:
    """The rows of a query, once. `schema` has a name of its own for each column: a second `x` is `x_1`.

    Iterating `batches` runs the query on; it raises UsageError where the query fails, QueryFailure where it needs more
    memory than it may use.
    """

    kind: Kind
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def answer(connection: duckdb.DuckDBPyConnection, sql: str) -> Answer:
    """Check a query, start it on a locked connection, and give its answer, to be read before anything else is asked.

    Args:
        connection: of `app.analytics.duck.connect`.
        sql: one SELECT, or EXPLAIN of one.

    Raises:
        UsageError: the query may not run, or is wrong.
        QueryFailure: it needs more memory than it may use.
    """
    import pyarrow as pa

    kind = check_query(connection, sql)
    with _one_line(connection, sql):
        reader = _executed(connection, sql)
    schema = pa.schema(
        [
            field.with_name(name)
            for field, name in zip(reader.schema, _distinct(reader.schema.names), strict=True)
        ]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        while True:
            with _one_line(connection, sql):
                batch = next(reader, None)
            if batch is None:
                return
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    return Answer(kind, schema, batches())


def _executed(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.RecordBatchReader:
    """Run a checked query: DuckDB parses PIVOT without IN into types for its columns, and the query.

    Of EXPLAIN it makes a transaction as well, by settings even, which are locked: without them it is the same here.
    """
    from duckdb import StatementType

    *types, last = (
        statement
        for statement in connection.extract_statements(sql)
        if statement.type in (StatementType.CREATE, StatementType.SELECT, StatementType.EXPLAIN)
    )
    for statement in types:
        connection.execute(statement)
    return connection.execute(last).to_arrow_reader(BATCH_ROWS)


@contextmanager
def _one_line(connection: duckdb.DuckDBPyConnection, sql: str) -> Iterator[None]:
    """Turn DuckDB's errors, and Arrow's about DuckDB's, into one line each."""
    import duckdb

    try:
        yield
    except (duckdb.Error, OSError, ValueError, MemoryError) as error:
        text = _own_words(connection, sql, str(error))
        if is_damage(error):
            raise database_failure("of this query", error) from None
        # Binder errors show the place in a picture of several lines.
        reason = " ".join(text.split("LINE ", 1)[0].split()).removeprefix("Invalid Error: ")
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(reason):
            raise QueryFailure(
                "query: needs more memory than it may use, must fit; ask for less, or allow more by --memory"
            ) from None
        raise UsageError(f"query: {reason or type(error).__name__}; correct it") from None


def _own_words(connection: duckdb.DuckDBPyConnection, sql: str, text: str) -> str:
    """Return the error that ended a query: its threads are interrupted then, and DuckDB at times reports that alone.

    (DuckDB's pull request 25902.) The query is run again to learn the reason.
    """
    import duckdb

    for _ in range(_ATTEMPTS):
        if "INTERRUPT Error" not in text:
            break
        try:
            for _batch in _executed(connection, sql):
                pass
        except (duckdb.Error, OSError, ValueError) as error:
            text = str(error)
        else:
            break
    return text


def _distinct(names: list[str]) -> list[str]:
    """Return the names, each once: repeated ones get a number."""
    distinct: list[str] = []
    for name in names:
        number, candidate = 0, name
        while candidate in distinct or (number and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        distinct.append(candidate)
    return distinct
