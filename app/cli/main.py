"""The command `app`.

Commands import what they need when they run, so that `app --help` answers at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

import typer

from app.cli import compare, database, models, profile, query, report, run, search, strategy, topology, trace
from app.cli.text import printable
from graph.errors import RuntimeFailure, SoapstoneError, TeamFailure

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
application.command("query")(query.query)
application.command("trace")(trace.trace)
application.command("report")(report.report)
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
    except SoapstoneError as error:
        # What is wrong with the command, or happened to the team, rank 0 says for all processes that torchrun started.
        alone = isinstance(error, RuntimeFailure) and not isinstance(error, TeamFailure)
        _fail(str(error), error.exit_code, silent=not (alone or _speaks()))
    except _Misuse as error:
        _refuse(error)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except SystemExit as error:  # SIGTERM
        code = error.code
    if code == _INTERRUPTED and _speaks():
        sys.stderr.write("interrupted\n")
    sys.exit(code if isinstance(code, int) else 0)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _refuse(error: Any) -> NoReturn:
    """End with one line about a command line that cannot be parsed; with the help where it is empty."""
    text = error.format_message()
    if not _speaks():
        sys.exit(2)
    if error.ctx is None or text == error.ctx.get_help():
        sys.stderr.write("".join(f"{printable(line)}\n" for line in text.rstrip().split("\n")))
        sys.exit(2)
    command = error.ctx.command_path
    _fail(f"{command}: {text[:1].lower()}{text[1:].rstrip('.')}; see {command} --help", 2)


def _fail(text: str, code: int, *, silent: bool = False) -> NoReturn:
    if not silent:
        sys.stderr.write(f"error: {' '.join(printable(text).split())}\n")
    sys.exit(code)


def _is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _speaks() -> bool:
    return not _is_rank() or os.environ["RANK"] == "0"


def command() -> None:
    """Run the command line, and end the process with it.

    Without the interpreter's own end, where nobody waits for it: it takes a second with torch, and gives nothing back
    that the operating system does not. A process that torchrun started never ends in that way: it may have threads that
    wait for one that is gone, which would keep it from ending, or that hold tensors, which can abort it.
    """
    try:
        main()
    except SystemExit as stop:
        code = stop.code
        if not _is_rank():
            if not isinstance(code, int) or threading.active_count() > 1 or _is_watched():
                raise
            atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # nobody reads on: Python says so as ever
            raise stop from None
        os._exit(code if isinstance(code, int) else 1)


def _is_watched() -> bool:
    """Return whether a profiler or a debugger wants to see the end."""
    return sys.getprofile() is not None or sys.gettrace() is not None


if __name__ == "__main__":
    command()
