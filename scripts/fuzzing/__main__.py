"""Fuzz the command line: for some minutes, a number of cases, or one case again. Exit code 1: something was found."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from scripts.fuzzing.cases import KINDS, Case, make_case, run_case
from scripts.fuzzing.corpus import Corpus, make_corpus, read_folder
from scripts.fuzzing.running import Runner, warm
from scripts.fuzzing.session import Session, Tally, described, numbers, run_in_processes


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that the arguments ask for, and return the exit code."""
    options = _parsed(arguments)
    root = Path(tempfile.mkdtemp(prefix="soapstone-fuzz-"))
    try:
        print("fuzz: importing, and making the files that cases start from", flush=True)
        began = time.monotonic()
        warm()
        corpus = _corpus(options.corpus or root / "corpus")
        print(f"fuzz: ready after {time.monotonic() - began:.0f} s", flush=True)
        if options.case:
            return _replay(make_case(*options.case), corpus)
        return _fuzz(options, corpus, root)
    except KeyboardInterrupt:
        print("fuzz: interrupted", flush=True)
        return 130
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("minutes", nargs="?", type=float, help="how long")
    wanted.add_argument("--count", type=int, help="so many cases, however long they take")
    wanted.add_argument(
        "--case", type=_case, metavar="SEED:NUMBER", help="this case alone; its folder is kept"
    )
    parser.add_argument("--seed", type=int, help="of all cases; else one of this moment, which is printed")
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="only cases of this kind; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cases")
    parser.add_argument(
        "--corpus", type=Path, help="a folder kept for later calls: made where it is not there"
    )
    return parser.parse_args(arguments)


def _case(text: str) -> tuple[int, int]:
    seed, number = text.split(":")
    return int(seed), int(number)


def _corpus(folder: Path) -> Corpus:
    if folder.exists():
        return read_folder(folder)
    return make_corpus(folder)


def _replay(case: Case, corpus: Corpus) -> int:
    folder = Path(tempfile.mkdtemp(prefix="soapstone-fuzz-case-")) / "case"
    result = run_case(case, Runner(), corpus, folder)
    print(
        f"{case.kind}: {shlex.join(('app', *case.arguments))!a}\nstop: {case.stop}\ndamage: {result.damage!a}"
    )
    for outcome in result.outcomes:
        print(f"--- {outcome.arguments!a}: exit code {outcome.code}\n{outcome.output[-3000:]!r}")
        print(
            "".join(
                letter if letter.isprintable() or letter == "\n" else "?" for letter in outcome.errors[-6000:]
            )
        )
    for finding in result.findings:
        print(described(case, result.damage, finding))
    print(f"folder: {folder}")
    return 1 if result.findings else 0


def _fuzz(options: argparse.Namespace, corpus: Corpus, root: Path) -> int:
    seed = options.seed if options.seed is not None else int(time.time())
    kinds = tuple(options.kind or KINDS)
    began = time.monotonic()
    until = began + options.minutes * 60 if options.minutes is not None else None

    def work(job: int) -> Tally:
        session = Session(seed, kinds, corpus, root)
        with suppress(KeyboardInterrupt):  # what was found until then is told
            for number in numbers(job, options.jobs, count=options.count, until=until):
                session.run(number)
        return session.tally

    tally = run_in_processes(options.jobs, work)
    took = time.monotonic() - began
    codes = ", ".join(f"{_named(code)}: {count}" for code, count in sorted(tally.codes.items()))
    print(
        f"fuzz: seed {seed}, {tally.cases} cases in {took:.0f} s ({tally.cases / max(took, 1e-9):.1f} a second, "
        f"{sum(os.times()[:4]):.0f} s of processor time), exit codes {codes}; {len(tally.found)} findings"
    )
    return 1 if tally.found else 0


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else str(code)


if __name__ == "__main__":
    sys.exit(main())
