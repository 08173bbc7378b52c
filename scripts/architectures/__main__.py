"""Check architectures from outside of the zoo in processes that may die of it; write the table of docs/models.md.

What is finished is not checked again. Exit code 1: an architecture that the page says to be equal is not; 2: a wrong
option.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from scripts.architectures import table
from scripts.architectures.checking import ArchitectureResult, Checking

RESULTS = ".soapstone/models"
PAGE = "docs/models.md"
LIMIT_S = 300.0
INTERRUPTED_CODE = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the architectures of the arguments and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.worker:
        with Checking() as checking:
            for name in options.names:
                print(json.dumps(checking.check(name).to_json()), flush=True)
        return 0
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept: the same command goes on", file=sys.stderr)
        return INTERRUPTED_CODE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/models",
        description="Import architectures of transformers and plain modules, and verify each against its module in "
        "plain PyTorch under data parallelism, FSDP and random strategies on two CPU processes.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; default: all")
    parser.add_argument("--again", action="store_true", help="check what is finished again")
    parser.add_argument("--failed", action="store_true", help="check what is finished and failed again")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help=f"seconds an architecture; default: {LIMIT_S:g}"
    )
    parser.add_argument("--results", default=RESULTS, help=f"folder of what is finished; default: {RESULTS}")
    parser.add_argument(
        "--page", default=PAGE, help=f"whose table is written, of all finished; default: {PAGE}"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run(options: argparse.Namespace) -> int:
    from scripts.architectures.catalog import names

    architectures = names()
    unknown = [name for name in options.names if name not in architectures]
    if unknown:
        print(
            f"error: {unknown[0]}: is unknown, must be one of {', '.join(architectures)}; correct it",
            file=sys.stderr,
        )
        return 2
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = options.names or architectures
    missing = [name for name in wanted if _is_due(read(folder, name), options)]
    start = time.monotonic()
    for number, outcome in enumerate(in_processes(missing, options.limit), 1):
        _write(folder / f"{outcome.name}.json", json.dumps(outcome.to_json(), indent=1) + "\n")
        seconds, start = time.monotonic() - start, time.monotonic()
        text = f"[{number}/{len(missing)}] {outcome.name}: {table.summary(outcome)} ({seconds:.0f} s)"
        print(text, flush=True)
    finished = [result for name in architectures if (result := read(folder, name)) is not None]
    page = Path(options.page)
    _write(page, table.updated(page.read_text(), finished))
    return 0 if all(item.ok for item in finished) else 1


def _is_due(before: ArchitectureResult | None, options: argparse.Namespace) -> bool:
    return before is None or options.again or (options.failed and not before.ok)


def read(folder: Path, name: str) -> ArchitectureResult | None:
    """Return the stored result of an architecture; None where it is not finished."""
    try:
        return ArchitectureResult(**json.loads((folder / f"{name}.json").read_text()))
    except FileNotFoundError:
        return None


def in_processes(names: Sequence[str], limit_s: float) -> Iterator[ArchitectureResult]:
    """Check architectures one after another in a process of their own; another goes on where one ends it."""
    waiting = list(names)
    while waiting:
        command = [sys.executable, "-m", "scripts.architectures", "--worker", *waiting]
        with tempfile.TemporaryFile("w+") as errors:
            # A session of its own, so that what it started ends with it.
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
            assert process.stdout is not None
            try:
                while waiting:
                    ready, _, _ = select.select([process.stdout], [], [], limit_s)
                    line = process.stdout.readline() if ready else b""
                    name = waiting.pop(0)
                    if line:
                        yield ArchitectureResult(**json.loads(line))
                        continue
                    reason = (
                        f"its process ended: {_last_line(errors)}"
                        if ready
                        else f"took longer than {limit_s:g} s"
                    )
                    yield ArchitectureResult(name, refused=reason)
                    break
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or ["no message"])[-1]


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
