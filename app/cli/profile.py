"""`app profile`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.output import TerminalProgress, percent, print_json, print_lines
from graph.errors import UsageError

if TYPE_CHECKING:
    from app.services.costs.profile import KindReport

# So many distinct failures are printed; the rest is in the database.
MOST_FAILURES = 10


def profile(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="A network of the zoo, or package.module:factory; may be given several times."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All networks of the zoo.")] = False,
    gpus: options.Gpus = None,
    device: options.Device = None,
    devices: options.Devices = None,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            help="For searches over its devices: local (those measured on, and their links), a packaged or measured "
            "topology or a YAML file with devices of the kind measured on.",
        ),
    ] = "local",
    nodes: options.Nodes = None,
    preset: options.Preset = "paper",
    batch_size: options.BatchSize = None,
    micro_batches: options.MicroBatches = 1,
    precision: options.Precision = "float32",
    optimizer: options.Optimizer = "sgd",
    batch_norm: options.BatchNorm = "synchronized",
    products: Annotated[
        int,
        typer.Option(
            "--products",
            min=0,
            help="Measure also so many matrix products of sizes between the networks'. Others are then "
            "estimated better.",
        ),
    ] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Measure nothing but whether devices of one kind agree; a slow one is named."
        ),
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Try calls again whose measurement failed in an earlier run."),
    ] = False,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure operators and links on this machine's devices into the database; what it holds is not measured again.

    Devices of one kind are compared first; one that is slower than the others is named, and measures nothing.

    Example: app profile --gpus 0-7 --model inception

    Example: app profile --gpus 0-7 --model inception --topology hgx-h100
    """
    from app.services.costs.profile import ProfileRequest, run_check, run_profile
    from app.services.costs.topologies import LOCAL
    from app.services.models.models import known_models

    if check and (model or everything or retry_failed or products or topology != LOCAL or nodes is not None):
        raise UsageError(
            "--check: was given with --model, --all, --topology, --nodes, --products or --retry-failed, must stand "
            "alone; leave one of them out"
        )
    request = ProfileRequest(
        models=known_models() if everything else tuple(model or ()),
        preset=preset,
        batch_size=batch_size,
        micro_batches=micro_batches,
        precision=precision,
        gpus=gpus,
        processor=options.processor(device),
        devices=devices,
        optimizer=optimizer,
        batch_norm=batch_norm,
        retry_failed=retry_failed,
        topology=None if topology == LOCAL else topology,
        nodes=nodes,
        products=products,
    )
    with TerminalProgress(quiet=as_json) as progress:
        report = run_check(request, progress) if check else run_profile(request, database, progress)
    if as_json:
        print_json(report.to_json())
        return
    for kind in report.kinds:
        if not check:
            _print_counts(kind)
        _print_agreement(kind)


def _print_counts(report: KindReport) -> None:
    calls = f"{report.needed} operator costs on {len(report.devices)} x {report.device_kind}"
    if report.measured == 0 and not report.failures:
        print_lines(f"{calls}: all known already, nothing measured")
    else:
        print_lines(
            f"{calls}: {report.measured} measured, {report.known} known already, {len(report.failures)} failed"
        )
    if report.again:
        print_lines(
            f"{report.again} measured again, since others of their operators made their costs unlikely"
        )
    counted = Counter(report.failures).most_common()
    for (name, reason), count in counted[:MOST_FAILURES]:
        print_lines(f"failed: {name}{f' ({count} times)' if count > 1 else ''}: {reason}")
    if len(counted) > MOST_FAILURES:
        print_lines(
            f"failed: {len(counted) - MOST_FAILURES} more; see the column failure of op_costs by app query"
        )


def _print_agreement(report: KindReport) -> None:
    from profiler.device_consistency import SLOW_SHARE

    for device in report.agreement:
        if not device.is_sound:
            print_lines(f"not as the others: {device.describe()}")
    sound = [device for device in report.agreement if device.is_sound]
    if not sound:
        return
    furthest = {bound: max(abs(device.excess(bound)) for device in sound) for bound in sound[0].excesses}
    shown = " and ".join(f"{percent(share)} in calls bound by {bound}" for bound, share in furthest.items())
    devices = f"{len(sound)} x {report.device_kind}"
    if max(furthest.values()) > SLOW_SHARE:
        print_lines(
            f"{devices}: none is slow in every round, but times vary by up to {shown}; check again when nothing else "
            "runs"
        )
    else:
        print_lines(f"{devices} agree: within {shown}")
