"""Device processes: how a process for one device is started, and ended.

Never forked from this one: a fork would copy torch's threads and CUDA context in an unusable state. On Linux they are
forked from a server, a process that has imported torch and computed nothing: that import takes longer than most
processes need for the rest. Elsewhere they are started afresh ("spawn").

Messages are small frozen dataclasses over a pipe. A child ends when its parent does, even inside a kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from graph.texts import describe_exit
from profiler.devices import PhysicalDevice
from profiler.pinning import (
    ENDING,
    INTERRUPT,
    begin_child,
    child_variables,
    pin_to_core,
    started_with,
    uninterrupted_children,
)

KILL_WAIT_S = 10.0

# On macOS, a fork after torch has loaded Accelerate may crash.
HAS_SERVER = sys.platform == "linux"

# What the server imports: all that workers, probes and ranks take. By name, since some stand above this package.
PRELOADED: tuple[str, ...] = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.distributed_c10d",
    "torch.fx.experimental.symbolic_shapes",  # torch imports it, with sympy, in a process's first backward
    "profiler.link_worker",
    "profiler.operators",
    "profiler.workers",
    "runtime.jobs.run",
    "runtime.launch.torchrun",
)

Body = Callable[[Connection, PhysicalDevice, Any], None]


class DeviceProcess:
    """A child process on one device, and this process's end of the pipe to it."""

    def __init__(self, body: Body, device: PhysicalDevice, argument: object) -> None:
        """Start `body(connection, device, argument)` in a new process on `device`."""
        self.device = device
        with starting_processes() as context:
            self.connection, far_end = context.Pipe(duplex=True)
            self.process: BaseProcess = context.Process(
                target=_child,
                args=(body, far_end, device, argument),
                name=f"soapstone-{device.label}",
                daemon=True,
            )
            self.process.start()
        far_end.close()

    def death(self) -> str | None:
        """Return how the process ended, in words, or None while it lives."""
        code = self.process.exitcode
        return None if code is None else f"the worker {describe_exit(code)}"

    def kill(self) -> None:
        """Kill the process and close the pipe."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(KILL_WAIT_S)
        self.connection.close()


@contextmanager
def starting_processes() -> Iterator[ForkServerContext | SpawnContext]:
    """Yield multiprocessing's context for device processes, which are to be started while this context lasts.

    They have `child_variables`, and Ctrl-C passes by them.
    """
    served = start_server()
    with started_with(child_variables()), uninterrupted_children():
        yield multiprocessing.get_context("forkserver") if served else multiprocessing.get_context("spawn")


def start_server() -> bool:
    """Start the server of device processes, unless it runs, and do not wait for it: its imports take seconds.

    Device processes have the environment variables of the server, but for those that they set themselves. Returns
    False where there can be no server.
    """
    if not HAS_SERVER:
        return False
    forkserver.set_forkserver_preload(list(PRELOADED))
    try:
        with started_with(child_variables()), uninterrupted_children(ENDING | INTERRUPT):
            forkserver.ensure_running()
    except OSError:  # the path of its socket, in the folder of temporary files, may be too long
        return False
    _end_server_at_exit()
    return True


@cache
def _end_server_at_exit() -> None:
    """End the server with this process, after multiprocessing has ended the processes that still run."""
    Finalize(None, _end_server, exitpriority=-1)


def _end_server() -> None:
    """Kill the server, which waits or imports still, and collect it."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError, ChildProcessError):  # others may have ended it
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


def _child(body: Body, connection: Connection, device: PhysicalDevice, argument: object) -> None:
    begin_child()
    # Before torch is imported, whose threads then inherit the core.
    pin_to_core(device.core)
    # A failure is reported as an outcome; warnings of operators are not.
    warnings.simplefilter("ignore")
    try:
        device.occupy()
        body(connection, device, argument)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    finally:
        connection.close()
