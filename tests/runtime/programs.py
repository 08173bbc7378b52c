"""Python programs that a test starts as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from profiler.pinning import child_variables

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
