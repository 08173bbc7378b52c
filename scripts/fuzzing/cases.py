"""The cases: each from a seed and a number, so that it can be repeated."""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from scripts.fuzzing.arguments import commands, random_arguments
from scripts.fuzzing.corpus import Corpus, read_folder, write_folder
from scripts.fuzzing.damage import damage
from scripts.fuzzing.file_oracles import FileJudge, judge_database
from scripts.fuzzing.found import FOUND
from scripts.fuzzing.oracles import Finding, judge, shape
from scripts.fuzzing.running import CommandOutcome, Runner, Stop
from scripts.fuzzing.values import chance

KINDS = ("arguments", "damage", "kill")
SHARES = (0.56, 0.36, 0.08)
# Commands that work for long where their arguments are right: they are stopped.
SLOW = (
    ("search",), ("run",), ("profile",), ("topology", "probe"), ("topology", "show"), ("models", "show"),
    ("strategy", "import"),
)  # fmt: skip
SMALL = ("--model", "mlp", "--preset", "small")
WALK = ("search", *SMALL, "--topology", "p100-cluster", "--devices", "2", "--proposals", "5")
LONG_WALK = (*WALK[:-3], "4", "--proposals", "400", "--fresh")
VIEWS = (
    "device_kinds", "environments", "op_costs", "link_costs", "graphs", "topologies", "strategies", "searches",
    "simulations", "executions", "proposals", "proposal_devices", "proposal_configurations", "proposal_starts",
    "best_per_model",
)  # fmt: skip
READINGS: tuple[tuple[str, ...], ...] = (
    ("db", "status"), ("db", "upgrade"), ("compare",), ("compare", "--search", "1"),
    ("compare", "--execution", "1"), ("compare", "--json"), ("trace", "--strategy", "1"),
    ("trace", "--execution", "1"), ("report",), ("report", "--execution", "1"), ("report", "--strategy", "2"),
    ("report", "--search", "1"), ("strategy", "list"), ("strategy", "list", "--json"),
    ("strategy", "show", "1"), ("strategy", "show", "3", "--json"), ("strategy", "diff", "1", "2"),
    ("strategy", "export", "1", "new.json"), ("strategy", "export", "2", "new.py", "--format", "dtensor"),
    ("strategy", "rebuild", "1"), ("strategy", "rebuild", "1", "--chain", "0", "--step", "3"),
    ("strategy", "rebuild", "2"), ("search", "--resume", "1"), ("search", "--resume", "2"), WALK,
    (*WALK, "--start", "1"), (*WALK, "--start", "strategy.json"),
    ("search", *SMALL, "--topology", "topology.yaml", "--proposals", "5"),
    ("search", *SMALL, "--device", "cpu", "--devices", "2", "--proposals", "5", "--on-miss", "estimate"),
    ("db", "export", "new.parquet"), ("db", "import", "costs.parquet"),
    ("db", "import", "costs.parquet", "--database", "new.sqlite"),
    ("strategy", "import", "strategy.json", *SMALL), ("topology", "show", "topology.yaml"),
    ("topology", "show", "topology.yaml", "--json"), ("models", "show", "mlp", "--preset", "small"),
    ("models", "cache"),
)  # fmt: skip
# Commands with about as many seconds as they take; the last two start processes, and are tried seldom.
KILLED: tuple[tuple[tuple[str, ...], float], ...] = (
    (LONG_WALK, 1.5), ((*LONG_WALK, "--workers", "2"), 1.5),
    (("search", "--resume", "1"), 0.5), (("db", "import", "costs.parquet"), 0.3),
    (("db", "import", "--shipped"), 0.5), (("strategy", "rebuild", "1"), 0.5),
    (("strategy", "export", "1", "new.json"), 0.3), (("trace", "--execution", "1"), 0.6), (("report",), 1.0),
    (("compare",), 0.5), (("query", "SELECT * FROM proposals"), 0.3),
    (("db", "upgrade", "--database", "new.sqlite"), 0.5),
    (("profile", *SMALL, "--device", "cpu", "--devices", "2", "--batch-size", "6"), 10.0),
    (("run", *SMALL, "--device", "cpu", "--devices", "2", "--iterations", "1000000"), 10.0),
)  # fmt: skip
STARTING_PROCESSES = 2


@dataclass(frozen=True)
class FuzzCase:
    """One case: a command, and the signal that stops it."""

    seed: int
    number: int
    kind: str
    arguments: tuple[str, ...]
    stop: Stop | None = None

    @property
    def replay(self) -> str:
        """The command that repeats it."""
        return f"scripts/fuzz --case {'found' if self.kind == 'found' else self.seed}:{self.number}"


@dataclass(frozen=True)
class CaseResult:
    """The result of a case: damage, findings, and outcomes of its commands."""

    case: FuzzCase
    damage: str
    findings: tuple[Finding, ...]
    outcomes: tuple[CommandOutcome, ...]


def make_case(seed: int, number: int) -> FuzzCase:
    """Return the case of this number."""
    random = Random(f"{seed} {number}")
    kind = random.choices(KINDS, weights=SHARES)[0]
    match kind:
        case "arguments":
            arguments = random_arguments(random)
            stop = None
            if any(arguments[: len(names)] == names for names in SLOW):
                stop = Stop(
                    random.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT)), random.uniform(0.3, 2.5)
                )
        case "damage":
            # New commands in the tree are tried as well.
            checks = tuple(command.names for command in commands() if command.names[-1] == "check")
            views = tuple(("query", f"SELECT * FROM {view}") for view in VIEWS)
            arguments, stop = random.choice((*READINGS, *READINGS, *views, *checks, *checks)), None
        case _:
            usual, seldom = KILLED[:-STARTING_PROCESSES], KILLED[-STARTING_PROCESSES:]
            arguments, longest_s = random.choice(usual if chance(random, 0.97) else seldom)
            signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
            stop = Stop(random.choice(signals), random.uniform(0, longest_s))
    return FuzzCase(seed, number, kind, arguments, stop)


def found_cases() -> list[FuzzCase]:
    """Return the cases that once found something; of kind `found`."""
    return [FuzzCase(0, number, "found", case.arguments, case.stop) for number, case in enumerate(FOUND)]


def run_case(case: FuzzCase, runner: Runner, corpus: Corpus, folder: Path) -> CaseResult:
    """Run a case in a folder, which must not exist yet and stays."""
    write_folder(corpus, folder)
    random = Random(f"{case.seed} {case.number} files")
    words, before = "", corpus
    if case.kind == "damage":
        words = runner.apart(lambda: damage(folder, random))
        before = read_folder(folder)
    elif case.kind == "found" and (made := FOUND[case.number].damage) is not None:
        words = runner.apart(lambda: made(folder) or "as found")
        before = read_folder(folder)
    outcome = runner.run(case.arguments, folder, case.stop)
    findings = list(judge(outcome, case.stop.number if case.stop else None, damaged=bool(words)))
    findings += FileJudge(outcome, folder).judge(before, read_folder(folder))
    outcomes = [outcome]
    if case.kind == "kill":
        for following, new_findings in _work_goes_on(runner, folder):
            outcomes.append(following)
            findings += new_findings
    return CaseResult(
        case, words, tuple({finding.key: finding for finding in findings}.values()), tuple(outcomes)
    )


def _work_goes_on(runner: Runner, folder: Path) -> Iterator[tuple[CommandOutcome, list[Finding]]]:
    """Run the commands of a user after a kill, and yield their outcomes with findings."""
    findings = list(judge_database(folder / "db.sqlite"))
    status = runner.run(("db", "status"), folder)
    findings += judge(status, None, damaged=False)
    if status.code:
        findings.append(Finding("db status fails after a kill", str(status.code), status.errors[-300:]))
    with closing(sqlite3.connect(folder / "db.sqlite")) as connection:
        searches = connection.execute("SELECT id, status FROM searches ORDER BY id").fetchall()
    if any(status == "running" for _, status in searches):
        findings.append(Finding("still running after a kill", "searches", str(searches)))
    yield status, findings
    for search in (search for search, status in searches if status == "interrupted"):
        resumed = runner.run(("search", "--resume", str(search)), folder)
        findings = list(judge(resumed, None, damaged=False))
        left = [
            name for name in read_folder(folder) if name.startswith("db.traces") and name.endswith(".tmp")
        ]
        findings += [Finding("leftover after resume", shape(name), name) for name in left]
        yield resumed, findings


def minimized(result: CaseResult, finding: Finding, runner: Runner, corpus: Corpus, folder: Path) -> FuzzCase:
    """Return the case with as few arguments as lead to the finding."""
    smallest, index = result.case, len(result.case.arguments) - 1
    while index >= 0:
        arguments = smallest.arguments[:index] + smallest.arguments[index + 1 :]
        shorter = replace(smallest, arguments=arguments)
        shutil.rmtree(folder, ignore_errors=True)
        if finding.key in {other.key for other in run_case(shorter, runner, corpus, folder).findings}:
            smallest = shorter
        index -= 1
    shutil.rmtree(folder, ignore_errors=True)
    return smallest
