"""The command `app`.

Commands import what they need when they run, so that `app --help` answers at once.
"""

from __future__ import annotations

import sys

import typer

from app.cli import compare, database, models, profile, run, search, strategy, topology
from graph.errors import RuntimeFailure, SoapstoneError

application = typer.Typer(
    name="app",
    help="Find fast ways to parallelize the training of a neural network, run them, and keep what is learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
application.command("profile")(profile.profile)
application.command("search")(search.search)
application.command("run")(run.run)
application.command("compare")(compare.compare)
application.add_typer(models.application, name="models")
application.add_typer(topology.application, name="topology")
application.add_typer(strategy.application, name="strategy")
application.add_typer(database.application, name="db")


def main() -> None:
    """Run the command line: a user's mistake is one line on standard error and exit code 2."""
    try:
        application(standalone_mode=True)
    except RuntimeFailure as error:
        _fail(error, 1)
    except SoapstoneError as error:
        _fail(error, 2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def _fail(error: SoapstoneError, code: int) -> None:
    sys.stderr.write("error: " + " ".join(str(error).split()) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
