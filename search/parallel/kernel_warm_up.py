"""Compiling the kernels of a search before it calls them, in two processes at once.

What is compiled is kept on disk, so this takes time in the first search after an installation alone. One kernel, the
walk's, takes as long as all others together: a process beside this one begins with it while the network is imported.
Each kernel is compiled by whoever comes to it first, under a lock, and read from disk by the others: nothing is
compiled twice, also where several searches begin at once, and where a process is ended, another one does its part.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, get_type_hints
from zlib import crc32

from numba import boolean, float64, int64
from numba.core import types
from numba.core.event import Event, Listener, install_listener

from graph.errors import UsageError
from search.kernels.backward_tasks import lay_out_backward
from search.kernels.collective_cost import price_collectives
from search.kernels.derivation import collectives_of, count_tasks, find_activity, weigh
from search.kernels.exchange import write_exchange
from search.kernels.fifo_order import run_fifo_order
from search.kernels.forward_tasks import lay_out_forward, lay_out_renewals
from search.kernels.gradient_buckets import fill_buckets, find_gathers
from search.kernels.incremental import compact, evaluate_program_order
from search.kernels.priority_order import number_by_position, run_priority_order
from search.kernels.program_order import run_program_order
from search.kernels.update_tasks import lay_out_updates
from search.orders import Order
from search.parallel.fork import Forked, can_fork, fork
from search.parallel.gc_pause import looking_seldom

LOCK_FILE = "compiling.lock"
# Whoever holds a lock that long may have been stopped: what it is at is compiled here too.
PATIENCE_S = 200.0
LOOK_S = 0.02

# numba annotates few of its functions.
_NAMED, _NAMED_ALIKE = cast(Any, types.NamedTuple), cast(Any, types.NamedUniTuple)
_INTS, _FLAGS, _NUMBERS = int64[::1], boolean[::1], float64[::1]
_INTS_2D, _FLAGS_2D, _NUMBERS_2D, _INTS_3D = int64[:, ::1], boolean[:, ::1], float64[:, ::1], int64[:, :, ::1]

# The arrays that are no lines of integers, by the kernel or the tuple that has them.
UNUSUAL: Mapping[str, Mapping[str, Any]] = {
    "GraphArrays": {"reading_gradient": _FLAGS, "needs_gradient": _FLAGS},
    "Holds": {"latency_s": _NUMBERS_2D, "s_per_byte": _NUMBERS_2D, "is_measured": _FLAGS},
    "Scratch": {"again_2GD": _INTS_3D},
    "Versions": {"again_2GD": _INTS_3D, "alike_ns_2O": _INTS_2D, "meets_2O": _INTS_2D},
    "Gathers": {"first_2O": _INTS_2D, "last_2O": _INTS_2D, "weight_2W": _INTS_2D},
    "Machines": {"update_s_D": _NUMBERS},
    "Checkpoints": {"row": _INTS_3D},
    "Routes": {"latency_s": _NUMBERS, "bandwidth": _NUMBERS, "is_used": _FLAGS},
    "write_exchange": {"latency_s_DD": _NUMBERS, "bandwidth_DD": _NUMBERS},
    "price_collectives": {"line_K4": _NUMBERS_2D, "used_KL": _FLAGS_2D},
    "evaluate_program_order": {"keeps_ends": _FLAGS},
    "compact": {"keeps_ends": _FLAGS},
}


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel, the types of the arguments that it is called with, and the number of its lock."""

    kernel: Any
    arguments: tuple[Any, ...]
    number: int

    def compile(self) -> None:
        """Read it from disk, or compile it and write it there."""
        self.kernel.compile(self.arguments)

    def read(self) -> bool:
        """Read it from disk; False where it is not there."""
        try:
            with install_listener("numba:compile", _Refusing()):
                self.compile()
        except _NotThere:
            return False
        return True


class Compiling:
    """The kernels of a search that nobody compiled here yet. A context: what is under way beside it ends with it."""

    def __init__(self, wanted: Sequence[Any]) -> None:
        # Under NUMBA_DISABLE_JIT kernels are functions.
        jobs = [job_of(kernel) for kernel in wanted if hasattr(kernel, "py_func")]
        self._jobs = [job for job in jobs if not job.read()]
        self._beside: Forked | None = None

    @property
    def left(self) -> int:
        """How many kernels are not in this process yet."""
        return len(self._jobs)

    @property
    def begun(self) -> bool:
        """Whether a process beside this one compiles."""
        return self._beside is not None

    def begin(self) -> None:
        """Begin in a process beside this one, where there can be one and what it compiles can be kept."""
        if self._jobs and can_fork() and all(job.kernel.stats.cache_path for job in self._jobs):
            with suppress(UsageError):  # no process can be had: all of it here, then
                self._beside = fork(self._serve)

    def finish(self) -> None:
        """Compile what is left, and have all of it in this process."""
        with looking_seldom():
            compile_jobs(self._jobs)
        self._jobs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._beside is not None:
            self._beside.kill()
            self._beside.ended()
            self._beside.connection.close()
            self._beside = None

    def _serve(self, _connection: Connection) -> None:
        """Be the process beside; called in its copy."""
        with looking_seldom():
            compile_jobs(self._jobs, waits=False)


def needed_kernels(order: Order, algorithms: Collection[str]) -> tuple[Any, ...]:
    """Return the kernels that every such search calls, those first that take longest to compile.

    What only some searches call is compiled when it is called.
    """
    in_program_order, walks = order == "program", order == "program" and "mcmc" in algorithms
    asked = (
        (evaluate_program_order, walks),
        (lay_out_backward, True),
        (write_exchange, True),
        (lay_out_forward, True),
        (run_priority_order, order.startswith("priority")),
        (run_fifo_order, order == "fifo"),
        (price_collectives, True),
        (lay_out_updates, True),
        (find_activity, True),
        (find_gathers, True),
        (run_program_order, in_program_order),
        (lay_out_renewals, True),
        (fill_buckets, True),
        (weigh, True),
        (number_by_position, order == "priority"),
        (compact, walks),
        (count_tasks, True),
        (collectives_of, True),
    )
    return tuple(kernel for kernel, needed in asked if needed)


def compile_jobs(jobs: Sequence[Job], *, waits: bool = True) -> None:
    """Compile kernels, or read from disk what other processes compile meanwhile.

    Args:
        jobs: the kernels, those first that are to be first.
        waits: for kernels that others are at, so that all of them are here in the end. Else those are left to them.
    """
    with _locks(jobs) as locks:
        left = list(jobs)
        until = time.monotonic() + PATIENCE_S
        while left:
            job = next((one for one in left if locks.take(one.number)), None)
            if job is None:
                if not waits:
                    return
                if time.monotonic() < until:
                    time.sleep(LOOK_S)
                    continue
                job = left[0]
            job.compile()
            locks.release(job.number)
            left.remove(job)


class _Locks:
    """Locks of kernels, in a file: a process that ends gives its own back. Without a file all are free."""

    def __init__(self, file: int | None) -> None:
        self._file = file

    def take(self, number: int) -> bool:
        """Take a lock; False: another process has it."""
        if self._file is None:
            return True
        import fcntl

        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # the file system has no locks
            self._file = None
        return True

    def release(self, number: int) -> None:
        """Give a lock back."""
        if self._file is None:
            return
        import fcntl

        with suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)


@contextmanager
def _locks(jobs: Sequence[Job]) -> Iterator[_Locks]:
    """Give the locks, beside what is compiled; free ones where nothing is kept."""
    with ExitStack() as stack:
        folder = jobs[0].kernel.stats.cache_path if jobs else None
        file: int | None = None
        if folder and can_fork():
            with suppress(OSError):
                file = os.open(Path(folder) / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                stack.callback(os.close, file)
        yield _Locks(file)


def job_of(kernel: Any) -> Job:
    """Return the job of a kernel; what it is called with follows from its annotations."""
    function = kernel.py_func
    hints = get_type_hints(function)
    arguments = tuple(
        _type(hints[name], function.__name__, name) for name in inspect.signature(function).parameters
    )
    # Of kernels in several files: a byte of the file of locks each.
    number = crc32(f"{function.__module__}.{function.__name__}".encode()) & 0x7FFFFFFF
    return Job(kernel, arguments, number)


def _type(hint: Any, owner: str, name: str) -> Any:
    """Return numba's type of an argument, or of a field of a tuple."""
    if hint is int:
        return int64
    fields = getattr(hint, "_fields", None)
    if fields is None:
        return UNUSUAL.get(owner, {}).get(name, _INTS)
    hints = get_type_hints(hint)
    inside = [_type(hints[field], hint.__name__, field) for field in fields]
    if len(set(inside)) == 1:
        return _NAMED_ALIKE(inside[0], len(inside), hint)
    return _NAMED(inside, hint)


class _NotThere(Exception):
    """A kernel is not on disk."""


class _Refusing(Listener):
    """Hears that a kernel is about to be compiled, and refuses; in other threads it may be."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def on_start(self, event: Event) -> None:  # noqa: ARG002  # numba's name
        """Refuse."""
        if threading.get_ident() == self._thread:
            raise _NotThere

    def on_end(self, event: Event) -> None:
        """Ignore the end."""
