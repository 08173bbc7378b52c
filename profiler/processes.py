"""Processes that each own one device: how they are started, spoken to, and ended.

Started afresh ("spawn"), never forked: a fork would copy torch's threads and CUDA context in an unusable state.
Messages are small frozen dataclasses over a pipe. A child ends by itself when its parent does, even inside a kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from profiler.devices import PhysicalDevice
from profiler.pinning import child_variables, pin_to_core, started_with, uninterrupted_children

KILL_WAIT_S = 10.0

Body = Callable[[Connection, PhysicalDevice, Any], None]


class DeviceProcess:
    """A child process on one device, and this process's end of the pipe to it."""

    def __init__(self, body: Body, device: PhysicalDevice, argument: object) -> None:
        """Start `body(connection, device, argument)` in a process of its own, on `device`."""
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
        return None if code is None else describe_exit(code)

    def kill(self) -> None:
        """End the process at once, whatever it does, and release what it held here."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(KILL_WAIT_S)
        self.connection.close()


def describe_exit(code: int) -> str:
    """Return an exit code, negative for a signal, in words."""
    if code >= 0:
        return f"the worker exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    advice = "; it may have run out of memory" if name == "SIGKILL" else ""
    return f"the worker was ended by signal {name}{advice}"


def _end_with_parent() -> None:
    """Wait for the parent's death, which nobody can announce, and end this process: no worker is left behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _child(body: Body, connection: Connection, device: PhysicalDevice, argument: object) -> None:
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    # Before torch is imported, whose threads then inherit the core.
    pin_to_core(device.core)
    # Warnings of operators belong to no one here; what fails is reported as an outcome.
    warnings.simplefilter("ignore")
    try:
        device.occupy()
        body(connection, device, argument)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    finally:
        connection.close()
