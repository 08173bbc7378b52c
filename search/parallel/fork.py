"""Forked processes: copies of this one, with all that it has in memory.

A forked process has graph, fragments, chains and loaded kernels at once, where a new one would spend seconds on them.
It must leave alone threads, files and connections of the process that it was copied from: it runs only the work that
it is given, closes every file but its pipe, collects no garbage that it did not make, and ends
without cleaning up.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn, TextIO

from graph.errors import UsageError
from graph.texts import describe_exit

# prctl(2): which signal this process gets when the one that forked it ends.
_PR_SET_PDEATHSIG = 1
# What asks a command to end; some systems have no SIGHUP.
ENDING_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@dataclass(frozen=True, slots=True)
class WorkFailure:
    """The last message of a forked process whose work raised: the exception, and its traceback."""

    error: BaseException
    traceback: str


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A forked process: its number, and the pipe to it."""

    number: int
    connection: Connection

    def wait(self) -> str:
        """Wait for its end; return in words how it came."""
        _, status = os.waitpid(self.number, 0)
        return describe_exit(os.waitstatus_to_exitcode(status))

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGKILL)

    def end(self) -> None:
        """End it at once, and close the pipe."""
        self.kill()
        self.wait()
        self.connection.close()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it stand still meanwhile."""
        with suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGCONT)


def can_fork() -> bool:
    """True where a process with threads may be forked, and the copy ends with it (Linux)."""
    return sys.platform.startswith("linux")


def fork(work: Callable[[Connection], None], *, prints: bool = False) -> ForkedProcess:
    """Start a copy of this process that does some work with its end of a pipe, and ends with it or with this process.

    Interrupts and requests to terminate do not reach it: its starter ends it. Where it `prints`, it writes to this
    process's standard output and standard error, which are to be flushed before.

    Raises:
        UsageError: the operating system starts no process.
    """
    near, far = Pipe()
    parent, set_option = os.getpid(), ctypes.CDLL(None).prctl
    # A signal between the fork and the first line of the copy would run this process's handler there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Of threads: from 3.12 on Python warns of them whatever the copy does.
            warnings.simplefilter("ignore", DeprecationWarning)
            number = os.fork()
        if number == 0:
            set_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _work(work, far, parent, prints=prints)
    except OSError as error:
        near.close()
        raise UsageError(
            f"search: a worker process cannot be started ({error.strerror}), must be; choose --workers 1"
        ) from None
    else:
        far.close()
        # A copy that is stopped before it ends with this process would outlive it for good.
        with suppress(EOFError, OSError):
            near.recv_bytes()
    finally:
        far.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ForkedProcess(number, near)


def _work(
    work: Callable[[Connection], None], connection: Connection, parent: int, *, prints: bool
) -> NoReturn:
    """Do the work, and end without returning: what is above on the stack is the other process's."""
    code = 1
    try:
        if os.getppid() == parent:
            connection.send_bytes(b"it ends with its parent")
            _leave_alone(connection, prints=prints)
            try:
                work(connection)
                code = 0
            except (EOFError, BrokenPipeError):
                pass  # nobody is there any more
            except BaseException as error:
                _send_failure(connection, error)
    finally:
        os._exit(code)


def _leave_alone(connection: Connection, *, prints: bool) -> None:
    """Part with all that this process has of the one that it was copied from, but for memory."""
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(1 if prints else 3):
        os.dup2(nothing, standard)
    kept = connection.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    if prints:
        # Python's own may write to another number than these, and hold text that the other process is to write.
        sys.stdout, sys.stderr = _text_file(1, sys.stdout), _text_file(2, sys.stderr)


def _text_file(number: int, alike: TextIO) -> TextIO:
    return open(number, "w", encoding=alike.encoding, errors=alike.errors, closefd=False)


def _send_failure(connection: Connection, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    try:
        connection.send(WorkFailure(error, text))
    except (TypeError, AttributeError, ValueError):  # cannot be pickled
        connection.send(WorkFailure(RuntimeError(repr(error)), text))
