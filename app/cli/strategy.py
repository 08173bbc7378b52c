"""`app strategy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli import options

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
    from app.cli.output import print_json, print_table
    from app.db.store import Store

    with Store.open(database) as store:
        found = store.strategies(limit=limit)
        names = {graph.id: graph.name for graph in store.graphs()}
    if as_json:
        print_json(
            [
                {
                    "id": one.id,
                    "digest": one.digest,
                    "model": names[one.graph_id],
                    "devices": one.device_count,
                    "source": one.source,
                }
                for one in found
            ]
        )
        return
    print_table(
        ["id", "digest", "model", "devices", "source", "made"],
        [
            [
                one.id,
                one.digest[:12],
                names[one.graph_id],
                one.device_count,
                one.source,
                f"{one.created_at:%Y-%m-%d %H:%M}",
            ]
            for one in found
        ],
    )


@application.command("export")
def export_strategy(
    strategy: Annotated[str, typer.Argument(help="A strategy's id or digest.")],
    file: Annotated[Path, typer.Argument(help="File to write; app run --strategy FILE reads it.")],
    database: options.Database = None,
) -> None:
    """Write a stored strategy to a JSON file that can be read, edited and run.

    Example: app strategy export 3 strategy.json
    """
    import json

    from app.cli.output import print_lines
    from app.db.store import Store
    from graph.errors import UsageError

    with Store.open(database) as store:
        record = store.strategy(strategy)
    text = json.dumps(json.loads(record.document), indent=1) + "\n"
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(
            f"file {file}: cannot be written ({error.strerror}), must be; choose another path"
        ) from error
    print_lines(f"strategy {record.digest[:12]} written to {file}")
