"""`app query`: a query over the database and its traces, its answer as a stream or in a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from app.analytics.answer import Answer, answer
from app.analytics.duck import DuckResources, connect, spill_folder
from app.analytics.formats import FORMATS, Format, write_csv, write_json, write_parquet
from app.db.engine import Database
from app.db.schema import open_database
from app.services.database.isolated_process import bound_memory, run_apart
from app.services.files import checked_target, replacing
from graph.errors import UsageError
from profiler.processors import memory_bytes as machine_memory_bytes

T = TypeVar("T")

LARGEST_TIME_S = 1e6
SMALLEST_MEMORY_GIB = 0.125
LARGEST_MEMORY_GIB = 2**20
# Of the machine's memory, as DuckDB has it; and of the query's memory, since DuckDB does not count all it takes.
_SHARE_OF_MACHINE = 0.8
_SHARE_OF_DUCKDB = 0.8


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a query may take, and how much memory; None: as long as it takes, four fifths of the machine's."""

    time_s: float | None = None
    memory_gib: float | None = None

    @property
    def memory_bytes(self) -> int:
        """The query's memory."""
        if self.memory_gib is None:
            return int(machine_memory_bytes() * _SHARE_OF_MACHINE)
        return int(self.memory_gib * 2**30)

    def check(self) -> None:
        """Check that the limits can be kept.

        Raises:
            UsageError: naming the option.
        """
        if self.time_s is not None and not 0 < self.time_s < LARGEST_TIME_S:
            raise UsageError(
                f"--timeout: is {self.time_s:g}, must be above 0 and below {LARGEST_TIME_S:.0f}; choose another"
            )
        memory = self.memory_gib
        if memory is not None and not SMALLEST_MEMORY_GIB <= memory <= LARGEST_MEMORY_GIB:
            raise UsageError(
                f"--memory: is {memory:g} GiB, must be between {SMALLEST_MEMORY_GIB} and {LARGEST_MEMORY_GIB}; "
                "choose another"
            )


def with_answer(database: str | None, sql: str, use: Callable[[Answer], T], limits: Limits = Limits()) -> T:
    """Return the result of `use` on a query's answer, both in a process of their own, where it may print.

    Raises:
        DatabaseError: the database is not made yet, or cannot be opened or read.
        UsageError: the query may not run, or is wrong.
        QueryFailure: it takes longer, or more memory, than it may.
    """
    with _opened(database) as opened:
        return _used(opened, sql, use, limits)


def export(database: str | None, sql: str, file_format: Format, path: Path, limits: Limits = Limits()) -> int:
    """Write the answer to a file, as a whole or not at all; return the number of rows.

    Raises:
        DatabaseError, UsageError, QueryFailure: as `with_answer`; or the file may not or cannot be written.
    """
    with _opened(database) as opened:
        target = checked_target(path, opened, "--output")
        with replacing(target, "--output") as temporary:

            def write(result: Answer) -> int:
                if file_format == "parquet":
                    return write_parquet(result, temporary)
                write_text = write_csv if file_format == "csv" else write_json
                with open(temporary, "w", encoding="utf-8", newline="") as file:
                    return write_text(result, file)

            return _used(opened, sql, write, limits)


def chosen_format(given: str | None, output: Path | None) -> Format:
    """Return the format that the options mean: the one given, else the output's suffix, else a table.

    Raises:
        UsageError: there is no such format, or it does not go with the output.
    """
    suffix = output.suffix.lower().removeprefix(".") if output is not None else ""
    name = given or (suffix if suffix in FORMATS else "table")
    for file_format in FORMATS:
        if name == file_format:
            break
    else:
        raise UsageError(f"--format: is {name}, must be one of {', '.join(FORMATS)}; choose one of them")
    if file_format == "parquet" and output is None:
        raise UsageError("--format parquet: has no file, must have one; name it by --output")
    if file_format == "table" and output is not None:
        raise UsageError(f"--output {output}: is for csv, json and parquet; choose one by --format")
    return file_format


@contextmanager
def _opened(database: str | None) -> Iterator[Database]:
    opened = open_database(database, to_read=True)
    try:
        yield opened
    finally:
        opened.dispose()


def _used(database: Database, sql: str, use: Callable[[Answer], T], limits: Limits) -> T:
    limits.check()
    spill = spill_folder()
    # No connection of this process may be one of the other as well.
    database.dispose()

    def work() -> T:
        resources = DuckResources(int(limits.memory_bytes * _SHARE_OF_DUCKDB), spill)
        with connect(database, resources) as connection:
            bound_memory(limits.memory_bytes)
            return use(answer(connection, sql))

    try:
        return run_apart(work, limits.time_s)
    finally:
        # DuckDB removes it, unless it was ended.
        shutil.rmtree(spill, ignore_errors=True)
