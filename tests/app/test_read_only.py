"""A SQLite database that cannot be written to: commands that read answer, those that write say so at once."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.db.store import Store
from graph.errors import DatabaseError
from tests.app.conftest import Command, store_results

NETWORK = ("--model", "mlp", "--preset", "small")
SEARCH = ("search", *NETWORK, "--topology", "p100-cluster", "--devices", "2", "--proposals", "20")

# Writes, and keeps the database open until its input ends.
WRITER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("UPDATE searches SET seed = 7")
connection.commit()
print("written", flush=True)
sys.stdin.read()
"""

Lock = Callable[[Path], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database that holds a search."""
    folder = tmp_path_factory.mktemp("made")
    store_results(folder / "stored.sqlite", SEARCH)
    return folder


@pytest.fixture
def lock() -> Iterator[Lock]:
    """Take away the right to write to a folder and its files: by their modes, and a mount where root has it still."""
    mounted: list[Path] = []
    taken: list[Path] = []

    def take(folder: Path) -> None:
        taken.append(folder)
        for path in (*folder.rglob("*"), folder):
            if not path.is_symlink():
                path.chmod(0o555 if path.is_dir() else 0o444)
        if not os.access(folder, os.W_OK):
            return
        for words in (("--bind", str(folder), str(folder)), ("-o", "remount,ro,bind", str(folder))):
            if shutil.which("mount") is None or subprocess.run(["mount", *words], check=False).returncode:
                pytest.skip("root may write everywhere, and may not mount here")
            mounted.append(folder)

    yield take
    for folder in dict.fromkeys(mounted):
        subprocess.run(["umount", str(folder)], check=True)
    for folder in taken:  # pytest removes them
        for path in (folder, *folder.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)


@pytest.fixture
def locked(made: Path, tmp_path: Path, lock: Lock, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that cannot be written to, as the default database."""
    folder = tmp_path / "locked"
    shutil.copytree(made, folder)
    lock(folder)
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{folder / 'stored.sqlite'}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def written_to(database: Path) -> Iterator[None]:
    """Let another process write to a database and keep it open: SQLite shares what it knows of a file within one."""
    writing = [sys.executable, "-c", WRITER, str(database)]
    with subprocess.Popen(writing, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        yield
        writer.communicate()


def test_what_reads_answers_as_ever(
    command: Command, made: Path, locked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [
        ("query", "FROM searches", "--json"),
        ("query", "SELECT count(*) AS proposals FROM proposals", "--json"),
        ("strategy", "list", "--json"),
        ("strategy", "show", "1", "--json"),
        ("compare", "--json"),
        ("topology", "list", "--json"),
    ]
    before = contents(locked)
    answers = []
    for words in (*questions, ("db", "status"), ("db", "check")):
        answers.append(command(*words))
        assert answers[-1].code == 0, answers[-1]
    for words in (
        ("trace", "--strategy", "1", "--output", str(tmp_path / "trace.json")),
        ("strategy", "export", "1", str(tmp_path / "strategy.json")),
        ("query", "FROM searches", "--output", str(tmp_path / "searches.csv")),
    ):
        assert command(*words).code == 0
    assert contents(locked) == before
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{made / 'stored.sqlite'}")
    writable = [command(*words) for words in questions]
    assert [answer.document for answer in answers[: len(questions)]] == [one.document for one in writable]


@pytest.mark.parametrize(
    "words",
    [
        ("db", "upgrade"),
        ("db", "import", "--shipped"),
        SEARCH,
        ("search", "--resume", "1"),
        ("run", *NETWORK, "--device", "cpu", "--strategy", "data-parallel"),
        ("profile", *NETWORK, "--device", "cpu", "--devices", "1"),
        ("strategy", "rebuild", "1"),
    ],
    ids=" ".join,
)
def test_what_writes_says_so_first(command: Command, locked: Path, words: tuple[str, ...]) -> None:
    refused = command(*words)
    assert refused.code == 2, refused
    assert refused.errors == (
        f"error: database {locked / 'stored.sqlite'}: cannot be written to, must be; let it be written to, or copy "
        "the database and name the copy by --database\n"
    )
    assert refused.output == ""


def test_a_folder_that_cannot_be_written_to_gets_no_database(
    command: Command, tmp_path: Path, lock: Lock
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    lock(empty)
    for words in (SEARCH, ("run", *NETWORK, "--device", "cpu"), ("db", "import", "--shipped")):
        refused = command(*words, "--database", str(empty / "new.sqlite"))
        assert refused.code == 2
        assert f"folder {empty} cannot be written to, must be" in refused.errors
        assert refused.errors.count("\n") == 1


def test_a_log_that_cannot_be_read_is_refused(made: Path, tmp_path: Path, lock: Lock) -> None:
    """A log without its index is what a copy of a database in use has: what is in it must not be left out."""
    copy, used = tmp_path / "copy", tmp_path / "used.sqlite"
    copy.mkdir()
    shutil.copy(made / "stored.sqlite", used)
    writer = sqlite3.connect(used)
    writer.execute("UPDATE searches SET seed = 7")
    writer.commit()
    for name in ("used.sqlite", "used.sqlite-wal"):
        shutil.copy(tmp_path / name, copy)
    writer.close()
    lock(copy)
    with pytest.raises(DatabaseError, match=r"has a log, used.sqlite-wal, must have none where it cannot"):
        Store.open(copy / "used.sqlite", to_read=True)


def test_beside_a_writer_what_is_in_the_log_is_read(
    command: Command, made: Path, tmp_path: Path, lock: Lock
) -> None:
    folder = tmp_path / "used"
    folder.mkdir()
    used = folder / "used.sqlite"
    shutil.copy(made / "stored.sqlite", used)
    with written_to(used):
        lock(folder)
        answer = command("query", "SELECT seed FROM searches", "--json", "--database", str(used))
    assert answer.document == [{"seed": 7}]


@pytest.mark.parametrize("beside", ["locked", "writable"])
def test_of_a_link_the_file_that_it_leads_to_and_its_log_are_read(
    command: Command, made: Path, tmp_path: Path, lock: Lock, beside: str
) -> None:
    """Whether the link's own folder can be written to does not matter."""
    folder, other = tmp_path / "used", tmp_path / "links"
    folder.mkdir()
    other.mkdir()
    used, link = folder / "used.sqlite", other / "link.sqlite"
    shutil.copy(made / "stored.sqlite", used)
    link.symlink_to(used)
    with written_to(used):
        lock(folder)
        if beside == "locked":
            lock(other)
        answer = command("query", "SELECT seed FROM searches", "--json", "--database", str(link))
        refused = command("db", "upgrade", "--database", str(link))
    assert answer.document == [{"seed": 7}]
    assert (refused.code, f"database {link}: cannot be written to, must be" in refused.errors) == (2, True)


# Writes without a log, and is killed before it has come to an end.
KILLED = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA journal_mode=DELETE")
connection.execute("PRAGMA cache_size=1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE searches SET seed = 99")
for _ in range(300):
    connection.execute("UPDATE strategies SET document = document || ?", (" " * 2000,))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_not_read(
    command: Command, made: Path, tmp_path: Path, lock: Lock
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    database = folder / "killed.sqlite"
    shutil.copy(made / "stored.sqlite", database)
    subprocess.run([sys.executable, "-c", KILLED, str(database)], check=False)
    assert (folder / "killed.sqlite-journal").stat().st_size
    lock(folder)
    for words in (("query", "SELECT seed FROM searches"), ("db", "status")):
        refused = command(*words, "--database", str(database))
        assert refused.code == 2
        assert (
            "has a log, killed.sqlite-journal, must have none where it cannot be written to" in refused.errors
        )
