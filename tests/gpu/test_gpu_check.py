"""The check of a card, on cards that are not there: all that it does itself, and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from profiler.pinning import child_variables
from scripts.gpu_check import staged_ranks
from scripts.gpu_check.__main__ import main, run_piece, what_is_missing
from scripts.gpu_check.pieces import PIECES
from scripts.gpu_check.report import ROW, PieceResult, add_to_report
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


ROWS = [{"call": "aten.mm.default", "error": ""}, {"call": "aten.add.Tensor", "error": "off by 1"}]
PRINT_ROWS = "".join(f"echo '{ROW}{json.dumps(row)}'; " for row in ROWS)


def test_a_piece_that_takes_too_long_is_ended_with_its_processes_and_keeps_its_rows(tmp_path: Path) -> None:
    child = tmp_path / "child"
    result = run_piece(
        ["sh", "-c", f"{PRINT_ROWS} sleep 1000 & echo $! >{child}; printf '{ROW}half'; wait"], 5.0
    )
    assert (result.passed, result.rows) == (False, ROWS)
    assert result.summary == "took longer than 5 s; 2 rows until then, first error: off by 1"
    deadline = time.monotonic() + 60
    while _is_alive(child.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(process: str) -> bool:
    try:
        # A process that has ended, and that nobody has waited for, is none.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_piece_that_breaks_down_keeps_its_rows() -> None:
    result = run_piece(["sh", "-c", f"{PRINT_ROWS} echo no such kernel >&2; exit 3"], 60.0)
    assert (result.passed, result.rows) == (False, ROWS)
    assert result.summary == "ended with code 3: no such kernel; 2 rows until then, first error: off by 1"
    assert run_piece(["sh", "-c", "kill -SEGV $$"], 60.0).summary == "ended with code -11"


def test_a_file_that_is_no_report_is_refused_before_any_piece(
    gpus: Virtual, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    (tmp_path / "half.json").write_text('{"facts": {}, "pie')
    for name in ("mine.json", "half.json", ".", "nowhere/report.json"):
        assert main(["--piece", "clocks", "--out", str(tmp_path / name)]) == 2, name
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1)
        assert error.startswith(f"gpu-check: --out {tmp_path / name}: ")
    assert (tmp_path / "mine.json").read_text() == '{"mine": 1}'


def test_a_rank_that_ends_without_an_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_ranks, "_job", lambda *_: None)
    monkeypatch.setattr(staged_ranks, "_rank", print)
    assert staged_ranks._verified("mlp", 2, "data parallel", 0) == "a rank ended without a word"


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
