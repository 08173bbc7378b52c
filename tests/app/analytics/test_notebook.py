"""What a notebook gets: frames and DuckDB's SQL, behind the same lock as `app query`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app import open_database
from app.analytics.catalog import CATALOG
from app.db.store import Store
from graph.errors import DatabaseError, UsageError
from tests.app.db import samples
from tests.app.db.samples import Scene

DOCS = Path(__file__).parents[3] / "docs"
USAGE = DOCS / "usage.md"
DOCUMENTATION = DOCS / "database.md"


@pytest.fixture
def filled(store: Store) -> Store:
    """Two strategies, both predicted and run."""
    scene = Scene.stored(store)
    for number in (1, 2):
        strategy = store.put_strategy(samples.strategy(scene.graph_id, number))
        store.put_simulation(scene.simulation(strategy, 1.0 * number))
        execution = store.start_execution(scene.execution(strategy))
        store.finish_execution(execution, [1.25 * number])
    return store


def test_frames_and_relations_hold_the_rows(filled: Store, database_url: str) -> None:
    with open_database(database_url) as database:
        assert database.views == list(CATALOG)
        frame = database.frame("executions")
        assert list(frame.columns) == list(CATALOG["executions"].columns)
        assert sorted(frame["median_s"]) == [1.25, 2.5]
        errors = database.frame("SELECT relative_error FROM predicted_vs_measured")
        assert errors["relative_error"].tolist() == [-0.2, -0.2]
        relation = database.sql("SELECT count(*) AS n, sum(predicted_s) AS s FROM predicted_vs_measured")
        assert relation.fetchall() == [(2, 3.0)]
        assert "BIGINT" in str(relation.types)


def test_notebook_lines_of_the_documentation_run(
    filled: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", USAGE.read_text(), flags=re.DOTALL)
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", database_url)
    names: dict[str, Any] = {}
    exec(lines, names)
    assert names["pairs"]["relative_error"].tolist() == [-0.2, -0.2]


def test_documentation_has_the_views_of_the_catalog() -> None:
    expected = "".join(
        f"\n### {name}\n\nA row: {view.row}.\n\n| column | meaning |\n|---|---|\n"
        + "".join(
            f"| {column} | {text.replace('|', chr(92) + '|')} |\n" for column, text in view.columns.items()
        )
        for name, view in CATALOG.items()
    )
    assert DOCUMENTATION.read_text().endswith(expected)


def test_lock_is_that_of_the_command(filled: Store, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n1\n")
    with open_database(database_url) as database:
        for sql in (
            f"FROM '{tmp_path}/x.csv'",
            f"COPY (SELECT 1) TO '{tmp_path}/y.csv'",
            "DELETE FROM store.graphs",
            "ATTACH ':memory:' AS other",
            "EXPLAIN SELECT 1",
            "SELECT nothing FROM graphs",
        ):
            with pytest.raises(UsageError) as raised:
                database.sql(sql)
            assert "\n" not in str(raised.value)
        with pytest.raises(UsageError, match="view execution: is not known, must be one of"):
            database.frame("execution")
    assert not (tmp_path / "y.csv").exists()


def test_database_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="is not made yet") as raised:
        open_database(tmp_path / "x.sqlite")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, app\n"
        "heavy = {'torch', 'duckdb', 'pandas', 'sqlalchemy', 'numpy', 'pyarrow'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
