"""`app compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.output import (
    TerminalProgress,
    milliseconds,
    percent,
    print_json,
    print_lines,
    print_table,
    ratio,
)
from graph.errors import UsageError

if TYPE_CHECKING:
    from app.analytics.accuracy import Accuracy
    from app.analytics.compare import ComparisonRow

ROWS = 20
"""Differences that --execution shows unless told."""


def compare(
    model: options.OfModel = None,
    topology: options.OfTopology = None,
    search: Annotated[
        int | None,
        typer.Option("--search", min=1, max=options.LARGEST_ID, help="Only strategies of this search."),
    ] = None,
    execution: Annotated[
        int | None,
        typer.Option(
            "--execution",
            min=1,
            help="Instead: where the step of this run, made with app run --profile, took longer than predicted.",
        ),
    ] = None,
    shown: Annotated[
        int | None,
        typer.Option(
            "--rows",
            min=0,
            help=f"Of --execution, show so many of the largest differences; {ROWS} unless told.",
        ),
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare predicted with measured step times of all strategies, and say how good the predictions are.

    Example: app compare --model inception

    Example: app compare --execution 3
    """

    if execution is not None:
        if (topology, search) != (None, None):
            raise UsageError(
                "--execution: is one run, must stand without --topology and --search; leave them out"
            )
        _print_attribution(execution, model, database, ROWS if shown is None else shown, as_json=as_json)
        return
    if shown is not None:
        raise UsageError(
            "--rows: is the number of differences of one run, must stand with --execution; say which run"
        )
    from app.analytics.compare import compare as compare_stored
    from app.analytics.names import graph_names, topology_names
    from app.db.store import Store

    with Store.open(database, to_read=True) as store:
        comparison = compare_stored(store.database, model, topology, search)
        if not comparison.rows and (model is not None or topology is not None):
            _refuse_filter(compare_stored(store.database).rows, model, topology)
    if as_json:
        print_json(
            {
                "strategies": [asdict(row) for row in comparison.rows],
                "accuracy": [asdict(row) for row in comparison.accuracy],
            }
        )
    elif not comparison.rows:
        print_lines("no strategy is stored yet: app search, then app run")
    else:
        topologies = topology_names(
            (row.topology_id, row.topology, row.topology_devices) for row in comparison.rows
        )
        graphs = graph_names((row.graph_id, row.model) for row in comparison.rows)
        _print_rows(comparison.rows, graphs, topologies)
        if comparison.accuracy:
            _print_accuracy(comparison.accuracy, graphs, topologies)


def _print_attribution(
    execution: int, model: str | None, database: str | None, shown: int, *, as_json: bool
) -> None:
    from app.cli.trace import print_attribution
    from app.services.models.models import name_own_model
    from app.services.timeline.trace import attribution_of

    name_own_model(model)
    with TerminalProgress(quiet=as_json) as progress:
        attribution = attribution_of(execution, database, progress)
    if as_json:
        print_json(attribution.to_json())
    else:
        print_attribution(attribution, shown)


def _print_rows(
    rows: Sequence[ComparisonRow], graphs: Mapping[int, str], topologies: Mapping[int, str]
) -> None:
    # A table for each graph, topology and training: one table of all would be wider than terminals.
    has_parts = any((row.micro_batches or 1) > 1 for row in rows)
    for title, group in groupby(
        rows, lambda row: _title(row, graphs[row.graph_id], topologies[row.topology_id])
    ):
        alike = list(group)
        print_table(
            [
                "strategy",
                "source",
                *(("M", "schedule") if has_parts else ()),
                "predicted",
                "measured",
                "noise",
                "error",
                "samples/s",
                "speedup",
                "runs",
            ],
            [
                [
                    row.strategy[:12],
                    row.source,
                    *((row.micro_batches or "-", row.schedule or "-") if has_parts else ()),
                    milliseconds(row.predicted_s),
                    milliseconds(row.measured_median_s),
                    milliseconds(row.measured_noise_s),
                    percent(row.relative_error),
                    _both(row.predicted_throughput_samples_per_s, row.measured_throughput_samples_per_s),
                    _both(row.predicted_speedup, row.measured_speedup),
                    row.executions,
                ]
                for row in alike
            ],
            title=title,
        )
        _print_scheduling(alike)
    restless = [row for row in rows if row.is_restless]
    if restless:
        print_table(
            [
                "restless by over 10 %: others, or speed",
                "measured",
                "less what they took",
                "error then",
                "speed",
                "at equal speed",
                "error then",
            ],
            [
                [
                    row.strategy[:12],
                    milliseconds(row.measured_median_s),
                    milliseconds(row.measured_undisturbed_s),
                    percent(row.relative_error_undisturbed),
                    "-" if row.measured_speed is None else f"{row.measured_speed:.2f}",
                    milliseconds(row.measured_at_usual_speed_s),
                    percent(row.relative_error_at_usual_speed),
                ]
                for row in restless
            ],
        )
    if has_parts:
        print_lines("M: micro-batches of a step, and the schedule in which stages work on them;")
    print_lines(
        "measured: median step of the newest run; noise: what repeating moves it by;",
        "error: (predicted - measured) / measured; samples/s and speedup: predicted / measured;",
        f"speedup is over data parallelism {'in as many micro-batches, ' if has_parts else ''}on the same model, "
        "topology and training;",
        "E and S: scheduling efficiency and speed-up potential (TicTac), predicted / of the run's recorded steps.",
    )


def _print_scheduling(rows: Sequence[ComparisonRow]) -> None:
    """Print E and S in a table of their own, where any are stored: that of times is as wide as a terminal."""
    cells = [
        [
            row.strategy[:12],
            _both(row.predicted_scheduling_efficiency, row.recorded_scheduling_efficiency),
            _both(row.predicted_speedup_potential, row.recorded_speedup_potential),
        ]
        for row in rows
    ]
    stored = [row for row in cells if row[1:] != [_both(None, None)] * 2]
    if stored:
        print_table(["strategy", "E", "S"], stored)


def _title(row: ComparisonRow, graph: str, topology: str) -> str:
    return f"{graph} on {topology}, batch size {_training(row)}"


def _training(row: ComparisonRow | Accuracy) -> str:
    """Return batch size, precision and optimizer of a row's step: "64, float32, sgd"; a batch norm if it is unusual."""
    usual = row.batch_norm == "synchronized"
    return f"{row.batch_size}, {row.precision}, {row.optimizer}{'' if usual else f', {row.batch_norm} batch norm'}"


def _training_in_parts(row: Accuracy) -> str:
    """Return a row's training in words, and its number of micro-batches where there are several."""
    parts = "" if row.micro_batches in (None, 1) else f", {row.micro_batches} micro-batches"
    return f"{_training(row)}{parts}"


def _both(predicted: float | None, measured: float | None) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.2f}"

    return f"{shown(predicted)} / {shown(measured)}"


def _print_accuracy(
    accuracy: Sequence[Accuracy], graphs: Mapping[int, str], topologies: Mapping[int, str]
) -> None:
    print_table(
        ["model", "topology", "batch, training", "strategies", "mean", "median", "95 %", "worst", "bias", "noise",
         "tau", "pairs", "choice"],
        [
            [
                graphs[row.graph_id],
                topologies[row.topology_id],
                _training_in_parts(row),
                row.strategies,
                percent(row.mean_error),
                percent(row.median_error),
                percent(row.p95_error),
                percent(row.worst_error),
                percent(row.bias),
                percent(row.noise),
                ratio(row.kendall_tau),
                row.pairs,
                percent(row.loss_of_choice),
            ]
            for row in accuracy
        ],
        title="errors of the predictions of strategies that were run",
    )  # fmt: skip
    taus = [row.kendall_tau for row in accuracy if row.kendall_tau is not None]
    if len(accuracy) > 1:
        mean = sum(row.mean_error for row in accuracy) / len(accuracy)
        worst = max(row.mean_error for row in accuracy)
        tau = f"; tau: mean {ratio(sum(taus) / len(taus))}, worst {ratio(min(taus))}" if taus else ""
        print_lines(f"over these {len(accuracy)}: mean error {percent(mean)}, worst {percent(worst)}{tau}")
    print_lines(
        "tau: Kendall's, over pairs of strategies that differ by more than their noise;",
        "choice: how much longer the strategy of the lowest prediction takes than the fastest.",
        "app compare --execution N: where a run made with --profile lost its time.",
    )


def _refuse_filter(rows: Sequence[ComparisonRow], model: str | None, topology: str | None) -> None:
    """Raise an error that names the stored networks or topologies, if there are any."""

    for option, name, stored in (
        ("--model", model, sorted({row.model for row in rows})),
        ("--topology", topology, sorted({row.topology for row in rows})),
    ):
        if rows and name is not None and name not in stored:
            raise UsageError(
                f"{option}: is {name}, must have a stored strategy; strategies are stored for {', '.join(stored)}"
            )
