"""`app db`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.output import print_json, print_lines, print_table
from graph.errors import UsageError
from graph.texts import counted

if TYPE_CHECKING:
    from app.services.costs.environments import HeldCosts
    from app.services.costs.packs import PackCounts, PackGroup
    from app.services.database.check import Findings
    from app.services.database.repair import Repaired

# Damages that are printed.
_MOST_SHOWN = 50

application = typer.Typer(help="The database: where it is, its schema, what it holds.", no_args_is_help=True)


@application.command("upgrade")
def upgrade_database(database: options.Database = None, as_json: options.AsJson = False) -> None:
    """Make the database, or bring its schema to this version's.

    Example: app db upgrade
    """
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
    """Show the schema's revision, the rows of each table, and what is held by device kind and environment.

    Costs of this machine's devices are taken from its current environment alone; of others it is said in what they
    differ from it.

    Example: app db status
    """
    from app.db.engine import display_name, resolve_url
    from app.db.schema import status
    from app.db.store import Store
    from app.services.costs.environments import held_costs

    current, head = status(database)
    name = display_name(resolve_url(database))
    counts: dict[str, int] = {}
    held = []
    if current is not None:
        # Raises the advice for a schema that is older or newer.
        with Store.open(database, to_read=True) as store:
            counts, held = store.table_counts(), held_costs(store)
    if as_json:
        print_json(
            {
                "database": name,
                "revision": current,
                "newest_revision": head,
                "tables": counts,
                "op_costs": [costs.to_json() for costs in held],
            }
        )
        return
    if current is None:
        print_lines(f"{name}: holds no database yet (newest revision {head}); make it by: app db upgrade")
        return
    print_lines(f"{name}: revision {current}, newest {head}")
    print_table(["table", "rows"], [[table, count] for table, count in counts.items()])
    if held:
        _print_held(held)


@application.command("check")
def check_database(
    repair: Annotated[
        str | None,
        typer.Option(
            "--repair",
            help="Save what is sound into this new database: a path or a URL. The old one stays as it is.",
        ),
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Look at all rows and at the traces beside them: say what is damaged, and what can be saved.

    Exit code 1 if anything is damaged. Nothing is written but the new database of --repair.

    Example: app db check
    """
    from app.services.database.check import check
    from app.services.database.repair import repair as save

    if repair is None:
        findings, saved = check(database), None
    else:
        findings, saved = save(database, repair)
    if as_json:
        print_json({**findings.to_json(), "repaired": None if saved is None else asdict(saved)})
    else:
        _print_findings(findings, saved)
    if findings.damages and saved is None:
        raise typer.Exit(1)


def _print_findings(findings: Findings, saved: Repaired | None) -> None:
    shown = findings.damages[:_MOST_SHOWN]
    # That of the database's own file names it.
    print_lines(
        *(str(damage) if damage.file == findings.name else f"{findings.name}: {damage}" for damage in shown)
    )
    if len(findings.damages) > len(shown):
        print_lines(f"... and {len(findings.damages) - len(shown)} more; --json lists all")
    print_lines(*(f"{path}: belongs to nothing that is stored, is not looked at" for path in findings.strays))
    rows, sound = sum(findings.rows.values()), sum(len(ids) for ids in findings.sound.values())
    held = f"{sound} of {rows} rows, {findings.sound_chunks} of {findings.chunk_count} chunks of traces"
    if not findings.damages:
        print_lines(f"{findings.name}: revision {findings.revision}, {held}: all as they were written")
    else:
        print_lines(f"{findings.name}: {counted(len(findings.damages), 'damage')}; {held} can be saved")
    if saved is not None:
        print_lines(
            f"{saved.name}: {sum(saved.rows.values())} rows, {saved.chunks} chunks of traces and {saved.recordings} "
            "recorded executions saved"
        )
    elif findings.damages:
        print_lines("save them by: app db check --repair NEW")


def _print_held(held: Sequence[HeldCosts]) -> None:
    from app.services.costs.environments import age_days, shortened

    print_table(
        ["device kind", "environment", "torch", "measured", "failed", "link fits", "oldest", "newest"],
        [
            [
                costs.summary.device_kind.name,
                costs.summary.environment.fingerprint[:12] + (" (current)" if costs.is_current else ""),
                costs.summary.environment.facts.get("torch", "-"),
                costs.summary.measured,
                costs.summary.failed,
                costs.summary.link_fits,
                f"{age_days(costs.summary.oldest):.1f} days",
                f"{age_days(costs.summary.newest):.1f} days",
            ]
            for costs in held
        ],
    )
    if not any(costs.is_current for costs in held):
        print_lines("nothing is held for this machine's current environment")
    for costs in {
        costs.summary.environment.fingerprint: costs for costs in held if not costs.is_current
    }.values():
        differing = (
            "this machine has no such device" if costs.differences is None else shortened(costs.differences)
        )
        print_lines(
            f"environment {costs.summary.environment.fingerprint[:12]} is not this machine's: {differing}"
        )


@application.command("export")
def export_pack(
    file: Annotated[Path, typer.Argument(help="The Parquet file to write.", writable=True)],
    device_kind: Annotated[
        str | None, typer.Option("--device-kind", help="Only what was measured on this kind. Default: all.")
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Write all measured costs, with their environments, into one file that another database can import.

    Example: app db export costs.parquet
    """
    from app.db.store import Store
    from app.services.costs.packs import write_pack

    with Store.open(database, to_read=True) as store:
        counts = write_pack(store, file, device_kind)
    if as_json:
        print_json({"file": str(file), **asdict(counts)})
    else:
        print_lines(
            f"{file}: {counts.op_costs} operator costs, {counts.link_costs} link costs, {counts.link_fits} fits"
        )


@application.command("import")
def import_pack(
    file: Annotated[Path | None, typer.Argument(help="A file that app db export wrote.")] = None,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="The packs that come with Soapstone, in place of a file.")
    ] = False,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Take in the costs of an exported file: the later of two measurements stays, and twice is as good as once.

    With --shipped those that come with Soapstone, for searches on machines whose devices are not at hand.

    Example: app db import costs.parquet
    """
    from app.db.engine import check_writable
    from app.db.store import Store
    from app.services.costs.packs import PackCounts, merge_pack, read_pack, shipped_packs

    if (file is None) is not shipped:
        raise UsageError(
            f"app db import: got {'both a file and' if shipped else 'neither a file nor'} --shipped, must have one of "
            "them; name a file, or give --shipped"
        )
    check_writable(database)
    # All are read before anything is stored.
    packs = {pack: read_pack(pack) for pack in ([file] if file is not None else shipped_packs())}
    with Store.open(database) as store:
        new = {pack: merge_pack(store, groups) for pack, groups in packs.items()}
    documents = [
        {"file": str(pack), "given": asdict(PackCounts.of(groups)), "new": asdict(new[pack])}
        for pack, groups in packs.items()
    ]
    if as_json:
        print_json(documents[0] if file is not None else {"packs": documents})
        return
    for pack, groups in packs.items():
        _print_imported(pack, groups, new[pack])


def _print_imported(file: Path, groups: tuple[PackGroup, ...], new: PackCounts) -> None:
    from app.services.costs.packs import PackCounts

    exported = PackCounts.of(groups)
    print_lines(
        f"{file}: {exported.op_costs} operator costs ({new.op_costs} new), {exported.link_costs} link costs "
        f"({new.link_costs} new), {exported.link_fits} fits ({new.link_fits} new)"
    )
    for group in groups:
        print_lines(f"{group.kind.name}, environment {group.environment.fingerprint[:12]}")
