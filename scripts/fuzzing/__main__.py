"""Fuzz the command line: for some minutes, a number of cases, or one case again. Exit code 1: something was found."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scripts.fuzzing.cases import KINDS, FuzzCase, found_cases, make_case, run_case
from scripts.fuzzing.corpus import Corpus, make_corpus, read_folder
from scripts.fuzzing.running import Runner, warm
from scripts.fuzzing.session import Session, Tally, described, run_in_processes


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that the arguments ask for, and return the exit code."""
    options = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was begun is removed
    root = Path(tempfile.mkdtemp(prefix="soapstone-fuzz-"))
    try:
        print("fuzz: importing, and making the files that cases start from", flush=True)
        began = time.monotonic()
        warm()
        corpus = _corpus(options.corpus or root / "corpus")
        print(f"fuzz: ready after {time.monotonic() - began:.0f} s", flush=True)
        if options.case:
            return _replay(options.case, corpus)
        return _fuzz(options, corpus, root)
    except KeyboardInterrupt:
        print("fuzz: interrupted", flush=True)
        return 130
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    usable = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("minutes", nargs="?", type=float, help="how long")
    wanted.add_argument("--count", type=int, help="so many cases, however long they take")
    wanted.add_argument(
        "--case", type=_case, metavar="SEED:NUMBER", help="this case alone; its folder is kept"
    )
    parser.add_argument("--seed", type=int, help="of all cases; else one of this moment, which is printed")
    parser.add_argument(
        "--kind", action="append", choices=(*KINDS, "found"), help="only cases of this kind; may be repeated"
    )
    parser.add_argument(
        "--jobs", type=int, default=usable, help="processes that run cases. Default: one a usable core"
    )
    parser.add_argument(
        "--corpus", type=Path, help="a folder kept for later calls: made where it is not there"
    )
    return parser.parse_args(arguments)


def _case(text: str) -> FuzzCase:
    seed, number = text.split(":")
    return found_cases()[int(number)] if seed == "found" else make_case(int(seed), int(number))


def _corpus(folder: Path) -> Corpus:
    if folder.exists():
        return read_folder(folder)
    return make_corpus(folder)


def _replay(case: FuzzCase, corpus: Corpus) -> int:
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
    began = time.monotonic()
    until = began + options.minutes * 60 if options.minutes is not None else None
    kinds = options.kind or (*KINDS, "found")

    def cases() -> Iterator[FuzzCase]:
        yield from found_cases()
        for number in itertools.count():
            if number == options.count or (until is not None and time.monotonic() > until):
                return
            yield make_case(seed, number)

    def work(job: int) -> Tally:
        session = Session(corpus, root)
        with suppress(KeyboardInterrupt):  # what was found until then is told
            for index, case in enumerate(cases()):
                if index % options.jobs == job and case.kind in kinds:
                    session.run(case)
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
