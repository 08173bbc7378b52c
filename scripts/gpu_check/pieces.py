"""The pieces of a GPU check, by name, in the order in which they say most: each takes less than ten minutes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from scripts.gpu_check import calls, clocks, contention, staged_ranks
from scripts.gpu_check.report import PieceResult, Row, add_row, judged

NETWORKS = ("mlp", "alexnet", "resnet101", "inception", "gpt2", "bert-large", "nmt", "dlrm")
PRECISIONS = ("float32", "tf32", "bfloat16")
# Of the tests that a piece runs: the piece says then which was the last.
TESTS_LIMIT_S = 540.0
# Predictions of one device must be so near.
STEP_ERROR = 0.05


class Check(Protocol):
    """A check of the GPU of an index; `quick`: of less."""

    def __call__(self, gpu: int, *, quick: bool) -> PieceResult:
        """Check, and return the result."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """A check, and the minutes that it is planned to take."""

    check: Check
    minutes: int


@contextmanager
def own_database() -> Iterator[dict[str, str]]:
    """Yield the environment of commands that share a database of their own."""
    with tempfile.TemporaryDirectory(prefix="soapstone-gpu-check-") as folder:
        yield {**os.environ, "SOAPSTONE_DATABASE_URL": f"sqlite:///{folder}/x.sqlite"}


def app(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a command of Soapstone and return its document, or its error under "error"."""
    done = _ran([sys.executable, "-m", "app", *arguments, "--json"], env=dict(environment))
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return {"error": f"app {arguments[0]}: {lines[-1][:200]}"}
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _ran(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], capture_output=True, text=True, check=False, **options)


def _pytest(*arguments: str) -> PieceResult:
    """Run tests that need a CUDA device."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "-p", "no:cacheprovider", *arguments]
    try:
        done = _ran(command, timeout=TESTS_LIMIT_S)
    except subprocess.TimeoutExpired as ended:
        # Bytes, whatever was asked for.
        printed = (ended.stdout or b"").decode(errors="replace").splitlines() or ["nothing"]
        summary = f"took longer than {TESTS_LIMIT_S:.0f} s; printed last: {printed[-1]}"
        return PieceResult(passed=False, summary=summary)
    lines = done.stdout.splitlines()
    rows = [{"failed": line} for line in lines if line.startswith(("FAILED", "ERROR"))]
    return PieceResult(done.returncode == 0, lines[-1] if lines else done.stderr[-200:], rows)


def tests(gpu: int, *, quick: bool) -> PieceResult:
    """Run the tests that need a CUDA device (pytest -m cuda)."""
    del gpu, quick
    return _pytest()


def verify(gpu: int, *, quick: bool) -> PieceResult:
    """Verify small networks on one GPU in float32, tf32 and bfloat16: loss and every gradient."""
    rows: list[Row] = []
    with own_database() as environment:
        for name in NETWORKS[:1] if quick else NETWORKS:
            for precision in PRECISIONS:
                document = app(
                    [
                        *("run", "--gpus", str(gpu), "--model", name, "--preset", "small"),
                        *("--precision", precision, "--strategy", "single-device", "--verify"),
                        *("--iterations", "1", "--warmup", "0", "--on-miss", "estimate"),
                    ],
                    environment,
                )
                error = document.get("error") or ("" if document["verified"] else "gradients differ")
                add_row(rows, {"network": name, "precision": precision, "error": error})
    return judged(rows, "verified")


def step(gpu: int, *, quick: bool) -> PieceResult:
    """Compare the summed costs of a step with the step itself, at batch 8 and 64."""
    rows: list[Row] = []
    preset = "small" if quick else "paper"
    with own_database() as environment:
        for name in ("mlp",) if quick else ("resnet101", "gpt2"):
            for batch in ("8", "64"):
                given = ["--gpus", str(gpu), "--model", name, "--preset", preset, "--batch-size", batch]
                document = app(["run", *given, "--strategy", "single-device"], environment)
                row = {"network": name, "batch": batch, "error": document.get("error", "")}
                if not row["error"]:
                    predicted_s, measured_s = document["predicted_step_time_s"], document["median_s"]
                    off = predicted_s / measured_s - 1
                    row |= {"predicted_s": predicted_s, "measured_s": measured_s, "off": off}
                    row["error"] = f"{name}, batch {batch}: {off:+.1%}" if abs(off) > STEP_ERROR else ""
                add_row(rows, row)
    return judged(rows, f"steps predicted within {STEP_ERROR:.0%}")


def commands(gpu: int, *, quick: bool) -> PieceResult:
    """Profile, search, run and compare, as a user does."""
    rows: list[Row] = []
    name, preset = ("mlp", "small") if quick else ("inception", "small")
    given = ["--gpus", str(gpu), "--model", name, "--preset", preset]
    with own_database() as environment:
        for arguments in (
            ["profile", *given],
            ["search", *given, "--proposals", "50"],
            ["run", *given],
            ["compare"],
        ):
            document = app(arguments, environment)
            error = document.get("error", "")
            if arguments[0] == "profile" and not error and document["failed"]:
                error = f"app profile: {document['failed']} calls failed"
            add_row(rows, {"command": arguments[0], "error": error})
    return judged(rows, "commands")


def nccl(gpu: int, *, quick: bool) -> PieceResult:
    """Run every pattern of communication over NCCL in a group of this GPU alone."""
    del gpu, quick
    return _pytest("tests/profiler/test_links.py::test_every_pattern_runs_over_nccl_on_one_gpu")


def sanitizer(gpu: int, *, quick: bool) -> PieceResult:
    """Execute calls of a small network under compute-sanitizer, which finds accesses out of bounds."""
    del quick
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return PieceResult(
            passed=None, summary="compute-sanitizer is not on PATH; it comes with the CUDA toolkit"
        )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "scripts.gpu_check"]
    command += ["--here", "--quick", "--piece", "calls", "--gpu", str(gpu)]
    done = _ran(command, cwd=Path(__file__).parents[2])
    lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line] or ["no summary"]
    return PieceResult(done.returncode == 0, lines[-1].strip("= "))


PIECES: dict[str, PlannedPiece] = {
    "tests": PlannedPiece(tests, 3),
    "calls": PlannedPiece(calls.check, 4),
    "verify": PlannedPiece(verify, 5),
    "timing": PlannedPiece(calls.check_times, 5),
    "step": PlannedPiece(step, 5),
    "clocks": PlannedPiece(clocks.check, 1),
    "contention": PlannedPiece(contention.check, 3),
    "ranks": PlannedPiece(staged_ranks.check, 6),
    "memory": PlannedPiece(calls.check_memory, 3),
    "nccl": PlannedPiece(nccl, 2),
    "commands": PlannedPiece(commands, 5),
    "sanitizer": PlannedPiece(sanitizer, 3),
}
