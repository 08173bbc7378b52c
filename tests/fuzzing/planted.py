"""Runs the fuzzer on commands with a planted defect, in a process of its own, and prints the findings as JSON.

As a module, since the fuzzer forks: a test's own process may have threads.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from scripts.fuzzing.cases import FuzzCase, make_case, run_case
from scripts.fuzzing.corpus import TRIPWIRE, Corpus, Entry, read_folder
from scripts.fuzzing.running import CommandLimits, Runner, Stop


def raises() -> None:
    """End with a traceback."""
    raise KeyError("planted")


def changes() -> None:
    """Change a row, as no reader may."""
    with closing(sqlite3.connect("db.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE graphs SET name = 'other'")


def destroys() -> None:
    """Write over the database."""
    Path("db.sqlite").write_text("{}")


def changes_notes() -> None:
    """Write over a file of the user's that the command line does not name."""
    Path("notes.txt").write_text("changed")


def imports() -> None:
    """Import the module that the database names."""
    sys.path.append(".")
    __import__("tripwire")


def leaves_a_process() -> None:
    """Leave a process running."""
    subprocess.Popen(["sleep", "600"])


def leaves_a_file() -> None:
    """Leave a temporary file."""
    Path(os.environ["TMPDIR"], "soapstone-query-1").mkdir()


def steers() -> None:
    """Print a name that steers the terminal."""
    sys.stdout.write("\x1b[2J\n")


def fails_silently() -> None:
    """End with an exit code and no reason."""
    sys.exit(2)


def dies() -> None:
    """End by a signal."""
    os.abort()


def waits() -> None:
    """Do not end."""
    time.sleep(600)


def ignores_the_end() -> None:
    """Go on when asked to end, and say that all was well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    time.sleep(600)


def behaves() -> None:
    """Print what was given and what the files hold."""
    digests = {name: entry.digest for name, entry in sorted(read_folder(Path()).items())}
    sys.stdout.write(f"{sys.argv} {digests}\n")


PLANTED = (
    raises, changes, destroys, changes_notes, imports, leaves_a_process, leaves_a_file, steers, fails_silently, dies,
    waits, ignores_the_end, behaves,
)  # fmt: skip


# Of those that are to be waited for no longer than needed.
LIMITS = {waits: CommandLimits(wall_s=1.0), leaves_a_process: CommandLimits(orphans_s=0.5)}


def small_corpus(folder: Path) -> Corpus:
    """Return the files of a case without the application: the defects need no more."""
    path = folder / "made.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE graphs (name TEXT)")
        connection.execute("INSERT INTO graphs VALUES ('mlp')")
    corpus = {name: Entry("folder") for name in ("tmp", "home", "cache")}
    corpus["db.sqlite"] = Entry("file", path.read_bytes())
    contents = {
        "notes.txt": "notes",
        "strategy.json": '{"format": 1}',
        "topology.yaml": "a: 1",
        "costs.parquet": "PAR1",
    }
    return corpus | {
        name: Entry("file", content.encode())
        for name, content in {**contents, "tripwire.py": TRIPWIRE}.items()
    }


def findings(corpus: Corpus, folder: Path) -> dict[str, list[str]]:
    """Return what each planted defect is found as."""
    found = {}
    for number, planted in enumerate(PLANTED):
        stop = Stop(signal.SIGTERM, 2.0) if planted is ignores_the_end else None
        case = FuzzCase(0, number, "arguments", ("compare",), stop)
        runner = Runner(planted, LIMITS.get(planted))
        result = run_case(case, runner, corpus, folder / planted.__name__)
        found[planted.__name__] = [finding.oracle for finding in result.findings]
    return found


def replayed(corpus: Corpus, folder: Path) -> list[list[str]]:
    """Return, for some cases, what they did each time: their arguments, the damage, and all that the command saw."""
    told = []
    for number in range(24):
        case = make_case(7, number)
        runner = Runner(behaves)
        results = [
            run_case(case, runner, corpus, folder / f"{number}-{turn}") for turn in range(2) if not case.stop
        ]
        told.append([f"{case} {result.damage} {result.outcomes[0].output!r}" for result in results])
    return told


def main(folder: Path) -> None:
    """Print both."""
    corpus = small_corpus(folder)
    json.dump({"findings": findings(corpus, folder), "replayed": replayed(corpus, folder)}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
