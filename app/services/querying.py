"""`app query`: a query over what is stored, its answer as a stream or in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.analytics.answer import Answer, answer
from app.analytics.duck import connect
from app.analytics.formats import FORMATS, Format, write_csv, write_json, write_parquet
from app.db.engine import Database
from app.db.schema import open_database
from app.services.files import checked_target, replacing
from graph.errors import UsageError


@contextmanager
def queried(database: str | None, sql: str, *, limit_s: float | None = None) -> Iterator[Answer]:
    """Open the database and give the answer to a query.

    Raises:
        DatabaseError: the database cannot be opened or read.
        UsageError: the query may not run, is wrong, or takes too long.
    """
    with _opened(database) as opened, _answered(opened, sql, limit_s) as found:
        yield found


def export(
    database: str | None, sql: str, file_format: Format, path: Path, *, limit_s: float | None = None
) -> int:
    """Write the answer to a file, as a whole or not at all; return the number of rows.

    Raises:
        DatabaseError, UsageError: as `queried`; or the file may not or cannot be written.
    """
    with _opened(database) as opened:
        target = checked_target(path, opened, "--output")
        with _answered(opened, sql, limit_s) as found, replacing(target, "--output") as temporary:
            if file_format == "parquet":
                return write_parquet(found, temporary)
            write = write_csv if file_format == "csv" else write_json
            with open(temporary, "w", encoding="utf-8", newline="") as file:
                return write(found, file)


def chosen_format(given: str | None, output: Path | None) -> Format:
    """Return the format that the options mean: the one given, else the output's suffix, else a table.

    Raises:
        UsageError: there is no such format, or it does not go with the output.
    """
    suffix = output.suffix.lower().removeprefix(".") if output is not None else ""
    name = given or (suffix if suffix in FORMATS else "table")
    for known in FORMATS:
        if name == known:
            break
    else:
        raise UsageError(f"--format: is {name}, must be one of {', '.join(FORMATS)}; choose one of them")
    if known == "parquet" and output is None:
        raise UsageError("--format parquet: has no file, must have one; name it by --output")
    if known == "table" and output is not None:
        raise UsageError(f"--output {output}: is for csv, json and parquet; choose one by --format")
    return known


@contextmanager
def _opened(database: str | None) -> Iterator[Database]:
    opened = open_database(database)
    try:
        yield opened
    finally:
        opened.dispose()


@contextmanager
def _answered(database: Database, sql: str, limit_s: float | None) -> Iterator[Answer]:
    with connect(database) as connection, answer(connection, sql, limit_s=limit_s) as found:
        yield found
