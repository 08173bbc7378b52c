"""Upserts for both dialects, and the conversion of rows to records and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite

from app.db.engine import Database, display_name
from app.db.failures import damaged_row, database_failure, row_name
from app.db.models import TABLES
from app.db.validation import EXCERPTS, Fault, values_of
from graph.canonical import canonical_json
from graph.errors import UsageError

Record = TypeVar("Record")
Item = TypeVar("Item")
Row = Mapping[str, Any]

BATCH_ROWS = 1000
"""Values in one IN (...): SQLite allows 32,766 parameters in a statement, PostgreSQL 65,535."""


class StorePart:
    """A family of the store's methods: one database, each method one transaction."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A writing transaction: committed at the end, rolled back by an exception."""
        with self._errors_named(), self.database.write_engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A reading transaction: one state of the database, whatever others write meanwhile."""
        with self._errors_named(), self.database.read_engine.begin() as connection:
            yield connection

    def _first(self, kind: type[Record], **equal: Any) -> Record | None:
        """Return a row of a record's table with these values, or None."""
        table = TABLES[kind]
        with self.read() as connection:
            return read_one(connection, kind, sa.select(table).where(*_equal(table, equal)))

    def _all(self, kind: type[Record], *order: str, **equal: Any) -> list[Record]:
        """Return the rows of a record's table in the order of some columns; None in `equal`: any value."""
        table = TABLES[kind]
        query = sa.select(table).where(*_equal(table, equal)).order_by(*(table.c[name] for name in order))
        with self.read() as connection:
            return read_all(connection, kind, query)

    def _newest(self, kind: type[Record], moment: str, limit: int, **equal: Any) -> list[Record]:
        """Return rows as `_all` does, the one of the latest moment first."""
        table = TABLES[kind]
        query = (
            sa.select(table).where(*_equal(table, equal)).order_by(table.c[moment].desc(), table.c.id.desc())
        )
        with self.read() as connection:
            return read_all(connection, kind, query.limit(limit))

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OverflowError:  # sqlite3's own; no row has such a number
            raise UsageError(
                "an id or a limit has more than 63 bits, must be at most 9223372036854775807; choose a smaller one"
            ) from None
        except exc.DBAPIError as error:
            raise database_failure(self.database.name, error) from error


def _equal(table: sa.Table, values: Mapping[str, Any]) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == value for name, value in values.items() if value is not None]


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Split into lists of at most BATCH_ROWS."""
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH_ROWS)):
        yield batch


def insert_ignoring(connection: sa.Connection, table: sa.Table, rows: Sequence[Row], key: str) -> None:
    """Insert rows named by the unique column `key`; rows that are there already stay as they are.

    Rows are sorted, since PostgreSQL deadlocks on two writers that lock the same rows in different orders.
    """
    unique = {row[key]: row for row in reversed(rows)}
    if unique:
        insert = _insert_ignoring(connection.dialect.name, table, key)
        connection.execute(insert, [unique[name] for name in sorted(unique)])


def upsert_newer(
    connection: sa.Connection,
    table: sa.Table,
    rows: Sequence[Row],
    key: Sequence[str],
    moment: str,
    *,
    keep: Sequence[str] = (),
) -> int:
    """Insert rows named by the unique columns `key`, replacing those whose `moment` is not later; return their number.

    Of two rows with one key in `rows`, the later in time counts, of equal times the last: PostgreSQL refuses
    to touch a row twice in one statement. A value in a column of `keep` stays unless it is NULL.
    """
    unique: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        name = tuple(row[column] for column in key)
        if name not in unique or unique[name][moment] <= row[moment]:
            unique[name] = row
    if not unique:
        return 0
    upsert = _upsert_newer(connection.dialect.name, table, tuple(rows[0]), tuple(key), moment, tuple(keep))
    connection.execute(upsert, [unique[name] for name in sorted(unique)])
    return len(unique)


def put_named(connection: sa.Connection, table: sa.Table, row: Row, key: str) -> int:
    """Insert one row named by `key` unless it is there; return its id."""
    insert_ignoring(connection, table, [row], key)
    return int(connection.execute(sa.select(table.c.id).where(table.c[key] == row[key])).scalar_one())


def insert_row(connection: sa.Connection, table: sa.Table, row: Row) -> int:
    """Insert one row; return its id."""
    return int(connection.execute(table.insert().values(row).returning(table.c.id)).scalar_one())


def row_of(record: object, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return a record's columns: mappings and tuples become canonical JSON, `id` is the database's to give."""
    row: dict[str, Any] = {}
    for field in fields(record):  # type: ignore[arg-type]
        if field.name == "id" or field.name in without:
            continue
        value = getattr(record, field.name)
        if isinstance(value, Mapping):
            value = canonical_json(dict(value))
        elif isinstance(value, tuple):
            value = canonical_json(list(value))
        row[field.name] = value
    return row


def record_of(connection: sa.Connection, kind: type[Record], row: Row) -> Record:
    """Return a record from a row that has its columns by name; JSON becomes mappings and tuples.

    Raises:
        DamagedDataError: the row is not as it was written.
    """
    try:
        return kind(**values_of(kind, row))
    except Fault as fault:
        table = TABLES.get(kind, EXCERPTS.get(kind))
        table_name = kind.__name__ if table is None else table.name
        name = display_name(connection.engine.url)
        raise damaged_row(row_name(name, table_name, row.get("id"), fault.column), fault.reason) from None


def read_one(connection: sa.Connection, kind: type[Record], query: sa.Select[Any]) -> Record | None:
    """Return the first row of a query as a record, or None."""
    row = connection.execute(query).mappings().first()
    return None if row is None else record_of(connection, kind, dict(row))


def read_all(connection: sa.Connection, kind: type[Record], query: sa.Select[Any]) -> list[Record]:
    """Return the rows of a query as records."""
    return [record_of(connection, kind, dict(row)) for row in connection.execute(query).mappings()]


# Made once: a search registers its chunks every second, a profile stores each cost as soon as it is measured, and to
# make a statement takes longer than to execute it.
@cache
def _insert_ignoring(dialect: str, table: sa.Table, key: str) -> sa.Insert:
    return _insert(dialect, table).on_conflict_do_nothing(index_elements=[key])


@cache
def _upsert_newer(
    dialect: str,
    table: sa.Table,
    columns: tuple[str, ...],
    key: tuple[str, ...],
    moment: str,
    keep: tuple[str, ...],
) -> sa.Insert:
    insert = _insert(dialect, table)
    # Each access makes the columns anew.
    excluded = insert.excluded
    changed: dict[str, Any] = {column: excluded[column] for column in columns if column not in key}
    for column in keep:
        changed[column] = sa.func.coalesce(table.c[column], excluded[column])
    return insert.on_conflict_do_update(
        index_elements=list(key), set_=changed, where=table.c[moment] <= excluded[moment]
    )


@cache
def update_by_id(table: sa.Table, columns: tuple[str, ...]) -> sa.Update:
    """Return a statement that changes columns of one row, to be executed with their values and that of `this_id`."""
    changes: dict[str, Any] = {name: sa.bindparam(name) for name in columns}
    return table.update().where(table.c.id == sa.bindparam("this_id")).values(changes)


def _insert(dialect: str, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
