"""All commands, under one name each.

They import what they need when they run, so that `app --help` answers at once.
"""

from __future__ import annotations

import typer

from app.cli import compare, database, models, profile, query, report, run, search, strategy, topology, trace
from app.cli.ending import is_rank
from graph.errors import UsageError

RANKED = frozenset({"run", "topology"})
"""The commands of which torchrun may start several processes."""

application = typer.Typer(
    name="app",
    help="Find fast ways to parallelize the training of a neural network, run them, and keep what is learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@application.callback()
def _started(context: typer.Context) -> None:
    command = context.invoked_subcommand
    if is_rank() and command not in RANKED:
        raise UsageError(
            f"app {command}: is started by torchrun, must be one process alone; start it without, as all but app run "
            "and app topology probe"
        )


application.command("profile")(profile.profile)
application.command("search")(search.search)
application.command("run")(run.run)
application.command("compare")(compare.compare)
application.command("query")(query.query)
application.command("trace")(trace.trace)
application.command("report")(report.report)
application.add_typer(models.application, name="models")
application.add_typer(topology.application, name="topology")
application.add_typer(strategy.application, name="strategy")
application.add_typer(database.application, name="db")
