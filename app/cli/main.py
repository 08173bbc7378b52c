"""The command `app`: its last line and its exit code, see `docs/cli.md`.

Little is imported before signals are taken: a command may be ended at any moment.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

from app.cli import ending
from app.cli.text import printable
from graph.errors import RankFailure, RuntimeFailure, SoapstoneError
from graph.texts import shown

FAILED, MISUSED = 1, 2
LONGEST_LINE = 1200
LONGEST_MISTAKE = 300
"""Letters of what Typer says, which repeats what was typed."""
REFUSAL_S = 5.0
"""All ranks refuse a command line, the first says why, and torchrun ends every rank as soon as one has ended."""


def main() -> NoReturn:
    """Run the command line, and raise `SystemExit` with its exit code: a mistake is one line on standard error."""
    try:
        ending.hear()
        code = _invoke()
        sys.stdout.flush()
    except BaseException as error:
        code = _explained(error)
    number = ending.came()
    # Ctrl-C is up to the command: a search shows the best so far. Other signals decide the exit code.
    if code == 0 and number is not None and 128 + number != ending.INTERRUPTED:
        code = _signalled(number)
    sys.exit(code)


def _invoke() -> int:
    """Run the command; return its exit code."""
    import typer

    from app.cli.application import application
    from app.cli.output import print_log
    from search.parallel.gc_pause import rare_collection

    # The exception of Typer for a command line that it cannot parse; it exports only this class's children.
    misuse: type[Exception] = typer.BadParameter.__bases__[0]
    print_log()
    try:
        # The modules of a command stay. Ranks run steps by the usual thresholds, as those do that a launcher starts.
        with nullcontext() if ending.is_rank() else rare_collection():
            # Not standalone: Typer would print a mistake in several lines, and an interrupt not at all.
            code = application(standalone_mode=False)
    except misuse as error:
        return _refuse(error)
    if code == ending.INTERRUPTED:
        _say_signal(code - 128)
    return code if isinstance(code, int) else 0


def _explained(error: BaseException) -> int:
    """Print in a line why the command ends, and return its exit code. What is a bug of ours is raised again."""
    if isinstance(error, RankFailure):
        return _fail(str(error), error.exit_code, silent=not (error.said_here or _speaks()))
    number = ending.came()
    if isinstance(error, KeyboardInterrupt):
        number = number or ending.INTERRUPTED - 128
    if number is not None:
        # Whatever became of the signal on its way: an import that it cut short raises something else.
        return _signalled(number)
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) and error.code - 128 in ending.WORDS:
            return _signalled(error.code - 128)
        return error.code if isinstance(error.code, int) else 0 if error.code is None else FAILED
    if isinstance(error, SoapstoneError):
        # Errors of the command and of the whole team are printed by rank 0 for all processes that torchrun started.
        alone = isinstance(error, RuntimeFailure)
        return _fail(str(error), error.exit_code, silent=not (alone or _speaks()))
    if isinstance(error, ending.OutputFailure):
        if error.broken_pipe:
            return ending.BROKEN_PIPE
        return _fail(f"standard output: cannot be written ({error}), must be; write to another place", FAILED)
    if isinstance(error, FileNotFoundError) and not _has_folder():
        return _fail("current folder: has been removed, must be there; change to another", MISUSED)
    raise error


def _has_folder() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _signalled(number: int) -> int:
    _say_signal(number)
    return 128 + number


def _say_signal(number: int) -> None:
    if _speaks():
        ending.say(number)


def _refuse(error: Any) -> int:
    """Print in a line why a command line cannot be parsed, with the help where it is empty; return the exit code."""
    text = error.format_message()
    if not _speaks():
        return MISUSED
    if error.ctx is not None and text == error.ctx.get_help():
        sys.stderr.write("".join(f"{printable(line)}\n" for line in text.rstrip().split("\n")))
        return MISUSED
    # Typer does not say whose option lacks its value.
    command = "app" if error.ctx is None else error.ctx.command_path
    reason = _misfit(error) or shown(f"{text[:1].lower()}{text[1:].rstrip('.')}", LONGEST_MISTAKE)
    return _fail(f"{command}: {reason}; see {command} --help", MISUSED)


def _misfit(error: Any) -> str | None:
    """Return an option's value and its allowed values, where Typer had pydantic read it; None where Typer says so."""
    details = getattr(error.__cause__, "errors", lambda: None)()
    if not details or error.param is None:
        return None
    detail = details[0]
    bounds = detail.get("ctx", {})
    expected = {
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "int_parsing_size": "a smaller number",
        "float_parsing": "a number",
        "greater_than_equal": f"at least {bounds.get('ge')}",
        "less_than_equal": f"at most {bounds.get('le')}",
    }.get(detail["type"], detail["msg"])
    name = error.param.opts[-1]  # of an argument its name
    return f"{name} is {shown(detail['input']) or 'empty'}, must be {expected}"


def _fail(text: str, code: int, *, silent: bool = False) -> int:
    if not silent:
        with suppress(OSError):  # the exit code says it too
            sys.stderr.write(f"error: {shown(' '.join(printable(text).split()), LONGEST_LINE)}\n")
    return code


def _speaks() -> bool:
    return not ending.is_rank() or os.environ["RANK"] == "0"


def let_rank_0_speak(code: int) -> None:
    """Let rank 0 say why all ranks refuse a command, before another one ends: the launcher ends all with the first."""
    if code == MISUSED and not _speaks():
        time.sleep(REFUSAL_S)


def command() -> None:
    """Run the command line, and end the process with it.

    Without the interpreter's own end, where nobody waits for it: it takes a second with torch, and gives nothing back
    that the operating system does not. A process that torchrun started, or that a signal ends, never ends in that way:
    it may have threads that wait for one that is gone, which would keep it from ending, or that hold tensors, which can
    abort it.
    """
    ending.open_standard_streams()
    with ending.listening() as listener:
        code: int | None = None
        try:
            try:
                main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else FAILED
            listener.finish()
        except (KeyboardInterrupt, SystemExit):  # a signal between the command's end and `finish`
            listener.finish()
            if code is None and listener.first is not None:
                ending.say(listener.first)
                code = 128 + listener.first
        code = FAILED if code is None else code
        if listener.first is not None:
            ending.end_children()
        elif not ending.is_rank() and (_others_work() or _is_watched()):
            sys.exit(code)
        else:
            let_rank_0_speak(code)
        atexit._run_exitfuncs()
        ending.end_tracker()
        sys.stderr.flush()
        os._exit(code)


def _others_work() -> bool:
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _is_watched() -> bool:
    """Return whether a profiler or a debugger wants to see the end."""
    return sys.getprofile() is not None or sys.gettrace() is not None


if __name__ == "__main__":
    command()
