"""Check of a whole database: which rows and files are damaged, and which can be saved (`app db check`).

Nothing is written. Tables are read parents first, so that each row's references can be followed; a row can be saved if
it is as it was written and all rows that it refers to can be. Of the trace of a search only what comes before the first
lost chunk can be saved: what a later proposal changed is not known without those before it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from app.db import chunks, models, reading, schema
from app.db.chunk_files import CHECKPOINT, GROUPS, read_table, read_text
from app.db.engine import Database, connect_engines, display_name, resolve_url
from app.db.failures import as_written
from app.db.models import TABLES
from app.db.recordings import FOLDER, recording_name
from app.db.records import GraphRecord, StrategyRecord, TopologyRecord, TraceRecord
from app.db.salvage import LostRow, Source, reading_only
from app.db.validation import Fault, values_of
from app.services.stored import strategy_in, topology_of
from app.services.timeline.store import read_file
from app.services.trace.recorder import groups_of, snapshots_of
from graph.errors import DamagedDataError, DatabaseError, DatabaseFailure, SoapstoneError, UsageError
from graph.texts import shown

Row = dict[str, Any]
KINDS = {table.name: kind for kind, table in TABLES.items()}
_TABLES_IN_ORDER = tuple(table for table in models.metadata.sorted_tables if table.name in KINDS)

_UNIQUE = {
    table.name: [
        tuple(column.name for column in constraint.columns)
        for constraint in sorted(table.constraints, key=lambda constraint: str(constraint.name))
        if isinstance(constraint, sa.UniqueConstraint)
    ]
    for table in _TABLES_IN_ORDER
}


@dataclass(frozen=True, slots=True)
class Damage:
    """A row, a column or a file that is not as it was written."""

    reason: str
    table: str | None = None
    row: int | None = None
    column: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        """Return the place and the reason."""
        parts = [f"table {self.table}"] if self.table else []
        parts += [f"row {self.row}"] if self.row else []
        parts += [f"column {self.column}"] if self.column else []
        where = ", ".join(parts) or self.file or "database"
        return f"{where}: {self.reason}"


@dataclass(slots=True)
class Findings:
    """The result of a check, by table: the number of rows, and the ids of rows that can be saved."""

    name: str
    revision: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    sound: dict[str, set[int]] = field(default_factory=dict)
    chunk_count: int = 0
    sound_chunks: int = 0
    recordings: list[Path] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the findings as a document."""
        return {
            "database": self.name,
            "revision": self.revision,
            "tables": {
                table: {"rows": count, "sound": len(self.sound[table])} for table, count in self.rows.items()
            },
            "chunks": {"registered": self.chunk_count, "sound": self.sound_chunks},
            "recorded_executions": len(self.recordings),
            "damages": [asdict(damage) for damage in self.damages],
            "stray_files": self.strays,
        }


Sink = Callable[[sa.Table, Row, Path | None], None]
"""Takes the rows that can be saved, parents first; with the row of a chunk its file."""


def _nowhere(_table: sa.Table, _row: Row, _file: Path | None) -> None:
    """Take a row that nobody wants."""


def check(database: str | None, sink: Sink = _nowhere) -> Findings:
    """Look at all that a database holds, and at its traces.

    Raises:
        UsageError: there is no such database.
        DatabaseError: it cannot be opened, or its schema is older or newer than this code.
    """
    url = resolve_url(database)
    if url.get_backend_name() == "sqlite" and not os.path.exists(str(url.database)):
        # Before it is connected to, which makes a user's folder for it.
        raise UsageError(
            f"database {display_name(url)}: is not there, must be to be checked; make it by app db upgrade"
        )
    opened = connect_engines(url, to_read=True)
    try:
        with ExitStack() as stack:
            folder = opened.trace_folder
            if (folder / reading.LOCK).exists():
                stack.enter_context(reading.shared(folder))
            source = stack.enter_context(reading_only(url))
            return _Check(opened, source, sink, database).findings()
    except exc.DBAPIError as error:
        raise schema.unusable(url, error) from None
    finally:
        opened.dispose()


class _Check:
    """One look at one database; `named`: as the user named it."""

    def __init__(self, database: Database, source: Source, sink: Sink, named: str | None) -> None:
        self._database = database
        self._named = named
        self._source = source
        self._sink = sink
        self._found = Findings(database.name)
        # What later tables are compared with.
        self._graphs: dict[int, tuple[GraphRecord, dict[str, Any]]] = {}
        self._digests: dict[int, str] = {}
        self._executions: dict[int, int] = {}
        self._running: set[int] = set()
        self._registered: set[str] = set()
        self._names: dict[tuple[str, tuple[str, ...], tuple[Any, ...]], int] = {}

    def findings(self) -> Findings:
        """Look at everything."""
        self._check_foreign_objects()
        self._check_schema()
        for reason in self._source.problems():
            self._found.damages.append(Damage(f"SQLite finds: {reason}", file=self._found.name))
        for table in _TABLES_IN_ORDER:
            self._found.rows[table.name], self._found.sound[table.name] = 0, set()
            if table is models.traces:
                self._check_traces(list(self._sound_rows(table)))
                continue
            for row in self._sound_rows(table):
                self._keep(table, row)
        self._check_recordings()
        self._check_strays()
        return self._found

    def _check_foreign_objects(self) -> None:
        for name, kind in self._source.foreign_objects().items():
            if kind == "view":
                raise schema.foreign_object_error(self._found.name, name, kind)
            reason = f"trigger {shown(name)} is none of Soapstone's"
            self._found.damages.append(Damage(reason, file=self._found.name))

    def _check_schema(self) -> None:
        try:
            revision = self._source.first(sa.text("SELECT version_num FROM alembic_version"))
        except LostRow as error:
            revision = None
            names = {"sqlite": "sqlite_master", "postgresql": "pg_tables"}
            if not self._is_ours(names["sqlite" if self._source.is_sqlite else "postgresql"]):
                raise DatabaseError(
                    f"database {self._found.name}: has no table of Soapstone's ({error.reason}), must have them; name "
                    "another by --database"
                ) from None
            self._damaged(error.reason, "alembic_version")
        else:
            if revision is None:
                self._damaged("has no row", "alembic_version")
        self._found.revision = None if revision is None else str(revision["version_num"])
        if self._found.revision not in (None, schema.HEAD):
            schema.check_current(self._database.url, self._found.revision, self._named)

    def _is_ours(self, catalog: str) -> bool:
        column = "name" if self._source.is_sqlite else "tablename"
        try:
            names = {row[column] for row in self._source.all(sa.text(f"SELECT {column} FROM {catalog}"))}
        except LostRow as lost:
            raise DatabaseFailure(
                f"database {self._found.name}: its list of tables cannot be read ({lost.reason}), must be for anything "
                "to be saved; restore a copy of it"
            ) from None
        return not names.isdisjoint(KINDS)

    def _damaged(
        self, reason: str, table: str | None = None, row: int | None = None, column: str | None = None
    ) -> None:
        self._found.damages.append(Damage(reason, table, row, column))

    def _keep(self, table: sa.Table, row: Row, file: Path | None = None) -> None:
        self._found.sound[table.name].add(row["id"])
        if table is models.executions:
            self._executions[row["id"]] = row["strategy_id"]
        self._sink(table, row, file)

    # ---- rows

    def _sound_rows(self, table: sa.Table) -> Iterator[Row]:
        """Yield the rows of a table that are as they were written, and note the others."""
        for row in self._source.rows(table):
            self._found.rows[table.name] += 1
            if isinstance(row, LostRow):
                reason = f"cannot be read ({row.reason})"
                if not row.number:
                    reason = f"rows cannot be read, it is not known how many ({row.reason})"
                self._damaged(reason, table.name, row.number or None)
                continue
            try:
                values = values_of(KINDS[table.name], row)
                self._check_content(table, row, values)
            except Fault as fault:
                self._damaged(fault.reason, table.name, row.get("id"), fault.column)
                continue
            except DamagedDataError as error:
                reason = str(error).partition(": ")[2].partition(", must be")[0]
                self._damaged(reason, table.name, row["id"])
                continue
            if self._closed(table, row) and self._alone(table, row):
                yield row

    def _check_content(self, table: sa.Table, row: Row, values: Row) -> None:
        """Check the documents of this table's rows."""
        if table is models.graphs:
            with as_written(f"table graphs, row {row['id']}"):
                described = json.loads(row["document"])
                self._graphs[row["id"]] = (GraphRecord(**values), described)
        elif table is models.topologies:
            topology = topology_of(TopologyRecord(**values))
            if row["device_count"] != len(topology.devices):
                raise Fault(
                    "device_count", f"is {row['device_count']}, the document has {len(topology.devices)}"
                )
        elif table is models.strategies:
            if row["graph_id"] in self._graphs:
                strategy_in(*self._graphs[row["graph_id"]], StrategyRecord(**values))
            self._digests[row["id"]] = row["digest"]
        elif table is models.searches and row["status"] == "running":
            self._running.add(row["id"])

    def _closed(self, table: sa.Table, row: Row) -> bool:
        """Return whether all rows that a row refers to can be saved; a lost optional reference is set to NULL."""
        closed = True
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name):
            column, parent = key.parent.name, key.column.table.name
            if row[column] is None or row[column] in self._found.sound[parent]:
                continue
            self._damaged(
                f"refers to row {row[column]} of {parent}, which is lost", table.name, row["id"], column
            )
            if key.parent.nullable:
                row[column] = None
            else:
                closed = False
        return closed

    def _alone(self, table: sa.Table, row: Row) -> bool:
        """Return whether no row before has the same name: a damaged index does not prevent it."""
        for columns in _UNIQUE[table.name]:
            name = (table.name, columns, tuple(row[column] for column in columns))
            first = self._names.setdefault(name, row["id"])
            if first != row["id"]:
                self._damaged(
                    f"is the same as that of row {first}", table.name, row["id"], ", ".join(columns)
                )
                return False
        return True

    # ---- files

    def _check_traces(self, rows: list[Row]) -> None:
        def search_and_kind(row: Row) -> tuple[int, str]:
            return row["search_id"], row["kind"]

        for (search_id, _), of_kind in groupby(sorted(rows, key=search_and_kind), key=search_and_kind):
            run = []
            for row in of_kind:
                self._registered.add(row["path"])
                record = TraceRecord(**row)
                (chunk,) = chunks.chunks_of([record], record.kind) or (None,)
                if chunk is None or f"/search-{search_id}/" not in row["path"]:
                    self._damaged("is no chunk of this search", "traces", row["id"], "path")
                    continue
                run.append((chunk, row, record))
            self._check_run(sorted(run, key=lambda entry: entry[0]))

    def _check_run(self, run: list[tuple[chunks.Chunk, Row, TraceRecord]]) -> None:
        """Look at the chunks of one kind of one search, in the order in which they were written."""
        before: int | None = 0
        for chunk, row, record in run:
            self._found.chunk_count += 1
            reason = self._fault_of_chunk(record)
            if reason is None and before is not None and chunk.first != before + 1:
                reason = f"follows flush {before}, must follow flush {chunk.first - 1}"
            file = str(self._database.trace_root / record.path)
            if reason is not None:
                self._found.damages.append(Damage(reason, file=f"trace chunk {file}"))
                before = None
            elif before is None:
                reason = "is whole, but comes after one that is lost"
                self._found.damages.append(Damage(reason, file=f"trace chunk {file}"))
            else:
                before = chunk.last
                self._found.sound_chunks += 1
                self._keep(models.traces, row, chunks.chunk_file(self._database, record))

    def _fault_of_chunk(self, record: TraceRecord) -> str | None:
        file = chunks.chunk_file(self._database, record)
        if file is None:
            return "is missing"
        try:
            with as_written(f"trace chunk {file}"):
                table = read_table(file, record.kind)
                searches = set(table["search"].unique().to_pylist())
                for key, interpret in ((CHECKPOINT, snapshots_of), (GROUPS, groups_of)):
                    text = read_text(file, key)
                    if text is not None:
                        interpret(text)
        except SoapstoneError as error:
            return str(error).removeprefix(f"trace chunk {file}: ").partition(", must be")[0]
        if table.num_rows != record.rows:
            return f"has {table.num_rows} rows, is registered with {record.rows}"
        return None if searches <= {record.search_id} else "is of another search"

    def _check_recordings(self) -> None:
        """Look at the recorded steps of executions; the rest of the folder is of executions that are not there."""
        folder = self._database.trace_folder / FOLDER
        executions = {
            recording_name(number, self._digests[strategy_id])
            for number, strategy_id in self._executions.items()
        }
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name not in executions:
                self._found.strays.append(str(path))
                continue
            try:
                read_file(path)
            except DamagedDataError as error:
                reason = str(error).removeprefix(f"trace chunk {path}: ").partition(", must be")[0]
                self._found.damages.append(Damage(reason, file=f"recorded steps {path}"))
            else:
                self._found.recordings.append(path)

    def _check_strays(self) -> None:
        """Name the files in the traces' folder that belong to nothing."""
        folder = self._database.trace_folder
        registered: dict[str, set[str]] = defaultdict(set)
        for path in self._registered:
            folder_path, _, name = path.rpartition("/")
            registered[folder_path.rpartition("/")[2]].add(name)
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else ():
            if entry.name in (reading.LOCK, FOLDER):
                continue
            number = entry.name.removeprefix("search-")
            if not entry.is_dir() or not number.isdecimal():
                self._found.strays.append(entry.path)
            elif int(number) not in self._running:
                names = registered[entry.name]
                self._found.strays += [
                    str(path) for path in sorted(Path(entry.path).iterdir()) if path.name not in names
                ]
