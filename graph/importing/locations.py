"""Where in the user's own source something of a forward comes from."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx

from graph.packages import PACKAGES

_TORCH = Path(torch.__file__).parent
_ROOT = Path(__file__).parents[2]
_OURS = tuple(_ROOT / package for package in PACKAGES)
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def of_error(error: BaseException) -> str:
    """Return "file:line" of the last line of the user's that led to an error; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return _last([(frame.filename, frame.lineno or 0) for frame in frames])


def of_node(node: fx.Node) -> str:
    """Return "file:line" of the last line of the user's that made a node; "" where the exporter kept none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return _last([(file, int(line)) for file, line in frames])


def passed_through(error: BaseException, file: str) -> bool:
    """True where an error was raised in, or below, a file of torch whose path ends so."""
    return any(frame.filename.endswith(file) for frame in traceback.extract_tb(error.__traceback__))


def _last(frames: Sequence[tuple[str, int]]) -> str:
    """Return the last of the frames that are neither torch's, ours nor Python's, of packages only where all are."""
    foreign = [(file, line) for file, line in frames if _is_foreign(Path(file))]
    own = [frame for frame in foreign if not {"site-packages", "dist-packages"} & set(Path(frame[0]).parts)]
    for file, line in reversed(own or foreign):
        path = Path(file)
        try:
            return f"{path.relative_to(Path.cwd())}:{line}"
        except ValueError:
            return f"{path}:{line}"
    return ""


def _is_foreign(path: Path) -> bool:
    in_packages = {"site-packages", "dist-packages"} & set(path.parts)
    is_standard = _STANDARD in path.parents and not in_packages
    return path.is_absolute() and not is_standard and _TORCH not in path.parents and not _is_ours(path)


def _is_ours(path: Path) -> bool:
    # A network of the zoo stands for a user's.
    return any(package in path.parents for package in _OURS) and _ROOT / "graph" / "zoo" not in path.parents
