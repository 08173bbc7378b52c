"""Fuzz the command line: for some minutes, for a number of cases, or one case again. Exit code 1: something was found."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from scripts.fuzzing.cases import KINDS, Case, Result, make_case, minimized, run_case
from scripts.fuzzing.corpus import Corpus, make_corpus, read_folder
from scripts.fuzzing.oracles import Finding
from scripts.fuzzing.running import Runner, warm


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that the arguments ask for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, help="how long")
    parser.add_argument("--count", type=int, help="so many cases, however long they take")
    parser.add_argument("--seed", type=int, default=None, help="of all cases; else one of this moment, which is printed")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="this case alone; its folder is kept")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only cases of this kind")
    parser.add_argument("--corpus", type=Path, help="a folder kept for later calls: made where it is not there")
    options = parser.parse_args(arguments)
    if (options.minutes is None) + (options.count is None) + (options.case is None) != 2:
        parser.error("give MINUTES, --count or --case")
    root = Path(tempfile.mkdtemp(prefix="soapstone-fuzz-"))
    print("fuzz: importing, and making the files that cases start from", flush=True)
    began = time.monotonic()
    warm()
    runner = Runner()
    corpus = _corpus(runner, options.corpus or root / "corpus")
    print(f"fuzz: ready after {time.monotonic() - began:.0f} s, {len(corpus)} files", flush=True)
    kinds = tuple(options.kind or KINDS)
    if options.case:
        seed, number = map(int, options.case.split(":"))
        return _replay(make_case(seed, number), runner, corpus, root)
    seed = options.seed if options.seed is not None else int(time.time())
    try:
        return _fuzz(Session(seed, kinds, runner, corpus, root), options)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _corpus(runner: Runner, folder: Path) -> Corpus:
    if folder.exists():
        return read_folder(folder)
    return make_corpus(runner, folder)


class Session:
    """Cases one after another, and what they found."""

    def __init__(self, seed: int, kinds: tuple[str, ...], runner: Runner, corpus: Corpus, root: Path) -> None:
        """Begin with nothing found."""
        self.seed, self.kinds, self.runner, self.corpus, self.root = seed, kinds, runner, corpus, root
        self.found: dict[tuple[str, str], str] = {}
        self.codes: Counter[int] = Counter()
        self.done = 0

    def run(self, number: int) -> None:
        """Run a case, and report what nobody has found before."""
        case = make_case(self.seed, number)
        if case.kind not in self.kinds:
            return
        folder = self.root / f"case-{number}"
        result = run_case(case, self.runner, self.corpus, folder)
        shutil.rmtree(folder, ignore_errors=True)
        self.done += 1
        self.codes[result.outcomes[0].code] += 1
        for finding in result.findings:
            if finding.key not in self.found:
                self.found[finding.key] = self._report(result, finding)

    def _report(self, result: Result, finding: Finding) -> str:
        case = result.case
        if case.kind == "arguments" and case.stop is None and finding.oracle != "does not end":
            case = minimized(result, finding, self.runner, self.corpus, self.root / "smaller")
        line = described(case, result.damage, finding)
        print(line, flush=True)
        return line


def described(case: Case, damage: str, finding: Finding) -> str:
    """Return one line on a finding, which says how to have it again."""
    typed = shlex.join(("app", *case.arguments))
    typed = "".join(letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode() for letter in typed)
    stop = f" [{case.stop.number.name} after {case.stop.after_s:.2f} s]" if case.stop else ""
    words = f" [{damage[:300]}]" if damage else ""
    words = "".join(letter if letter.isprintable() else "?" for letter in words)
    return f"FOUND {finding.oracle}: {finding.detail} | {finding.words!r} | {typed}{stop}{words} | {case.replay}"


def _replay(case: Case, runner: Runner, corpus: Corpus, root: Path) -> int:
    folder = root / "case"
    result = run_case(case, runner, corpus, folder)
    print(f"{case.kind}: {shlex.join(('app', *case.arguments))!r}\nstop: {case.stop}\ndamage: {result.damage!r}")
    for outcome in result.outcomes:
        print(f"--- {outcome.arguments}: exit code {outcome.code}\n{outcome.output[-3000:]!r}\n{outcome.errors[-6000:]}")
    for finding in result.findings:
        print(described(case, result.damage, finding))
    print(f"folder: {folder}")
    return 1 if result.findings else 0


def _fuzz(session: Session, options: argparse.Namespace) -> int:
    began, number = time.monotonic(), options.first
    end = began + options.minutes * 60 if options.minutes else None
    try:
        while time.monotonic() < end if end else number < options.first + options.count:
            session.run(number)
            number += 1
    except KeyboardInterrupt:
        print("fuzz: interrupted", flush=True)
    took = time.monotonic() - began
    used = sum(os.times()[:4])
    codes = ", ".join(f"{_named(code)}: {count}" for code, count in sorted(session.codes.items()))
    print(
        f"fuzz: seed {session.seed}, {session.done} cases in {took:.0f} s ({session.done / max(took, 1e-9):.1f} a second, "
        f"{used:.0f} s of processor time in all), exit codes {codes}; {len(session.found)} findings"
    )
    return 1 if session.found else 0


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else str(code)


if __name__ == "__main__":
    sys.exit(main())
