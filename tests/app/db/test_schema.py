"""How a database is found, opened, upgraded and refused."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from app.db import check, engine, schema
from app.db.engine import migration_engine, resolve_url
from app.db.records import TASK_ORDERS, TraceRecord
from app.db.schema import downgrade, open_database, status, upgrade
from app.db.store import Store
from app.services.database import check as checking
from graph.errors import DatabaseError, UsageError
from tests.app.db import samples


def tables(url: str) -> list[str]:
    """Return the names of the tables at a URL."""
    own = migration_engine(resolve_url(url))
    names = sa.inspect(own).get_table_names()
    own.dispose()
    return sorted(names)


def execute(url: str, statement: str) -> None:
    """Execute one statement."""
    own = migration_engine(resolve_url(url))
    with own.begin() as connection:
        connection.execute(sa.text(statement))
    own.dispose()


def test_first_open_makes_the_schema_silently(database_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert status(database_url) == (None, schema.HEAD)
    open_database(database_url).dispose()
    assert status(database_url) == (schema.HEAD, schema.HEAD)
    assert capfd.readouterr() == ("", "")


def test_migrations_and_models_agree(database_url: str) -> None:
    assert check.check() == []
    upgrade(database_url)
    assert check.differences(resolve_url(database_url)) == []


def test_a_new_database_is_what_the_migrations_make(database_url: str) -> None:
    upgrade(database_url)
    migrated, versions = structure_of(database_url), rows_of(database_url)
    downgrade(database_url, revision="base")
    execute(database_url, "DROP TABLE alembic_version")
    open_database(database_url).dispose()
    created = structure_of(database_url)
    assert created.keys() == migrated.keys()
    for table, (columns, *rest) in migrated.items():
        # Later migrations add columns at the end.
        assert sorted(created[table][0]) == sorted(columns)
        assert created[table][1:] == tuple(rest)
    assert rows_of(database_url) == versions


def test_disagreement_is_seen(database_url: str) -> None:
    upgrade(database_url)
    execute(database_url, "ALTER TABLE graphs ADD COLUMN extra TEXT")
    assert "extra" in str(check.differences(resolve_url(database_url)))


def test_upgrade_again_keeps_the_rows_and_downgrade_drops_them(database_url: str) -> None:
    assert upgrade(database_url) == ""
    with Store.open(database_url) as store:
        store.put_graph(samples.graph())
    assert upgrade(database_url) == schema.HEAD
    with Store.open(database_url) as store:
        assert store.table_counts()["graphs"] == 1
    assert downgrade(database_url, revision="base") == schema.HEAD
    assert tables(database_url) == ["alembic_version"]
    assert status(database_url) == (None, schema.HEAD)
    with Store.open(database_url) as store:
        assert store.table_counts()["graphs"] == 0


def test_older_schema_names_the_command(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade(database_url, revision="0001")
    with pytest.raises(
        DatabaseError, match=rf"schema is 0001, must be {schema.HEAD}; run: app db upgrade --database "
    ) as raised:
        open_database(database_url)
    assert "\n" not in str(raised.value)
    with pytest.raises(DatabaseError, match=f"^{re.escape(str(raised.value))}$"):
        checking.check(database_url)
    monkeypatch.setenv(engine.ENVIRONMENT_VARIABLE, database_url)
    with pytest.raises(DatabaseError, match=r"run: app db upgrade$"):
        open_database()


def test_newer_schema_is_refused(database_url: str) -> None:
    upgrade(database_url)
    execute(database_url, "UPDATE alembic_version SET version_num = '9999'")
    for act in (open_database, upgrade):
        with pytest.raises(
            DatabaseError, match=r"schema is 9999, .* is older than the database; install"
        ) as raised:
            act(database_url)
        assert "\n" not in str(raised.value)
    assert status(database_url) == ("9999", schema.HEAD)


def test_tables_of_another_program_are_left_alone(database_url: str) -> None:
    execute(database_url, "CREATE TABLE customers (id INTEGER)")
    for act in (open_database, upgrade):
        with pytest.raises(DatabaseError, match=r"has tables of another program \(customers\)"):
            act(database_url)
    assert tables(database_url) == ["customers"]


def stored_by_0001(url: str) -> None:
    """Make a database of revision 0001 with rows that later ones touch, as that revision's Soapstone wrote them."""
    upgrade(url, revision="0001")
    moment = "'2026-01-02 03:04:05'"
    for statement in (
        "INSERT INTO graphs VALUES (1, 'g', 'mlp', '{}', 1, 1, 1, '{}')",
        "INSERT INTO topologies VALUES (1, 't', 'local', 2, '{}')",
        "INSERT INTO trainings VALUES (1, 'r', 8, '{}')",
        f"INSERT INTO environments VALUES (1, 'e', '{{}}', {moment})",
        f"INSERT INTO strategies VALUES (1, 's', 1, 2, '{{}}', 'search', {moment})",
        *(
            f"INSERT INTO searches VALUES ({number}, 1, 1, 1, 'mcmc', 7, '{{}}', '{state}', 5, 3, 2.0, 1.0, 1,"
            f" 'x.traces/search-{number}', {moment}, NULL)"
            for number, state in enumerate(("running", "finished", "interrupted", "failed"), 1)
        ),
        *(
            f"INSERT INTO executions VALUES ({number}, 1, 1, 1, 1, 3, '{state}', '[1.0]', 1.0, 1.0, 1.0, 8.0, NULL,"
            f" NULL, {moment}, NULL)"
            for number, state in enumerate(("running", "finished", "failed"), 1)
        ),
        "INSERT INTO simulations VALUES (1, 1, 1, 1, 2, 'fifo', 'c', 1.0, 0.5, 0.25, 0.25, 1.5, 64, '[7]', true,"
        f" {moment})",
        f"INSERT INTO traces VALUES (1, 2, 'proposals', 'x.traces/search-2/chunk-000001.parquet', 5, {moment})",
    ):
        execute(url, statement)
    if url.startswith("postgresql"):
        # Its numbers go on by themselves only after rows that they were given to.
        for table in (
            "graphs",
            "topologies",
            "trainings",
            "environments",
            "strategies",
            "searches",
            "executions",
            "simulations",
            "traces",
        ):
            execute(
                url, f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"
            )


def rows_of(url: str) -> dict[str, list[dict[str, object]]]:
    """Return all rows of all tables, by table."""
    own = migration_engine(resolve_url(url))
    with own.connect() as connection:
        found = {
            name: [
                dict(row)
                for row in connection.execute(sa.text(f"SELECT * FROM {name} ORDER BY 1")).mappings()
            ]
            for name in sa.inspect(connection).get_table_names()
        }
    own.dispose()
    return found


def structure_of(url: str) -> dict[str, tuple[list[Any], ...]]:
    """Return columns, constraints and indexes of all tables."""
    own = migration_engine(resolve_url(url))
    inspector = sa.inspect(own)
    found: dict[str, tuple[list[Any], ...]] = {}
    for name in inspector.get_table_names():
        found[name] = (
            [(one["name"], str(one["type"]), one["nullable"]) for one in inspector.get_columns(name)],
            sorted((str(one["name"]), one["column_names"]) for one in inspector.get_indexes(name)),
            sorted((str(one["name"]), one["sqltext"]) for one in inspector.get_check_constraints(name)),
            sorted((str(one["name"]), one["referred_table"]) for one in inspector.get_foreign_keys(name)),
            sorted((str(one["name"]), one["column_names"]) for one in inspector.get_unique_constraints(name)),
        )
    own.dispose()
    return found


def test_0001_is_upgraded_and_taken_back_with_its_rows(database_url: str) -> None:
    stored_by_0001(database_url)
    before, structure = rows_of(database_url), structure_of(database_url)
    assert upgrade(database_url) == "0001"
    assert check.differences(resolve_url(database_url)) == []
    with Store.open(database_url) as store:
        statuses = [store.search(number).status for number in (1, 2, 3, 4)]
        assert statuses == ["interrupted", "finished", "interrupted", "failed"]
        assert [store.execution(number).status for number in (1, 2, 3)] == [
            "interrupted",
            "finished",
            "failed",
        ]
        assert store.search(2).owner is None
        assert store.search(2).lower_bound_s is None
        chunk = TraceRecord(2, "starts", "x.traces/search-2/starts-000001.parquet", 3)
        store.record_traces(2, [chunk])
        (simulation,) = store.simulations(strategy_id=1)
        for order in TASK_ORDERS:
            store.put_simulation(replace(simulation, task_order=order, cost_digest="d"))
        assert len(store.simulations(strategy_id=1)) == 1 + len(TASK_ORDERS)
    assert downgrade(database_url, revision="0001") == schema.HEAD
    after = rows_of(database_url)
    # Only what was running is another row than before. Of the simulations, those of orders that 0001 knows stay.
    kept = [one for one in after["simulations"] if one["cost_digest"] == "d"]
    assert [one["task_order"] for one in kept] == ["program", "fifo"]
    after["simulations"] = [one for one in after["simulations"] if one not in kept]
    before["searches"][0]["status"] = "interrupted"
    before["executions"][0] |= {"status": "failed", "failure": "interrupted"}
    before["alembic_version"] = [{"version_num": "0001"}]
    assert after == before
    assert structure_of(database_url) == structure


def test_failed_upgrade_changes_nothing(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "locate_migrations", lambda: Path(__file__).parent / "broken_migrations")
    with pytest.raises(DatabaseError, match="no_such_table"):
        upgrade(database_url)
    assert tables(database_url) == []


def test_default_is_a_file_in_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "made by us"))
    monkeypatch.delenv(engine.ENVIRONMENT_VARIABLE, raising=False)
    assert status() == (None, schema.HEAD)
    assert not (tmp_path / "made by us").exists(), "asking for the status makes nothing"
    with pytest.raises(UsageError, match="is not there, must be to be checked"):
        checking.check(None)
    assert not (tmp_path / "made by us").exists(), "neither does a check"
    open_database().dispose()
    assert (tmp_path / "made by us" / "soapstone" / "soapstone.sqlite").is_file()


def test_option_beats_variable_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(engine.ENVIRONMENT_VARIABLE, "one.sqlite")
    assert resolve_url().database == str(tmp_path / "one.sqlite")
    assert resolve_url("two.sqlite").database == str(tmp_path / "two.sqlite")
    assert resolve_url(f"sqlite:///{tmp_path}/three.sqlite").database == str(tmp_path / "three.sqlite")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://me@host/name", "'mysql' is no known kind, must be sqlite or postgresql"),
        ("sqlite://", "is in memory, must be a file"),
        ("sqlite:///:memory:", "is in memory, must be a file"),
        ("postgresql://host:nonsense/name", "is not a URL"),
        ("://", "is not a URL"),
        ("postgresql://me@host", "has no database name"),
        ("", "name is empty"),
        ("postgresql://me:secret@localhost:1/name", "cannot be used"),
    ],
)
def test_bad_url_is_one_line_without_the_password(url: str, message: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(DatabaseError, match=message) as raised:
        open_database(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["postgresql://me@host/name", "postgres://me@host/name"])
def test_plain_postgresql_means_psycopg(url: str) -> None:
    pytest.importorskip("psycopg")
    assert resolve_url(url).drivername == "postgresql+psycopg"


def test_unusable_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("certainly not a database\n" * 100)
    (tmp_path / "byte.sqlite").write_text("x")
    (tmp_path / "folder").mkdir()
    for name, message in {
        "text.sqlite": "is not a SQLite database",
        "byte.sqlite": "is not a SQLite database",
        "folder": "is a folder, must be a file",
        "missing/x.sqlite": "missing does not exist, must exist",
    }.items():
        with pytest.raises(DatabaseError, match=message) as raised:
            open_database(tmp_path / name)
        assert "\n" not in str(raised.value)
    assert (tmp_path / "byte.sqlite").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DatabaseError, match="cannot be written to"):
        open_database(tmp_path / "x.sqlite")


def test_sqlite_is_set_up_for_many_writers(tmp_path: Path) -> None:
    database = open_database(tmp_path / "x.sqlite")
    with database.write_engine.begin() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
        assert pragmas == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 60_000}
        # The writing transaction holds the lock from its start, and readers do not wait for it.
        other = sqlite3.connect(tmp_path / "x.sqlite", timeout=0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()
        with database.read_engine.begin() as reader:
            assert reader.exec_driver_sql("SELECT count(*) FROM graphs").scalar() == 0
    with database.read_engine.begin() as reader, pytest.raises(sa.exc.OperationalError, match="readonly"):
        reader.exec_driver_sql("DELETE FROM graphs")
    database.dispose()


def test_missing_driver_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        DatabaseError, match=r"psycopg is not installed, must be; run pip install 'soapstone\[pg\]'"
    ):
        resolve_url("postgresql://me@host/name")


def test_migrations_are_found_in_an_installed_package(tmp_path: Path) -> None:
    """A wheel has no `migrations` beside `app`: it carries them inside, as `app/_migrations`."""
    root = schema.locate_migrations().parent
    for package in ("app", "graph"):
        for source in (root / package).glob("**/*.py"):
            if "_migrations" not in source.parts:
                target = tmp_path / source.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    shutil.copytree(schema.locate_migrations(), tmp_path / "app" / "_migrations")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-m", "app.db.check"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_interrupt_while_a_connection_is_closed_is_no_traceback(tmp_path: Path) -> None:
    """SQLAlchemy logs it, and raises it as well."""
    program = """
import sys
from app.db import engine
def interrupted(self):
    raise KeyboardInterrupt
engine.Connection.close = interrupted
database = engine.connect_engines(engine.resolve_url(sys.argv[1]))
database.write_engine.connect().close()
try:
    database.dispose()
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", program, str(tmp_path / "new.sqlite")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_without_a_home_folder_there_is_no_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor is there one relative to where the user is, who may be in somebody else's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOAPSTONE_DATABASE_URL", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(DatabaseError, match="you have no home folder, must have one for the default"):
        resolve_url()
    Store.open(tmp_path / "named.sqlite").close()
    for path in ("~nobody-of-that-name/x.sqlite", "a\udcff", "a\0", "sqlite:///a%00"):
        with pytest.raises(DatabaseError, match=r"must be a path|nobody's home folder"):
            resolve_url(path)
    with pytest.raises(DatabaseError, match="cannot be used"):
        Store.open("a" * 300)
