"""A process of its own for a query: it ends in time, and with the command, and its memory has a bound.

A thread that computes in a library cannot be ended, and what a library allocates it need not count. A forked process
has what is imported and opened here at once, and prints where this one does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

from graph.errors import QueryFailure, SoapstoneError, UsageError
from search.parallel.fork import WorkFailure, can_fork, fork

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The last message of the process, where its work did not raise: the result."""

    result: T


def run_apart(work: Callable[[], T], limit_s: float | None = None) -> T:
    """Return the result of `work` in a forked process, which is gone when this returns or raises.

    Where a process cannot be forked, on other systems than Linux, the work is done in this one, without a limit.

    Raises:
        QueryFailure: it took longer than `limit_s`, or the process ended by itself.
        UsageError: there is a limit, and no process to keep it.
        Exception: what the work raised.
    """
    if not can_fork():
        if limit_s is not None:
            raise UsageError("--timeout: is for Linux, where a process can be forked; leave it out")
        return work()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        forked = fork(partial(_tell, work), prints=True)
    except UsageError as error:
        raise QueryFailure("query: its process cannot be started, must be; end other programs") from error
    said: Any = None
    in_time = False
    try:
        in_time = forked.connection.poll(limit_s)
        if in_time:
            said = forked.connection.recv()
    except EOFError:
        pass
    finally:
        if said is None:
            forked.kill()
        end = forked.wait()
        forked.connection.close()
    if isinstance(said, Done):
        return said.result  # type: ignore[no-any-return]
    if isinstance(said, WorkFailure):
        if not isinstance(said.error, SoapstoneError):
            said.error.add_note(said.traceback)
        raise said.error
    if in_time:
        raise QueryFailure(f"query: its process {end}, must end with an answer; ask for less")
    raise QueryFailure(
        f"query: took longer than {limit_s:g} s, must end within --timeout; allow more or ask for less"
    )


def bound_memory(memory_bytes: int) -> None:
    """Let this process have so many bytes of data more than it has by now: further allocations fail.

    Not its address space, of which DuckDB, threads and files take much that is never memory.
    """
    if not can_fork():
        return
    import resource

    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = re.search(r"^VmData:\s+(\d+) kB", status, flags=re.MULTILINE)
    limit = memory_bytes + (int(held[1]) * 1024 if held is not None else 0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)  # what bounds this process already may only become less
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _tell(work: Callable[[], T], connection: Connection) -> None:
    connection.send(Done(work()))
