"""Python programs that a test starts as processes of their own."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from profiler.pinning import begin_child, child_variables
from runtime.launch.torchrun import call_on_ranks

LIMIT_S = 240.0


def output_of(*arguments: str, folder: Path, before: tuple[str, ...] = ()) -> list[str]:
    """Return the lines that Python prints with `arguments`, started in a folder; it must end well.

    before: the words of a command that starts it.
    """
    done = subprocess.run(
        [*before, sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **child_variables()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def outputs_on_ranks(count: int, *arguments: str, folder: Path) -> list[tuple[Any, str]]:
    """Run a Python file on ranks that torchrun's launcher forks; return the exit code and the output of each.

    They have imported torch already, which under torchrun itself takes most of the time of a small program.
    """
    return call_on_ranks(count, _run_file, (arguments, folder))


def _run_file(arguments: tuple[str, ...], folder: Path) -> tuple[Any, str]:
    begin_child()
    os.chdir(folder)
    sys.argv = list(arguments)
    # The file may end its process at once, and what it has printed with it.
    ended_at_once = os._exit

    def end(code: int) -> None:
        # Not the watch over the process that started this one.
        if threading.current_thread() is threading.main_thread():
            sys.exit(code)
        ended_at_once(code)

    os._exit = end  # type: ignore[assignment]
    with redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as ended:
            return ended.code, output.getvalue()
    return 0, output.getvalue()
