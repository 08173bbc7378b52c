"""Tables, JSON and progress bars. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from app.services.recomputing import RecomputationReport


def speaks() -> bool:
    """True in the process that tells the user: of those that torchrun started, rank 0 alone."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def print_json(document: Any) -> None:
    """Write one JSON document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2, sort_keys=True) + "\n")


def print_lines(*lines: str) -> None:
    """Write lines to standard output."""
    sys.stdout.write("".join(line + "\n" for line in lines))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Write a table to standard output; numbers are expected as text, already rounded."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds for people; a dash where there are none."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.3f} ms"


def percent(share: float | None) -> str:
    """Return a share as per cent; a dash where there is none."""
    return "-" if share is None else f"{share * 100:.1f} %"


def ratio(value: float | None) -> str:
    """Return a number with two decimals; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}"


def mebibytes(size_bytes: float | None) -> str:
    """Return bytes as MiB; a dash where there are none."""
    return "-" if size_bytes is None else f"{size_bytes / 2**20:.1f} MiB"


def recomputation_line(report: RecomputationReport) -> str:
    """Return in a line what is made again in the backward, what that costs and what it saves."""
    count = len(report.groups)
    return (
        f"made again in the backward: {count} group{'' if count == 1 else 's'}, {report.operators} of "
        f"{report.all_operators} operators; {milliseconds(report.added_s)} a step more, and "
        f"{mebibytes(report.saved_bytes)} less on the fullest device (roughly)"
    )


class TerminalProgress:
    """Implements `app.services.progress.Progress` on standard error: bars on a terminal, lines elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._tasks: list[TaskID] = []

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._tasks:
            self.end()
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._console.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    def begin(self, text: str, total: int | None) -> None:
        """Show a bar, below those of stages that this one is part of; off a terminal, one line."""
        if self._bars.disable:
            self.say(text if total is None else f"{text}: {total}")
        self._tasks.append(self._bars.add_task(text, total=total))

    def advance(self, steps: int = 1, text: str | None = None) -> None:
        """Move the bar."""
        if self._tasks:
            self._bars.update(self._tasks[-1], advance=steps, description=text)

    def end(self) -> None:
        """Take the last bar away."""
        if self._tasks:
            self._bars.remove_task(self._tasks.pop())
