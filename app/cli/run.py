"""`app run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.output import (
    TerminalProgress,
    all_reduce_lines,
    byte_size,
    compiled_line,
    micro_batch_lines,
    milliseconds,
    percent,
    print_json,
    print_lines,
    print_table,
    scheduling_line,
    synchronization_lines,
)
from graph.errors import RuntimeFailure
from graph.texts import counted

if TYPE_CHECKING:
    from app.services.run.report import RunReport

# Deviations that are printed.
SHOWN = 10

# As many as tell a typical step from a disturbed one.
RECORDED_STEPS = 5


def run(
    model: options.Model,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            help="best, data-parallel, zero (data parallel with shared optimizer state), fsdp (with shared weights, "
            "too), expert, single-device, megatron, megatron-4 (tensor parallel on 4 devices, data parallel over the "
            "rest), hugectr-localized, hugectr-distributed (embedding tables model parallel), insightface "
            "(classifiers by classes), 3d-2x2x2 (data, tensor and pipeline parallel), a strategy's id or digest, or a "
            "JSON file.",
        ),
    ] = "best",
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    device: options.Device = None,
    preset: options.Preset = "paper",
    batch_size: options.BatchSize = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches",
            min=1,
            help="Go through the batch in so many parts, of which gradients add up; the network is imported at the "
            "batch size of one. Default: as many as the strategy has.",
        ),
    ] = None,
    schedule: options.ScheduleName = None,
    gradients: options.Gradients = None,
    credits: Annotated[
        str | None,
        typer.Option(
            "--credits",
            help="Of schedule actors: for each stage, the micro-batches that it may have in flight, such as 3,2,1. "
            "Default: the strategy's, else those of 1f1b.",
        ),
    ] = None,
    precision: options.Precision = "float32",
    optimizer: options.Optimizer = "sgd",
    batch_norm: options.BatchNorm = "synchronized",
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Steps to measure.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps before the first measured one.")] = 2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of weights, data and dropout.")] = 0,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare loss and every gradient with one device, and with the module itself."
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help=f"Record {RECORDED_STEPS} more steps, for app trace.")
    ] = False,
    recompute: Annotated[
        str | None,
        typer.Option(
            "--recompute",
            help="all: make every activation again in the backward, in groups of the network; none: keep all. Default: "
            "as the strategy says.",
        ),
    ] = None,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile, by torch.compile, whatever a device computes between one communication and the next. "
            "Default: what the strategy says.",
        ),
    ] = False,
    substitute: Annotated[
        bool,
        typer.Option(
            "--substitute",
            help="Apply every substitution that the network allows (see app models show --substitutions); of a "
            "baseline. Default: those of the strategy.",
        ),
    ] = False,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse",
            help="Execute groups of pointwise operators and normalizations, and products with activations, as one "
            "operator each, compiled by torch.compile; of a baseline. Default: those of the strategy.",
        ),
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="How weights are synchronized: fifo (gradients are summed in buckets, as they become full), p3 (in "
            "slices, the first layers' first, into the next step's forward; where updates are shared, slices are "
            "gathered so, too), tic or tac (where updates are shared: weights are gathered in this order, into the "
            "next step's forward), each alone or with a size in bytes as in p3:200000. Default: what the strategy "
            "says.",
        ),
    ] = None,
    on_miss: Annotated[
        str, typer.Option("--on-miss", help="A cost that the prediction lacks: measure, estimate or fail.")
    ] = "measure",
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            help="Seconds that a process waits for another, or may be silent itself, before the run is given up.",
        ),
    ] = 1800.0,
    limit: Annotated[
        float | None,
        typer.Option("--limit", help="Seconds after which the whole run is given up. Default: none."),
    ] = None,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            help="Under torchrun: the topology whose device r is rank r: a packaged one, a YAML file, or one that app "
            "topology probe --name measured. Default: measured for this run.",
            show_default=False,
        ),
    ] = "local",
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Execute a strategy on this machine's devices, one process a device, and store predicted and measured time.

    Under torchrun, on one host or several, each of its processes is one device.

    Example: app run --model inception --strategy best

    Example: app run --gpus 0-7 --model inception

    Example: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST -m app run --model inception
    """
    from app.services.costs.operator_costs import ON_MISS
    from app.services.models.models import requested_model
    from app.services.run.run import RunRequest, run_strategy
    from graph.synchronization import read_synchronization
    from graph.texts import one_of

    request = RunRequest(
        model=requested_model(model, preset, batch_size, precision),
        micro_batches=micro_batches,
        schedule=options.schedule(schedule),
        gradients=options.gradients(gradients),
        credits=options.credits_of_stages(credits),
        strategy=strategy,
        devices=devices,
        processor=options.processor(device),
        gpus=gpus,
        optimizer=optimizer,
        batch_norm=batch_norm,
        substitute=substitute,
        fuse=fuse,
        iterations=iterations,
        warmup=warmup,
        seed=seed,
        verify=verify,
        on_miss=one_of(ON_MISS, on_miss, "--on-miss"),
        timeout_s=timeout,
        limit_s=limit,
        topology=topology,
        recorded=RECORDED_STEPS if profile else 0,
        recompute=recompute,
        compile_stretches=compile,
        synchronization=None if policy is None else read_synchronization(policy, "--policy"),
    )
    with TerminalProgress(quiet=as_json) as progress:
        report = run_strategy(request, database, progress)
    if report is None:
        return
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.failure is not None:
        raise RuntimeFailure(report.failure)


def _as_if(what: str, step_s: float | None, batch_size: int) -> list[list[str]]:
    """Return the table's row of a step as it would have been, or no row where that is not known."""
    if step_s is None or step_s <= 0:
        return []
    return [[f"measured, {what}", milliseconds(step_s), f"{batch_size / step_s:.2f}"]]


def _at_usual_speed(report: RunReport) -> str:
    error = report.relative_error_at_usual_speed
    return "" if error is None else f", {percent(error)} at equal speed"


def _print(report: RunReport) -> None:
    print_lines(
        f"execution {report.execution_id}: {report.model}, batch size {report.batch_size}, on "
        f"{counted(report.devices, 'device')}, strategy {report.strategy_digest[:12]}, "
        f"{counted(len(report.result.step_times_s), 'step')}"
    )
    print_table(
        ["", "step", "samples/s"],
        [
            ["predicted", milliseconds(report.predicted_s), f"{report.batch_size / report.predicted_s:.2f}"],
            ["measured, median", milliseconds(report.result.median_s), f"{report.throughput:.2f}"],
            [
                "measured, fastest",
                milliseconds(report.result.minimum_s),
                f"{report.batch_size / report.result.minimum_s:.2f}",
            ],
            *_as_if("less what others took", report.result.undisturbed_s, report.batch_size),
            *_as_if("at the speed of its costs", report.at_usual_speed_s, report.batch_size),
        ],
    )
    if report.is_restless:
        print_lines(
            "restless: other processes took more than a tenth of the steps, or the cores' speed differs so much from "
            "that of the costs; run it again where nothing else computes"
        )
    print_lines(
        f"prediction error {percent(report.relative_error)}{_at_usual_speed(report)}; loss "
        f"{report.result.losses[0]:.4f} in the first step, {report.result.losses[-1]:.4f} in the last"
    )
    print_lines(scheduling_line(report.scheduling, report.recorded_scheduling))
    if report.recomputed:
        groups = counted(len(report.recomputed), "group")
        print_lines(f"activations of {groups} of operators were made again in the backward")
    if report.compiled:
        print_lines(compiled_line(report.compiled))
    print_lines(*all_reduce_lines(report.all_reduces))
    print_lines(*synchronization_lines(report.synchronization))
    print_lines(*micro_batch_lines(report.micro_batches))
    if report.fullest is not None:
        fullest = report.memory[report.fullest]
        roughly = "" if report.memory_account == "walk" else " (roughly)"
        print_lines(
            f"peak memory of device {report.fullest}, the fullest: predicted {byte_size(fullest.predicted)}{roughly}, "
            f"measured {byte_size(fullest.measured)} (error {percent(fullest.relative_error)}); "
            f"its process held {byte_size(fullest.process)}"
        )
    if report.deviations is not None:
        print_table(
            ["largest deviations from one device", "of", "absolute", "relative", "allowed"],
            [
                [
                    deviation.what,
                    deviation.name,
                    f"{deviation.largest:.2e}",
                    f"{deviation.relative:.2e}",
                    f"{deviation.allowed:.0e}",
                ]
                for deviation in report.deviations[:SHOWN]
            ],
        )
        print_lines(
            f"{sum(deviation.ok for deviation in report.deviations)} of {len(report.deviations)} are equal: loss, "
            "gradients, weights after one update, buffers; eager: the module's own; --json lists all"
        )
