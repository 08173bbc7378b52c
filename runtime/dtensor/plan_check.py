"""Runs a generated plan on gloo processes of this machine, before it is handed over.

Each process of `torchrun` executes this module; the first one that fails writes why into a file of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from profiler.pinning import child_variables

PLAN_FILE = "plan.py"
SUMMARY_FILE = "summary"
FAILURE_FILE = "failure"
END_S = 5
"""How long torchrun gets to end its processes."""


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
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", __name__, folder,
        ]  # fmt: skip
        # Without GPUs, the file chooses gloo.
        variables = {
            **os.environ,
            **child_variables(),
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        launcher = subprocess.Popen(
            command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, errors = launcher.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return PlanCheck(failure=f"it ran for more than {timeout_s:g} s")
        finally:
            _end(launcher)
        return _ending(Path(folder), errors)


def _end(launcher: subprocess.Popen[str]) -> None:
    """End torchrun and its processes, where they still run; torchrun ends its own when it is asked to."""
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.communicate(timeout=END_S)
            return
        launcher.kill()
        launcher.communicate()


def _ending(folder: Path, errors: str) -> PlanCheck:
    failures = sorted(folder.glob(f"{FAILURE_FILE}-*"), key=lambda file: file.stat().st_mtime_ns)
    if failures:
        return PlanCheck(failure=failures[0].read_text())
    summary = folder / SUMMARY_FILE
    if summary.is_file():
        verdict, _, line = summary.read_text().partition("\n")
        return PlanCheck(equal=verdict == str(True), summary=line)
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no reason given")
    return PlanCheck(failure=f"its processes ended without a result ({last})")


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


def main() -> None:
    """Check a plan as one of torchrun's processes."""
    folder = Path(sys.argv[1])
    code = 0
    try:
        _check(folder)
    except (Exception, SystemExit) as error:
        (folder / f"{FAILURE_FILE}-{os.environ['RANK']}").write_text(_describe(error))
        code = 1
    os._exit(code)  # as generated files end: a thread of gloo may still hold a tensor


if __name__ == "__main__":
    main()
