"""Cases one after another, in several processes, and their findings."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from scripts.fuzzing.cases import CaseResult, FuzzCase, minimized, run_case
from scripts.fuzzing.corpus import Corpus
from scripts.fuzzing.oracles import Finding
from scripts.fuzzing.running import Runner
from search.parallel.fork import WorkFailure, fork


@dataclass
class Tally:
    """The findings of cases: a line each, by their keys; and the exit codes of the commands."""

    found: dict[str, str] = field(default_factory=dict)
    codes: Counter[int] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        """How many cases there were."""
        return sum(self.codes.values())

    def add(self, other: Tally) -> None:
        """Add the findings of another tally."""
        self.found |= other.found
        self.codes += other.codes


class Session:
    """Runs cases, and reports new findings."""

    def __init__(self, corpus: Corpus, root: Path) -> None:
        """Begin with nothing found; folders of cases are made in `root`."""
        self.tally = Tally()
        self._corpus, self._root = corpus, root
        self._runner = Runner()

    def run(self, case: FuzzCase) -> None:
        """Run a case, and print its new findings."""
        folder = self._root / f"case-{case.kind}-{case.number}"
        result = run_case(case, self._runner, self._corpus, folder)
        shutil.rmtree(folder, ignore_errors=True)
        self.tally.codes[result.outcomes[0].code] += 1
        for finding in result.findings:
            if finding.key not in self.tally.found:
                self.tally.found[finding.key] = self._described(result, finding)
                print(self.tally.found[finding.key], flush=True)
                # The moment of a signal does not come again, nor where a command waited.
                if case.stop is not None or finding.oracle == "does not end":
                    print(_errors(result), flush=True)

    def _described(self, result: CaseResult, finding: Finding) -> str:
        case = result.case
        if case.kind == "arguments" and case.stop is None and finding.oracle != "does not end":
            case = minimized(
                result, finding, self._runner, self._corpus, self._root / f"smaller-{case.number}"
            )
        return described(case, result.damage, finding)


def run_in_processes(jobs: int, work: Callable[[int], Tally]) -> Tally:
    """Do the work of each number below `jobs` in a fork of this process, and return the joint tally."""

    def tell(number: int, connection: Connection) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.send(work(number))

    sys.stdout.flush()
    forks = [fork(partial(tell, number), prints=True) for number in range(jobs)]
    tally = Tally()
    try:
        for forked in forks:
            try:
                told = forked.connection.recv()
            except EOFError:
                raise RuntimeError(
                    f"fuzz: process {forked.number} {forked.wait()} before it told what it found"
                ) from None
            if isinstance(told, WorkFailure):
                raise told.error from RuntimeError(told.traceback)
            tally.add(told)
            forked.wait()
    except SystemExit:  # SIGTERM; Ctrl-C reaches them as well, and they tell what they found
        for forked in forks:
            forked.end()
        raise
    return tally


def described(case: FuzzCase, damage: str, finding: Finding) -> str:
    """Return one line on a finding, with the command that repeats it."""
    typed = "".join(_visible(letter) for letter in shlex.join(("app", *case.arguments)))
    stop = f" [{case.stop.number.name} after {case.stop.after_s:.2f} s]" if case.stop else ""
    words = "".join(_visible(letter) for letter in damage)
    damaged = f" [{words[:400]}]" if words else ""
    line = f"FOUND {finding.key} | {finding.words!a} | {_short(typed)}{stop}{damaged} | {case.replay}"
    return "".join(_visible(letter) for letter in line)


def _errors(result: CaseResult) -> str:
    """Return the standard error of a case's commands, indented; at most its last 100 lines."""
    lines = [line for outcome in result.outcomes for line in outcome.errors.splitlines()]
    return "\n".join("    " + "".join(_visible(letter) for letter in line) for line in lines[-100:])


def _short(text: str) -> str:
    return text if len(text) <= 1000 else f"{text[:1000]}..."


def _visible(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
