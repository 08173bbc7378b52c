"""Processes that tests start, forked from the server of device processes: imports take longer than what they do."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from profiler.pinning import begin_child
from profiler.processes import starting_processes


def start_process(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start `target(*arguments)` in a process that has this one's environment variables, and ends with it."""
    with starting_processes() as context:
        process = context.Process(target=_child, args=(dict(os.environ), target, arguments), daemon=True)
        process.start()
    return process


def _child(variables: dict[str, str], target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    begin_child()
    os.environ.clear()
    os.environ.update(variables)
    target(*arguments)
