"""The result of a benchmark, and its tables."""

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from rich.console import Console
from rich.table import Table

CellValue = str | int | float | None
Row = dict[str, CellValue]


class MeasuredValue(TypedDict):
    """One measured value and, where there is one, the target that it must not exceed or fall below."""

    name: str
    value: float
    unit: str
    at_most: float | None
    at_least: float | None


class BenchmarkResult(TypedDict):
    """The outcome of one benchmark; `conditions` says under which counts and sizes it was measured.

    table: rows of equal columns, where the figures are many of a kind. parts: as many more, of what these consist of.
    formats: how a column's numbers are printed, as of `format`.
    """

    benchmark: str
    conditions: dict[str, str | int | float]
    measurements: list[MeasuredValue]
    table: NotRequired[Sequence[Mapping[str, CellValue]]]
    parts: NotRequired[Sequence[Mapping[str, CellValue]]]
    formats: NotRequired[dict[str, str]]


def measurement(
    name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
) -> MeasuredValue:
    """Return one measured value with its target, if any."""
    return MeasuredValue(name=name, value=value, unit=unit, at_most=at_most, at_least=at_least)


def percentile(shares: Sequence[float], quantile: float) -> float:
    """Return a quantile of some shares, in percent."""
    import numpy as np

    return 100 * float(np.quantile(shares, quantile))


def quantiles(
    name: str, shares: Sequence[float], *, median: float | None, p90: float | None
) -> list[MeasuredValue]:
    """Return median and 90th percentile of some shares, in percent, with the most that each may be, if any."""
    return [
        measurement(f"{name}: median", percentile(shares, 0.5), "%", at_most=median),
        measurement("    90th percentile", percentile(shares, 0.9), "%", at_most=p90),
    ]


def meets_target(measured: MeasuredValue) -> bool:
    """Return whether a value keeps within its target; one without a target does."""
    at_most, at_least = measured["at_most"], measured["at_least"]
    return (at_most is None or measured["value"] <= at_most) and (
        at_least is None or measured["value"] >= at_least
    )


def target_text(measured: MeasuredValue) -> str:
    """Return a target as text, such as `<= 0.5 s`, or a dash where there is none."""
    parts = [
        f"{sign} {bound:g} {measured['unit']}"
        for sign, bound in (("<=", measured["at_most"]), (">=", measured["at_least"]))
        if bound is not None
    ]
    return ", ".join(parts) or "-"


def show(result: BenchmarkResult, console: Console) -> None:
    """Print a result as a table: each measured value beside its target."""
    conditions = ", ".join(f"{name} {value}" for name, value in result["conditions"].items())
    table = Table(title=f"{result['benchmark']} ({conditions})", title_justify="left")
    for column in ("what", "measured", "target", "met"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for measured in result["measurements"]:
        has_target = measured["at_most"] is not None or measured["at_least"] is not None
        met = ("yes" if meets_target(measured) else "no") if has_target else "-"
        table.add_row(
            measured["name"], f"{measured['value']:.4g} {measured['unit']}", target_text(measured), met
        )
    console.print(table)
    for rows in (result.get("table"), result.get("parts")):
        if rows:
            console.print(grid(rows, result.get("formats", {})))


def grid(
    rows: Sequence[Mapping[str, CellValue]], formats: Mapping[str, str], title: str | None = None
) -> Table:
    """Return rows of equal columns as a table to print; all but the first column are aligned by their ends."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == next(iter(rows[0])) else "right")
    for row in rows:
        table.add_row(*(cell_text(value, formats.get(column)) for column, value in row.items()))
    return table


def number(row: Mapping[str, CellValue], column: str) -> float:
    """Return the number in a column of a row."""
    value = row[column]
    if not isinstance(value, int | float):
        raise TypeError(f"{column}: is {value!r}, must be a number")
    return float(value)


def cell_text(value: CellValue, style: str | None) -> str:
    """Return a value as text; a dash where it is not known."""
    if value is None:
        return "-"
    return f"{value:{style}}" if style is not None and not isinstance(value, str) else str(value)
