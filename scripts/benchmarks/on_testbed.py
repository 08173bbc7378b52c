"""Commands on the hosts of a testbed (`scripts/testbed`), for benchmarks: root is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graph.errors import RuntimeFailure

TESTBED = "bench"

RunCommand = Callable[..., dict[str, Any]]
"""Takes arguments, and by `before` what stands before them on the command line; returns a JSON document."""


@contextmanager
def hosts(bandwidth: str, *, devices: int) -> Iterator[Callable[..., dict[str, Any]]]:
    """Make two hosts of so many ranks; yield what lets a command run on both.

    Raises:
        RuntimeFailure: they cannot be made, or a command failed.
    """

    def on_hosts(command: RunCommand, *arguments: str) -> dict[str, Any]:
        return command(*arguments, before=_testbed_command("run", "--"))

    said(_testbed_command("up", "--hosts", "2", "--devices", str(devices), "--bandwidth", bandwidth))
    try:
        yield on_hosts
    finally:
        said(_testbed_command("down"))


def _testbed_command(action: str, *others: str) -> list[str]:
    return [sys.executable, "-m", "scripts.testbeds", action, "--name", TESTBED, *others]


def app(database: str, *arguments: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """Run a command of `app`, on the hosts where something stands before it; return its JSON document.

    Raises:
        RuntimeFailure: it failed.
    """
    executable = str(Path(sys.executable).with_name("app"))
    return said([*before, executable, *arguments, "--json", "--database", database])


def said(command: Sequence[str]) -> dict[str, Any]:
    """Run a command to its end; return its JSON document, empty where it prints none.

    Raises:
        RuntimeFailure: it failed.
    """
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[-500:]
        raise RuntimeFailure(f"benchmark: {' '.join(command)} failed, must not: {reason}")
    document: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return document
