"""`app db`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from app.cli import options

application = typer.Typer(help="The database: where it is, its schema, what it holds.", no_args_is_help=True)


@application.command("upgrade")
def upgrade_database(database: options.Database = None, as_json: options.AsJson = False) -> None:
    """Make the database, or bring its schema to this version's.

    Example: app db upgrade
    """
    from app.cli.output import print_json, print_lines
    from app.db.engine import display_name, resolve_url
    from app.db.schema import status, upgrade

    before = upgrade(database)
    revision, _ = status(database)
    name = display_name(resolve_url(database))
    if as_json:
        print_json({"database": name, "revision": revision, "revision_before": before or None})
    elif before == revision:
        print_lines(f"{name}: at revision {revision} already")
    else:
        print_lines(f"{name}: brought from revision {before or 'none'} to {revision}")


@application.command("status")
def database_status(database: options.Database = None, as_json: options.AsJson = False) -> None:
    """Show the schema's revision, the rows of each table, and the op costs by device kind and environment.

    Example: app db status
    """
    from app.cli.output import print_json, print_lines, print_table
    from app.db.engine import display_name, resolve_url
    from app.db.schema import status
    from app.db.store import Store

    current, head = status(database)
    name = display_name(resolve_url(database))
    counts: dict[str, int] = {}
    summaries = []
    if current is not None:
        # Says what to do about a schema that is older or newer.
        with Store.open(database) as store:
            counts, summaries = store.table_counts(), store.cost_summaries()
    if as_json:
        print_json(
            {
                "database": name,
                "revision": current,
                "newest_revision": head,
                "tables": counts,
                "op_costs": [
                    {
                        "device_kind": one.device_kind.name,
                        "environment": one.environment.fingerprint,
                        "measured": one.measured,
                        "failed": one.failed,
                        "oldest": one.oldest.isoformat(),
                        "newest": one.newest.isoformat(),
                    }
                    for one in summaries
                ],
            }
        )
        return
    print_lines(f"{name}: revision {current or 'none'}, newest {head}")
    if current is None:
        print_lines("make it by: app db upgrade")
        return
    print_table(["table", "rows"], [[table, count] for table, count in counts.items()])
    if summaries:
        print_table(
            ["device kind", "environment", "torch", "measured", "failed", "oldest", "newest"],
            [
                [
                    one.device_kind.name,
                    one.environment.fingerprint[:12],
                    one.environment.facts.get("torch", "-"),
                    one.measured,
                    one.failed,
                    f"{one.oldest:%Y-%m-%d %H:%M}",
                    f"{one.newest:%Y-%m-%d %H:%M}",
                ]
                for one in summaries
            ],
        )


@application.command("export")
def export_pack(
    file: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    device_kind: Annotated[
        str | None,
        typer.Option(
            "--device-kind", help="Only what was measured on this kind. Default: all.", show_default=False
        ),
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Write all measured costs, with their environments, into one file that another database can import.

    Example: app db export costs.parquet
    """
    from app.cli.output import print_json, print_lines
    from app.db.store import Store
    from app.services.packs import write_pack

    with Store.open(database) as store:
        counts = write_pack(store, file, device_kind)
    if as_json:
        print_json({"file": str(file), **asdict(counts)})
    else:
        print_lines(
            f"{file}: {counts.op_costs} operator costs, {counts.link_costs} link costs, {counts.link_fits} fits"
        )


@application.command("import")
def import_pack(
    file: Annotated[Path, typer.Argument(help="A file that app db export wrote.")],
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Take in the costs of an exported file: the later of two measurements stays, and twice is as good as once.

    Example: app db import costs.parquet
    """
    from app.cli.output import print_json, print_lines
    from app.db.store import Store
    from app.services.packs import PackCounts, merge_pack, read_pack

    groups = read_pack(file)
    given = PackCounts.of(groups)
    with Store.open(database) as store:
        new = merge_pack(store, groups)
    if as_json:
        print_json({"file": str(file), "given": asdict(given), "new": asdict(new)})
        return
    print_lines(
        f"{file}: {given.op_costs} operator costs ({new.op_costs} new), {given.link_costs} link costs "
        f"({new.link_costs} new), {given.link_fits} fits ({new.link_fits} new)"
    )
    for group in groups:
        print_lines(f"{group.kind.name}, environment {group.environment.fingerprint[:12]}")
