"""`app strategy`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.output import (
    TerminalProgress,
    all_reduce_lines,
    compiled_line,
    device_ranges,
    micro_batch_lines,
    milliseconds,
    print_json,
    print_lines,
    print_table,
    recomputation_line,
    scheduling_line,
    synchronization_lines,
)
from graph.errors import UsageError
from graph.texts import counted

if TYPE_CHECKING:
    from app.services.strategies.strategies import ShownOperator, ShownStrategy, SimulatedCost
    from graph.parallel_graph import ParallelChain

TopologyName = Annotated[
    str | None,
    typer.Option(
        "--topology",
        help="Costs on the topology of this name, among those simulated on. Default: the newest.",
    ),
]
Rows = Annotated[int, typer.Option("--rows", min=0, help="Show so many operators, the dearest. 0: all.")]

application = typer.Typer(help="Stored strategies, and strategies as files.", no_args_is_help=True)


@application.command("list")
def list_strategies(
    database: options.Database = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """List stored strategies, newest first.

    Example: app strategy list
    """
    from app.db.references import Referred
    from app.db.store import Store

    with Store.open(database, to_read=True) as store:
        names = Referred("graphs", ((graph.id, graph.name) for graph in store.graphs()))
        models = [(strategy, names[strategy.graph_id]) for strategy in store.strategies(limit=limit)]
    if as_json:
        print_json(
            [
                {
                    "id": strategy.id,
                    "digest": strategy.digest,
                    "model": model,
                    "devices": strategy.device_count,
                    "source": strategy.source,
                }
                for strategy, model in models
            ]
        )
        return
    print_table(
        ["id", "digest", "model", "devices", "source", "made"],
        [
            [
                strategy.id,
                strategy.digest[:12],
                model,
                strategy.device_count,
                strategy.source,
                f"{strategy.created_at:%Y-%m-%d %H:%M}",
            ]
            for strategy, model in models
        ],
    )


@application.command("rebuild")
def rebuild(
    search: Annotated[int, typer.Argument(max=options.LARGEST_ID, help="The search that visited it.")],
    chain: Annotated[
        int | None, typer.Option("--chain", min=0, max=2**31 - 1, help="The chain, see view proposals.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="After so many proposals of the chain. Default: all.")
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Store a strategy that a search visited, from its trace: any of them, without --chain and --step the fastest.

    Example: app strategy rebuild 3 --chain 1 --step 250
    """
    from app.db.store import Store
    from app.services.trace.replay import rebuild as rebuild_strategy

    with Store.open(database, create=False) as store:
        visited = rebuild_strategy(store, search, chain, step)
    simulated_s = None if visited.simulated_ns is None else visited.simulated_ns / 1e9
    if as_json:
        print_json(
            {
                "search": visited.search_id,
                "chain": visited.chain,
                "step": visited.step,
                "strategy": visited.record.id,
                "digest": visited.record.digest,
                "simulated_step_time_s": simulated_s,
            }
        )
        return
    print_lines(
        f"strategy {visited.record.id}: {visited.record.digest[:12]}, chain {visited.chain} of search "
        f"{visited.search_id} after {counted(visited.step, 'proposal')}, simulated step {milliseconds(simulated_s)}"
    )


@application.command("export")
def export_strategy(
    strategy: Annotated[str, typer.Argument(help="A strategy's id or digest.")],
    file: Annotated[Path | None, typer.Argument(help="File to write.", writable=True)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write: the same as FILE.", writable=True)
    ] = None,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="json: for app run --strategy FILE. dtensor: a Python file of PyTorch's own plans (DTensor, "
            "parallelize_module, fully_shard), for what a device mesh expresses. pipelining: a Python file of "
            "torch.distributed.pipelining, for stages of one device each.",
        ),
    ] = "json",
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Run the file of --format dtensor or pipelining first, on a gloo process of this machine for each "
            "device: one step must equal the plain module's.",
        ),
    ] = False,
    model: options.OwnModel = None,
    database: options.Database = None,
) -> None:
    """Write a stored strategy to a file that can be read, edited and run.

    Example: app strategy export 3 strategy.json
    """
    from app.services.models.models import name_own_model
    from app.services.strategies import export as exporting

    target = file or output
    if target is None or (file is not None and output is not None):
        named = "no file" if target is None else "both FILE and --output"
        raise UsageError(
            f"strategy export: got {named}, must have one file to write; name it as FILE or --output"
        )
    name_own_model(model)
    exported = exporting.export_strategy(database, strategy, target, file_format, check=check)
    print_lines(f"strategy {exported.strategy.digest[:12]} written to {target}")
    print_lines(*micro_batch_lines(exported.micro_batches))
    if exported.checked is not None:
        print_lines(f"checked on {counted(exported.processes, 'process', 'processes')}: {exported.checked}")


@application.command("show")
def show_strategy(
    strategy: Annotated[str, typer.Argument(help="A strategy's id or digest.")],
    topology: TopologyName = None,
    rows: Rows = 30,
    pcg: Annotated[
        bool,
        typer.Option(
            "--pcg",
            help="Show it as a parallel computation graph (Unity) instead: machine views, and the Partition, Combine, "
            "Replicate and Reduce before each operator, in the graph's order. Nothing is simulated.",
        ),
    ] = False,
    model: options.OwnModel = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a stored strategy: degrees and devices of every operator, and what each costs in the simulated step.

    Example: app strategy show 3
    """
    from app.services.models.models import name_own_model
    from app.services.strategies import strategies

    name_own_model(model)
    if pcg:
        if topology is not None:
            raise UsageError("--topology: is for costs, must not be given with --pcg; leave one of them out")
        _show_parallel_graph(strategy, rows, database, as_json=as_json)
        return
    with TerminalProgress(quiet=as_json) as progress:
        shown = strategies.show_strategy(database, strategy, topology, progress)
    if as_json:
        print_json(shown.to_json())
        return
    print_lines(_headline(shown))
    print_lines(*_step_lines(shown, rows or None))
    chosen = sorted(shown.operators, key=lambda operator: -(operator.cost.total_s if operator.cost else 0.0))
    chosen = chosen[: rows or None]
    print_table(
        ["operator", "type", "degrees", "devices", "computing", "messages"],
        [
            [
                operator.name,
                operator.target,
                _degrees(operator),
                device_ranges(operator.devices),
                *_cells(operator.cost),
            ]
            for operator in chosen
        ]
        + [[name, "-", "-", "-", *_cells(cost)] for name, cost in shown.shared.items()],
    )
    if len(chosen) < len(shown.operators):
        print_lines(f"the {len(chosen)} dearest of {len(shown.operators)} operators; --rows 0 shows all")
    print_lines(_LEGEND)


def _show_parallel_graph(strategy: str, rows: int, database: str | None, *, as_json: bool) -> None:
    from app.services.strategies.parallel_graphs import show_parallel_graph
    from graph.parallel_graph import named_degrees

    with TerminalProgress(quiet=as_json) as progress:
        shown = show_parallel_graph(database, strategy, progress)
    if as_json:
        print_json(shown.to_json())
        return
    record, parallel = shown.record, shown.parallel
    print_lines(
        f"strategy {record.id}: {record.digest[:12]} ({record.source}) for {shown.graph.name}, "
        f"{counted(record.device_count, 'device')}; {counted(len(parallel.operators), 'operator')}, "
        f"{counted(parallel.parallel_operators, 'parallelization operator')}"
    )
    cells: list[list[str]] = []
    chosen = parallel.operators[: rows or None]
    for operator, placed in zip(shown.graph.operators, chosen, strict=False):
        cells += [_chain_cells(chain) for chain in placed.inputs if chain.operators or chain.moves]
        degrees = named_degrees(operator, placed.degrees)
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        cells.append([placed.name, text or "whole", placed.view.text(degrees), placed.outputs[0].text])
    if len(chosen) == len(parallel.operators) and parallel.loss.operators:
        cells.append(_chain_cells(parallel.loss))
    print_table(["operator", "degrees", "machine view", "result"], cells)
    if len(chosen) < len(parallel.operators):
        print_lines(f"the first {len(chosen)} of {len(parallel.operators)} operators; --rows 0 shows all")
    print_lines(
        "after ->: a value on its way to the operator below; result: size/degree of each dim, copies, partial sums."
    )


def _chain_cells(chain: ParallelChain) -> list[str]:
    return [
        f"-> {chain.value}",
        chain.text or "other devices",
        device_ranges(chain.target.view.devices),
        chain.target.tensor.text,
    ]


@application.command("diff")
def diff_strategies(
    one: Annotated[str, typer.Argument(help="A strategy's id or digest.")],
    other: Annotated[str, typer.Argument(help="Another for the same network.")],
    topology: TopologyName = None,
    rows: Rows = 30,
    model: options.OwnModel = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Say which operators two strategies configure differently, and what each costs in the simulated steps.

    Example: app strategy diff 3 1
    """
    from app.services.models.models import name_own_model
    from app.services.strategies import strategies

    name_own_model(model)
    with TerminalProgress(quiet=as_json) as progress:
        difference = strategies.diff_strategies(database, (one, other), topology, progress)
    if as_json:
        print_json(difference.to_json())
        return
    for side, shown in (("A", difference.first), ("B", difference.second)):
        print_lines(f"{side}: {_headline(shown)}")
        print_lines(*(f"{side}: {line}" for line in _step_lines(shown, 0)))
    if not difference.operators:
        print_lines("no operator differs")
        return
    chosen = difference.operators[: rows or None]
    print_table(
        ["operator", "", "degrees", "devices", "computing", "messages"],
        [
            [name, side, _degrees(shown), device_ranges(shown.devices), *_cells(shown.cost)]
            for first, second in chosen
            for name, side, shown in ((first.name, "A", first), ("", "B", second))
        ]
        + [
            [name if side == "A" else "", side, "-", "-", *_cells(costs.get(name))]
            for name in sorted({*difference.first.shared, *difference.second.shared})
            for side, costs in (("A", difference.first.shared), ("B", difference.second.shared))
        ],
    )
    same = len(difference.first.operators) - len(difference.operators)
    print_lines(
        f"{counted(len(difference.operators), 'operator differs', 'operators differ')}, "
        f"{counted(same, 'does not', 'do not')}; shown: {len(chosen)}, the largest change of cost first",
        _LEGEND,
    )


@application.command("import")
def import_strategy(
    file: Annotated[Path, typer.Argument(help="A file of app strategy export, edited or not.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The network that it is for. Default: the stored one that the file names."
        ),
    ] = None,
    preset: options.Preset = "paper",
    batch_size: options.BatchSize = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches",
            min=1,
            help="The network at the batch size of one of so many parts. Default: as many as the file's.",
        ),
    ] = None,
    precision: options.Precision = "float32",
    batch_norm: options.BatchNorm = "synchronized",
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, help="Devices that it is made for. Default: up to the highest that it names."
        ),
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a strategy file against its network and store it; the file executes nothing.

    Example: app strategy import strategy.json
    """
    from app.services.models.models import requested_model
    from app.services.strategies import strategies

    request = None if model is None else requested_model(model, preset, batch_size, precision)
    with TerminalProgress(quiet=as_json) as progress:
        done = strategies.import_strategy(
            database, file, request, batch_norm, devices, progress, micro_batches=micro_batches
        )
    if as_json:
        print_json(
            {
                "id": done.record.id,
                "digest": done.record.digest,
                "model": done.model,
                "devices": done.record.device_count,
                "known": done.known,
            }
        )
        return
    print_lines(
        f"strategy {done.record.id}: {done.record.digest[:12]} for {done.model} on "
        f"{counted(done.record.device_count, 'device')}, " + ("stored before" if done.known else "stored")
    )


_LEGEND = (
    "computing: its tasks on their busiest device; messages: of its outputs and their gradients, added up; other work "
    "may hide both."
)


def _headline(shown: ShownStrategy) -> str:
    record = shown.record
    text = (
        f"strategy {record.id}: {record.digest[:12]} ({record.source}) for {shown.model}, "
        f"{counted(record.device_count, 'device')}{_sharing(shown)}"
    )
    if shown.setting is None:
        return f"{text}; never simulated: app run"
    return (
        f"{text}; on {shown.setting.topology}, batch size {shown.setting.batch_size}: simulated step "
        f"{milliseconds(shown.step_s)}, measured {milliseconds(shown.measured_s)}"
    )


def _step_lines(shown: ShownStrategy, groups: int | None) -> list[str]:
    """Return lines on how the step is made; `groups`: how many recomputed groups are named, None for all."""
    lines = [] if shown.scheduling is None else [scheduling_line(shown.scheduling)]
    if shown.recomputation is not None:
        lines.append(recomputation_line(shown.recomputation))
        lines += (f"  {first} to {last}" for first, last in shown.recomputation.groups[:groups])
    if shown.compiled:
        lines.append(compiled_line(shown.compiled))
    return [
        *lines,
        *all_reduce_lines(shown.all_reduces or ()),
        *synchronization_lines(shown.synchronization),
        *micro_batch_lines(shown.micro_batches),
    ]


def _sharing(shown: ShownStrategy) -> str:
    """Return the numbers of weights that are shared, by level of sharding."""
    counts = Counter(shown.sharding.values())
    return "".join(f", {level} of {count} weights shared" for level, count in sorted(counts.items()))


def _degrees(operator: ShownOperator) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in operator.degrees.items()) or "whole"


def _cells(cost: SimulatedCost | None) -> list[str]:
    return ["-", "-"] if cost is None else [milliseconds(cost.compute_s), milliseconds(cost.communication_s)]
