"""The fuzzer finds what it is to find: commands with a planted defect, and none in one without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `tests.fuzzing.planted` printed."""
    command = [sys.executable, "-m", "tests.fuzzing.planted", str(tmp_path_factory.mktemp("planted"))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("planted", "oracles"),
    [
        ("raises", ["traceback"]),
        ("changes", ["changed the database"]),
        ("destroys", ["destroyed"]),
        ("changes_notes", ["changed a file"]),
        ("imports", ["ran code"]),
        ("leaves_a_process", ["left a process"]),
        ("leaves_a_file", ["leftover"]),
        ("steers", ["raw control characters"]),
        ("fails_silently", ["exit code 2 without a reason"]),
        ("dies", ["ended by SIGABRT"]),
        ("waits", ["does not end"]),
        ("ignores_the_end", ["exit code 3"]),
        ("behaves", []),
    ],
)
def test_a_planted_defect_is_found(told: Any, planted: str, oracles: list[str]) -> None:
    assert told["findings"][planted] == oracles


def test_a_case_is_the_same_again(told: Any) -> None:
    replayed = [turns for turns in told["replayed"] if turns]
    assert len(replayed) >= 12
    assert all(first == second for first, second in replayed)
    # The cases differ from each other, and among them are damaged files.
    assert len({first for first, _ in replayed}) == len(replayed)
    assert any("kind='damage'" in first for first, _ in replayed)
