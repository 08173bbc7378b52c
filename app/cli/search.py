"""`app search`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options

if TYPE_CHECKING:
    from app.services.searching import SearchReport


def search(
    model: options.Model,
    topology: options.Topology = "local",
    devices: options.Devices = None,
    nodes: options.Nodes = None,
    device: options.Device = None,
    preset: options.Preset = "paper",
    batch_size: options.BatchSize = None,
    precision: options.Precision = "float32",
    optimizer: options.Optimizer = "sgd",
    batch_norm: options.BatchNorm = "synchronized",
    proposals: Annotated[int, typer.Option("--proposals", min=0, help="Budget, all chains together.")] = 4000,
    chains: Annotated[int, typer.Option("--chains", min=1, help="Number of Markov chains.")] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed and database, same strategy.")] = 0,
    beta: Annotated[
        float, typer.Option("--beta", min=0.0, help="Inverse temperature of the acceptance.")
    ] = 300.0,
    order: Annotated[str, typer.Option("--order", help="Order on a resource: program or fifo.")] = "program",
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time", help="Stop after SECONDS; such a result cannot be reproduced.", show_default=False
        ),
    ] = None,
    on_miss: Annotated[
        str | None,
        typer.Option(
            "--on-miss",
            help="A cost not stored: measure, estimate or fail. Default: measure on topology local, else estimate.",
            show_default=False,
        ),
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Search a fast strategy for a model on a topology, and store it with every proposal.

    Example: app search --model inception --topology p100-cluster --batch-size 64
    """
    from app.cli.output import TerminalProgress, print_json
    from app.services.costs import ON_MISS
    from app.services.models import requested_model
    from app.services.searching import SearchRequest, run_search
    from graph.errors import UsageError

    if on_miss is not None and on_miss not in ON_MISS:
        raise UsageError(f"--on-miss: is {on_miss}, must be one of {', '.join(ON_MISS)}; choose one of them")
    request = SearchRequest(
        model=requested_model(model, preset, batch_size),
        topology=topology,
        devices=devices,
        nodes=nodes,
        processor=options.processor(device),
        precision=precision,
        optimizer=optimizer,
        batch_norm=batch_norm,
        proposals=proposals,
        chains=chains,
        seed=seed,
        beta=beta,
        order=order,  # type: ignore[arg-type]  # run_search checks it
        time_limit_s=time_limit,
        on_miss=on_miss,
    )
    with TerminalProgress(quiet=as_json) as progress:
        if time_limit is not None:
            progress.warn(
                "--time: how far the search comes depends on this machine's speed, so it is not reproducible"
            )
        report = run_search(request, database, progress)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
        if topology == "local":
            _print_next(report, model, preset, batch_size, device, devices)


def _print_next(
    report: SearchReport,
    model: str,
    preset: str,
    batch_size: int | None,
    device: str | None,
    devices: int | None,
) -> None:
    """Print the command that runs what was found."""
    from app.cli.output import print_lines

    given = [
        ("--preset", preset if preset != "paper" else None),
        ("--batch-size", batch_size),
        ("--device", device),
        ("--devices", devices),
    ]
    words = ["app run --model", model, *(f"{name} {value}" for name, value in given if value is not None)]
    print_lines("run it: " + " ".join([*words, f"--strategy {report.best.digest[:12]}"]))


def _print(report: SearchReport) -> None:
    from app.cli.output import mebibytes, milliseconds, percent, print_lines, print_table

    rate = report.proposals / report.seconds if report.seconds > 0 else 0.0
    print_lines(
        f"search {report.search_id}: {report.model}, batch size {report.batch_size}, on {report.devices} devices of "
        f"{report.topology}",
        f"{report.proposals} proposals, {report.accepted} accepted, {report.seconds:.1f} s ({rate:.0f} a second)"
        + ("; interrupted, the best so far is kept" if report.interrupted else ""),
    )
    reference = next(one for one in report.predictions if one.name == "data-parallel")
    print_table(
        [
            "strategy",
            "id",
            "predicted step",
            "samples/s",
            "vs data parallel",
            "measured",
            "estimated",
            "data sheet",
            "bytes moved",
            "peak memory",
        ],
        [
            [
                one.name,
                one.strategy_id,
                milliseconds(one.step_time_s),
                f"{one.throughput:.1f}",
                f"{reference.step_time_s / one.step_time_s:.2f} x",
                percent(one.shares["measured"]),
                percent(one.shares["estimated"]),
                percent(one.shares["datasheet"]),
                mebibytes(one.bytes_moved),
                mebibytes(max(one.peak_memory_bytes)) + ("" if one.feasible else " (does not fit)"),
            ]
            for one in report.predictions
        ],
    )
    print_lines("measured, estimated, data sheet: the share of the predicted busy time that rests on each.")
    if report.unsplit:
        print_lines(
            f"{len(report.unsplit)} operators have no rule or sizes that do not factor: see app models show"
        )
