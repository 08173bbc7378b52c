"""`app report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli import options
from app.cli.output import TerminalProgress, print_json, print_lines


def report(
    output: Annotated[Path, typer.Option("--output", help="File to write.", writable=True)] = Path(
        "report.html"
    ),
    model: options.OfModel = None,
    topology: options.OfTopology = None,
    search: Annotated[
        int | None, typer.Option("--search", min=1, max=options.LARGEST_ID, help="Only this search's curve.")
    ] = None,
    execution: Annotated[
        int | None,
        typer.Option(
            "--execution",
            min=1,
            help="Draw this run's step. Default: the newest run that recorded its steps, else the newest run.",
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="Draw the step of this strategy: its id or digest.")
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Write one HTML file that opens offline: searches, predicted against measured, timeline, strategy, memory, costs.

    Needs plotly and Jinja2: pip install 'soapstone[report]'.

    Example: app report --model inception --output report.html
    """
    from app.services.models.models import name_own_model
    from app.services.report.report import ReportRequest, write_report

    if model is not None and ":" in model:
        name_own_model(model)
    request = ReportRequest(output, model, topology, search, execution, strategy)
    with TerminalProgress(quiet=as_json) as progress:
        written = write_report(request, database, progress)
    if as_json:
        print_json(written.to_json())
        return
    print_lines(f"{len(written.drawn)} figures written to {written.file} ({written.size_bytes / 1e6:.1f} MB)")
    for name, reason in written.left_out:
        print_lines(f"without {name}: {reason}")
