"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from graph.errors import UsageError

if TYPE_CHECKING:
    from graph.schedule import GradientSums, Schedule

# Of a row, in every database.
LARGEST_ID = 2**63 - 1

Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="Path of a SQLite file, or a URL. Default: $SOAPSTONE_DATABASE_URL, else the user's data folder.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Model = Annotated[
    str,
    typer.Option("--model", help="A network of the zoo (see app models list), or package.module:factory."),
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The network, where it is a function of your own that you have not named before: package.module:factory.",
    ),
]
Preset = Annotated[
    str, typer.Option("--preset", help="Sizes of a zoo network: paper or small; of gpt2 also xl.")
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", help="Samples a step, over all devices. Default: the preset's.")
]
MicroBatches = Annotated[
    int,
    typer.Option(
        "--micro-batches",
        min=1,
        help="The batch is gone through in so many parts: the network is imported at the batch size of one.",
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="The order of micro-batches: gpipe, 1f1b, interleaved, zero-bubble or actors. Default: the "
        "strategy's, else 1f1b.",
    ),
]
Gradients = Annotated[
    str | None,
    typer.Option(
        "--gradients",
        help="When gradients are summed over replicas: last (once, after the last micro-batch) or each (in every one; "
        "where the optimizer is shared, only shares of gradients are kept). Default: the strategy's, else last; a "
        "search tries both.",
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        help="Number format of the whole step: float32, tf32 (GPUs only), bfloat16 or float16 (no loss scaling).",
    ),
]
Optimizer = Annotated[str, typer.Option("--optimizer", help="sgd, momentum or adam.")]
BatchNorm = Annotated[
    str,
    typer.Option(
        "--batch-norm", help="synchronized: statistics of the whole batch; local: of each part, as DDP."
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda. Default: cuda where there are GPUs, else cpu.")
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus", help="GPUs of this machine to use, such as 0-7 or 0,2, in place of --device and --devices."
    ),
]
Devices = Annotated[int | None, typer.Option("--devices", help="Use the first N devices. Default: all.")]
Topology = Annotated[
    str,
    typer.Option(
        "--topology", help="local, a packaged or measured topology (see app topology list), or a YAML file."
    ),
]
OfModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Only this network (a graph's name). Of your own: package.module:factory, which may then be run.",
    ),
]
OfTopology = Annotated[str | None, typer.Option("--topology", help="Only this topology (its name).")]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Number of nodes of a packaged topology.")]


def processor(device: str | None) -> Any:
    """Return "cpu", "cuda" or None.

    Raises:
        UsageError: the option is something else.
    """

    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device: is {device}, must be cpu or cuda; choose one")
    return device


def schedule(text: str | None) -> Schedule | None:
    """Return the schedule that --schedule names; None where it is left out.

    Raises:
        UsageError: it is none.
    """
    from graph.schedule import Schedule
    from graph.texts import one_of

    return None if text is None else one_of(Schedule, text, "--schedule")


def gradients(text: str | None) -> GradientSums | None:
    """Return when gradients are summed, as --gradients names it; None where it is left out.

    Raises:
        UsageError: it names neither.
    """
    from graph.schedule import GradientSums
    from graph.texts import one_of

    return None if text is None else one_of(GradientSums, text, "--gradients")


def credits_of_stages(text: str | None) -> tuple[int, ...]:
    """Return the numbers that --credits names; none where it is left out.

    Raises:
        UsageError: something is no number.
    """
    from graph.texts import shown

    numbers = () if text is None else tuple(part.strip() for part in text.split(","))
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in numbers):
        raise UsageError(
            f"--credits: is {shown(text)}, must be a whole number for each stage, joined by commas; correct it"
        )
    return tuple(map(int, numbers))
