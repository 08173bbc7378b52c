"""Files that one worker of a test run makes, and all of its workers read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the path of the file `name` of this test run; the first worker that asks for it calls `make`."""
    folder = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # That of all workers.
        folder = folder.parent
    path = folder / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{name}")
            make(unfinished)
            unfinished.rename(path)
    return path
