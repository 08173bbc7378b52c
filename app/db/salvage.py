"""Reading a damaged database row by row, past pages that cannot be read, and without writing to it.

A scan of a SQLite table ends at the first page that cannot be read. What lies behind it is reached from the other end,
and by number: each table has indexes of its own pages that say which rows there are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc, pool

from app.db.engine import connect_engines, display_name, read_only_uri
from app.db.failures import Connection, is_damage, one_line
from app.db.schema import foreign_objects

# Between two rows that can be read, as many numbers are tried where no index tells.
LONGEST_GAP = 100_000
# And so many after the last.
LONGEST_END = 1000


class LostRow(Exception):
    """A row that cannot be read, and why; row 0: nobody knows which, or how many."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


class Source:
    """A database that is read and never written to: one transaction for as long as nothing in it is damaged."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self.is_sqlite = connection.dialect.name == "sqlite"

    def first(self, statement: sa.Executable) -> dict[str, Any] | None:
        """Return the first row of a query.

        Raises:
            LostRow: it cannot be read.
        """
        try:
            row = self._connection.execute(statement).mappings().first()
        except exc.DBAPIError as error:
            raise self._lost(error) from None
        return None if row is None else dict(row)

    def all(self, statement: sa.Executable) -> Iterator[dict[str, Any]]:
        """Yield the rows of a query one after the other.

        Raises:
            LostRow: the next one cannot be read.
        """
        try:
            result = self._connection.execution_options(yield_per=500).execute(statement)
            for row in result.mappings():
                yield dict(row)
        except exc.DBAPIError as error:
            raise self._lost(error) from None

    def foreign_objects(self) -> dict[str, str]:
        """Return triggers and views that are none of Soapstone's (`schema.foreign_objects`); none of a lost schema."""
        try:
            return foreign_objects(self._connection)
        except exc.DBAPIError as error:
            self._lost(error)
            return {}

    def problems(self) -> list[str]:
        """Return the lines of SQLite's integrity check; none on PostgreSQL."""
        if not self.is_sqlite:
            return []
        try:
            rows = [str(row["integrity_check"]) for row in self.all(sa.text("PRAGMA integrity_check"))]
        except LostRow as error:
            return [error.reason]
        return [line for text in rows for line in text.splitlines() if line != "ok"]

    def rows(self, table: sa.Table) -> Iterator[dict[str, Any] | LostRow]:
        """Yield the rows of a table, a `LostRow` in place of a row that cannot be read."""
        read: set[int] = set()
        try:
            for row in self.all(sa.select(table).order_by(table.c.id)):
                read.add(row["id"])
                yield row
            return
        except LostRow as error:
            reason = error.reason
        lost = 0
        numbers = self._numbers(table)
        for number in sorted((numbers | _between(read | numbers)) - read):
            try:
                salvaged = self.first(sa.select(table).where(table.c.id == number))
            except LostRow as error:
                if number in numbers:
                    lost += 1
                    yield LostRow(number, error.reason)
                continue
            if salvaged is not None:
                yield salvaged
        if not lost:
            yield LostRow(0, reason)

    def _numbers(self, table: sa.Table) -> set[int]:
        """Return the numbers of a table's rows, as far as the table and each of its indexes tell."""
        sources = [""]
        if self.is_sqlite:
            named = sa.text("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = :table")
            sources = ["NOT INDEXED", "NOT INDEXED ORDER BY id DESC"]
            with suppress(LostRow):
                for row in self.all(named.bindparams(table=table.name)):
                    sources.append(f'INDEXED BY "{row["name"]}"')
        numbers: set[int] = set()
        for source in sources:
            with suppress(LostRow):
                for row in self.all(sa.text(f"SELECT id FROM {table.name} {source}")):
                    numbers.add(row["id"])
        return numbers

    def _lost(self, error: exc.DBAPIError) -> LostRow:
        if not is_damage(error):
            raise error
        if not self.is_sqlite:
            # PostgreSQL gives a transaction up at the first error.
            self._connection.rollback()
        return LostRow(0, one_line(error))


def _between(numbers: set[int]) -> set[int]:
    """Return numbers in the gaps of those that are read, and after them, that may be rows'."""
    ordered = sorted(numbers | {0})
    tried: set[int] = set()
    for before, after in zip(ordered, [*ordered[1:], ordered[-1] + LONGEST_END], strict=True):
        if after - before <= LONGEST_GAP - len(tried):
            tried.update(range(before + 1, after))
    return tried


@contextmanager
def reading_only(url: sa.URL) -> Iterator[Source]:
    """Yield a database to read, as it is now; a SQLite file by `read_only_uri`.

    Raises:
        DBAPIError: it cannot be opened.
    """
    if url.get_backend_name() != "sqlite":
        database = connect_engines(url)
        try:
            with database.read_engine.connect() as connection:
                yield Source(connection)
        finally:
            database.dispose()
        return
    path = Path(display_name(url))

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(read_only_uri(path), uri=True, factory=Connection, isolation_level=None)
        # Of a schema that is damaged in part, the rest counts. Nothing is written: the file is opened to be read.
        connection.execute("PRAGMA writable_schema=ON")
        return connection

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=pool.NullPool)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")
            yield Source(connection)
    finally:
        engine.dispose()
