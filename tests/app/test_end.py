"""How the command's process ends."""

from __future__ import annotations

import pstats
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.db.schema import upgrade

# Something that only an interpreter that ends in its own way takes apart.
BEGIN = """
import atexit, sys, threading, time
class Kept:
    def __del__(self, write=sys.stderr.write):
        write("taken apart ")
kept = Kept()
atexit.register(sys.stderr.write, "said goodbye ")
from app.cli.main import command
"""


def ended(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("arguments", "code"), [(("topology", "list"), 0), (("topology", "show", "no"), 2)])
def test_a_command_says_all_and_ends_without_taking_apart_what_it_loaded(
    arguments: tuple[str, ...], code: int
) -> None:
    done = ended("command()", *arguments)
    whole = ended("from app.cli.main import main; main()", *arguments)
    assert (done.returncode, done.stdout) == (whole.returncode, whole.stdout)
    assert done.returncode == code
    assert done.stderr == whole.stderr.replace("taken apart ", "")
    assert done.stderr.endswith("said goodbye ")
    assert whole.stderr.endswith("taken apart ")


def test_a_thread_that_works_on_is_waited_for() -> None:
    later = (
        "threading.Thread(target=lambda: (threading.main_thread().join(), sys.stderr.write('done '))).start()\n"
        "command()"
    )
    done = ended(later, "topology", "list")
    assert done.returncode == 0
    assert done.stderr == "done said goodbye taken apart "


def test_a_profiler_sees_the_end(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    command = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "app", "topology", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert any(name == "command" for _, _, name in pstats.Stats(str(profile)).stats)  # type: ignore[attr-defined]


TOPOLOGY = ("topology", "show", "p100-cluster")
# In a process of its own.
QUERY = ("query", "SELECT * FROM device_kinds")


@pytest.fixture
def new_database(database: Path) -> None:
    """Make the database that commands use, which holds nothing yet."""
    upgrade(database)


@pytest.mark.parametrize(
    "arguments", [(*TOPOLOGY, "--json"), TOPOLOGY, (*QUERY, "--json"), (*QUERY, "--format", "csv"), QUERY]
)
@pytest.mark.usefixtures("new_database")
def test_where_nobody_reads_on_the_command_ends_as_others_do(arguments: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    # As a shell reports a command that SIGPIPE ended.
    assert (process.returncode, said) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [("topology", "list"), ("topology", "list", "--json"), ("--help",), QUERY, (*QUERY, "--format", "csv")],
)
@pytest.mark.usefixtures("new_database")
def test_a_full_disk_behind_standard_output_is_said_in_a_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "app", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "error: standard output: cannot be written (no space left on device), must be; write to another place\n"
    )


def test_closed_standard_streams_are_no_error() -> None:
    shell = f'"{sys.executable}" -m app topology list <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell], check=False).returncode == 0
