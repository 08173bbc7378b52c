"""How the command's process ends."""

from __future__ import annotations

import pstats
import subprocess
import sys
from pathlib import Path

import pytest

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
    later = "threading.Thread(target=lambda: (time.sleep(1), sys.stderr.write('done '))).start()\ncommand()"
    done = ended(later, "topology", "list")
    assert done.returncode == 0
    assert done.stderr == "done said goodbye taken apart "


def test_a_profiler_sees_the_end(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    command = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "app", "topology", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert any(name == "command" for _, _, name in pstats.Stats(str(profile)).stats)  # type: ignore[attr-defined]


def test_nobody_reading_on_is_no_error_of_ours() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app", "topology", "show", "p100-cluster", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode != 0
    assert "Traceback" not in said
