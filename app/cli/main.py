"""The command `app`.

Commands import what they need when they run, so that `app --help` answers at once.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any, NoReturn

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


# What Typer raises for a command line that it cannot parse; it exports only this class's children.
_Misuse: type[Exception] = typer.BadParameter.__bases__[0]
_INTERRUPTED = 130


def main() -> None:
    """Run the command line: a user's mistake is one line on standard error and exit code 2."""
    # As an exception, so that what is under way is ended and recorded.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        # Not standalone: Typer would print a mistake in several lines, and an interrupt not at all.
        code = application(standalone_mode=False)
    except RuntimeFailure as error:
        _fail(str(error), 1)
    except SoapstoneError as error:
        _fail(str(error), 2)
    except _Misuse as error:
        _refuse(error)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(code if isinstance(code, int) else 0)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _refuse(error: Any) -> NoReturn:
    """End with one line about a command line that cannot be parsed; with the help where it is empty."""
    text = error.format_message()
    if error.ctx is None or text == error.ctx.get_help():
        sys.stderr.write(text.rstrip() + "\n")
        sys.exit(2)
    command = error.ctx.command_path
    _fail(f"{command}: {text[:1].lower()}{text[1:].rstrip('.')}; see {command} --help", 2)


def _fail(text: str, code: int) -> NoReturn:
    sys.stderr.write("error: " + " ".join(text.split()) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
