"""Device processes: how a process for one device is started, and ended.

Started afresh ("spawn"), never forked: a fork would copy torch's threads and CUDA context in an unusable state.
Messages are small frozen dataclasses over a pipe. A child ends when its parent does, even inside a kernel.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from graph.texts import describe_exit
from profiler.devices import PhysicalDevice
from profiler.pinning import (
    child_variables,
    end_with_parent,
    pin_to_core,
    started_with,
    uninterrupted_children,
)

KILL_WAIT_S = 10.0

Body = Callable[[Connection, PhysicalDevice, Any], None]


class DeviceProcess:
    """A child process on one device, and this process's end of the pipe to it."""

    def __init__(self, body: Body, device: PhysicalDevice, argument: object) -> None:
        """Start `body(connection, device, argument)` in a new process on `device`."""
        context = multiprocessing.get_context("spawn")
        self.device = device
        self.connection, far_end = context.Pipe(duplex=True)
        self.process: BaseProcess = context.Process(
            target=_child,
            args=(body, far_end, device, argument),
            name=f"soapstone-{device.label}",
            daemon=True,
        )
        with started_with(child_variables()), uninterrupted_children():
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


def _child(body: Body, connection: Connection, device: PhysicalDevice, argument: object) -> None:
    end_with_parent()
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
