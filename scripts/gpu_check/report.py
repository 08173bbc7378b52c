"""The report of a GPU check: a JSON file, to which each piece adds its result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Before a row, and before a result, on the standard output of a piece's process.
ROW, RESULT = "gpu-check row: ", "gpu-check result: "


@dataclass(frozen=True, slots=True)
class PieceResult:
    """The result of a piece.

    passed: whether all of it is as it must be; None: nothing could be checked, for the reason in `summary`.
    summary: one line. rows: figures, of equal keys. seconds: how long it took.
    """

    passed: bool | None
    summary: str
    rows: Sequence[Row] = field(default_factory=list)
    seconds: float = 0.0


def add_row(rows: list[Row], row: Row) -> None:
    """Add a row, and print it: the rows of a piece that is ended, or ends itself, stay in the report."""
    rows.append(row)
    print(ROW + json.dumps(row, default=str), flush=True)


def printed_result(lines: Iterable[str], end: str) -> PieceResult:
    """Return the result that a piece's process has printed; where it has not, its rows, and its `end`."""
    rows: list[Row] = []
    for line in lines:
        if not line.endswith("\n"):
            break  # the process was ended while it printed
        if line.startswith(RESULT):
            return PieceResult(**json.loads(line.removeprefix(RESULT)))
        if line.startswith(ROW):
            rows.append(json.loads(line.removeprefix(ROW)))
    failed = [row["error"] for row in rows if row.get("error")]
    seen = (
        f"; {len(rows)} rows until then" + (f", first error: {failed[0]}" if failed else "") if rows else ""
    )
    return PieceResult(passed=False, summary=end + seen, rows=rows)


def judged(rows: Sequence[Row], what: str) -> PieceResult:
    """Return the result of rows with an `error` each, empty where all is well; `what` they are then."""
    failed = [row for row in rows if row.get("error")]
    summary = f"{len(rows) - len(failed)} of {len(rows)} {what}"
    return PieceResult(not failed, summary + (f"; first: {failed[0]['error']}" if failed else ""), rows)


def read_report(file: Path) -> dict[str, Any]:
    """Return the report in a file, or an empty one where there is no file.

    Raises:
        ValueError: what the file holds is no report.
    """
    if not file.is_file():
        return {}
    report = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(report, dict) or not isinstance(report.get("pieces"), dict):
        raise ValueError("it has no pieces")
    return report


def add_to_report(file: Path, facts: dict[str, Any], piece: str, result: PieceResult) -> None:
    """Write a piece's result into the report, which is begun where there is none, or one of another machine."""
    report = read_report(file)
    if report.get("facts") != facts:
        report = {"facts": facts, "pieces": {}}
    report["pieces"][piece] = asdict(result)
    # In one step: an interruption leaves the report of the pieces before.
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.write_text(json.dumps(report, indent=1, sort_keys=True, default=str) + "\n", encoding="utf-8")
    unfinished.replace(file)


def line_of(piece: str, result: PieceResult) -> str:
    """Return a result as one line."""
    state = {True: "passed", False: "FAILED", None: "not checked"}[result.passed]
    return f"{piece:12} {state:12} {result.seconds:6.0f} s  {result.summary}"
