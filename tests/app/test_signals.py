"""A signal ends a command at every stage in the same way; what is under way is ended and recorded."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.app.conftest import Command


@pytest.mark.parametrize(("number", "word"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_a_search_that_is_ended_is_stored_as_interrupted(
    database: Path, number: signal.Signals, word: str
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
    assert (process.returncode, errors) == (128 + number, f"{word}\n")
    # Ctrl-C is a user's "enough": the best so far is shown. A request to terminate is not.
    assert ("interrupted, the best so far is kept" in output) is (number is signal.SIGINT)
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT status, best_strategy_id IS NOT NULL FROM searches").fetchall()
    assert rows == [("interrupted", number is signal.SIGINT)]


START = "import app.cli.main as main, app.cli.application, os, signal, sys, time\n"
# Replaces what a command does, after its imports.
SERVE = "app.cli.application.application = lambda **_: work()\nmain.command()\n"
RUN = (
    "run", "--model", "mlp", "--preset", "small", "--device", "cpu", "--devices", "2", "--strategy", "data-parallel",
    "--on-miss", "estimate", "--iterations", "1000000000",
)  # fmt: skip


def ended(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "hung up")],
)
@pytest.mark.parametrize(
    "stage",
    [
        # Becomes an `ImportError` on its way, or nothing at all.
        "def work():\n    try: os.kill(os.getpid(), {0}); time.sleep(9)\n"
        "    except BaseException: raise ImportError('half of it') from None\n" + SERVE,
        # Before any command's module is there.
        "import builtins\nreal = builtins.__import__\n"
        "def look(name, *rest):\n    if name == 'typer': os.kill(os.getpid(), {0})\n    return real(name, *rest)\n"
        "builtins.__import__ = look\nmain.command()\n",
        # Python drops what is raised there.
        "class Part:\n    def __del__(self): os.kill(os.getpid(), {0}); time.sleep(0.2)\n"
        "def work():\n    Part()\n    time.sleep(9)\n    print('goes on')\n" + SERVE,
    ],
    ids=["in a command", "in an import", "in a destructor"],
)
def test_a_signal_is_said_in_a_word_and_has_its_exit_code(
    stage: str, number: signal.Signals, word: str
) -> None:
    # The tests may have been started where it is ignored (nohup), which stays so in what they start.
    heeded = f"signal.signal({int(number)}, signal.default_int_handler)\n"
    done = ended(START + heeded + stage.format(int(number)))
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"{word}\n")


def test_who_asks_twice_does_not_wait_for_what_is_under_way() -> None:
    script = f"""
import threading
def work():
    def ask_again():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * main.ending.AGAIN_S)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Timer(0.3, ask_again).start()
    while True:
        try: time.sleep(100)
        except BaseException: print("goes on", flush=True)
{SERVE}"""
    done = ended(START + script)
    assert (done.returncode, done.stdout, done.stderr) == (143, "goes on\n", "terminated\n")


def test_an_ignored_signal_stays_ignored() -> None:
    ignored = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = ended(ignored + START + "def work(): os.kill(os.getpid(), signal.SIGHUP); print('done')\n" + SERVE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_line_changes_nothing(number: signal.Signals) -> None:
    script = f"""
def look(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "finish":
        sys.setprofile(None)
        os.kill(os.getpid(), {int(number)})
def work():
    print("done")
    sys.setprofile(look)
{SERVE}"""
    heeded = f"import sys\nsignal.signal({int(number)}, signal.default_int_handler)\n"
    done = ended(START + heeded + script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_run_whose_processes_start_ends_with_all_of_them(
    known_links: None, database: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "app", *RUN], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        assert any(line.startswith("running") for line in process.stderr)
        # Python that imports torch, and would say where it was.
        while len(started := psutil.Process(process.pid).children(recursive=True)) < 3:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)
        os.killpg(process.pid, number)  # as a terminal does
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (
        128 + number,
        f"{'terminated' if number == 15 else 'interrupted'}\n",
    )
    # Not even as defunct ones.
    assert [child for child in started if child.is_running()] == []


@pytest.mark.slow
def test_a_search_that_is_killed_is_resumed_to_the_same_end(command: Command, database: Path) -> None:
    arguments = (
        "search", "--model", "mlp", "--preset", "small", "--topology", "p100-cluster", "--devices", "8",
        "--proposals", "12000", "--fresh", "--json",
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
