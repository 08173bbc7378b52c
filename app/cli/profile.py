"""`app profile`."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import options


def profile(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="A network of the zoo, or package.module:factory; may be given several times."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All networks of the zoo.")] = False,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="GPUs to measure on, such as 0-7 or 0,2.", show_default=False)
    ] = None,
    device: options.Device = None,
    devices: options.Devices = None,
    preset: options.Preset = "paper",
    batch_size: options.BatchSize = None,
    optimizer: options.Optimizer = "sgd",
    batch_norm: options.BatchNorm = "synchronized",
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure operators and links on this machine's devices into the database; what it holds is not measured again.

    Example: app profile --gpus 0-7 --model inception
    """
    from app.cli.output import TerminalProgress, print_json, print_lines
    from app.services.models import known_models
    from app.services.profiling import ProfileRequest, run_profile

    request = ProfileRequest(
        models=known_models() if everything else tuple(model or ()),
        preset=preset,
        batch_size=batch_size,
        gpus=gpus,
        processor=options.processor(device),
        devices=devices,
        optimizer=optimizer,
        batch_norm=batch_norm,
    )
    with TerminalProgress(quiet=as_json) as progress:
        report = run_profile(request, database, progress)
    if as_json:
        print_json(report.to_json())
        return
    what = f"{report.needed} operator costs on {report.devices} x {report.device_kind}"
    if report.measured == 0 and report.failed == 0:
        print_lines(f"{what}: all known already, nothing measured")
    else:
        print_lines(
            f"{what}: {report.measured} measured, {report.known} known already, {report.failed} failed"
        )
    for name in report.failed_operators:
        print_lines(f"failed: {name} (see the column failure of op_costs)")
