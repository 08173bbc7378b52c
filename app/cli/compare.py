"""`app compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options

if TYPE_CHECKING:
    from app.analytics.compare import ComparisonRow


def compare(
    model: Annotated[
        str | None, typer.Option("--model", help="Only this network (a graph's name).", show_default=False)
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", help="Only this topology (its name).", show_default=False)
    ] = None,
    search: Annotated[
        int | None, typer.Option("--search", help="Only strategies of this search.", show_default=False)
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare predicted with measured step times of all strategies that were run; a DuckDB query.

    Example: app compare --model inception
    """
    from app.analytics.compare import compare as compare_stored
    from app.cli.output import milliseconds, percent, print_json, print_lines, print_table, ratio
    from app.db.store import Store

    with Store.open(database) as store:
        rows = compare_stored(store.database, model, topology, search)
        if not rows and (model is not None or topology is not None):
            _refuse_filter(compare_stored(store.database), model, topology)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if not rows:
        print_lines("no strategy is stored yet: app search, then app run")
        return
    print_table(
        [
            "model",
            "topology",
            "batch",
            "strategy",
            "source",
            "predicted",
            "measured",
            "error",
            "predicted/s",
            "measured/s",
            "speedup",
            "predicted",
            "runs",
        ],
        [
            [
                row.model,
                row.topology,
                row.batch_size,
                row.strategy[:12],
                row.source,
                milliseconds(row.predicted_s),
                milliseconds(row.measured_median_s),
                percent(row.relative_error),
                ratio(row.predicted_throughput_samples_per_s),
                ratio(row.measured_throughput_samples_per_s),
                ratio(row.measured_speedup),
                ratio(row.predicted_speedup),
                row.executions,
            ]
            for row in rows
        ],
    )
    print_lines(
        "measured: median step of the newest run; error: (predicted - measured) / measured; /s: samples a second;",
        "speedup: over data parallelism on the same model, topology and batch size, measured and predicted.",
    )


def _refuse_filter(rows: Sequence[ComparisonRow], model: str | None, topology: str | None) -> None:
    """Raise an error that names what is stored, if anything is."""
    from graph.errors import UsageError

    for option, given, known in (
        ("--model", model, sorted({row.model for row in rows})),
        ("--topology", topology, sorted({row.topology for row in rows})),
    ):
        if rows and given is not None and given not in known:
            raise UsageError(
                f"{option}: is {given}, must have a stored strategy; strategies are stored for {', '.join(known)}"
            )
