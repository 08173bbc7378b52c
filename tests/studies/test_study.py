"""`scripts/study` with real searches of small networks: what it stores, goes on with, and repeats."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from app.services.progress import Progress
from scripts.studies.__main__ import main
from scripts.studies.cells import K80, P100, StudyCell
from scripts.studies.results import Folder, StudyResult
from scripts.studies.running import run_cell

SMALL = ("--quick", "--networks", "rnnlm", "--devices", "4", "--budget", "40", "--workers", "1", "--json")
# The one with the batch of each device on the first cluster.
WEAK = StudyCell("rnnlm", P100, 4, 16, "small", 40, 2, 0)
STRONG = StudyCell("rnnlm", P100, 4, 4, "small", 40, 4, 0)


@dataclass(frozen=True, slots=True)
class Study:
    """A finished study, and what it printed."""

    folder: Path
    document: dict[str, Any]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what the database answers."""
        with sqlite3.connect(self.folder / "study.sqlite") as connection:
            return connection.execute(query).fetchall()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """All tables of one small network on 4 devices: three searches in a worker process."""
    folder = tmp_path_factory.mktemp("study")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([*SMALL, "--results", str(folder)])
    assert code == 0
    return Study(folder, json.loads(printed.getvalue()))


def result(study: Study, cell: StudyCell) -> StudyResult:
    """Return a finished cell's result."""
    found = Folder(study.folder).read(cell)
    assert found is not None
    return found


def test_every_cell_is_searched_once_and_stored_as_any_search(study: Study) -> None:
    assert (study.document["finished"], study.document["cells"]) == (3, 3)
    stored = study.rows(
        "SELECT topology.name, training.batch_size, search.status FROM searches AS search "
        "JOIN topologies AS topology ON topology.id = search.topology_id "
        "JOIN trainings AS training ON training.id = search.training_id ORDER BY 1, 2"
    )
    assert stored == [
        ("k80-cluster[:4]", 16, "finished"),
        ("p100-cluster[:4]", 4, "finished"),
        ("p100-cluster[:4]", 16, "finished"),
    ]


def test_tables_say_what_the_database_says(study: Study) -> None:
    (row,) = [row for row in study.document["tables"]["throughput"] if row["cluster"] == P100]
    times = {
        name: study.rows(
            f"SELECT step_time_s FROM simulations WHERE strategy_id = {one['strategy']} "
            f"AND step_time_s = {one['step_time_s']!r}"
        )
        for name, one in result(study, WEAK).strategies.items()
    }
    assert all(len(found) >= 1 for found in times.values())
    ((found_s,), *_), ((parallel_s,), *_) = times["found"], times["data-parallel"]
    assert row["found /s"] == pytest.approx(16 / found_s)
    assert row["over data parallel"] == pytest.approx(parallel_s / found_s)


def test_nothing_that_was_found_is_slower_than_what_it_is_compared_with(study: Study) -> None:
    for row in study.document["tables"]["throughput"]:
        assert all(row[name] >= 1 for name in row if name.startswith("over ") and row[name] is not None)
    for row in study.document["tables"]["zoo"]:
        assert row["bound ms"] <= row["found ms"] <= row["ms"]
        assert row["found ms"] <= row["without baselines ms"] <= row["random starts ms"]


def test_a_second_run_searches_nothing_and_shows_the_same(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    before = study.rows("SELECT count(*) FROM searches")
    assert main([*SMALL, "--results", str(study.folder)]) == 0
    assert json.loads(capsys.readouterr().out) == study.document
    assert study.rows("SELECT count(*) FROM searches") == before


def test_plots_are_well_formed_and_have_a_line_a_strategy(study: Study) -> None:
    for topology in (P100, K80):
        root = ElementTree.parse(study.folder / f"throughput-{topology}.svg").getroot()
        assert len(root.findall(".//{*}polyline")) == 4


def test_the_same_cell_is_searched_to_the_same_end_after_an_interrupt(study: Study, tmp_path: Path) -> None:
    class Impatient(Progress):
        """Presses ctrl-C when the walk has begun."""

        def __init__(self) -> None:
            self.walks = False

        def begin(self, text: str, total: int | None) -> None:
            super().begin(text, total)
            self.walks = text == "searching rnnlm-small"

        def advance(self, steps: int = 1, text: str | None = None) -> None:
            super().advance(steps, text)
            if self.walks and steps:
                raise KeyboardInterrupt

    database = f"sqlite:///{tmp_path / 'x.sqlite'}"
    assert run_cell(STRONG, database, Impatient()) is None
    document = run_cell(STRONG, database, Progress())
    assert document is not None
    first = result(study, STRONG).document
    for name in ("strategies", "optcnn", "chains"):
        assert _without_what_varies(document[name]) == _without_what_varies(first[name])
    with sqlite3.connect(tmp_path / "x.sqlite") as connection:
        assert connection.execute("SELECT status FROM searches").fetchall() == [
            ("interrupted",),
            ("finished",),
        ]


def _without_what_varies(document: Any) -> Any:
    """Leave out the numbers of rows, which depend on what else a database holds, and times of this machine."""
    if isinstance(document, list):
        return [_without_what_varies(one) for one in document]
    if isinstance(document, dict):
        return {
            name: _without_what_varies(one)
            for name, one in document.items()
            if name not in ("strategy", "seconds")
        }
    return document


def test_another_seed_or_budget_is_another_cell(study: Study) -> None:
    folder = Folder(study.folder)
    assert folder.read(WEAK) is not None
    assert folder.read(replace(WEAK, seed=1)) is None
    assert folder.read(replace(WEAK, proposals=41)) is None


def test_a_damaged_result_is_one_line(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Folder(tmp_path).write_text(f"cells/{WEAK.key}.json", "{")
    assert main([*SMALL, "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {WEAK.key}.json: is no result of this study")


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--networks", "alexnet,nonesuch", "error: --networks: nonesuch is unknown"),
        ("--devices", "3", "error: --devices: is 3, must be of 1, 2, 4, 8, 16, 32, 64"),
        ("--devices", "four", "error: --devices: is four, must be numbers"),
        ("--budget", "0", "error: --budget: is 0, must be at least 1"),
        ("--seed", "-1", "error: --seed: is -1, must be at least 0"),
        ("--workers", "0", "error: --workers: is 0, must be at least 1"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, error: str
) -> None:
    assert main(["--results", str(tmp_path / "x"), option, value]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(error)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_study_ends_its_searches(
    tmp_path: Path, number: signal.Signals, wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    arguments = ("--quick", "--networks", "rnnlm", "--devices", "4", "--budget", "1000000000")
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.studies", *arguments, "--results", str(tmp_path), "--table", "zoo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(
            lambda: bool(list(tmp_path.glob("*.traces/search-1/*.parquet"))) or process.poll() is not None
        )
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output) == (130, "")
    assert errors == "interrupted; what is finished is kept: the same command goes on\n"
    with sqlite3.connect(tmp_path / "study.sqlite") as connection:
        assert connection.execute("SELECT status FROM searches").fetchall() == [("interrupted",)]
