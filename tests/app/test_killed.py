"""kill -9 at a random moment of `app run` and `app profile`: the database stays whole, nobody is left, work goes on."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.app.conftest import Command
from tests.quick import seeds

WAIT_S = 60.0
SMALL = ("--preset", "small", "--device", "cpu", "--devices", "2")
COMMANDS = {
    "run": ("run", "--model", "mlp", *SMALL, "--strategy", "data-parallel", "--on-miss", "estimate",
            "--iterations", "1000000000"),
    "profile": ("profile", "--model", "inception", *SMALL),
}  # fmt: skip


@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_a_whole_database_and_no_process(
    command: Command, database: Path, name: str, seed: int
) -> None:
    assert command("db", "upgrade").code == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "app", *COMMANDS[name]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # From the start of the interpreter until well into the work.
    time.sleep(random.Random(f"{name} {seed}").uniform(0.1, 15))
    assert process.poll() is None
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(started, timeout=WAIT_S)
    assert left == []
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        kept = connection.execute("SELECT count(*) FROM op_costs").fetchone()
    # The next command finds the database as it is, and what ran in no process any more.
    assert command("db", "status").code == 0
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM op_costs").fetchone() == kept
        statuses = connection.execute("SELECT status FROM executions").fetchall()
    assert set(statuses) <= {("interrupted",)}
