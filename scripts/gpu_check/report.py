"""The report of a GPU check: a JSON file, to which each piece adds its result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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


def judged(rows: Sequence[Row], what: str) -> PieceResult:
    """Return the result of rows with an `error` each, empty where all is well; `what` they are then."""
    failed = [row for row in rows if row.get("error")]
    summary = f"{len(rows) - len(failed)} of {len(rows)} {what}"
    return PieceResult(not failed, summary + (f"; first: {failed[0]['error']}" if failed else ""), rows)


def add_to_report(file: Path, facts: dict[str, Any], piece: str, result: PieceResult) -> None:
    """Write a piece's result into the report, which is begun where there is none, or one of another machine."""
    report: dict[str, Any] = {}
    if file.is_file():
        report = json.loads(file.read_text(encoding="utf-8"))
    if report.get("facts") != facts:
        report = {"facts": facts, "pieces": {}}
    report["pieces"][piece] = asdict(result)
    file.write_text(json.dumps(report, indent=1, sort_keys=True, default=str) + "\n", encoding="utf-8")


def line_of(piece: str, result: PieceResult) -> str:
    """Return a result as one line."""
    state = {True: "passed", False: "FAILED", None: "not checked"}[result.passed]
    return f"{piece:12} {state:12} {result.seconds:6.0f} s  {result.summary}"
