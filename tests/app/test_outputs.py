"""No command writes over what belongs to a database; a file is written as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from app.services.files import replacing
from graph.errors import StorageFullError, UsageError
from tests.app.commands import Parameter, all_parameters
from tests.app.conftest import Command, Outcome, store_results

# Arguments with which each command that writes a file gets as far as writing it.
WRITING: dict[str, tuple[str, ...]] = {
    "db export": (),
    "query": ("SELECT 1 AS one", "--format", "json"),
    "report": (),
    "strategy export": ("1",),
    "trace": ("--strategy", "1"),
}
NETWORK = ("--model", "mlp", "--preset", "small", "--topology", "p100-cluster", "--devices", "2")
# Paths that a command only reads.
READ = {("db import", "file"), ("strategy import", "file")}


PATHS = [parameter for parameter in all_parameters() if parameter.is_path]
OUTPUTS = [parameter for parameter in PATHS if parameter.information.writable]
# One of each command.
OUTPUT = {parameter.command: parameter for parameter in OUTPUTS}


def test_every_path_of_a_command_is_marked_as_written_or_listed_as_read() -> None:
    assert {(one.command, one.name) for one in PATHS if one not in OUTPUTS} == READ
    assert OUTPUT.keys() == WRITING.keys()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two databases, each with a search and so with chunks of its trace; to be copied."""
    folder = tmp_path_factory.mktemp("made")
    store_results(folder / "test.sqlite", ("search", *NETWORK, "--proposals", "20", "--workers", "1"))
    shutil.copy(folder / "test.sqlite", folder / "other.db")
    shutil.copytree(folder / "test.traces", folder / "other.traces")
    return folder


@pytest.fixture
def stored(made: Path, database: Path) -> Path:
    """A copy of those databases in a folder of the test's own; commands use the first."""
    shutil.copytree(made, database.parent, dirs_exist_ok=True)
    return database.parent


def names_of_stored_files(folder: Path) -> dict[str, Path]:
    """Return paths under which files of databases can be reached, or would be."""
    chunk = next(folder.glob("test.traces/search-1/chunk-*.parquet"))
    (folder / "link.json").symlink_to(folder / "test.sqlite")
    (folder / "link.parquet").symlink_to(chunk)
    os.link(folder / "test.sqlite", folder / "hard.json")
    os.link(chunk, folder / "hard.parquet")
    (folder / "elsewhere").symlink_to(folder / "test.traces" / "search-1")
    return {
        "the database": folder / "test.sqlite",
        "its log": folder / "test.sqlite-wal",
        "the log's index": folder / "test.sqlite-shm",
        "its journal": folder / "test.sqlite-journal",
        "in capitals": folder / "TEST.SQLITE",
        "by another way": folder / "test.traces" / ".." / "test.sqlite",
        "a chunk": chunk,
        "a new file in its traces": folder / "test.traces" / "new.json",
        "in a linked folder": folder / "elsewhere" / "new.json",
        "a link": folder / "link.json",
        "a link to a chunk": folder / "link.parquet",
        "a hard link": folder / "hard.json",
        "a hard link to a chunk": folder / "hard.parquet",
        "another database": folder / "other.db",
        "another's log": folder / "other.db-wal",
        "another's chunk": folder / "other.traces" / chunk.relative_to(folder / "test.traces"),
    }


def write(command: Command, output: Parameter, target: Path) -> Outcome:
    """Let a command write to a path."""
    name = output.command
    return command(*name.split(), *WRITING[name], *output.given(target))


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder but the logs of SQLite and the locks, which come and go as they are used."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-wal", "-shm", ".lock"))
    }


def test_a_search_begins_in_no_folder_of_a_database_that_is_gone(command: Command, stored: Path) -> None:
    (stored / "test.sqlite").unlink()
    before = contents(stored / "test.traces")
    outcome = command("search", *NETWORK, "--proposals", "20", "--workers", "1")
    assert (outcome.code, outcome.output) == (2, ""), outcome
    assert "search-1: has the trace of another database" in outcome.errors.splitlines()[-1]
    assert contents(stored / "test.traces") == before
    assert command("query", "SELECT count(*) AS n FROM searches", "--format", "json").document == [{"n": 0}]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda one: f"{one.command} {one.name}")
def test_nothing_is_written_over_what_belongs_to_a_database(
    command: Command, stored: Path, output: Parameter
) -> None:
    targets = names_of_stored_files(stored)
    before = contents(stored)
    for title, target in targets.items():
        outcome = write(command, output, target)
        assert outcome.code == 2, (title, outcome)
        assert outcome.errors.startswith("error: "), (title, outcome)
        assert outcome.errors.count("\n") == 1, (title, outcome)
        assert "belongs to a database" in outcome.errors, (title, outcome)
        assert contents(stored) == before, title


@pytest.mark.parametrize("name", sorted(WRITING.keys() - {"db export"}))
def test_a_file_of_the_users_own_is_replaced_and_keeps_its_permissions(
    command: Command, stored: Path, name: str
) -> None:
    # Alike in its name, but none of the database's.
    file = stored / "test.sqlite.json"
    file.write_text("before")
    file.chmod(0o640)
    outcome = write(command, OUTPUT[name], file)
    assert outcome.code == 0, outcome
    assert len(file.read_text()) > len("before")
    assert file.stat().st_mode & 0o777 == 0o640
    assert not list(stored.glob(".*"))


@pytest.mark.parametrize("name", sorted(WRITING))
def test_what_cannot_be_written_is_said_in_one_line(command: Command, stored: Path, name: str) -> None:
    (stored / "circle").symlink_to(stored / "circle")
    os.mkfifo(stored / "pipe")
    for target in (
        stored,
        stored / "pipe",
        stored / "circle",
        stored / "no" / "folder",
        stored / ("x" * 300),
    ):
        outcome = write(command, OUTPUT[name], target)
        assert outcome.code == 2, outcome
        assert outcome.errors.count("\n") == 1, outcome
        assert "choose another" in outcome.errors or "make it first" in outcome.errors


class Broken(BaseException):
    """Anything that ends a command, such as Ctrl-C."""


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, UsageError, Broken])
def test_what_ends_while_it_writes_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, ending: type[BaseException]
) -> None:
    target = tmp_path / "kept.json"
    target.write_text("before")
    with pytest.raises(ending), replacing(target, "--output") as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise ending
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_called_full_and_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    target = tmp_path / "kept.json"
    target.write_text("before")
    with (
        pytest.raises(StorageFullError, match=r"kept\.json: the disk or a quota is full") as raised,
        replacing(target, "--output"),
        open("/dev/full", "w") as file,
    ):
        file.write("more than is left")
    assert raised.value.exit_code == 1
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]
