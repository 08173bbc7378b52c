"""Run pieces of the GPU check. Exit code 0: all passed; 1: one did not; 2: there is nothing to check with."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.gpu_check.pieces import PIECES
from scripts.gpu_check.report import RESULT, PieceResult, add_to_report, line_of, printed_result, read_report

# Of one piece; a piece is planned to take less.
LIMIT_S = 590.0


def main(arguments: list[str] | None = None) -> int:
    """Run the pieces that the arguments name, or all; print a line for each, and write the report."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument(
        "--piece", action="append", choices=list(PIECES), help="only this one; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and how long each takes")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU to check, as CUDA counts")
    parser.add_argument("--quick", action="store_true", help="less of each piece")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check.json"), help="the report, which pieces add to"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        for name, piece in PIECES.items():
            print(f"{name:12} about {piece.minutes} min  {(piece.check.__doc__ or '').splitlines()[0]}")
        return 0
    if (missing := what_is_missing(options.gpu)) is not None:
        print(f"gpu-check: {missing}", file=sys.stderr)
        return 2
    if options.here:
        (name,) = options.piece
        result = PIECES[name].check(options.gpu, quick=options.quick)
        print(RESULT + json.dumps(asdict(result), default=str))
        return 0
    if (reason := _why_not_written(options.out)) is not None:
        print(f"gpu-check: --out {options.out}: {reason}; name another file", file=sys.stderr)
        return 2
    return _run_all(options)


def what_is_missing(gpu: int) -> str | None:
    """Return in one line what a check needs and this machine lacks; None where nothing is missing."""
    import torch

    if torch.version.cuda is None and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} is built without CUDA, must have it; install a CUDA build "
            "(https://pytorch.org), on a machine with an NVIDIA GPU"
        )
    if not torch.cuda.is_available():
        return "torch sees no GPU, must see one; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    if gpu >= torch.cuda.device_count():
        return f"--gpu {gpu}: this machine has {torch.cuda.device_count()} GPUs, must be one of them"
    return None


def _why_not_written(file: Path) -> str | None:
    """Return why no report can be written to a file, before the first piece has taken its minutes; None if it can."""
    try:
        read_report(file)
    except (OSError, ValueError) as error:
        return f"is no report of this check ({error}), must be one, or not there"
    folder = file.absolute().parent
    if file.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return f"cannot be written, must be a file in a folder of yours, and {folder} is none"
    return None


def _run_all(options: argparse.Namespace) -> int:
    facts = _facts(options.gpu)
    failed = False
    for name in options.piece or PIECES:
        began = time.monotonic()
        result = _in_process(name, options)
        result = replace(result, seconds=time.monotonic() - began)
        add_to_report(options.out, facts, name, result)
        print(line_of(name, result), flush=True)
        failed = failed or result.passed is False
    print(f"report: {options.out}; docs/gpus.md says where to send it")
    return 1 if failed else 0


def _facts(gpu: int) -> dict[str, Any]:
    import torch

    from profiler.environment import environment

    properties = torch.cuda.get_device_properties(gpu)
    return {
        **environment("cuda").facts,
        "gpu": properties.name,
        "gpu_memory_bytes": int(properties.total_memory),
        "commit": _commit(),
    }


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _in_process(name: str, options: argparse.Namespace) -> PieceResult:
    """Return the result of a piece in a process of its own: one that breaks its context, or hangs, ends no other."""
    command = [
        sys.executable,
        "-m",
        "scripts.gpu_check",
        "--here",
        "--piece",
        name,
        "--gpu",
        str(options.gpu),
    ]
    command += ["--quick"] if options.quick else []
    return run_piece(command, LIMIT_S)


def run_piece(command: Sequence[str], limit_s: float) -> PieceResult:
    """Return the result that a process prints, else what it printed until it ended, or was ended at the limit."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # A session of its own, with all processes that the piece starts: none may stay beside the next piece.
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        try:
            code = process.wait(limit_s)
            end = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            end = f"took longer than {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        if process.returncode >= 0:
            last = [line for line in errors.read().splitlines() if line.strip()][-1:] or ["no message"]
            end = f"{end}: {last[0][:200]}"
        output.seek(0)
        return printed_result(output, end)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C does: the piece ends too, which is in a session of its own.
        signal.signal(number, lambda given, _: sys.exit(128 + given))
    sys.exit(main())
