"""Whatever names hold, what a command prints steers no terminal, forges no line and is no markup."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli.output import TerminalProgress, print_lines, print_table
from app.cli.text import printable
from app.db.records import LinkFitRecord
from app.db.store import Store
from graph.canonical import canonical_json, digest
from tests.app.conftest import Command, Outcome
from tests.app.db import samples
from tests.app.db.samples import Scene

# Colour, title, bell, clearing by a C1 control, writing from right to left, new lines of three sorts, erasing.
EVIL = "\x1b[31m\x1b]0;title\x07\x9b2J\u202egpj\r\nforged\u2028line\x7f\b"
MARKUP = "[b]:x:[/b]"
ROOT = Path(__file__).parents[2]

TOPOLOGY = """
name: "NAME"
kinds:
  "NAME":
    {processor: cuda, peak_flops: {float32: 1 TFLOP/s}, memory: 1 GiB, memory_bandwidth: 1 GB/s, launch_latency: 1 us}
nodes: {count: 1, devices: {"NAME": 1}}
"""


def assert_plain(outcome: Outcome) -> None:
    printed = outcome.output + outcome.errors
    assert {letter for letter in printed if not letter.isprintable()} <= {"\n"}, outcome
    assert not any(line.startswith("forged") for line in printed.splitlines())
    assert "Traceback" not in printed


@pytest.fixture
def hostile(database: Path) -> Path:
    """A database in which every name and text that its schema leaves free steers a terminal."""
    evil = f"{MARKUP}{EVIL}"
    with Store.open(database) as store:
        scene = Scene.stored(store, model=evil)
        configured = json.dumps({"operators": {evil: {"degrees": {evil: 1}, "devices": [0]}}})
        record = samples.strategy(scene.graph_id, 0)
        strategy = store.put_strategy(replace(record, document=configured))
        store.put_simulation(scene.simulation(strategy, 0.5))
        execution = store.start_execution(scene.execution(strategy))
        store.finish_execution(execution, [1.0, 2.0])
        kind = store.put_device_kind(samples.device_kind(evil))
        store.put_op_costs(kind, scene.environment_id, [samples.op_cost(3)])
        store.put_link_fits(
            kind, scene.environment_id, [LinkFitRecord(evil, 2, 9e-5, 3e9, 1.5, residual=0.1)]
        )
        with store.database.write_engine.begin() as connection:
            topology = canonical_json({**json.loads(samples.topology().document), "name": evil})
            connection.exec_driver_sql("UPDATE topologies SET name = ?, document = ?", (evil, topology))
            model = json.dumps({"name": evil, "preset": evil, "batch_size": 8, "precision": "float32"})
            graph = {"batch_norm": "synchronized", "operators": []}
            connection.exec_driver_sql(
                "UPDATE graphs SET model = ?, document = ?, digest = ?",
                (model, canonical_json(graph), digest(graph)),
            )
            connection.exec_driver_sql("UPDATE op_signatures SET target = ?", (evil,))
            facts = {"torch": evil, evil: evil}
            connection.exec_driver_sql(
                "UPDATE environments SET facts = ?, fingerprint = ?", (canonical_json(facts), digest(facts))
            )
    return database


@pytest.mark.parametrize(
    "arguments",
    [
        ("strategy", "list"),
        ("strategy", "show", "1"),
        ("strategy", "diff", "1", "1"),
        ("strategy", "export", "1", "missing/x.json"),
        ("compare",),
        ("compare", "--model", EVIL),
        ("compare", "--execution", "1"),
        ("db", "status"),
        ("db", "export", "pack.parquet", "--device-kind", EVIL),
        ("trace", "--execution", "1", "--output", "trace.json"),
        ("report", "--output", "report.html"),
        ("report", "--model", EVIL, "--output", "report.html"),
        ("run", "--model", f"mlp{EVIL}", "--strategy", EVIL),
        ("search", "--model", EVIL),
        ("models", "show", EVIL),
        ("topology", "show", EVIL),
        ("query", "SELECT * FROM predicted_vs_measured"),
        ("query", "SELECT model, topology FROM predicted_vs_measured"),
        ("query", "SELECT device_kind, environment, target FROM op_costs", "--json"),
        ("query", f"SELECT 1 AS \"{EVIL}\", '{EVIL}'"),
        ("query", f"EXPLAIN SELECT * FROM graphs WHERE model = '{EVIL}'"),
        ("query", f'FROM "{EVIL}"'),
        ("query", f"SELECT error('{EVIL}')"),
        (EVIL,),
        ("query", f"--{EVIL}"),
    ],
)
def test_no_command_passes_on_what_a_name_holds(
    command: Command,
    hostile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = command(*arguments)
    assert_plain(outcome)
    assert outcome.output or outcome.errors


def test_names_are_shown_as_they_are_but_for_what_steers(
    command: Command, hostile: Path, tmp_path: Path
) -> None:
    assert f"{MARKUP}?[31m?]0;title??2J?gpj  forged line" in command("strategy", "list").output
    assert MARKUP in command("compare").output
    file = tmp_path / "evil.yaml"
    file.write_text(TOPOLOGY.replace("NAME", f"{MARKUP}\\e[31m\\a\\u202e"))
    outcome = command("topology", "show", str(file))
    assert_plain(outcome)
    assert f"{MARKUP}?[31m??: 1 device in 1 node\n" in outcome.output
    assert outcome.output.count(MARKUP) >= 2


def test_data_are_whole_in_files_and_plain_on_a_terminal(command: Command, hostile: Path) -> None:
    asked = ("query", "SELECT model FROM graphs", "--format", "csv")
    outcome = command(*asked)
    (row,) = csv.DictReader(io.StringIO(outcome.output, newline=""))
    assert row["model"] == f"{MARKUP}{EVIL}"
    shown = on_a_terminal(*asked)
    assert "".join(letter for letter in shown if not letter.isprintable()).replace("\r\n", "") == ""
    assert MARKUP in shown


def on_a_terminal(*arguments: str) -> str:
    """Return what a command prints on a terminal that knows no colours."""
    near, far = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "app", *arguments],
        stdin=far,
        stdout=far,
        stderr=far,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(far)
    shown = b""
    with os.fdopen(near, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(65536):
                shown += part
        except OSError:  # the other end is closed
            pass
    assert process.wait(timeout=60) == 0, shown
    return shown.decode()


def test_progress_and_tables_are_plain_text(capfd: pytest.CaptureFixture[str]) -> None:
    text = f"{MARKUP}{EVIL}"
    with TerminalProgress() as progress:
        progress.say(text)
        progress.warn(text)
        progress.begin(text, 3)
        progress.advance(1, text)
    print_table([text], [[text]], title=text)
    print_lines(text)
    printed = capfd.readouterr()
    assert_plain(Outcome(0, printed.out, printed.err))
    assert printed.err.count(MARKUP) == 3
    assert printed.out.count(MARKUP) == 4


def test_letters_of_all_languages_stay() -> None:
    assert printable("Größe 模型 نموذج 😀 a\u00a0b") == "Größe 模型 نموذج 😀 a b"


@pytest.mark.parametrize("width", [20, 40, 60, 100, 160])
@pytest.mark.parametrize("cut", [True, False])
def test_a_table_fits_its_terminal_and_is_readable(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, *, cut: bool
) -> None:
    monkeypatch.setattr("app.cli.output.WIDTH_OF_FILES", width)
    names = ["database", "schema", "name", "column_names", "temporary"]
    rows = [
        ["memory", "main", f"view {place}", ", ".join(map(str, range(50))), "false"] for place in range(3)
    ]
    print_table(names, rows, cut=cut)
    lines = capfd.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if line[0] in "│┃"]
    if cells:
        assert max(map(len, lines)) <= width
        # No column is so narrow that words are broken into letters.
        assert ["memory", "main"] in [row[:2] for row in cells]
        assert cells[0][0] == "database"
    else:
        assert width < 60
        assert lines[1].startswith("  database      mem")
        assert max(map(len, lines)) <= width or not cut


def test_only_one_module_of_the_command_line_prints() -> None:
    """What is printed elsewhere would not be looked at: see `app.cli.output`."""
    printing = re.compile(
        r"\bprint\(|sys\.std(out|err)\b|\bConsole\(|\becho\(|\brich\b(?!_markup)|__stdout__"
    )
    allowed = {
        "app/cli/output.py": "prints",
        "app/cli/ending.py": "the word about a signal, and what standard output failed with",
        "app/cli/main.py": "the last line of a command that fails",
        "app/cli/query.py": "closes what nobody reads",
        "app/db/check.py": "a check of the developers'",
        "app/services/database/isolated_process.py": "flushes",
        "app/services/models/models.py": "sends elsewhere what a module of the user's prints",
    }
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "app").rglob("*.py"))
        if printing.search(path.read_text())
    }
    assert found == set(allowed)
