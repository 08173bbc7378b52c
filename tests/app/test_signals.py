"""What is under way when a signal comes is ended and recorded."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.app.conftest import Command


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_search_that_is_ended_is_stored_as_interrupted(
    database: Path, number: signal.Signals, code: int
) -> None:
    arguments = ("search", "--model", "mlp", "--preset", "small", "--topology", "p100-cluster")
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", *arguments, "--proposals", "1000000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any(line.startswith("searching") for line in process.stderr)
        # The chains walk as soon as proposals are written.
        while not list(database.parent.glob("*.traces/search-1/*.parquet")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (code, "")
    # Ctrl-C is a user's "enough": the best so far is shown. A request to terminate is not.
    assert ("interrupted, the best so far is kept" in output) is (number is signal.SIGINT)
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT status, best_strategy_id IS NOT NULL FROM searches").fetchall()
    assert rows == [("interrupted", number is signal.SIGINT)]


@pytest.mark.slow
def test_a_search_that_is_killed_is_resumed_to_the_same_end(command: Command, database: Path) -> None:
    arguments = (
        "search", "--model", "mlp", "--preset", "small", "--topology", "p100-cluster", "--devices", "8",
        "--proposals", "1500", "--fresh", "--json",
    )  # fmt: skip
    whole = command(*arguments).document
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(database.parent.glob("*.traces/search-2/chunk-*.parquet")):
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    resumed = command("search", "--resume", "2", "--json").document
    assert 0 < resumed["resumed_at"] < whole["proposals"]
    for key in ("proposals", "accepted", "predictions"):
        assert resumed[key] == whole[key]
