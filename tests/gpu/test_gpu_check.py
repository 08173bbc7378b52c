"""The check of a card, on cards that are not there: all that it does itself, and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiler.pinning import child_variables
from scripts.gpu_check.__main__ import main, what_is_missing
from scripts.gpu_check.pieces import PIECES
from scripts.gpu_check.report import PieceResult, add_to_report
from tests.gpu.conftest import HERE
from tests.gpu.virtual_device import VARIABLE, Speeds, Virtual

ROOT = HERE.parents[1]


def test_without_a_card_one_line_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    missing = what_is_missing(0)
    if missing is None:
        pytest.skip("there is a card")
    assert main([]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("gpu-check: torch")


@pytest.mark.parametrize("name", ["calls", "timing", "clocks", "contention", "memory"])
def test_a_piece_passes_on_a_virtual_card(gpus: Virtual, name: str) -> None:
    gpus.speeds.most_computed = 2**24
    result = PIECES[name].check(0, quick=True)
    assert result.passed is (None if name == "timing" else True), (result.summary, result.rows)
    assert result.rows
    json.dumps(result.rows)


def _checked(tmp_path: Path, chosen: Speeds, *pieces: str) -> tuple[int, dict[str, object], str]:
    speeds, out = tmp_path / "speeds.json", tmp_path / "report.json"
    chosen.write(speeds)
    variables = {
        **os.environ,
        **child_variables(),
        VARIABLE: str(speeds),
        "PYTHONPATH": os.pathsep.join((str(HERE / "start"), str(ROOT))),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    named = [argument for piece in pieces for argument in ("--piece", piece)]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", "--quick", "--out", str(out), *named],
        cwd=ROOT, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(out.read_text()) if out.is_file() else {}, done.stdout + done.stderr


def test_a_piece_runs_in_a_process_of_its_own_and_is_in_the_report(tmp_path: Path) -> None:
    code, report, text = _checked(tmp_path, Speeds(most_computed=2**12), "clocks")
    assert code == 0, text
    pieces = report["pieces"]
    assert isinstance(pieces, dict)
    assert list(pieces) == ["clocks"]
    assert text.startswith("clocks       passed")


def test_pieces_add_to_the_report_of_one_machine(tmp_path: Path) -> None:
    file, result = tmp_path / "report.json", PieceResult(passed=True, summary="well")
    for facts, piece in (({"gpu": 1}, "calls"), ({"gpu": 1}, "step"), ({"gpu": 2}, "clocks")):
        add_to_report(file, facts, piece, result)
        pieces = json.loads(file.read_text())["pieces"]
        assert list(pieces) == {"calls": ["calls"], "step": ["calls", "step"], "clocks": ["clocks"]}[piece]


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["verify", "ranks", "commands"])
def test_a_piece_of_commands_passes_on_a_virtual_card(tmp_path: Path, piece: str) -> None:
    code, report, text = _checked(tmp_path, Speeds(kernel_s=2e-3), piece)
    assert code == 0, (text, report)


@pytest.mark.slow
def test_steps_are_predicted_and_executed_on_a_virtual_card(tmp_path: Path) -> None:
    """How near they come there says nothing: a virtual kernel takes as long for a few weights as for many."""
    _, report, text = _checked(tmp_path, Speeds(kernel_s=2e-3), "step")
    rows = report["pieces"]["step"]["rows"]  # type: ignore[index]
    assert [abs(row["off"]) < 0.2 for row in rows] == [True, True], text
