"""`app query`: each format holds the rows, each mistake is one line, and no file is harmed."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pyarrow import parquet

from app.analytics.catalog import CATALOG
from app.analytics.formats import rows
from app.db.store import Store
from app.services.database.query import with_answer
from search.parallel.fork import can_fork
from tests.app.conftest import Command
from tests.app.db import samples

# One call of a function for minutes, which nothing interrupts, and which takes memory that DuckDB does not count.
STUBBORN = "SELECT length(array_to_string(range(100000000), ','))"
SPILLING = (
    "SELECT max(n) FROM (SELECT row_number() OVER (ORDER BY hash(x), x) AS n FROM range(1000000000) AS t(x))"
)
KINDS = """SELECT 1::HUGEINT AS whole, 0.5::DOUBLE AS real, 1.5 AS fixed, NULL AS nothing, true AS flag,
    'a, "b"' AS text, [1, 2] AS list, {'x': 1} AS struct, MAP {'k': 2} AS map, TIMESTAMP '2026-01-02 03:04:05' AS at,
    DATE '2026-01-02' AS day, 'NaN'::DOUBLE AS nan, '\\xAB'::BLOB AS binary, 7 AS real"""


@pytest.fixture
def filled(database: Path) -> Path:
    """A database with three graphs."""
    with Store.open(database) as store:
        for number, name in enumerate(["inception", "alexnet", "vgg16"]):
            store.put_graph(samples.graph(number, name=name))
    return database


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands run: an empty one."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_table_is_the_default(command: Command, filled: Path) -> None:
    outcome = command("query", "SELECT model, operator_count, NULL AS x FROM graphs ORDER BY model")
    assert outcome.code == 0, outcome
    lines = [line.replace("│", " ").split() for line in outcome.output.splitlines()]
    assert ["alexnet", "121", "-"] in lines
    assert outcome.output.endswith("3 rows\n")


def test_table_of_many_columns_becomes_one_line_a_value(command: Command, filled: Path) -> None:
    outcome = command("query", "SELECT 'x' AS a" + "".join(f", {n} AS long_column_{n}" for n in range(30)))
    assert outcome.code == 0, outcome
    assert ["long_column_29", "29"] in [line.split() for line in outcome.output.splitlines()]


def test_long_cells_and_tables_are_cut_and_say_so(command: Command, filled: Path) -> None:
    outcome = command("query", "SELECT x, repeat('y', 5000) AS y FROM range(500) AS t(x)", "--rows", "2")
    assert outcome.code == 0, outcome
    assert max(len(line) for line in outcome.output.splitlines()) <= 160
    assert "…" in outcome.output
    assert "the first 2 rows" in outcome.output


def test_plan_is_shown_as_it_is(command: Command, filled: Path) -> None:
    outcome = command("query", "EXPLAIN SELECT 42")
    assert outcome.code == 0, outcome
    assert "PROJECTION" in outcome.output


def test_csv_and_json_hold_every_kind_of_value(command: Command, filled: Path) -> None:
    table = command("query", KINDS, "--format", "csv")
    assert table.code == 0, table
    (row,) = csv.DictReader(io.StringIO(table.output))
    assert row == {
        "whole": "1",
        "real": "0.5",
        "fixed": "1.5",
        "nothing": "",
        "flag": "true",
        "text": 'a, "b"',
        "list": "[1, 2]",
        "struct": '{"x": 1}',
        "map": '[["k", 2]]',
        "at": "2026-01-02 03:04:05",
        "day": "2026-01-02",
        "nan": "nan",
        "binary": "ab",
        "real_1": "7",
    }
    (found,) = command("query", KINDS, "--json").document
    assert found == {
        "whole": 1,
        "real": 0.5,
        "fixed": 1.5,
        "nothing": None,
        "flag": True,
        "text": 'a, "b"',
        "list": [1, 2],
        "struct": {"x": 1},
        "map": [["k", 2]],
        "at": "2026-01-02 03:04:05",
        "day": "2026-01-02",
        "nan": None,
        "binary": "ab",
        "real_1": 7,
    }
    assert command("query", "SELECT 1 AS x WHERE false", "--json").document == []


def test_files_hold_all_rows(command: Command, filled: Path, tmp_path: Path) -> None:
    sql = "SELECT x, sin(x) AS y FROM range(120000) AS t(x)"
    for name in ("out.parquet", "out.csv", "out.json"):
        outcome = command("query", sql, "--output", str(tmp_path / name))
        assert outcome.output == f"120000 rows written to {tmp_path / name}\n", outcome
    assert parquet.read_table(tmp_path / "out.parquet").column("x").to_pylist() == list(range(120000))
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 120001
    assert [row["x"] for row in json.loads((tmp_path / "out.json").read_text())] == list(range(120000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SELEC 1",), "syntax error"),
        (("SELECT nothing FROM graphs",), 'column "nothing" not found'),
        (("DELETE FROM store.graphs",), "is DELETE, must be one SELECT"),
        (("FROM 'x.csv'",), "FROM x.csv is not allowed"),
        (("SELECT 1::INTEGER / 'a'::INTEGER",), "Could not convert"),
        (("SELECT $1",), "parameters"),
        (("SELECT error('first' || chr(10) || 'second')",), "first second"),
        (("SELECT 1", "--timeout", "nan"), "--timeout"),
        (("SELECT 1", "--memory", "nan"), "--memory"),
        (("SELECT 1", "--memory", "0.1"), "--memory: is 0.1 GiB, must be between 0.125 and"),
        (("SELECT 1", "--format", "xml"), "must be one of table, csv, json, parquet"),
        (("SELECT 1", "--format", "parquet"), "--output"),
        (("SELECT 1", "--output", "x.txt"), "--format"),
        (("SELECT 1", "--json", "--format", "csv"), "--json"),
        (("SELECT 1", "--output", "missing/x.csv"), "does not exist"),
        (("SELECT 1", "--output", "/dev/null", "--format", "csv"), "no regular file"),
        (("SELECT INTERVAL 1 DAY AS x", "--output", "x.parquet"), "cast the column"),
        ((), "--views"),
    ],
)
def test_mistakes_are_one_line(
    command: Command, filled: Path, here: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = command("query", *arguments)
    assert outcome.code == 2, outcome
    (line,) = outcome.errors.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert list(here.iterdir()) == []


@pytest.mark.skipif(not can_fork(), reason="a query has no process of its own elsewhere")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STUBBORN, "--timeout", "1"), "took longer than 1 s, must end within --timeout"),
        (("FROM range(1000000000000)", "--output", "x.csv", "--timeout", "1"), "took longer than 1 s"),
        ((STUBBORN, "--memory", "0.5"), "needs more memory than it may use"),
        (("SELECT repeat('x', 2000000000)", "--output", "x.parquet", "--memory", "0.5"), "needs more memory"),
    ],
)
def test_whatever_a_query_does_it_keeps_its_limits(
    command: Command, filled: Path, here: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = command("query", *arguments)
    (line,) = outcome.errors.splitlines()
    assert (outcome.code, message in line) == (1, True), outcome
    assert list(here.iterdir()) == []
    assert [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE] == []


def test_failed_export_leaves_the_old_file(command: Command, filled: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    file.write_text("old\n")
    sql = "SELECT CASE WHEN x < 900000 THEN x ELSE error('late') END AS y FROM range(1000000) AS t(x)"
    outcome = command("query", sql, "--output", str(file))
    assert (outcome.code, "late" in outcome.errors) == (2, True), outcome
    assert file.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_query_runs_apart_over_every_backend(store: Store, database_url: str) -> None:
    """The connections of this process, which has used some, are not those of the query's."""
    store.put_graph(samples.graph())
    store.database.dispose()  # SQLite must not be open where a process is forked
    assert with_answer(database_url, "SELECT model FROM graphs", lambda found: list(rows(found))) == [
        ("inception",)
    ]
    store.put_graph(samples.graph(1))
    assert store.table_counts()["graphs"] == 2


def test_views_are_listed_with_their_columns(command: Command, database: Path) -> None:
    text = command("query", "--views").output
    for name, view in CATALOG.items():
        assert f"{name}: {view.row}\n" in text
    listed = command("query", "--views", "--json").document
    assert {one["view"]: one["columns"] for one in listed} == {
        name: view.columns for name, view in CATALOG.items()
    }
    assert not database.exists()


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "app", "query", *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# `python -c` is interactive for DuckDB, which there draws how far a statement is, where that takes seconds.
INTERACTIVE = """
import duckdb
class Watched:
    def __init__(self, connection):
        self.connection, self.first = connection, True
    def __getattr__(self, name):
        return getattr(self.connection, name)
    def execute(self, *arguments):
        setting = "SELECT current_setting('enable_progress_bar')"
        draws, = self.connection.execute(setting).fetchone()
        assert draws == self.first, arguments
        self.first = False
        return self.connection.execute(*arguments)
connect = duckdb.connect
duckdb.connect = lambda *arguments, **options: Watched(connect(*arguments, **options))
from app.cli.main import command
command()
"""


def test_duckdb_draws_no_progress_beside_the_answer(filled: Path) -> None:
    query = ("query", "SELECT 1 AS one", "--json")
    done = subprocess.run(
        [sys.executable, "-c", INTERACTIVE, *query], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [{"one": 1}]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_query_ends_with_its_command(
    filled: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = start(SPILLING, "--memory", "0.2", TMPDIR=str(folder))
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("soapstone-query-*/*")) and time.monotonic() < deadline:
            assert command.poll() is None, command.communicate()
            time.sleep(0.05)
        (query,) = psutil.Process(command.pid).children()
        command.send_signal(number)
        output, errors = command.communicate(timeout=120)
        # One that was killed waits for nobody.
        query.wait(timeout=120)
    finally:
        command.kill()
    assert (command.returncode, output, "Traceback" in errors) == (code, "", False)
    if number is not signal.SIGKILL:
        assert list(folder.iterdir()) == []
    if number is signal.SIGINT:
        assert errors == "interrupted\n"


def test_a_reader_that_leaves_early_ends_the_query_as_other_commands(filled: Path) -> None:
    process = start("SELECT * FROM range(10000000)", "--format", "csv")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "range\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
