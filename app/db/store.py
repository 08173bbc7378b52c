"""The store: the one port between Soapstone and its database.

`Store` has a method for each thing that is read or written; arguments and results are the frozen dataclasses
of `app.db.records`, and numbers called `..._id` are what the `put_...` and `start_...` methods return. Each
method is one transaction. Every `put_...` may be repeated: the same row is found again by what names it, and
of two measurements of one thing the later stays. Any number of processes may write at once. Methods by
family: `app.db.store_costs`, `app.db.store_nouns`, `app.db.store_runs`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from app.db import models
from app.db.chunks import merge_ended, recover
from app.db.schema import open_database
from app.db.store_costs import CostStore
from app.db.store_nouns import NounStore
from app.db.store_runs import RunStore
from graph.errors import DamagedDataError, DatabaseError


class Store(CostStore, NounStore, RunStore):
    """All of the database's methods on one opened database; a context manager that closes its connections."""

    @classmethod
    def open(
        cls,
        database: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        to_read: bool = False,
    ) -> Self:
        """Open by path or URL; None means SOAPSTONE_DATABASE_URL, else the file in the user's data folder.

        create, to_read: as `open_database` has it.

        Searches and executions that are running in no process any more become interrupted, and their traces are
        repaired. Chunks of searches that have ended are merged. Not where the file cannot be written to.

        Raises:
            DatabaseError: it cannot be opened, or its schema is older or newer than this code.
        """
        store = cls(open_database(database, create=create, to_read=to_read))
        if store.database.is_read_only:
            return store
        try:
            store.end_orphans(lambda search_id: recover(store, search_id))
            # A damaged table ends the commands that need it.
            with suppress(DatabaseError):
                merge_ended(store)
        except BaseException:
            store.close()
            raise
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, DamagedDataError) and str(error).startswith("table "):
            # Found in a record, which does not know where it was read.
            raise DamagedDataError(f"database {self.database.name}: {error}") from None

    def table_counts(self) -> dict[str, int]:
        """Return the number of rows of every table, by name."""
        with self.read() as connection:
            return {
                table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
                for table in sorted(models.metadata.tables.values(), key=lambda table: table.name)
            }
