"""Compiling the kernels of a search before it calls them, in two processes at once.

What is compiled is kept on disk, so this takes time in the first search after an installation alone. One kernel, the
incremental simulation, takes as long as all others together: a helper process begins with it while the network is
imported. Each kernel is compiled under a lock of its own, by whoever comes to it first, and read from disk by the
others: nothing is compiled twice, also where several searches begin at once, and where a process is ended, another one
does its part.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, get_args, get_origin, get_type_hints

from numba import boolean, float64, int64
from numba.core import types
from numba.core.event import Event, Listener, install_listener

from graph import locks
from graph.errors import UsageError
from search.kernels.collective_formulas import collectives_ns, price_collectives
from search.kernels.derivation import derive
from search.kernels.fifo_order import run_fifo_order
from search.kernels.fragment_table import find_fragments, find_touched, hold_lookup
from search.kernels.fragment_writing import hold_writing, write_fragments
from search.kernels.gradient_buckets import fill_buckets
from search.kernels.held import HeldTuple, HeldTupleType
from search.kernels.incremental import compact, evaluate_program_order, hold_proposal
from search.kernels.priority_order import number_by_position, run_priority_order
from search.kernels.program_order import run_program_order
from search.kernels.regions import find_regions
from search.kernels.task_graph import emit_task_graph, most_tasks
from search.kernels.weight_gathers import find_gathers
from search.orders import Order
from search.parallel.fork import ForkedProcess, can_fork, fork
from search.parallel.gc_pause import rare_collection

# Whoever holds a kernel's lock that long may have been stopped: the kernel is compiled here too.
PATIENCE_S = 200.0

# numba annotates few of its functions.
_NAMED, _NAMED_ALIKE = cast(Any, types.NamedTuple), cast(Any, types.NamedUniTuple)
_INTS, _FLAGS, _NUMBERS = int64[::1], boolean[::1], float64[::1]
_INTS_2D, _FLAGS_2D, _NUMBERS_2D = int64[:, ::1], boolean[:, ::1], float64[:, ::1]
_INTS_3D, _NUMBERS_3D = int64[:, :, ::1], float64[:, :, ::1]

# The arrays that are no lines of integers, by the kernel or the tuple that has them.
UNUSUAL: Mapping[str, Mapping[str, Any]] = {
    "GraphArrays": {"reading_gradient": _FLAGS, "needs_gradient": _FLAGS},
    "ResourceSets": {
        "latency_s": _NUMBERS_2D,
        "s_per_byte": _NUMBERS_2D,
        "segments": _INTS_2D,
        "curve": _NUMBERS_2D,
    },
    "Derivation": {"again_2GD": _INTS_3D},
    "Workload": {"uniform_ns_2O": _INTS_2D, "exchange_2O": _INTS_2D},
    "GatherArrays": {"first_2O": _INTS_2D, "last_2O": _INTS_2D, "weight_2W": _INTS_2D},
    "Machines": {"update_s_D": _NUMBERS},
    "Routes": {"latency_s": _NUMBERS, "bandwidth": _NUMBERS, "is_used": _FLAGS},
    "ExchangeLinks": {
        "latency_s_DD": _NUMBERS,
        "bandwidth_DD": _NUMBERS,
        "segments": _INTS_2D,
        "curve": _NUMBERS_2D,
        "busy_2L": _INTS_2D,
    },
    "FragmentSources": {"common_K3": _INTS_2D, "at_PD": _INTS_2D, "unknown_N3": _INTS_2D},
    "CollectiveList": {"row_K7": _INTS_2D},
    "FragmentLookup": {"missing_N2": _INTS_2D},
    "price_all_reduce": {"leads": _FLAGS, "line_2": _NUMBERS},
    "price_collectives": {"line_KA2": _NUMBERS_3D, "used_KL": _FLAGS_2D},
}


class KernelWarmUp:
    """The kernels of a search that nobody compiled here yet. A context: its helper process ends with it.

    remaining: kernels that are not in this process yet. helper: a process that compiles beside this one.
    """

    def __init__(self, kernels: Sequence[Any]) -> None:
        # Under NUMBA_DISABLE_JIT kernels are functions.
        self.remaining = [kernel for kernel in kernels if hasattr(kernel, "py_func") and not is_read(kernel)]
        self.helper: ForkedProcess | None = None

    def start_helper(self) -> None:
        """Start the helper, where there can be one and compiled kernels can be kept."""
        if self.remaining and can_fork() and all(kernel.stats.cache_path for kernel in self.remaining):
            with suppress(UsageError):  # no process can be had: all of it here, then
                self.helper = fork(self._help)

    def finish(self) -> None:
        """Compile the remaining kernels, and have all of them in this process."""
        with rare_collection():
            for kernel in reversed(self.remaining):  # the helper begins at the other end
                compile_once(kernel)
        self.remaining = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.helper is not None:
            self.helper.end()
            self.helper = None

    def _help(self, _connection: Connection) -> None:
        """Be the helper; called in its copy."""
        with rare_collection():
            for kernel in self.remaining:
                compile_once(kernel)


def needed_kernels(order: Order, algorithms: Collection[str]) -> tuple[Any, ...]:
    """Return the kernels that every such search calls: the incremental simulation first, the slowest others last.

    Kernels that only some searches call are compiled when they are called.
    """
    in_program_order, walks = order == "program", order == "program" and "mcmc" in algorithms
    asked = (
        (evaluate_program_order, walks),
        (compact, walks),
        (hold_proposal, walks),
        (number_by_position, order == "priority"),
        (find_touched, True),
        (hold_lookup, True),
        (fill_buckets, True),
        (find_fragments, True),
        (most_tasks, True),
        (run_program_order, in_program_order),
        (find_gathers, True),
        (derive, True),
        (price_collectives, True),
        (collectives_ns, True),
        (find_regions, True),
        (run_fifo_order, order == "fifo"),
        (run_priority_order, order.startswith("priority")),
        (hold_writing, True),
        (write_fragments, True),
        (emit_task_graph, True),
    )
    return tuple(kernel for kernel, needed in asked if needed)


def compile_once(kernel: Any) -> None:
    """Compile a kernel, or read from disk what another process compiles meanwhile."""
    with kernel_lock(kernel, PATIENCE_S):
        kernel.compile(argument_types(kernel))


def is_read(kernel: Any) -> bool:
    """Read a kernel from disk; return whether it is there."""
    try:
        with install_listener("numba:compile", _Refusing()):
            kernel.compile(argument_types(kernel))
    except _NotThere:
        return False
    return True


@contextmanager
def kernel_lock(kernel: Any, patience_s: float) -> Iterator[bool]:
    """Hold the lock of a kernel, a file in its cache folder, if it is free in time; yield whether it is held.

    Where there is no such folder, or the file system has no locks, it is not held.
    """
    folder = kernel.stats.cache_path
    if folder is None:
        yield False
        return
    path = Path(folder) / f"{kernel.py_func.__module__}.{kernel.py_func.__name__}.lock"
    with ExitStack() as stack:
        is_held = False
        with suppress(OSError):  # a timeout is one
            stack.enter_context(locks.exclusive(path, patience_s))
            is_held = True
        yield is_held


def argument_types(kernel: Any) -> tuple[Any, ...]:
    """Return numba's types of the arguments that a kernel is called with, which follow from its annotations."""
    function = kernel.py_func
    hints = get_type_hints(function)
    return tuple(
        _type(hints[name], function.__name__, name) for name in inspect.signature(function).parameters
    )


def _type(hint: Any, owner: str, name: str) -> Any:
    """Return numba's type of an argument, or of a field of a tuple."""
    if hint is int:
        return int64
    if get_origin(hint) is HeldTuple:
        return HeldTupleType([("value", _type(get_args(hint)[0], owner, name))])
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
