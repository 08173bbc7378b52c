"""The conditions of a device's process: one core, one thread, the loopback interface, an end with its parent.

The workers of the profiler and the processes of the runtime share these functions, so that an operator is measured
under the conditions in which it runs. Nothing here imports torch before it must: threads that torch starts
inherit the core of the thread that imports it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import wait

# Parameters of mallopt (malloc.h): no block is a mapping of its own, the heap grows by so much and is never cut.
# Only -1 means never: the largest number is a limit of 2 GiB, which gradients pass.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_GROWN_BYTES = 64 * 2**20


def can_pin() -> bool:
    """True where the operating system lets a process choose its cores (Linux; not macOS)."""
    return hasattr(os, "sched_setaffinity")


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def pin_to_core(core: int | None) -> bool:
    """Keep this process, and the threads that it starts from now on, on one core.

    Returns False, and changes nothing, where the operating system has no such call or `core` is None.
    """
    if core is None or not can_pin():
        return False
    os.sched_setaffinity(0, {core})
    return True


@contextmanager
def threads_that_yield() -> Iterator[None]:
    """Start threads, of a communication library, that never interrupt a computing one: for them it must wait or pause.

    A message that arrives wakes gloo's thread on the core on which its process computes. Where that happens while the
    process holds gloo's lock, to send a message of its own, gloo's thread asks for the lock in a loop until the
    scheduler's time slice is over: 3 to 6 ms, on one in four small exchanges on two cores under Linux 6.18. Threads
    of the policy SCHED_BATCH take the core only from a thread that has nothing to do or whose time slice is over.

    Where the operating system has no such policy, or this thread's own is a special one, nothing is changed.
    """
    policy = getattr(os, "SCHED_BATCH", None)
    if policy is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    try:
        # Threads inherit it from the one that starts them; some containers forbid the call.
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def give_way() -> None:
    """Let a communication thread that has work take this core: call it while none of the library's locks are held.

    Those of `threads_that_yield` would else wait for the end of the computing thread's time slice, 4 ms and more, and
    with them the message that they are to send.
    """
    if hasattr(os, "sched_yield"):
        os.sched_yield()


def limit_threads() -> None:
    """Make torch compute on one thread: a CPU device is one core."""
    import torch

    torch.set_num_threads(1)


def can_keep_memory() -> bool:
    """Return whether `keep_freed_memory` can set the C library's use of freed memory (glibc)."""
    return os.name == "posix" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees, for its next tensors, where the C library is glibc.

    By default glibc gives large blocks back to the operating system when they are freed, and the next tensor's pages
    fault one by one: a relu on 6 MB then takes 2.5 times as long. Which blocks these are depends on what was freed
    before, so that the same operator took one time in one process and another in the next.

    Returns False, and changes nothing, with another C library.
    """
    if not can_keep_memory():
        return False
    library = ctypes.CDLL(None)
    kept = [
        library.mallopt(_M_MMAP_MAX, 0),
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER),
        library.mallopt(_M_TOP_PAD, _GROWN_BYTES),
    ]
    return all(kept)


def return_freed_memory() -> None:
    """Return memory to the system that the process has freed and, after `keep_freed_memory`, still holds."""
    if can_keep_memory():
        ctypes.CDLL(None).malloc_trim(0)


def loopback_interface() -> str:
    """Return the name of the network interface that holds 127.0.0.1: "lo" on Linux, "lo0" on macOS."""
    import psutil

    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(entry.family == socket.AF_INET and entry.address == "127.0.0.1" for entry in addresses):
            return name
    return "lo"


def child_variables() -> dict[str, str]:
    """Return the environment variables of a device's process.

    PYTHONSAFEPATH: a folder of the user's with its own `runtime/` must not hijack the process's imports. One OpenMP
    and MKL thread, and torch.compile in the process itself. Processes of one machine meet on the loopback interface,
    whatever the host name resolves to. Of what torch's libraries log, errors alone.
    """
    interface = loopback_interface()
    return {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def begin_child() -> None:
    """Begin a child process: it ends as soon as its parent is gone, since a killed parent can end nobody.

    It can be ended by signals that its server lets pass by. Collections of garbage pass by what the server imported:
    one that looked at all of it would take a quarter of a second, and make each page a copy.
    """
    gc.freeze()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    parent = parent_process()
    if parent is None:
        return

    def exit_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=exit_with_parent, name="parent-watch", daemon=True).start()


# Variables that are set for children now: how many contexts set each, and its value before the first.
_set_now: dict[str, tuple[int, str | None]] = {}
_set_now_lock = threading.Lock()


@contextmanager
def started_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while a child process is started, then restore them.

    Contexts may overlap, in several threads too: the last one to end restores what was there before the first.
    """
    with _set_now_lock:
        for name, value in variables.items():
            count, before = _set_now.get(name, (0, os.environ.get(name)))
            _set_now[name] = (count + 1, before)
            os.environ[name] = value
    try:
        yield
    finally:
        with _set_now_lock:
            for name in variables:
                count, before = _set_now.pop(name)
                if count > 1:
                    _set_now[name] = (count - 1, before)
                elif before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before


INTERRUPT = frozenset({signal.SIGINT})
ENDING = frozenset({signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])})
"""What ends a process; a server of processes, which ends with its parent, lets it pass by."""


@contextmanager
def uninterrupted_children(signals: frozenset[signal.Signals] = INTERRUPT) -> Iterator[None]:
    """Let Ctrl-C, or other signals, pass by the processes that are started meanwhile, from their first moment on.

    A terminal sends it to all processes, and this one decides what it means. They inherit that this thread blocks it;
    another thread takes it for this process, whose main thread handles it as ever.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    _start_tracker()
    over = threading.Event()
    threading.Thread(target=over.wait, name="interrupts", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def _start_tracker() -> None:
    """Start the process that multiprocessing keeps beside this one, unless it runs; its start unblocks signals.

    It lets interrupts pass, but not the end of a terminal, after which it still has to clean up.
    """
    if threading.current_thread() is not threading.main_thread():
        resource_tracker.ensure_running()
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.signal(signal.SIGHUP, before)
