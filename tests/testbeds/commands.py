"""`scripts/testbed` as a command, and the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0


def start(*arguments: str, folder: Path = ROOT, path: str | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.testbeds", "--folder", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **({} if path is None else {"PATH": path})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(*arguments: str, folder: Path = ROOT, path: str | None = None) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command."""
    with start(*arguments, folder=folder, path=path) as process:
        output, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, output, errors


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        # A process that has ended, and that nobody has waited for, is none.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
