"""Tables, JSON and progress bars. Results go to standard output, everything else to standard error.

It is imported with every command, and so imports rich only where it draws.

No other module of the command line prints: what is printed here steers no terminal (`app.cli.text`), and no text in it
is markup of rich's.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from app.cli.text import printable
from app.services.progress import Progress
from graph.texts import counted, ranges

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.text import Text

    from app.services.predict.all_reduces import ShownAllReduce
    from app.services.predict.recomputation_report import RecomputationReport
    from app.services.timeline.recorded_scheduling import RecordedScheduling
    from search.simulate.scheduling import Scheduling


# Below so many letters a column of a table says nothing; a table in a file or a pipe is as wide as a wide terminal.
_NARROWEST = 10
WIDTH_OF_FILES = 160


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            sys.stderr.write(f"{printable(record.getMessage())}\n")


_log_lines = _LogLines(logging.WARNING)


def print_log() -> None:
    """Write the log of Soapstone's modules, warnings of waiting for a lock among it, to standard error."""
    logging.getLogger("app").addHandler(_log_lines)


def print_json(document: Any) -> None:
    """Write one JSON document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2, sort_keys=True) + "\n")


def print_lines(*lines: str) -> None:
    """Write lines to standard output."""
    sys.stdout.write("".join(printable(line) + "\n" for line in lines))


def data_output() -> TextIO:
    """Return the file for CSV and JSON: standard output; on a terminal, text without control characters."""
    return cast(TextIO, _Terminal()) if sys.stdout.isatty() else sys.stdout


class _Terminal:
    def write(self, text: str) -> int:
        return sys.stdout.write("\n".join(map(printable, text.split("\n"))))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    title: str | None = None,
    *,
    right: Collection[int] = (),
    cut: bool = False,
) -> None:
    """Write a table to standard output; numbers are expected as text, already rounded.

    Where its columns would be too narrow to read, each row is a block of lines, as psql does by "\\x auto".

    Args:
        columns: their names.
        rows: their cells.
        title: stands above.
        right: numbers of the columns that are flush right.
        cut: keep a cell in one line, and say that it was cut, rather than fold it.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, highlight=False)
    names = [Text(printable(name)) for name in columns]
    cells = [[Text(printable(str(cell))) for cell in row] for row in rows]
    heading = None if title is None else Text(printable(title), style="italic")
    widths = _widths(names, cells, console.width, cut=cut)
    if widths is None:
        _print_blocks(console, names, cells, heading, cut=cut)
        return
    table = Table(title=heading, title_justify="left")
    for number, (name, width) in enumerate(zip(names, widths, strict=True)):
        table.add_column(
            name,
            justify="right" if number in right else "left",
            width=width,
            no_wrap=cut,
            overflow="ellipsis" if cut else "fold",
        )
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _widths(names: list[Text], cells: list[list[Text]], width: int, *, cut: bool) -> list[int] | None:
    """Return a width for each column, the widest made narrower until all fit; None where words would not fit."""
    columns = list(zip(names, *cells, strict=True))
    wanted = [max(cell.cell_len for cell in column) for column in columns]
    words = wanted if cut else [max(map(_longest_word, column)) for column in columns]
    least = [min(length, _NARROWEST) for length in words]
    # A line and two spaces for each column, and the last line.
    left = width - 3 * len(columns) - 1
    if sum(least) > left:
        return None
    widest = max(wanted, default=0)
    while (
        sum(fitted := [max(low, min(want, widest)) for low, want in zip(least, wanted, strict=True)]) > left
    ):
        widest -= 1
    return fitted


def _longest_word(text: Text) -> int:
    from rich.cells import cell_len

    return max((cell_len(word) for word in text.plain.split()), default=0)


def _print_blocks(
    console: Console, names: list[Text], cells: list[list[Text]], title: Text | None, *, cut: bool
) -> None:
    """Print a line for each cell, and where nothing is in the table its columns alone."""
    from rich.text import Text

    if title is not None:
        console.print(title)
    longest = max(name.cell_len for name in names)
    if not cells:
        console.print(Text(", ".join(name.plain for name in names)), soft_wrap=True)
    for number, row in enumerate(cells, 1):
        console.print(Text(f"row {number}", style="bold"))
        for name, cell in zip(names, row, strict=True):
            line = Text.assemble("  ", name, " " * (longest - name.cell_len + 2), cell)
            if cut:
                line.truncate(console.width, overflow="ellipsis")
            console.print(line, soft_wrap=True)


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds for people; a dash where there are none."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.3f} ms"


def percent(share: float | None) -> str:
    """Return a share as per cent; a dash where there is none."""
    return "-" if share is None else f"{share * 100:z.1f} %"


def ratio(value: float | None) -> str:
    """Return a number with two decimals; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}"


def byte_size(size_bytes: float | None) -> str:
    """Return bytes as MiB, few as KiB; a dash where there are none."""
    if size_bytes is None:
        return "-"
    if 0 < abs(size_bytes) < 2**20 / 10:
        return f"{size_bytes / 2**10:.1f} KiB"
    return f"{size_bytes / 2**20:.1f} MiB"


def compiled_line(stretches: Sequence[Sequence[str]]) -> str:
    """Return in a line which stretches are compiled, by the first and the last operator of each."""
    return "compiled: " + ", ".join(f"{first} to {last}" for first, last in stretches)


def device_ranges(devices: Sequence[int]) -> str:
    """Return devices in the order of the tasks, runs of consecutive devices as first-last."""
    shown = ranges(devices)
    return ", ".join(shown if len(shown) <= 8 else [*shown[:7], f"... ({len(devices)})"])


def all_reduce_lines(entries: Sequence[ShownAllReduce]) -> list[str]:
    """Return in a line for each group of devices which algorithms its all-reduces have."""
    by_devices: dict[tuple[int, ...], list[str]] = {}
    for entry in entries:
        size = f" from {entry.from_bytes:,} bytes" if entry.from_bytes else ""
        by_devices.setdefault(entry.devices, []).append(entry.algorithm + size)
    return [
        f"all-reduces over devices {device_ranges(devices)}: {', '.join(algorithms)}"
        for devices, algorithms in by_devices.items()
    ]


def synchronization_lines(document: Mapping[str, Any]) -> list[str]:
    """Return a line on how weights are synchronized (`synchronization_to_json`), where not as by default."""
    if not document:
        return []
    from graph.synchronization import synchronization_from_json

    return [f"synchronization: {synchronization_from_json(document).text}"]


def micro_batch_lines(document: Mapping[str, Any]) -> list[str]:
    """Return a line on a strategy's micro-batches (`micro_batch_report`); none where it has only one."""
    if not document:
        return []
    line = f"micro-batches: {document['count']}, schedule {document['schedule']}"
    if document.get("credits"):
        line += f", credits {' '.join(map(str, document['credits']))}"
    if document.get("gradients"):
        line += f", gradients summed in {document['gradients']}"
    stages, samples = document.get("stages"), document.get("samples")
    if stages is not None:
        line += f", {counted(stages, 'stage')}"
    if samples is not None:
        line += f"; {counted(samples, 'sample')} each"
    return [line]


def scheduling_line(predicted: Scheduling, recorded: RecordedScheduling | None = None) -> str:
    """Return TicTac's scheduling efficiency and speed-up potential of a step in a line, as predicted and recorded."""
    efficiency, potential = percent(predicted.efficiency), ratio(predicted.speedup_potential)
    if recorded is not None:
        efficiency += f" predicted, {percent(recorded.efficiency)} recorded"
        potential += f" predicted, {ratio(recorded.speedup_potential)} recorded"
    return f"scheduling efficiency {efficiency}; speed-up potential {potential}"


def recomputation_line(report: RecomputationReport) -> str:
    """Return in a line the extent of recomputation, its time and the memory that it saves."""
    count, saved = len(report.groups), report.saved_bytes
    return (
        f"made again in the backward: {counted(count, 'group')}, {report.operators} of "
        f"{report.all_operators} operators; {milliseconds(report.added_s)} a step more, and "
        f"{byte_size(abs(saved))} {'more' if saved < 0 else 'less'} on the fullest device (roughly)"
    )


class TerminalProgress(Progress):
    """Shows progress on standard error, of the ranks of torchrun by rank 0 alone: bars on a terminal, else lines."""

    def __init__(self, *, quiet: bool = False) -> None:
        from rich import progress
        from rich.console import Console

        quiet = quiet or (os.environ.get("RANK", "0") != "0" and "WORLD_SIZE" in os.environ)
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bars = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
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
        self._console.print(printable(text), markup=False, emoji=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        warning = f"warning: {printable(text)}"
        self._console.print(warning, style="yellow", markup=False, emoji=False, soft_wrap=True)

    def begin(self, text: str, total: int | None) -> None:
        """Show a bar, below those of the stages that it is part of; off a terminal, one line."""
        if self._bars.disable:
            self.say(text if total is None else f"{text}: {total}")
        self._tasks.append(self._bars.add_task(printable(text), total=total))

    def advance(self, steps: int = 1, text: str | None = None) -> None:
        """Move the bar."""
        if self._tasks:
            shown = None if text is None else printable(text)
            self._bars.update(self._tasks[-1], advance=steps, description=shown)

    def end(self) -> None:
        """Take the last bar away."""
        if self._tasks:
            self._bars.remove_task(self._tasks.pop())
