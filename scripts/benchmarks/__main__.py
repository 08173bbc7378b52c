"""Run one benchmark by name. Exit code 2: no such benchmark; 1: it could not be run."""

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from rich.console import Console

from graph.errors import SoapstoneError
from scripts.benchmarks.result import BenchmarkResult, show

NOT_BENCHMARKS = (
    "__main__",
    "launches",
    "line_plot",
    "on_testbed",
    "outside",
    "pairs",
    "recording",
    "result",
    "synchronized_batch_norm",
    "wire_ddp",
    "zoo",
)


def benchmark_names() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in modules if module.name not in NOT_BENCHMARKS)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the arguments name, print its result, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Run one benchmark.")
    parser.add_argument("name", help=f"one of: {', '.join(benchmark_names())}")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    options = parser.parse_args(arguments)
    if options.name not in benchmark_names():
        names = ", ".join(benchmark_names())
        print(f"error: benchmark: '{options.name}' is not known, must be one of {names}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"scripts.benchmarks.{options.name}")
    try:
        result = cast(Callable[..., BenchmarkResult], module.run)(quick=options.quick)
    except SoapstoneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result, sort_keys=True))
    else:
        show(result, Console(width=None if sys.stdout.isatty() else 220))
    return 0


if __name__ == "__main__":
    sys.exit(main())
