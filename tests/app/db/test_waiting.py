"""Who waits for another process's lock on a SQLite file says for whom, and ends in one line where it stays."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from app.db import engine
from app.db.owners import writer_of
from app.db.store import Store
from graph.errors import DatabaseFailure
from tests.app.db import samples

WAIT_S = 120.0
# Takes the lock to write, and lets go of it when its input ends.
HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "used.sqlite"
    Store.open(path).close()
    return path


@contextmanager
def holding(database: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that holds the lock until its input is closed."""
    words = [sys.executable, "-c", HOLDER, str(database)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder
        holder.stdin.close()


def begin_import(database: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "app", "db", "import", "--shipped", "--database", str(database)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_notice(waiting: subprocess.Popen[str], database: Path, holder: subprocess.Popen[bytes]) -> None:
    assert waiting.stderr is not None
    line = waiting.stderr.readline()
    assert line.startswith(f"database {database}: ")
    assert line.endswith("writes to it; waiting for at most 60 s\n")
    if Path("/proc/locks").exists():
        assert f"process {holder.pid} ({sys.executable} -c " in line


def test_an_import_says_for_whom_it_waits_and_goes_on(database: Path) -> None:
    with holding(database) as holder:
        waiting = begin_import(database)
        read_notice(waiting, database, holder)
    _, errors = waiting.communicate(timeout=WAIT_S)
    assert (waiting.returncode, errors) == (0, "")
    with Store.open(database) as store:
        assert store.table_counts()["op_costs"] > 0


def test_who_waits_hears_signals(database: Path) -> None:
    with holding(database) as holder:
        waiting = begin_import(database)
        read_notice(waiting, database, holder)
        os.kill(waiting.pid, signal.SIGINT)
        _, errors = waiting.communicate(timeout=WAIT_S)
    assert (waiting.returncode, errors) == (130, "interrupted\n")


def test_a_lock_that_stays_is_one_line(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(engine, "NOTICE_S", 0.02)
    with Store.open(database) as store:
        with holding(database):
            for _ in range(2):
                with pytest.raises(DatabaseFailure) as raised:
                    store.put_environment(samples.environment())
        assert str(raised.value) == (
            f"database {database}: another process writes to it, must let go of it in between; wait for that process, "
            "or end it"
        )
        # The connection is as good as before.
        assert store.put_environment(samples.environment()) == 1


def test_a_database_is_not_made_under_another_writer_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(engine, "NOTICE_S", 0.02)
    new = tmp_path / "new.sqlite"
    with holding(new), pytest.raises(DatabaseFailure, match="another process writes to it"):
        Store.open(new)


def test_a_lock_of_ones_own_process_is_said_to_be_one(database: Path) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert writer_of(database) == "another thread of this process"
        connection.execute("ROLLBACK")
    with holding(database) as holder:
        link = database.with_name("link.sqlite")
        link.symlink_to(database)
        assert writer_of(link).startswith(f"process {holder.pid} (")
