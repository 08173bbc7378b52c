"""The study's tables for people, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.studies.tables import StudyTable, Value


def cell_text(value: Value, style: str | None) -> str:
    """Return a value as text; a dash where it is not known."""
    if value is None:
        return "-"
    return f"{value:{style}}" if style is not None and not isinstance(value, str) else str(value)


def _texts(table: StudyTable) -> list[list[str]]:
    return [[cell_text(value, table.formats.get(name)) for name, value in row.items()] for row in table.rows]


def _is_number(table: StudyTable, column: str) -> bool:
    return any(isinstance(row[column], int | float) for row in table.rows)


def print_tables(tables: Sequence[StudyTable], counts: Mapping[str, int], console: Console) -> None:
    """Print tables; those of the study first, the zoo's counts last."""
    for table in tables:
        grid = Table(title=table.title, title_justify="left")
        for column in table.rows[0]:
            grid.add_column(column, justify="right" if _is_number(table, column) else "left")
        for texts in _texts(table):
            grid.add_row(*texts)
        console.print(grid)
    if counts.get("cells"):
        console.print("zoo: " + ", ".join(f"{count} {name}" for name, count in counts.items()))


def markdown(tables: Sequence[StudyTable]) -> str:
    """Return tables as Markdown, each under its title."""
    parts = []
    for table in tables:
        columns = list(table.rows[0])
        rule = ["---:" if _is_number(table, column) else "---" for column in columns]
        lines = [columns, rule, *_texts(table)]
        parts += [f"## {table.title}", "", *("| " + " | ".join(line) + " |" for line in lines), ""]
    return "\n".join(parts)


def document(tables: Sequence[StudyTable], counts: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """Return the tables' numbers, not rounded, as a JSON document."""
    return {
        "tables": {table.name: [dict(row) for row in table.rows] for table in tables},
        "zoo": dict(counts),
        **more,
    }
