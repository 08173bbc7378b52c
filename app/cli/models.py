"""`app models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.output import byte_size, print_json, print_lines, print_table
from graph.texts import counted

if TYPE_CHECKING:
    from app.services.models.models import ImportedModel

application = typer.Typer(
    help="The networks that come with Soapstone, and what is in one.", no_args_is_help=True
)


@application.command("list")
def list_models(as_json: options.AsJson = False) -> None:
    """List the networks that come with Soapstone; some need an extra to be installed.

    Example: app models list
    """
    from graph.zoo import hugging_face_names, zoo_entry, zoo_names

    entries = [zoo_entry(name) for name in (*zoo_names(), *hugging_face_names())]
    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "title": entry.title,
                    "paper": entry.paper,
                    "batch_size": entry.batch_size,
                    "extra": entry.extra or None,
                }
                for entry in entries
            ]
        )
        return
    print_table(
        ["name", "network", "batch size", "extra", "source"],
        [[entry.name, entry.title, entry.batch_size, entry.extra or "-", entry.paper] for entry in entries],
    )


@application.command("show")
def show_model(
    model: Annotated[str, typer.Argument(help="A network of the zoo, or package.module:factory.")],
    preset: options.Preset = "paper",
    batch_size: options.BatchSize = None,
    micro_batches: options.MicroBatches = 1,
    precision: options.Precision = "float32",
    batch_norm: options.BatchNorm = "synchronized",
    axes: Annotated[
        bool, typer.Option("--axes", help="List every operator with its axes, as strategy files name them.")
    ] = False,
    substitutions: Annotated[
        bool,
        typer.Option("--substitutions", help="List what can be put in place of operators: rules and names."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Import a network and show its operators, their rules and axes, and what cannot be split.

    With --axes every operator by its name, in the order of the graph, and the axes along which it can be split: their
    kinds and their sizes, which are the largest degrees.

    Example: app models show inception

    Example: app models show gpt2 --preset small --axes

    Example: app models show inception --substitutions
    """
    from app.services.models.models import import_graph, requested_model
    from app.services.models.summary import NO_AXIS, described

    network = requested_model(model, preset, batch_size, precision, micro_batches)
    imported = import_graph(network, batch_norm=batch_norm)
    if substitutions:
        _show_substitutions(imported, as_json=as_json)
        return
    report = described(imported)
    if as_json:
        print_json(report.to_json(axes=axes))
        return
    print_lines(
        f"{report.name}: {counted(report.operators, 'operator')} in {counted(report.groups, 'group')}, "
        f"{report.parameters:,} parameters, "
        f"{report.forward_flops / 1e9:.2f} GFLOP forward at batch size {report.batch_size // micro_batches}"
        + (f", one of {micro_batches} micro-batches of {report.batch_size}" if micro_batches > 1 else ""),
        f"{report.splittable_share * 100:.2f} % of the operations are in operators that can be split",
    )
    if axes:
        print_table(
            ["operator", "type", "axis", "kind", "size"],
            [
                [operator.name, operator.target, axis.name, axis.kind, axis.size]
                if number == 0
                else ["", "", axis.name, axis.kind, axis.size]
                for operator in report.axes
                for number, axis in enumerate(operator.axes or (NO_AXIS,))
            ],
        )
        return
    print_table(
        ["operator", "count", "rule", "axes", "GFLOP", "share"],
        [
            [row.target, row.count, row.rule, row.axes, f"{row.flops / 1e9:.2f}", f"{row.share * 100:.1f} %"]
            for row in report.rows
        ],
    )
    for reason, names in report.reasons():
        print_lines(f"{len(names)} x {reason}: {', '.join(names)}")


def _show_substitutions(model: ImportedModel, *, as_json: bool) -> None:
    from app.services.predict.compiled_stretches import has_compiler
    from graph.substitutions.rewriting import WITH_COMPILER, WITHOUT_COMPILER, matches
    from graph.substitutions.substitution import substitutions_to_json

    found = matches(model.graph, (*WITHOUT_COMPILER, *(WITH_COMPILER if has_compiler() else ())))
    if as_json:
        print_json(substitutions_to_json(found))
    elif not found:
        print_lines(f"{model.graph.name}: no rule applies to its operators")
    else:
        print_table(["rule", "operators"], [[one.rule, ", ".join(one.operators)] for one in found])


@application.command("cache")
def show_cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove the kept graphs.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Say where the graphs of Soapstone's own networks are kept, so that they are imported once; or remove them.

    The folder is the user's cache folder, or $SOAPSTONE_CACHE_DIR. It may be removed at any time.

    Example: app models cache --clear
    """
    from app.services.models import graph_cache

    removed = graph_cache.clear() if clear else 0
    count, size_bytes = graph_cache.contents()
    folder = graph_cache.folder()
    if as_json:
        print_json(
            {
                "folder": None if folder is None else str(folder),
                "graphs": count,
                "bytes": size_bytes,
                "removed": removed,
            }
        )
        return
    if folder is None:
        print_lines("no graphs are kept: you have no cache folder; set HOME or SOAPSTONE_CACHE_DIR")
    elif clear:
        print_lines(f"{counted(removed, 'graph')} removed from {folder}")
    else:
        print_lines(f"{counted(count, 'graph')}, {byte_size(size_bytes)}, in {folder}")
