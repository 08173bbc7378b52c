"""The table of docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from scripts.architectures.checking import RANDOM, RANDOM_STRATEGIES, ArchitectureResult

BEGIN, END = "<!-- table: scripts/models -->", "<!-- end -->"
_LONGEST = 240


def summary(outcome: ArchitectureResult) -> str:
    """Return one line that says how an architecture did."""
    if outcome.refused is not None:
        return f"not imported: {outcome.refused}"
    failed = outcome.failures
    if not failed:
        return f"{outcome.operators} operators, equal under {len(outcome.equal)} strategies"
    return f"{outcome.operators} operators, {len(failed)} of {len(outcome.equal)} fail: {failed[0][0]}: {failed[0][1]}"


def updated(page: str, outcomes: Sequence[ArchitectureResult]) -> str:
    """Return a page with the table of `outcomes` in place of its own."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{_table(outcomes)}\n{END}{after}"


def _table(outcomes: Sequence[ArchitectureResult]) -> str:
    lines = [
        f"{sum(item.ok for item in outcomes)} of {len(outcomes)} are equal to their modules under every strategy.",
        "",
        "| architecture | operators | flops that can be split | data parallel | fsdp | random strategies |",
        "|---|---|---|---|---|---|",
        *(row(outcome) for outcome in outcomes),
    ]
    failed = [(item.name, *failure) for item in outcomes for failure in _distinct(item)]
    if failed:
        lines += ["", "What failed, and why:", "", "| architecture | where | reason |", "|---|---|---|"]
        lines += [f"| {name} | {where} | {_cell(reason)} |" for name, where, reason in failed]
    return "\n".join(lines) + "\n"


def row(outcome: ArchitectureResult) -> str:
    """Return an architecture's line of the table."""
    if outcome.refused is not None:
        return f"| {outcome.name} | refused | | | | |"
    verdicts = [reason for title, reason in outcome.equal.items() if title.startswith(RANDOM)]
    return (
        f"| {outcome.name} | {outcome.operators:,} | {(outcome.splittable or 0) * 100:.2f} % | "
        f"{_word(outcome, 'data-parallel')} | {_word(outcome, 'fsdp')} | "
        f"{verdicts.count(None)} of {RANDOM_STRATEGIES} equal |"
    )


def _word(outcome: ArchitectureResult, title: str) -> str:
    return "equal" if outcome.equal[title] is None else "**fails**"


def _distinct(outcome: ArchitectureResult) -> list[tuple[str, str]]:
    """Return the failures, but repetitions that differ in numbers alone."""
    kept: dict[str, tuple[str, str]] = {}
    for where, reason in outcome.failures:
        kept.setdefault(re.sub(r"[0-9.e+-]+", "N", reason)[:60], (where, reason))
    return list(kept.values())


def _cell(text: str) -> str:
    text = re.sub(r"\S*/site-packages/", "", text)
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return short.replace("|", "/").replace("<", "&lt;")
