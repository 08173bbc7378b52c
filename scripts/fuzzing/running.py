"""Runs the command line in a fork of this process, which has imported all that is heavy."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LARGEST_FILE_BYTES = 2**30
MARK = "mark"


@dataclass(frozen=True)
class CommandLimits:
    """The limits of a command, beyond which it counts as one that does not end."""

    wall_s: float = 300.0  # a probe of links takes more than a minute beside other work
    processor_s: int = 60
    memory_bytes: int = 6 * 2**30
    orphans_s: float = 15.0


@dataclass(frozen=True)
class Stop:
    """A signal, so long after the beginning."""

    number: signal.Signals
    after_s: float


@dataclass(frozen=True)
class CommandOutcome:
    """The end of a command: its exit code (negative: by this signal), its output, and the processes that it left."""

    arguments: tuple[str, ...]
    code: int
    output: bytes
    errors: str
    timed_out: bool
    stopped: bool  # whether it still ran when the signal came
    orphans: tuple[str, ...]
    ran: str  # names of modules that left the tripwire's mark


def warm() -> None:
    """Import the modules of all commands, and load the search's kernels, for forks to share; no thread may be left."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # another has a thread of its own
    import importlib
    import pkgutil

    import app

    for module in pkgutil.walk_packages(app.__path__, "app."):
        if "_migrations" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in (
        "torch",
        "duckdb",
        "pyarrow.parquet",
        "pandas",
        "alembic.command",
        "yaml",
        "rich.table",
        "runtime",
        "app.db.schema",
    ):
        importlib.import_module(name)
    import torch

    from search.parallel.kernel_warm_up import KernelWarmUp, needed_kernels

    torch.set_num_threads(1)
    KernelWarmUp(needed_kernels("program", ["mcmc"])).finish()
    _warm_commands()
    gc.collect()
    gc.freeze()  # a fork's collector would touch, and so copy, every page


def _warm_commands() -> None:
    """Run commands that start no thread in this process, so that their late imports are done as well."""
    import typer.main

    from app.cli.application import application
    from app.cli.main import main

    # Made anew by every call, and the same each time.
    tree = typer.main.get_command(application)
    typer.main.get_command = lambda typer_instance: tree  # noqa: ARG005  # Typer's name
    before = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="soapstone-fuzz-") as folder, open(os.devnull, "w") as nowhere:
        database = ("--database", f"{folder}/db.sqlite")
        for arguments in (
            ("topology", "list"),
            ("db", "upgrade", *database),
            ("strategy", "list", *database),
        ):
            sys.argv = ["app", *arguments]
            with contextlib.redirect_stdout(nowhere), contextlib.suppress(SystemExit):
                main()
    signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """Let this process end with its parent, which may be killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


class Runner:
    """Runs commands one after another, each in a fork, and finds the processes that they leave."""

    def __init__(self, main: Callable[[], None] | None = None, limits: CommandLimits | None = None) -> None:
        """Begin; `main` stands in for the application's own in tests. What a command leaves becomes this process's."""
        self._main = main
        self._limits = limits or CommandLimits()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self, arguments: Sequence[str], folder: Path, stop: Stop | None = None) -> CommandOutcome:
        """Run `app` with these arguments in the folder, whose database, cache and temporary files it has."""
        limits = self._limits
        out, err, mark = (folder.with_name(folder.name + f".{name}") for name in ("out", "err", MARK))
        for path in (out, err):
            path.write_bytes(b"")
        began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        # What comes before the command listens (`app.cli.ending`) waits until it does.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        process = os.fork()
        if process == 0:
            self._become(arguments, folder, (out, err, mark))
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        handle = os.pidfd_open(process)
        try:
            stopped = False
            if stop is not None and not _ended(handle, began + stop.after_s):
                stopped = True
                _send(process, stop.number)
            timed_out = not _ended(handle, time.monotonic() + limits.wall_s)
            if timed_out:
                os.kill(process, signal.SIGUSR1)  # says where it is
                _ended(handle, time.monotonic() + 1)
                os.kill(process, signal.SIGKILL)
        except BaseException:  # this process is to end: nobody else would end the other
            os.killpg(process, signal.SIGKILL)
            raise
        finally:
            os.close(handle)
        _, status = os.waitpid(process, 0)
        orphans = _orphans(limits.orphans_s)
        outcome = CommandOutcome(
            tuple(arguments),
            os.waitstatus_to_exitcode(status),
            out.read_bytes(),
            err.read_text("utf-8", "surrogateescape"),
            timed_out,
            stopped,
            orphans,
            mark.read_text() if mark.exists() else "",
        )
        for path in (out, err, mark):
            path.unlink(missing_ok=True)
        return outcome

    def apart(self, work: Callable[[], str]) -> str:
        """Do some work in a fork, which may start threads, and return its words."""
        from search.parallel.fork import WorkFailure, fork

        forked = fork(lambda connection: connection.send(work()))
        words = forked.connection.recv()
        forked.wait()
        forked.connection.close()
        return f"failed: {words.traceback}" if isinstance(words, WorkFailure) else str(words)

    def _become(self, arguments: Sequence[str], folder: Path, files: tuple[Path, Path, Path]) -> NoReturn:
        """Execute the command in this process, and end it."""
        code = 70
        try:
            os.setsid()
            end_with_parent()
            _enter(folder, self._limits, files)
            sys.argv = ["app", *arguments]
            code = self._call()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _call(self) -> int:
        """Run the command line to the interpreter's end, and return its exit code."""
        if self._main is None:
            from app.cli.main import command

            main = command
        else:
            main = self._main
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            main()
        except SystemExit as stop:
            if stop.code is None or isinstance(stop.code, int):
                return stop.code or 0
            print(stop.code, file=sys.stderr)
            return 1
        except BaseException:
            # As a user would see it.
            traceback.print_exc()
            return 1
        return 0


def _enter(folder: Path, limits: CommandLimits, files: tuple[Path, Path, Path]) -> None:
    out, err, mark = files
    for number, path in ((1, out), (2, err)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(target, number)
        os.close(target)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    # A folder has what its command wrote, whether or not this user keeps bytecode.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    tempfile.tempdir = None
    sys.modules["__main__"].__package__ = None  # messages say `app`, as argv does
    os.environ |= {
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "home"),
        "XDG_DATA_HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "SOAPSTONE_CACHE_DIR": str(folder / "cache"),
        "SOAPSTONE_DATABASE_URL": f"sqlite:///{folder / 'db.sqlite'}",
        "SOAPSTONE_FUZZ_MARK": str(mark),
        "COLUMNS": "100",
    }
    resource.setrlimit(resource.RLIMIT_CPU, (limits.processor_s, limits.processor_s + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _ended(handle: int, until: float) -> bool:
    """Wait for the process; False: it is not over by then."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(max(0.0, (until - time.monotonic()) * 1000)))


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGINT:  # a terminal sends it to all
            os.killpg(process, number)
        else:
            os.kill(process, number)


def _orphans(patience_s: float) -> tuple[str, ...]:
    """Wait for processes that the command left, and return the command lines of those that stay; they are ended."""
    until = time.monotonic() + patience_s
    while children := _children():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > until:
            names = tuple(_command_line(child) for child in children)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
            return names
        time.sleep(0.002)
    return ()


def _children() -> list[int]:
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(number) for number in text.split()]


def _command_line(process: int) -> str:
    try:
        raw = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return "gone"
    return raw.replace(b"\0", b" ").decode("utf-8", "replace")[:200] or "zombie"
