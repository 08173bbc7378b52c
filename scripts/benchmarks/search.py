"""How soon a search from the command line has a good answer: `app search`, from the command to the printed result.

Each search is a process of its own on a database of its own; costs are estimates from data sheets. It is timed twice:
the first time the network is imported through torch, the second time its graph is kept (`app models cache`). How good
its answer is, is said against what a long search of the same network and topology finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement

GAP_PERCENT, MEMORY_GB = 2.0, 1.0
LONG_S = 600


@dataclass(frozen=True, slots=True)
class SearchCase:
    """A search: its name, the arguments of `app search`, and its time limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    budget: tuple[str, ...]
    limit_s: float


def _case(name: str, model: str, batch_size: int, nodes: int, limit_s: float, budget: int) -> SearchCase:
    arguments = (
        "--model", model, "--batch-size", str(batch_size), "--topology", "hgx-h100", "--nodes", str(nodes),
        "--precision", "bfloat16",
    )  # fmt: skip
    return SearchCase(name, arguments, ("--proposals", str(budget)), limit_s)


# Targets: a third of what PyTorch's experimental AutoParallel takes, or better.
CASES = (
    _case("gpt2, 8 devices", "gpt2", 64, 1, 5, 200),
    _case("gpt2, 8 x 8 devices", "gpt2", 512, 8, 10, 200),
    _case("inception, 8 devices", "inception", 256, 1, 5, 200),
    _case("Llama-3-8B, 8 x 8 devices", "hf-llama", 64, 8, 30, 200),
)
QUICK = SearchCase(
    "mlp, 4 devices",
    ("--model", "mlp", "--preset", "small", "--topology", "hgx-h100", "--devices", "4"),
    ("--proposals", "50"),
    60,
)


@dataclass(frozen=True, slots=True)
class Finished:
    """A search that ended: seconds from the command to its end, its peak memory in bytes, the step it predicts.

    `processor_s`: of all cores, with the processes that it waited for.
    """

    wall_s: float
    processor_s: float
    peak_bytes: int
    step_time_s: float
    proposals: int


def run(*, quick: bool) -> BenchmarkResult:
    """Search each case, and again for `LONG_S` seconds; in quick mode a small one, and five seconds.

    Raises:
        RuntimeError: a search failed; the message holds what it said.
    """
    cases, long_s = ((QUICK,), 5) if quick else (CASES, LONG_S)
    measurements: list[MeasuredValue] = []
    rows = []
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as cache:
        # Compiled kernels are kept on disk: the first search on a fresh machine fills that cache.
        _search((*QUICK.arguments, *QUICK.budget), cache)
        for case in cases:
            folder = str(Path(cache, case.name))
            first = _search((*case.arguments, *case.budget), folder)
            second = _search((*case.arguments, *case.budget), folder)
            # Chains of no end: a limit of time ends them together.
            long = _search((*case.arguments, "--proposals", "100000000", "--time", str(long_s)), folder)
            measurements += _measurements(case, first, second, long)
            rows.append(_row(case, first, second, long))
    return BenchmarkResult(
        benchmark="search",
        conditions={"cores": os.cpu_count() or 1, "long search": f"{long_s} s"},
        measurements=measurements,
        table=rows,
    )


def _measurements(case: SearchCase, first: Finished, second: Finished, long: Finished) -> list[MeasuredValue]:
    best_s = min(second.step_time_s, long.step_time_s)
    return [
        measurement(f"{case.name}: the first search", first.wall_s, "s", at_most=case.limit_s),
        measurement("    the second search", second.wall_s, "s", at_most=case.limit_s),
        measurement(
            "    above the long search's",
            100 * (second.step_time_s / best_s - 1),
            "%",
            at_most=GAP_PERCENT,
        ),
        measurement("    peak memory, first", first.peak_bytes / 1e9, "GB", at_most=MEMORY_GB),
        measurement("    peak memory, second", second.peak_bytes / 1e9, "GB", at_most=MEMORY_GB),
    ]


def _row(case: SearchCase, first: Finished, second: Finished, long: Finished) -> dict[str, str]:
    return {
        "search": case.name,
        "first s": f"{first.wall_s:.1f}",
        "second s": f"{second.wall_s:.1f}",
        "processor s": f"{second.processor_s:.1f}",
        "proposals": str(second.proposals),
        "found": f"{second.step_time_s * 1e3:.2f} ms",
        "long search": f"{long.step_time_s * 1e3:.2f} ms",
        "its proposals": str(long.proposals),
    }


def _search(arguments: tuple[str, ...], cache: str) -> Finished:
    """Run `app search` on a new database, with graphs kept in a folder, and wait for it."""
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        output, errors = Path(folder, "output.json"), Path(folder, "errors.txt")
        command = [str(Path(sys.executable).with_name("app")), "search", *arguments, "--json"]
        began = time.perf_counter()
        with output.open("w") as into, errors.open("w") as said:
            process = subprocess.Popen(
                command,
                stdout=into,
                stderr=said,
                env={
                    **os.environ,
                    "SOAPSTONE_DATABASE_URL": f"sqlite:///{folder}/x.sqlite",
                    "SOAPSTONE_CACHE_DIR": cache,
                },
            )
            # The only way to learn the peak memory of this process and of no other one.
            _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"app search {' '.join(arguments)}: {errors.read_text().strip()}")
        report = json.loads(output.read_text())
    unit = 1 if sys.platform == "darwin" else 1024
    return Finished(
        wall_s,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * unit,
        report["predictions"][0]["predicted_step_time_s"],
        report["proposals"],
    )
