"""The study's tables for people, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from scripts.benchmarks.result import cell_text, grid
from scripts.studies.tables import StudyTable


def _texts(table: StudyTable) -> list[list[str]]:
    return [[cell_text(value, table.formats.get(name)) for name, value in row.items()] for row in table.rows]


def _is_number(table: StudyTable, column: str) -> bool:
    return any(isinstance(row[column], int | float) for row in table.rows)


def print_tables(tables: Sequence[StudyTable], counts: Mapping[str, int], console: Console) -> None:
    """Print tables; those of the study first, the zoo's counts last."""
    for table in tables:
        console.print(grid(table.rows, table.formats, table.title))
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
