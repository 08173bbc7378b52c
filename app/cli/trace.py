"""`app trace`."""

from __future__ import annotations

from pathlib import Path
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
    scheduling_line,
)
from graph.texts import counted

if TYPE_CHECKING:
    from app.services.timeline.attribution import Attribution
    from app.services.timeline.trace import TraceReport


def trace(
    execution: Annotated[
        int | None,
        typer.Option(
            "--execution",
            min=1,
            help="A run that recorded its steps (app run --profile): measured beside simulated.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help="A stored strategy's id or digest: simulated, and beside it its newest recorded run.",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            help="Of a strategy that was simulated on several: the name of the one meant. Default: the newest.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="File to write.", writable=True)] = Path(
        "trace.json"
    ),
    rows: Annotated[int, typer.Option("--rows", min=0, help="Show so many of the largest differences.")] = 20,
    model: options.OwnModel = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the timeline of a strategy's step as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

    Of a run that recorded its steps, the measured timeline stands beside the simulated one, and a table says which
    operators, waits and copies took longer than predicted.

    Example: app trace --execution 3 --output trace.json
    """
    from app.services.models.models import name_own_model
    from app.services.timeline.trace import TraceRequest
    from app.services.timeline.trace import trace as write_trace

    name_own_model(model)
    with TerminalProgress(quiet=as_json) as progress:
        report = write_trace(TraceRequest(execution, strategy, topology, output), database, progress)
    if as_json:
        print_json(report.to_json())
        return
    _print(report, rows)


def _print(report: TraceReport, rows: int) -> None:
    if report.attribution is not None:
        print_attribution(report.attribution, rows)
    step = report.step
    if report.attribution is None:
        print_lines(scheduling_line(step.simulation.scheduling))
    print_lines(
        f"{step.graph.name} on {counted(len(step.topology.devices), 'device')} of {step.topology.name}, "
        f"strategy {step.record.digest[:12]}, simulated step {milliseconds(step.simulation.step_time_s)}",
        f"{report.events} events written to {report.file}; open it in ui.perfetto.dev",
    )


def print_attribution(attribution: Attribution, rows: int) -> None:
    """Print where a step took longer than predicted: the sums of each kind, then the largest rows."""

    columns = ["kind", "predicted", "measured", "difference", "of the step"]
    whole = attribution.measured_s

    def cells(predicted_s: float, measured_s: float) -> list[object]:
        difference = measured_s - predicted_s
        return [
            milliseconds(predicted_s),
            milliseconds(measured_s),
            f"{difference * 1e3:+.3f} ms",
            percent(difference / whole),
        ]

    print_table(
        columns,
        [
            *([row.kind, *cells(row.predicted_s, row.measured_s)] for row in attribution.by_kind),
            ["step", *cells(attribution.predicted_s, attribution.measured_s)],
        ],
        title=f"execution {attribution.execution_id}: mean of {attribution.recorded_steps} recorded steps",
    )
    if rows:
        print_table(
            [columns[0], "what", *columns[1:]],
            [
                [row.kind, row.subject, *cells(row.predicted_s, row.measured_s)]
                for row in attribution.rows[:rows]
            ],
            title="largest differences",
        )
    print_lines(
        "means over the devices; the differences of all rows add up to that of the step",
        scheduling_line(attribution.predicted, attribution.recorded),
    )
