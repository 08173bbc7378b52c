"""How soon the command line answers: the wall time of `app --help`, started as a user starts it."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from scripts.benchmarks.result import BenchmarkResult, measurement

TARGET_S = 0.5


def run(*, quick: bool) -> BenchmarkResult:
    """Time `app --help`, one process a run, after one run that fills the caches of the file system.

    Raises:
        subprocess.CalledProcessError: `app --help` failed.
    """
    runs = 5 if quick else 21
    command = [str(Path(sys.executable).with_name("app")), "--help"]
    times_s = [_wall_time_s(command) for _ in range(1 + runs)][1:]
    return BenchmarkResult(
        benchmark="cli",
        conditions={"command": "app --help", "runs": runs},
        measurements=[
            measurement("median", statistics.median(times_s), "s", at_most=TARGET_S),
            measurement("minimum", min(times_s), "s"),
            measurement("maximum", max(times_s), "s"),
        ],
    )


def _wall_time_s(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
