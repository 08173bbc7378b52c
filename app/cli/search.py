"""`app search`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.output import (
    TerminalProgress,
    byte_size,
    compiled_line,
    micro_batch_lines,
    milliseconds,
    percent,
    print_json,
    print_lines,
    print_table,
    recomputation_line,
    synchronization_lines,
)
from graph.errors import UsageError

if TYPE_CHECKING:
    from app.services.models.models import ModelRequest
    from app.services.search.micro_batch_searches import MicroBatchSearches
    from app.services.search.report import SearchReport
    from app.services.search.substitution_searches import SubstitutionSearches

AUTO = "auto"


def search(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A network of the zoo (see app models list), or package.module:factory. With --resume only "
            "where it is a function of your own that you have not named before.",
        ),
    ] = None,
    topology: options.Topology = "local",
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    nodes: options.Nodes = None,
    device: options.Device = None,
    preset: options.Preset = "paper",
    batch_size: options.BatchSize = None,
    micro_batches: Annotated[
        str,
        typer.Option(
            "--micro-batches",
            help="Strategies that go through the batch in so many parts; auto: a search for each of 1, 2, 4, ... 32 "
            "that divide the batch, and the best of all.",
        ),
    ] = "1",
    schedule: options.ScheduleName = None,
    gradients: options.Gradients = None,
    precision: options.Precision = "float32",
    optimizer: options.Optimizer = "sgd",
    batch_norm: options.BatchNorm = "synchronized",
    proposals: Annotated[
        int,
        typer.Option(
            "--proposals",
            min=0,
            help="Budget of the --chains together; a known start adds a chain with the share of one.",
        ),
    ] = 4000,
    chains: Annotated[int, typer.Option("--chains", min=1, help="Number of Markov chains.")] = 4,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            help="Same seed on the same database (or, with --fresh, the same costs): same strategy.",
        ),
    ] = 0,
    beta: Annotated[
        float, typer.Option("--beta", min=0.0, help="Inverse temperature of the acceptance.")
    ] = 300.0,
    order: Annotated[
        str,
        typer.Option(
            "--order",
            help="Order on a resource: program, fifo, or by priority of communications: priority (as P3), "
            "priority-tic, priority-tac.",
        ),
    ] = "program",
    time_limit: Annotated[
        float | None, typer.Option("--time", help="Stop after SECONDS; such a result cannot be reproduced.")
    ] = None,
    on_miss: Annotated[
        str | None,
        typer.Option(
            "--on-miss",
            help="A cost not stored: measure, estimate or fail. Default: measure on topology local, else estimate.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not start from strategies that are known already.")
    ] = False,
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--start",
            help="Start a chain from this stored strategy (id or digest; may be repeated), not from the best known.",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            help="mcmc, optcnn, tofu, placement, exhaustive, greedy, random, sharding or recomputation; several "
            "joined by commas, each a start of the next. unity: mcmc, then substitutions and strategies together. With "
            "micro-batches pipeline, greedy, random, recomputation or sharding. "
            "Default: mcmc, with micro-batches pipeline.",
            show_default=False,
        ),
    ] = None,
    compare_baselines: Annotated[
        bool,
        typer.Option(
            "--compare-baselines",
            help="Simulate all baselines that the network has, and print the gain over the best of them.",
        ),
    ] = False,
    share_weights: Annotated[
        bool,
        typer.Option(
            "--share-weights",
            help="Let devices share optimizer state (ZeRO) or weights (FSDP) that several hold, where it is better.",
        ),
    ] = False,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Where a strategy does not fit the memory, drop activations in the forward and make them again in the "
            "backward.",
        ),
    ] = False,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile, by torch.compile, the stretches of the best strategy between one communication and the next "
            "that are measured to be faster so; on this machine's devices.",
        ),
    ] = False,
    substitute: Annotated[
        bool,
        typer.Option(
            "--substitute",
            help="Apply every substitution that the network allows before the search (app models show "
            "--substitutions); --algorithm unity chooses which.",
        ),
    ] = False,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse",
            help="Execute groups of pointwise operators and normalizations, and products with activations, as one "
            "operator each, compiled by torch.compile, before the search; --algorithm unity then chooses which.",
        ),
    ] = False,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="How the best strategy synchronizes weights: fifo, p3, tic or tac, as in `app run --policy`, or auto: "
            "whatever is predicted to be the fastest.",
        ),
    ] = "fifo",
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm/--no-confirm",
            help="On this machine's devices, measure again what decides between the best strategies found and the "
            "best baseline, and search on where the order changes.",
        ),
    ] = True,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Processes that walk chains, at most one a chain, and look for what optcnn and unity add up; the "
            "result is the same. Default: one a usable core.",
        ),
    ] = None,
    resume: Annotated[
        int | None,
        typer.Option(
            "--resume",
            min=1,
            max=options.LARGEST_ID,
            help="Go on with this search, which was stopped or killed, as it would have gone on.",
        ),
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Search a fast strategy for a model on a topology, and store it with every proposal.

    It starts also from the best strategies that earlier searches found for that network and topology, or for the
    nearest ones. One that was interrupted or killed goes on where it was by --resume, which takes its options.
    The graph of a network of the zoo is imported once and then kept, see app models cache.

    Example: app search --model inception --topology p100-cluster --batch-size 64
    """
    from app.services.models.importing import importing
    from app.services.models.models import name_own_model, requested_model

    if resume is not None:
        from app.services.search.search import resume_search

        _refuse_beside_resume(context)
        name_own_model(model)
        with TerminalProgress(quiet=as_json) as progress:
            _show(resume_search(resume, database, progress, workers=workers), as_json=as_json)
        return
    if model is None:
        raise UsageError(
            "app search: --model is missing, must be given (or --resume ID); name a network, see app search --help"
        )
    if fresh and start:
        raise UsageError("app search: --fresh and --start are both given, must be one of them; leave one out")
    count = _micro_batches(micro_batches)
    order_of_stages, sums = options.schedule(schedule), options.gradients(gradients)
    network = requested_model(model, preset, batch_size, precision, 1 if count is None else count)
    imported = context.with_resource(importing(network, batch_norm=batch_norm, processes=workers))

    # Beside the import: these load compiled kernels and the database.
    from app.services.costs.operator_costs import ON_MISS
    from app.services.search.micro_batches import DEFAULT_ALGORITHM
    from app.services.search.policies import checked_policy
    from app.services.search.request import SearchRequest, search_options
    from app.services.search.search import run_search
    from graph.texts import one_of
    from search.algorithms.registry import UNITY

    usual = DEFAULT_ALGORITHM if network.micro_batches > 1 else "mcmc"
    joint = algorithm == UNITY
    request = SearchRequest(
        model=network,
        topology=topology,
        devices=devices,
        nodes=nodes,
        processor=options.processor(device),
        gpus=gpus,
        optimizer=optimizer,
        batch_norm=batch_norm,
        proposals=proposals,
        chains=chains,
        seed=seed,
        beta=beta,
        order=order,  # type: ignore[arg-type]  # run_search checks it
        time_limit_s=time_limit,
        on_miss=None if on_miss is None else one_of(ON_MISS, on_miss, "--on-miss"),
        fresh=fresh,
        starts=tuple(start or ()),
        algorithm=usual if joint or algorithm is None else algorithm,
        compare_baselines=compare_baselines,
        workers=workers,
        share_weights=share_weights,
        recompute=recompute,
        confirm=confirm,
        compile_stretches=compile,
        policy=checked_policy(policy),
        schedule=order_of_stages,
        gradients=sums,
        substitute=substitute,
        fuse=fuse,
    )
    with TerminalProgress(quiet=as_json) as progress:
        if time_limit is not None:
            search_options(request)  # what is refused needs no warning
            progress.warn(
                "--time: how far the search comes depends on this machine's speed, so it is not reproducible"
            )
        if count is None:
            from app.services.search.micro_batch_searches import run_searches

            searches = run_searches(request, algorithm, database, progress, imported)
            report = searches.best
        elif joint:
            from app.services.search.substitution_searches import run_substitution_searches

            joint_searches = run_substitution_searches(request, database, progress, imported)
            report = joint_searches.best
        else:
            report = run_search(request, database, progress, imported)
    if count is None:
        _show_all(searches, as_json=as_json)
    elif joint:
        _show_joint(joint_searches, as_json=as_json)
    else:
        _show(report, as_json=as_json)
    if topology == "local" and not as_json:
        chosen = {
            "--optimizer": optimizer if optimizer != "sgd" else None,
            "--batch-norm": batch_norm if batch_norm != "synchronized" else None,
            "--gpus": gpus,
            "--device": device,
            "--devices": devices,
            # A URL may hold a password.
            "--database": "URL" if database is not None and "://" in database else database,
        }
        _print_next(report, network, chosen)


def _micro_batches(text: str) -> int | None:
    """Return the number that --micro-batches names; None for `auto`.

    Raises:
        UsageError: it is neither.
    """
    from graph.texts import shown

    if text == AUTO:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"--micro-batches: is {shown(text)}, must be a number from 1 or {AUTO}; choose one")
    return int(text)


def _refuse_beside_resume(context: typer.Context) -> None:
    """Refuse options beside --resume: a search that goes on has its own.

    Raises:
        UsageError: another option is given.
    """

    for name in context.params:
        source = context.get_parameter_source(name)
        if (
            name not in ("resume", "model", "workers", "database", "as_json")
            and source is not None
            and source.name == "COMMANDLINE"
        ):
            option = "--time" if name == "time_limit" else "--" + name.replace("_", "-")
            raise UsageError(
                f"{option}: is given beside --resume, which goes on with the search's own options; leave it out"
            )


def _show(report: SearchReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.interrupted or report.unconfirmed:
        # Ctrl-C is a user's "enough": the best so far is a result all the same.
        raise typer.Exit(128 + signal.SIGINT)


def _show_all(searches: MicroBatchSearches, *, as_json: bool) -> None:
    if as_json:
        print_json(searches.to_json())
    else:
        _print(searches.best)
        print_table(
            ["micro-batches", "schedule", "stages", "predicted step", "samples/s", "peak memory", "search"],
            [
                [
                    row["count"],
                    row["schedule"] or "-",
                    row["stages"] or "-",
                    milliseconds(row["predicted_step_time_s"]),
                    f"{row['predicted_throughput_samples_per_s']:.1f}",
                    byte_size(row["peak_memory_bytes"]) + ("" if row["feasible"] else " (does not fit)"),
                    row["search"],
                ]
                for row in searches.rows()
            ],
        )
        print_lines(
            f"the best {'so far ' if searches.interrupted else ''}is of search {searches.best.search_id}"
        )
    if searches.interrupted:
        raise typer.Exit(128 + signal.SIGINT)


def _show_joint(searches: SubstitutionSearches, *, as_json: bool) -> None:
    if as_json:
        print_json(searches.to_json())
    else:
        _print(searches.best)
        print_table(
            ["substitutions", "predicted step", "search"],
            [
                [len(substitutions), milliseconds(report.best.step_time_s), report.search_id]
                for substitutions, report in searches.reports
            ],
        )
        print_lines(
            f"{len(searches.evaluated)} sets of substitutions were evaluated; the best has {len(searches.chosen)}"
            + (":" if searches.chosen else ", the graph as imported"),
            *(f"  {substitution.text}" for substitution in searches.chosen),
        )
    if searches.interrupted:
        raise typer.Exit(128 + signal.SIGINT)


def _print_next(report: SearchReport, model: ModelRequest, chosen: Mapping[str, object]) -> None:
    """Print the command that runs the best strategy."""
    import shlex

    differing = [
        ("--preset", model.preset if model.preset != "paper" else None),
        ("--batch-size", model.batch_size),
        ("--precision", model.precision if model.precision != "float32" else None),
        *chosen.items(),
    ]
    words = [
        "app run --model",
        model.name,
        *(f"{name} {shlex.quote(str(value))}" for name, value in differing if value is not None),
    ]
    print_lines("run it: " + " ".join([*words, f"--strategy {report.best.digest[:12]}"]))


def _print(report: SearchReport) -> None:
    from app.services.search.confirmation import TOLERANCE
    from graph.texts import counted

    made = report.proposals - (report.resumed_at or 0)
    rate = made / report.seconds if report.seconds > 0 else 0.0
    print_lines(
        f"search {report.search_id}: {report.model}, batch size {report.batch_size}, on "
        f"{counted(report.devices, 'device')} of {report.topology}",
        f"{counted(report.proposals, 'proposal')}, {report.accepted} accepted, {report.seconds:.1f} s "
        f"({rate:.0f} a second)"
        + (
            "; interrupted, the best so far is kept"
            + (f", go on by: app search --resume {report.search_id}" if report.resumable else "")
            if report.interrupted
            else ""
        ),
    )
    if report.resumed_at is not None:
        print_lines(f"resumed after {counted(report.resumed_at, 'proposal')}")
    for start in report.starts:
        print_lines(f"starts also from known strategy {start.digest[:12]}, found for {start.found_for}")
    for algorithm in report.algorithms:
        if (algorithm.name, algorithm.proven) != ("mcmc", ""):
            time_s = algorithm.step_time_s
            result = "does not fit the memory" if time_s is None else f"found {milliseconds(time_s)}"
            simulated = counted(algorithm.proposals, "strategy", "strategies")
            print_lines(f"{algorithm.name}: {result}, {simulated} simulated, {algorithm.seconds:.1f} s")
            if algorithm.proven:
                print_lines(f"  proven: {algorithm.proven}")
    reference = next(prediction for prediction in report.predictions if prediction.name == "data-parallel")
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
                prediction.name,
                prediction.strategy_id,
                milliseconds(prediction.step_time_s),
                f"{prediction.throughput:.1f}",
                f"{reference.step_time_s / prediction.step_time_s:.2f} x",
                percent(prediction.shares["measured"]),
                percent(prediction.shares["estimated"]),
                percent(prediction.shares["datasheet"]),
                byte_size(prediction.bytes_moved),
                byte_size(max(prediction.peak_memory_bytes))
                + ("" if prediction.feasible else " (does not fit)"),
            ]
            for prediction in report.predictions
        ],
    )
    print_lines(
        f"best baseline: {report.best_baseline.name}, {milliseconds(report.best_baseline.step_time_s)}; what was found "
        f"is {report.best_baseline.step_time_s / report.best.step_time_s:.2f} x as fast"
    )
    for confirmation in report.confirmations:
        print_lines(f"search {confirmation.search_id}: {confirmation.says()}")
    if report.confirmations:
        print_lines(
            f"confirmed: by the new costs the winner is at most {TOLERANCE * 100:.0f} % slower than the fastest, "
            "and than it was found to be"
            if report.confirmations[-1].holds
            else f"not confirmed: by the new costs {report.confirmations[-1].doubt}; search once more, best on a quiet "
            "machine"
        )
    if report.unconfirmed:
        print_lines("not confirmed: interrupted while its costs were measured again")
    if report.bound is not None and report.gap is not None:
        by_costs = (
            ""
            if report.searched_step_time_s == report.best.step_time_s
            else f" by the costs of the search, which found {milliseconds(report.searched_step_time_s)}"
        )
        print_lines(
            f"at most {percent(report.gap)} above the best possible{by_costs}: lower bound "
            f"{milliseconds(report.bound.seconds)} "
            f"({report.bound.kind}{'' if report.bound.whole else ', some operators counted as nothing'})"
        )
    print_lines(
        f"scheduling efficiency {percent(report.best.scheduling_efficiency)}: from all tasks one after the other, "
        f"{1 + report.best.speedup_potential:.2f} x the work of the busiest device or link, to that work alone"
    )
    if report.best.launch_s:
        share = report.best.launch_s / report.best.step_time_s
        print_lines(
            f"to issue the step takes its hosts up to {milliseconds(report.best.launch_s)}, {percent(share)} of it"
        )
    if report.recomputation is not None:
        print_lines(recomputation_line(report.recomputation))
    if report.compiled:
        print_lines(compiled_line(report.compiled))
    print_lines(*synchronization_lines(report.synchronization))
    print_lines(*micro_batch_lines(report.micro_batches))
    print_lines("measured, estimated, data sheet: the share of the predicted busy time that rests on each.")
    if report.estimate_error is not None:
        met = counted(
            len(report.estimate_errors),
            "cost that the search met is an estimate",
            "costs that the search met are estimates",
        )
        print_lines(
            f"{met}; where the truth is known, half of such estimates are within {percent(report.estimate_error)}"
        )
    if report.unsplit:
        print_lines(
            f"{counted(len(report.unsplit), 'operator has', 'operators have')} no rule or sizes that do not factor: "
            "see app models show"
        )
