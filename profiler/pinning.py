"""What makes a process a device of its own: one core, one thread, the loopback interface.

The workers of the profiler and the processes of the runtime use the same functions, so that an operator is measured
under the conditions in which it later runs. Nothing here imports torch before it must: threads that torch starts
inherit the core of the thread that imports it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


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


def limit_threads() -> None:
    """Make torch compute on one thread: a CPU device is one core."""
    import torch

    torch.set_num_threads(1)


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
    and MKL thread. Processes of one machine meet on the loopback interface, whatever the host name resolves to.
    """
    interface = loopback_interface()
    return {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


@contextmanager
def started_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while a child process is started, then restore what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
