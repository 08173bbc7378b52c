"""Runs a generated plan on gloo processes of this machine, before it is handed over.

Every rank that fails writes why into a file of its own; the first one counts.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from graph.errors import RuntimeFailure
from profiler.pinning import begin_child
from runtime.launch.torchrun import call_on_ranks

PLAN_FILE = "plan.py"
SUMMARY_FILE = "summary"
FAILURE_FILE = "failure"


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """The end of a plan's own check: `summary` is its last line, `failure` one line where it could not run."""

    equal: bool = False
    summary: str = ""
    failure: str = ""


def check_plan(source: str, processes: int, timeout_s: float) -> PlanCheck:
    """Run a plan's own check (one training step against the plain module, in float64) and return how it ended.

    Args:
        source: the text of the generated file; the model's factory is looked for from the current folder.
        processes: as many gloo processes as its mesh has devices.
        timeout_s: after which all of them are ended.
    """
    with tempfile.TemporaryDirectory(prefix="soapstone-plan-") as folder:
        Path(folder, PLAN_FILE).write_text(source)
        reason = ""
        try:
            call_on_ranks(processes, _check_as_rank, (folder, timeout_s))
        except RuntimeFailure as error:
            reason = str(error)
        return _ending(Path(folder), reason)


def _ending(folder: Path, reason: str) -> PlanCheck:
    failures = sorted(folder.glob(f"{FAILURE_FILE}-*"), key=lambda file: file.stat().st_mtime_ns)
    if failures:
        return PlanCheck(failure=failures[0].read_text())
    summary = folder / SUMMARY_FILE
    if summary.is_file() and not reason:
        verdict, _, line = summary.read_text().partition("\n")
        return PlanCheck(equal=verdict == str(True), summary=line)
    return PlanCheck(failure=f"its processes ended without a result ({reason or 'no reason given'})")


def _check(folder: Path) -> None:
    """Check the plan in `folder` as one rank; rank 0 writes its verdict and the last line that it prints."""
    specification = importlib.util.spec_from_file_location("plan", folder / PLAN_FILE)
    assert specification is not None
    assert specification.loader is not None
    plan = importlib.util.module_from_spec(specification)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        specification.loader.exec_module(plan)
        equal = plan.check(plan.make_mesh())
    lines = [line for line in printed.getvalue().splitlines() if line.strip()]
    if os.environ["RANK"] == "0":
        (folder / SUMMARY_FILE).write_text(f"{equal}\n{lines[-1]}")


def _describe(error: BaseException) -> str:
    """Return an error in one line: its class and the first line of its message."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _fail(folder: Path, reason: str) -> None:
    """End this rank at once, with its reason in a file."""
    (folder / f"{FAILURE_FILE}-{os.environ['RANK']}").write_text(reason)
    os._exit(1)


def _check_as_rank(folder: str, timeout_s: float) -> None:
    """Check a plan as one of the launched processes."""
    begin_child()
    # Without GPUs, the file chooses gloo.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A model of the user's own is in the current folder.
    sys.path.insert(0, os.getcwd())
    too_long = (Path(folder), f"it ran for more than {timeout_s:g} s")
    limit = threading.Timer(timeout_s, _fail, too_long)
    limit.daemon = True
    limit.start()
    try:
        _check(Path(folder))
    except (Exception, SystemExit) as error:
        _fail(Path(folder), _describe(error))
    limit.cancel()
    # As generated files end: a thread of gloo that still holds a tensor would abort the interpreter's own end.
    atexit.register(os._exit, 0)
