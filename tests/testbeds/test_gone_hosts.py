"""A host whose network goes away: all ranks end within seconds, each side says why, and nothing stored is lost.

Ranks wait for each other for half an hour; the time limit of a command here is far below that.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runtime.launch.host_watch import SILENCE_S
from scripts.testbeds.network import namespaces_of, processes_in
from tests.testbeds.commands import WAIT_S, is_alive, outcome, start, wait_for

# Steps whose messages fill the wire; ranks that are computing, or stopped, while the others wait for them.
NETWORK = """
import os, signal, time, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()
def fine(batch_size=6):
    return Net(), (torch.randn(batch_size, 512),), {}
def executes(rank):
    # Rank 0 alone imports the model first.
    imports = rank == "0" and not os.path.exists("imported")
    open("imported", "w").close()
    return os.environ.get("RANK") == rank and not imports
def compute():
    open("computing", "w").close()
    x = torch.randn(300, 300)
    while True:
        x = (x @ x).clamp(-1, 1)
def computing_0(batch_size=6):
    return compute() if executes("0") else fine(batch_size)
def computing_1(batch_size=6):
    return compute() if executes("1") else fine(batch_size)
def preparing(batch_size=6):
    return compute()
def stopping(batch_size=6):
    if executes("1"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return fine(batch_size)
"""
# Rank 0 waits for rank 1 inside of torch, where no signal is heard.
JOINING = """
import os, time
from runtime.launch import rank_leader
def sleep(*arguments, **options):
    open("joining", "w").close()
    time.sleep(600)
if os.environ["RANK"] == "1":
    rank_leader.join_group = sleep
rank_leader.LaunchedRanks.join("cpu", 600.0)
"""
APP = ("python", "-m", "tests.app.brief_app")
RUN = ("--device", "cpu", "--strategy", "data-parallel", "--on-miss", "estimate")
ENDLESS = ("--iterations", "1000000")
MANY_BYTES = 4 * 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with networks in it."""
    (tmp_path / "networks.py").write_text(NETWORK)
    return tmp_path


@pytest.fixture
def up(absent: str) -> Iterator[Callable[[int, int], str]]:
    """Make a testbed of so many hosts and devices; return its name."""
    made = f"{absent}-gone"

    def make(hosts: int, devices: int) -> str:
        code, _, errors = outcome("up", "--hosts", str(hosts), "--devices", str(devices), "--name", made)
        assert code == 0, errors
        return made

    yield make
    # One namespace may be gone.
    assert outcome("down", "--name", made)[0] == 0


def cut_off(name: str, host: int) -> None:
    """Take a host's link away; nothing arrives from there any more, and nobody is told."""
    subprocess.run(["ip", "-n", f"{name}-switch", "link", "delete", f"port{host}"], check=True)


def sent_bytes(name: str, host: int) -> int:
    command = ["ip", "-s", "-j", "-n", f"{name}-{host}", "link", "show", "eth0"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def executions(database: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT status, failure FROM executions ORDER BY id").fetchall()


def executes(database: Path) -> bool:
    """Return whether an execution has begun."""
    try:
        return bool(database.exists() and executions(database))
    except sqlite3.OperationalError:  # its tables are being made
        return False


def is_sound(database: Path) -> bool:
    """Return whether a database is whole, and can be written."""
    with closing(sqlite3.connect(database, timeout=1.0)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def said(errors: str) -> dict[int, list[str]]:
    """Return the errors of each host that says any; the launchers' own lines are left out."""
    lines: dict[int, list[str]] = {}
    for line in errors.splitlines():
        prefix, separator, text = line.partition(": error: ")
        if line.startswith("error: "):
            lines.setdefault(0, []).append(line.removeprefix("error: "))
        elif separator and prefix.startswith("host "):
            lines.setdefault(int(prefix.removeprefix("host ")), []).append(text)
    return lines


def gone(rank: int, host: int, *, seen_from: int) -> str:
    return f"rank {rank}: its host 10.77.0.{host + 1} has not answered 10.77.0.{seen_from + 1} for {SILENCE_S} s ("


@contextmanager
def running(name: str, folder: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command on all hosts; it is ended in the end."""
    with start("run", "--name", name, "--", *command, folder=folder) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def after_cut(
    name: str, folder: Path, command: Sequence[str], *, host: int = 1, when: Callable[[], bool]
) -> dict[int, list[str]]:
    """Run a command, cut a host off as soon as `when` is true, and return what each host said; all must fail."""
    with running(name, folder, command) as process:
        wait_for(lambda: process.poll() is not None or when())
        assert process.poll() is None, process.communicate()
        processes = processes_in(namespaces_of(name))
        cut_off(name, host)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, errors
    assert [is_alive(each) for each in processes] == [False] * len(processes)
    return said(errors)


def run_of(factory: str, database: Path) -> tuple[str, ...]:
    return (*APP, "run", "--model", f"networks:{factory}", *RUN, *ENDLESS, "--database", str(database))


# ---- a run


def test_a_run_in_the_middle_of_messages_ends_on_both_sides_and_keeps_what_was_stored(
    up: Callable[[int, int], str], folder: Path
) -> None:
    database, name = folder / "test.sqlite", up(2, 1)
    # A step on two hosts, equal to one on one device.
    ended = ("run", "--model", "networks:fine", *RUN, "--iterations", "2", "--database", str(database))
    code, output, errors = outcome(
        "run", "--name", name, "--", *APP, *ended, "--verify", "--json", folder=folder
    )
    assert (code, executions(database)) == (0, [("finished", None)]), errors
    report = json.loads(output)
    assert (report["devices"], report["verified"], report["failure"]) == (2, True, None)
    assert processes_in([f"{name}-0", f"{name}-1"]) == ()
    before = sent_bytes(name, 1)

    def runs() -> bool:
        return len(executions(database)) == 2 and sent_bytes(name, 1) > before + 5 * MANY_BYTES

    said_by = after_cut(name, folder, run_of("fine", database), when=runs)
    assert {host: len(lines) for host, lines in said_by.items()} == {0: 1, 1: 1}
    assert said_by[0][0].startswith(gone(1, 1, seen_from=0))
    assert said_by[1][0].startswith(gone(0, 0, seen_from=1))
    assert executions(database) == [("finished", None), ("failed", said_by[0][0])]
    assert is_sound(database)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, id="with the store"), pytest.param(1, id="cut off")])
def test_a_run_in_the_middle_of_computing_ends_on_both_sides(
    up: Callable[[int, int], str], folder: Path, rank: int
) -> None:
    database, name = folder / "test.sqlite", up(2, 1)
    computing = (folder / "computing").exists
    said_by = after_cut(name, folder, run_of(f"computing_{rank}", database), when=computing)
    assert {host: len(lines) for host, lines in said_by.items()} == {0: 1, 1: 1}
    assert said_by[0][0].startswith(gone(1, 1, seen_from=0))
    assert said_by[1][0].startswith(gone(0, 0, seen_from=1))
    assert executions(database) == [("failed", said_by[0][0])]
    assert is_sound(database)


@pytest.mark.slow
def test_rank_0_is_interrupted_where_it_prepares(up: Callable[[int, int], str], folder: Path) -> None:
    database, name = folder / "test.sqlite", up(2, 1)
    said_by = after_cut(name, folder, run_of("preparing", database), when=(folder / "computing").exists)
    assert {host: len(lines) for host, lines in said_by.items()} == {0: 1, 1: 1}
    assert said_by[0][0].startswith(gone(1, 1, seen_from=0))
    assert said_by[1][0].startswith(gone(0, 0, seen_from=1))


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 2])
def test_of_three_hosts_those_say_it_that_cannot_reach_rank_0(
    up: Callable[[int, int], str], folder: Path, host: int
) -> None:
    database, name = folder / "test.sqlite", up(3, 1)

    said_by = after_cut(name, folder, run_of("fine", database), host=host, when=lambda: executes(database))
    assert {number: len(lines) for number, lines in said_by.items()} == (
        {0: 1, 1: 1, 2: 1} if host == 0 else {0: 1, 2: 1}
    )
    ((_, reason),) = executions(database)
    assert reason == said_by[0][0]
    assert is_sound(database)


@pytest.mark.slow
def test_ranks_that_are_still_joining_end_on_both_sides(up: Callable[[int, int], str], folder: Path) -> None:
    name = up(2, 1)
    (folder / "join.py").write_text(JOINING)
    said_by = after_cut(name, folder, ("python", "join.py"), when=(folder / "joining").exists)
    assert {host: len(lines) for host, lines in said_by.items()} == {0: 1, 1: 1}
    assert said_by[0][0].startswith(gone(1, 1, seen_from=0))
    assert said_by[1][0].startswith(gone(0, 0, seen_from=1))


# ---- a probe


@pytest.mark.slow
def test_a_probe_ends_on_both_sides_and_stores_nothing_half(
    up: Callable[[int, int], str], folder: Path
) -> None:
    database, name = folder / "test.sqlite", up(2, 2)
    # In all sizes: a brief probe would be over.
    command = ("python", "-m", "app", "topology", "probe", "--device", "cpu")
    options = ("--name", "wire", "--database", str(database))
    said_by = after_cut(name, folder, (*command, *options), when=lambda: sent_bytes(name, 1) > MANY_BYTES)
    # One line a host, of two ranks each.
    assert {host: len(lines) for host, lines in said_by.items()} == {0: 1, 1: 1}
    assert said_by[0][0].startswith((gone(2, 1, seen_from=0), gone(3, 1, seen_from=0)))
    assert said_by[1][0].startswith(gone(0, 0, seen_from=1))
    assert is_sound(database)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT name FROM topologies").fetchall() == []


# ---- what is no host that is gone


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_longer_than_the_silence_is_waited_for(
    up: Callable[[int, int], str], folder: Path
) -> None:
    name = up(2, 1)
    command = (*APP, "run", "--model", "networks:stopping", *RUN, "--iterations", "2")
    options = ("--database", str(folder / "test.sqlite"))

    def stopped() -> list[int]:
        processes = processes_in([f"{name}-1"])
        return [process for process in processes if " T " in Path(f"/proc/{process}/stat").read_text()]

    with running(name, folder, (*command, *options)) as process:
        wait_for(lambda: process.poll() is not None or bool(stopped()))
        assert process.poll() is None, process.communicate()
        time.sleep(1.5 * SILENCE_S)
        (rank,) = stopped()
        os.kill(rank, signal.SIGCONT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, said(errors)) == (0, {})


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["while links are measured", "while steps are made"])
def test_processes_killed_together_with_their_namespace_end_the_others(
    up: Callable[[int, int], str], folder: Path, stage: str
) -> None:
    database, name = folder / "test.sqlite", up(2, 1)

    def reached() -> bool:
        return sent_bytes(name, 1) > MANY_BYTES if "links" in stage else executes(database)

    with running(name, folder, run_of("fine", database)) as process:
        wait_for(lambda: process.poll() is not None or reached())
        assert process.poll() is None, process.communicate()
        for other in processes_in([f"{name}-1"]):
            os.kill(other, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", f"{name}-1"], check=True)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    ((line,),) = said(errors).values()
    assert line.startswith("rank 1: ")
    assert executions(database) == ([] if "links" in stage else [("failed", line)])
    assert is_sound(database)
