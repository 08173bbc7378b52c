"""`app run` as a user has it: verification that fails, limits, interrupts; each stored as what it was."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.app.conftest import USERS_NETWORK, Command

pytestmark = pytest.mark.usefixtures("known_links")

TWO = ("--device", "cpu", "--devices", "2", "--strategy", "data-parallel", "--on-miss", "estimate")
SMALL = ("run", "--model", "mlp", "--preset", "small", *TWO)
NETWORK = f"""{USERS_NETWORK}
def differing(batch_size=6):
    module, args, kwargs = fine(batch_size)
    if not module.a.bias.is_meta:
        module.a.bias.data += os.getpid() % 1000 / 1000
    return module, args, kwargs

def hooked(batch_size=6):
    module, args, kwargs = fine(batch_size)
    if not module.a.bias.is_meta:
        module.a.bias.register_hook(lambda gradient: 2 * gradient)
    return module, args, kwargs

class Counting(Net):
    steps = 0
    def forward(self, x, y):
        self.steps += 1
        return super().forward(x, y) * self.steps
def counting(batch_size=6):
    return Counting(), *fine(batch_size)[1:]
"""


def executions(database: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute("SELECT status, failure, median_s IS NOT NULL FROM executions").fetchall()


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, with a user's own networks."""
    (tmp_path / "networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return "networks"


def test_a_verified_run_lists_every_tensor(command: Command, database: Path, networks: str) -> None:
    done = command("run", "--model", f"{networks}:fine", *TWO, "--verify", "--json")
    assert done.code == 0, done
    assert (done.document["verified"], done.document["failure"]) == (True, None)
    found = [(one["what"], one["name"]) for one in done.document["deviations"]]
    names = ("a.weight", "a.bias", "b.weight", "b.bias")
    assert sorted(found) == sorted(
        [(what, name) for what in ("gradient", "weight") for name in names]
        + [("eager gradient", name) for name in names]
        + [("loss", name) for name in ("in float64", "eager", "eager, the second time")]
        + [("loss", "the run's own, in its precision")]
    )
    assert all(
        one["absolute"] >= 0 and one["relative"] <= one["allowed"] for one in done.document["deviations"]
    )
    assert executions(database) == [("finished", None, True)]


def test_a_module_that_differs_by_process_fails_verification(
    command: Command, database: Path, networks: str
) -> None:
    done = command("run", "--model", f"{networks}:differing", *TWO, "--verify", "--json")
    assert done.code == 1
    line = "verification: parameter a.bias is built otherwise on rank 1 than on rank 0"
    assert done.errors.startswith(f"error: {line}")
    assert done.errors.count("\n") == 1
    assert done.document["verified"] is False
    assert not all(one["ok"] for one in done.document["deviations"])
    ((status, failure, timed),) = executions(database)
    assert (status, timed) == ("failed", True)
    assert str(failure).startswith(line)


def test_a_module_that_is_not_its_graph_fails_verification(command: Command, networks: str) -> None:
    done = command("run", "--model", f"{networks}:hooked", *TWO, "--verify", "--json")
    assert done.code == 1
    assert done.errors.startswith(
        "error: verification: eager gradient of a.bias deviates by 5.00e-01, must be within"
    )
    assert done.errors.count("\n") == 1
    assert done.document["verified"] is False
    assert {one["name"] for one in done.document["deviations"] if not one["ok"]} == {"a.bias"}


def test_a_module_that_python_changes_is_refused(command: Command, networks: str) -> None:
    done = command("run", "--model", f"{networks}:counting", *TWO)
    assert (done.code, done.output) == (2, "")
    assert done.errors.splitlines()[1:] == [
        f"error: model {networks}:counting: its forward changes attribute steps (1 to 2), must not, as export keeps "
        "its value for all steps; make it a buffer, or change it outside of the forward"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "0"), "--limit: is 0.0, must be above 0"),
        (("--topology", "dgx1-v100"), "--topology: is dgx1-v100, must be left out without torchrun"),
    ],
)
def test_wrong_options_are_one_line(command: Command, arguments: tuple[str, ...], message: str) -> None:
    done = command(*SMALL, *arguments)
    assert done.code == 2
    assert done.errors.startswith(f"error: {message}")
    assert done.errors.count("\n") == 1


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "app", *SMALL, "--iterations", "1000000000", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_running(process: subprocess.Popen[str], database: Path) -> None:
    """Wait until the run's own processes are there."""
    assert process.stderr is not None
    assert any(line.startswith("running") for line in process.stderr)
    assert executions(database) == [("running", None, False)]
    time.sleep(2)


def test_an_interrupted_run_is_stored_as_such(database: Path) -> None:
    process = started()
    try:
        wait_until_running(process, database)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")
    assert executions(database) == [("interrupted", None, False)]


def test_a_run_past_its_limit_is_given_up_and_stored(command: Command, database: Path) -> None:
    before = multiprocessing.active_children()  # of other tests
    done = command(*SMALL, "--iterations", "1000000000", "--limit", "12")
    line = "run: took longer than 12 s, must end within --limit; allow more or ask for fewer iterations"
    assert (done.code, done.output) == (1, "")
    assert done.errors.splitlines()[-1] == f"error: {line}"
    assert set(multiprocessing.active_children()) <= set(before)
    assert executions(database) == [("failed", line, False)]


def test_the_line_that_a_search_prints_runs_what_was_found(
    command: Command, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(database, "its own.sqlite")
    searched = command(
        "search", "--model", "mlp", "--preset", "small", "--device", "cpu", "--devices", "2", "--proposals", "20",
        "--optimizer", "momentum", "--batch-norm", "local", "--database", "its own.sqlite", "--no-confirm",
    )  # fmt: skip
    assert searched.code == 0, searched
    line = searched.output.splitlines()[-1].removeprefix("run it: app ")
    ran = command(*shlex.split(line), "--iterations", "2", "--json")
    assert ran.code == 0, ran
    with sqlite3.connect("its own.sqlite") as connection:
        trainings = connection.execute("SELECT document FROM trainings").fetchall()
    (document,) = (json.loads(text) for (text,) in trainings)
    assert (document["optimizer"], document["batch_norm"]) == ("momentum", "local")
