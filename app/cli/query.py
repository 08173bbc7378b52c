"""`app query`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import options
from app.cli.output import data_output, print_json, print_lines, print_table
from graph.errors import UsageError

if TYPE_CHECKING:
    from app.analytics.answer import Answer

_LONGEST_CELL = 400


def query(
    sql: Annotated[str | None, typer.Argument(help="One SELECT, or EXPLAIN of one, in DuckDB's SQL.")] = None,
    views: Annotated[bool, typer.Option("--views", help="List the views and their columns instead.")] = False,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="table, csv, json or parquet. Default: what --output ends in, else table."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write to this file.", writable=True)
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of a table to print at most.")] = 100,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Give up after so many seconds. Default: never.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", help="GiB that the query may use. Default: four fifths of this machine's."),
    ] = None,
    database: options.Database = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Ask what is stored: one query over the views, read only. docs/database.md describes them.

    Example: app query "SELECT model, topology, best_measured_median_s FROM best_per_model"
    """
    from app.services.database import query as querying

    if views and sql is not None:
        raise UsageError("app query: got both a query and --views, must have one of them; leave one out")
    if views:
        _print_views(as_json=as_json)
        return
    if sql is None:
        raise UsageError("app query: has no query, must have one, or --views; write it in quotes")
    if as_json and file_format not in (None, "json"):
        raise UsageError(f"--json: goes with --format json only, not {file_format}; leave one out")
    limits = querying.Limits(timeout, memory)
    chosen = querying.chosen_format("json" if as_json else file_format, output)
    if output is not None:
        count = querying.export(database, sql, chosen, output, limits)
        print_lines(f"{count} rows written to {output}")
        return
    querying.with_answer(database, sql, lambda answer: _print(answer, chosen, rows), limits)


def _print(answer: Answer, file_format: str, limit: int) -> None:
    import sys

    from app.analytics.formats import write_csv, write_json
    from app.cli import ending
    from search.parallel.fork import can_fork

    if can_fork():
        ending.watch_output()  # of the query's own process
    if file_format == "csv":
        write_csv(answer, data_output())
    elif file_format == "json":
        write_json(answer, data_output())
    elif answer.kind == "explain":
        _print_plan(answer)
    else:
        _print_table(answer, limit)
    sys.stdout.flush()


def _print_plan(answer: Answer) -> None:
    from app.analytics.formats import rows

    for row in rows(answer):
        print_lines(*str(row[-1]).rstrip().split("\n"))


def _print_table(answer: Answer, limit: int) -> None:
    from itertools import islice

    from app.analytics.formats import rows

    lines = list(islice(rows(answer), limit + 1))
    shown = lines[:limit]
    names = answer.schema.names
    if names:
        numeric = {column for column in range(len(names)) if any(_is_number(row[column]) for row in shown)}
        print_table(names, [[_cell(value) for value in row] for row in shown], right=numeric, cut=True)
    if len(lines) > limit:
        print_lines(
            f"the first {limit} rows; --rows N shows more, --format csv, json or parquet with --output all"
        )
    elif len(lines) != 1:
        print_lines(f"{len(lines)} rows")


def _cell(value: Any) -> str:
    import json

    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _print_views(*, as_json: bool) -> None:
    from app.analytics.catalog import CATALOG

    if as_json:
        print_json(
            [{"view": name, "row": view.row, "columns": view.columns} for name, view in CATALOG.items()]
        )
        return
    for name, view in CATALOG.items():
        longest = max(len(column) for column in view.columns)
        print_lines(f"{name}: {view.row}")
        print_lines(*(f"  {column.ljust(longest)}  {text}" for column, text in view.columns.items()), "")
