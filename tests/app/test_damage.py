"""Databases and traces that a disk, or somebody, has damaged: one line, and what is whole is saved into a new one."""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from app.db.engine import migration_engine, resolve_url
from app.db.records import LinkCostRecord
from app.db.store import Store
from app.services.database.check import check
from app.services.database.repair import repair
from graph.errors import DatabaseError, UsageError
from tests.app.conftest import Command, Outcome, store_results
from tests.app.db import samples
from tests.app.db.backends import database_url, postgres_host

__all__ = ["database_url", "postgres_host"]

# On data sheets: nothing is measured.
SEARCH = ("search", "--model", "mlp", "--preset", "small", "--topology", "dgx1-v100", "--proposals", "200")
READING = (
    ("db", "status"),
    ("strategy", "list"),
    ("strategy", "rebuild", "1"),
    ("query", "FROM best_per_model"),
    ("compare",),
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a search that can be gone on with, and with costs of some pages; to be copied."""
    path = tmp_path_factory.mktemp("sound") / "sound.sqlite"
    store_results(path, SEARCH)
    with Store.open(path) as store:
        kind, environment = (
            store.put_device_kind(samples.device_kind()),
            store.put_environment(samples.environment()),
        )
        store.put_op_costs(kind, environment, [samples.op_cost(size) for size in range(1, 200)])
        link = LinkCostRecord("p2p", 2, 1024, 1e-4, 2e-4, (1e-4, 3e-4), samples.moment(1))
        store.put_link_costs(kind, environment, [link])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE searches SET status = 'interrupted'")
    return path


@pytest.fixture
def copy(sound: Path, database: Path) -> Path:
    """A copy of `sound`, which commands use by default."""
    shutil.copy(sound, database)
    folder = database.with_suffix(".traces")
    shutil.copytree(sound.with_suffix(".traces"), folder)
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in (("traces", "path"), ("searches", "trace_path")):
            connection.execute(
                f"UPDATE {table} SET {column} = replace({column}, 'sound.', ?)", (f"{database.stem}.",)
            )
        connection.execute("PRAGMA journal_mode=DELETE")
    return database


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file of a folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_one_line(outcome: Outcome) -> bool:
    """Return whether a command failed with one line, after those that say what it does."""
    return (
        outcome.code == 1
        and outcome.errors.count("error: ") == 1
        and outcome.errors.splitlines()[-1].startswith("error: ")
        and "app db check" in outcome.errors
    )


def check_saved(command: Command, database: Path, new: Path) -> dict[str, Any]:
    """Save a database into a new one, which must be whole; return what was found. The old files stay as they are."""
    before = digests(database.parent)
    found = command("db", "check", "--database", str(database), "--json")
    assert found.code in (0, 1), found
    saved = command("db", "check", "--database", str(database), "--repair", str(new), "--json")
    assert saved.code == 0, saved
    again = command("db", "check", "--database", str(new), "--json")
    assert (again.code, again.document["damages"]) == (0, []), again
    assert digests(database.parent) == before
    with closing(sqlite3.connect(new)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    document: dict[str, Any] = {**found.document, "code": found.code, "saved": saved.document["repaired"]}
    return document


def test_a_sound_database_is_sound_and_its_copy_is_the_same(
    command: Command, copy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    new = tmp_path_factory.mktemp("saved") / "new.sqlite"
    found = check_saved(command, copy, new)
    assert (found["code"], found["damages"], found["stray_files"]) == (0, [], [])
    assert found["saved"]["rows"] == {
        name: one["rows"] for name, one in found["tables"].items() if one["rows"]
    }
    assert found["saved"]["chunks"] == found["chunks"]["registered"] > 0
    rebuilt = [
        command("strategy", "rebuild", "1", "--database", str(path), "--json").document["digest"]
        for path in (copy, new)
    ]
    assert rebuilt[0] == rebuilt[1]
    refused = command("db", "check", "--repair", str(copy))
    assert (refused.code, refused.output) == (2, "")
    assert "is there already, must be a new file" in refused.errors


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))]
)
def test_flipped_bits_are_one_line_and_the_rest_is_saved(
    command: Command, copy: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    draw = random.Random(seed)
    content = bytearray(copy.read_bytes())
    if seed % 2:
        page = draw.randrange(1, len(content) // 4096) * 4096
        content[page : page + 4096] = draw.randbytes(4096)
    else:
        for _ in range(20):
            content[draw.randrange(100, len(content))] ^= 1 << draw.randrange(8)
    copy.write_bytes(content)
    found = check_saved(command, copy, tmp_path_factory.mktemp("saved") / "new.sqlite")
    assert found["damages"] or not seed % 2
    assert found["saved"]["rows"].get("op_costs", 0) > 0 or found["damages"]
    lines = command("db", "check", "--database", str(copy)).output.splitlines()
    assert all(line.count(copy.name) == 1 for line in lines if line.startswith(str(copy))), lines
    for arguments in READING:
        outcome = command(*arguments)
        assert outcome.code == 0 or is_one_line(outcome), (arguments, outcome)


CHUNK_DAMAGES = ("missing", "truncated", "flipped", "another", "folder")


@pytest.mark.parametrize("damage", CHUNK_DAMAGES)
def test_a_damaged_chunk_is_named_and_what_came_before_is_saved(
    command: Command, copy: Path, tmp_path_factory: pytest.TempPathFactory, damage: str
) -> None:
    folder = copy.with_suffix(".traces") / "search-1"
    path = sorted(folder.glob("chunk-*.parquet"))[-1]
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        for place in range(16, len(content) // 2, 16):
            content[place] ^= 1
        path.write_bytes(content)
    elif damage == "another":
        shutil.copy(next(folder.glob("starts-*")), path)
    elif damage == "folder":
        path.mkdir()
    for arguments in (("strategy", "rebuild", "1"), ("search", "--resume", "1")):
        outcome = command(*arguments)
        assert is_one_line(outcome), outcome
        assert str(path) in outcome.errors
    found = check_saved(command, copy, tmp_path_factory.mktemp("saved") / "new.sqlite")
    assert found["code"] == 1
    assert [one["file"] for one in found["damages"]] == [f"trace chunk {path}"]
    assert found["saved"]["chunks"] == found["chunks"]["registered"] - 1


def test_stray_files_of_a_trace_are_in_nobodys_way(command: Command, copy: Path) -> None:
    folder = copy.with_suffix(".traces") / "search-1"
    strays = [
        folder / name for name in ("notes.tmp", "notes.99999999999999999999.tmp", "chunk-x.parquet", "a b")
    ]
    for path in strays:
        path.write_text("not ours")
    (folder / "chunk-000099.parquet").mkdir()
    (folder / "more.1.tmp").mkdir()
    with closing(sqlite3.connect(copy)) as connection, connection:
        # Of a process that was killed: its trace is put in order.
        connection.execute("UPDATE searches SET status = 'running', owner = NULL")
    assert command("strategy", "rebuild", "1").code == 0
    found = command("db", "check", "--json")
    assert (found.code, found.document["damages"]) == (0, [])
    assert set(found.document["stray_files"]) >= {str(path) for path in strays}
    assert all(path.read_text() == "not ours" for path in strays)


@contextmanager
def changed(url: str, table: str, column: str, value: object) -> Iterator[int]:
    """Change a column of a table's first row for a while; give the number of the row."""
    engine = migration_engine(resolve_url(url))
    with engine.begin() as connection:
        number, before = connection.execute(
            sa.text(f"SELECT id, {column} FROM {table} ORDER BY id LIMIT 1")
        ).one()
        update = sa.text(f"UPDATE {table} SET {column} = :value WHERE id = :id")
        connection.execute(update, {"value": value, "id": number})
    yield number
    with engine.begin() as connection:
        connection.execute(update, {"value": before, "id": number})
    engine.dispose()


MALFORMED = (
    ("device_kinds", "description", "{"),
    ("environments", "facts", '{"torch":"0"}'),
    ("op_signatures", "key", "[]"),
    ("op_costs", "samples_s", "[1,null]"),
    ("link_costs", "samples_s", "1" * 6000),
    ("graphs", "model", "[]"),
    ("graphs", "document", "{}"),
    ("topologies", "document", "[" * 100_000),
    ("trainings", "document", '{"batch_size":1e999}'),
    ("strategies", "document", "{"),
    ("searches", "options", "NaN"),
    ("simulations", "peak_bytes", '{"0":1}'),
)


def test_every_malformed_document_is_found_by_its_row_and_column(
    command: Command, sound: Path, database_url: str
) -> None:
    repair(str(sound), database_url)
    assert check(database_url).damages == []
    readers = {
        "device_kinds": ("db", "export", "/dev/null"),
        "graphs": ("strategy", "list"),
        "strategies": ("strategy", "list"),
        "searches": ("strategy", "rebuild", "1"),
    }
    for table, column, value in MALFORMED:
        with changed(database_url, table, column, value) as number:
            places = {(one.table, one.row, one.column) for one in check(database_url).damages}
            assert (table, number, column) in places, (table, column, places)
            if table in readers and (table, column) != ("device_kinds", "description"):
                outcome = command(*readers[table], "--database", database_url)
                assert is_one_line(outcome), (table, column, outcome)
                assert f"table {table}, row {number}, column {column}: " in outcome.errors
    assert check(database_url).damages == []


def test_rows_without_their_parents_are_left_out_and_counted(
    command: Command, copy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("DELETE FROM graphs")
    outcome = command("strategy", "list")
    assert is_one_line(outcome), outcome
    where = f"database {copy}: table graphs, row 1"
    assert f"error: {where}: is not there, while another row refers to it" in outcome.errors
    found = check_saved(command, copy, tmp_path_factory.mktemp("saved") / "new.sqlite")
    assert found["code"] == 1
    assert {one["table"] for one in found["damages"]} >= {"strategies", "searches", "simulations", "traces"}
    for table in ("strategies", "searches", "simulations", "traces"):
        assert found["tables"][table]["rows"] > 0 == found["tables"][table]["sound"]
    assert found["saved"]["rows"]["op_costs"] == found["tables"]["op_costs"]["rows"]


def test_values_that_no_column_of_that_type_may_hold_are_named(copy: Path) -> None:
    for table, column, value in (
        ("strategies", "created_at", "yesterday"),
        ("searches", "best_time_s", "soon"),
        ("searches", "alive_at", b"\xff"),
        ("graphs", "name", b"\xff\xfe"),
        ("op_costs", "median_s", 9e999),
    ):
        with changed(f"sqlite:///{copy}", table, column, value) as number:
            places = {(one.table, one.row, one.column) for one in check(str(copy)).damages}
            assert (table, number, column) in places, (table, column, places)


def test_an_interrupted_repair_leaves_nothing(copy: Path, tmp_path: Path) -> None:
    new = tmp_path / "other" / "new.sqlite"
    new.parent.mkdir()
    (new.parent / "new.traces").write_text("in the way")
    with pytest.raises(UsageError, match="is there already"):
        repair(str(copy), str(new))
    (new.parent / "new.traces").unlink()
    copy.write_bytes(b"certainly not a database" * 1000)
    with pytest.raises(DatabaseError, match="is not a SQLite database"):
        repair(str(copy), str(new))
    assert list(new.parent.iterdir()) == []


def test_a_repair_that_is_killed_leaves_no_database_under_the_new_name(sound: Path, tmp_path: Path) -> None:
    """And the next one is not in its way."""
    program = (
        "import os, signal, sys\nfrom app.services.database import repair\n"
        "repair._copied = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "repair.repair(sys.argv[1], sys.argv[2])"
    )
    new = tmp_path / "new.sqlite"
    killed = subprocess.run([sys.executable, "-c", program, str(sound), str(new)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".repairing"]
    repair(str(sound), str(new))
    assert check(str(new)).damages == []


def test_numbers_go_on_after_those_that_were_saved(sound: Path, database_url: str) -> None:
    repair(str(sound), database_url)
    with Store.open(database_url) as store:
        known = {one.id for one in store.environments()}
        assert store.put_environment(samples.environment(7)) not in known


def test_a_trigger_runs_nothing_and_the_rows_are_saved_without_it(
    command: Command, copy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with closing(sqlite3.connect(copy)) as connection, connection:
        # Of nobody: the next command that opens the database says that it has ended.
        connection.execute("UPDATE searches SET status = 'running', owner = NULL")
        connection.execute("CREATE TRIGGER t AFTER UPDATE ON searches BEGIN DELETE FROM strategies; END")
    before = digests(copy.parent)
    for words in READING:
        outcome = command(*words)
        assert is_one_line(outcome), outcome
        assert "has a trigger t, which is none of Soapstone's" in outcome.errors
    assert digests(copy.parent) == before
    found = check_saved(command, copy, tmp_path_factory.mktemp("saved") / "new.sqlite")
    assert [one["reason"] for one in found["damages"]] == ["trigger t is none of Soapstone's"]
    assert found["saved"]["rows"]["strategies"] == found["tables"]["strategies"]["rows"] > 0


def test_a_view_in_place_of_a_table_does_not_run(command: Command, copy: Path) -> None:
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("CREATE VIEW mine AS SELECT 1")
    assert command("strategy", "list").code == 0
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("ALTER TABLE strategies RENAME TO others")
        connection.execute(f"CREATE VIEW strategies AS {endless} SELECT others.* FROM others, n")
    for words in (*READING, ("db", "check")):
        outcome = command(*words)
        assert (outcome.code, outcome.errors.count("error: ")) == (1, 1), outcome
        assert "has a view strategies, which is none of Soapstone's" in outcome.errors


def test_of_a_file_that_lost_its_list_of_tables_it_is_said_that_nothing_can_be_saved(
    command: Command, copy: Path
) -> None:
    copy.write_bytes(copy.read_bytes()[:4096])  # the first page: the list's root, but none of its leaves
    assert is_one_line(command("strategy", "list"))
    checked = command("db", "check")
    assert (checked.code, checked.output) == (1, ""), checked
    assert "its list of tables cannot be read" in checked.errors
    assert "restore a copy" in checked.errors


def test_of_two_repairs_into_one_database_one_is_refused(sound: Path, database_url: str) -> None:
    words = (sys.executable, "-m", "app", "db", "check", "--database", str(sound), "--repair", database_url)
    repairs = [
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [one.communicate()[1] for one in repairs]
    assert sorted(one.returncode for one in repairs) == [0, 2], errors
    (refusal,) = [error for error, one in zip(errors, repairs, strict=True) if one.returncode == 2]
    reasons = ("is there already", "is not empty", "another repair is writing into")
    assert any(reason in refusal for reason in reasons), refusal
    if database_url.startswith("sqlite"):
        folder = Path(database_url.removeprefix("sqlite:///")).parent
        assert [path.name for path in folder.iterdir() if path.name.endswith(".repairing")] == []
    assert check(database_url).damages == []
    with Store.open(database_url) as repaired, Store.open(sound) as old:
        assert repaired.table_counts() == old.table_counts()


def test_a_repair_without_room_is_one_line_and_leaves_nothing(sound: Path, tmp_path: Path) -> None:
    new = tmp_path / "other" / "new.sqlite"
    new.parent.mkdir()
    # Files may grow to 64 KiB.
    limited = ("bash", "-c", 'ulimit -f 64; exec "$@"', "full")
    words = (sys.executable, "-m", "app", "db", "check", "--database", str(sound), "--repair", str(new))
    ended = subprocess.run([*limited, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended
    assert ended.stderr.startswith(f"error: database {new}: the disk or a quota is full "), ended
    assert ended.stderr.count("\n") == 1
    assert list(new.parent.iterdir()) == []
