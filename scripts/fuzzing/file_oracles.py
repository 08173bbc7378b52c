"""Oracles of files: a command destroys nothing, changes nothing that it only reads, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from scripts.fuzzing.corpus import Corpus, Entry
from scripts.fuzzing.oracles import Finding, command_of, shape, typed_command
from scripts.fuzzing.running import CommandOutcome

# Commands that write into the database; others leave it as it is.
WRITERS = (
    ("search",), ("run",), ("profile",), ("db", "upgrade"), ("db", "import"), ("strategy", "import"),
    ("strategy", "rebuild"), ("topology", "probe"), ("topology", "show"),
)  # fmt: skip
# Set whenever a database is opened, for work whose process is gone.
VOLATILE = ("status", "owner", "alive_at", "finished_at")
USUAL_OUTPUTS = {"trace": "trace.json", "report": "report.html"}
# Files of locks, which stay, and a cache of torch's.
KEPT = ("tmp/soapstone-devices", "tmp/torchinductor_")


class FileJudge:
    """Compares the files of a case before and after its command."""

    def __init__(self, outcome: CommandOutcome, folder: Path) -> None:
        """Begin, with a command's end and the folder that it ran in."""
        self._outcome = outcome
        self._folder = folder
        self._command = command_of(outcome)
        self._writes = any(typed_command(outcome)[: len(names)] == names for names in WRITERS)
        # One that was killed, or did not end, could not clean up.
        self._gentle = outcome.code >= 0 and not outcome.timed_out
        named = {part for argument in outcome.arguments for part in (argument, argument.partition("=")[2])}
        self._named = {os.path.realpath(folder / name) for name in named if 0 < len(name) < 200}

    def judge(self, before: Corpus, after: Corpus) -> Iterator[Finding]:
        """Yield findings of files that the command must not have changed or left."""
        for name in sorted(before.keys() | after.keys()):
            old, new = before.get(name), after.get(name)
            if old == new or name.endswith("readers.lock"):
                continue
            if name.endswith(("-wal", "-shm", "-journal")):
                yield from self._judge_log(name, old, new)
            elif old is None:
                if new is not None and not _is_tempfiles_own(name, new):
                    yield from self._judge_new(name)
            elif name.startswith("cache/"):
                continue  # made again where it does not fit
            elif name.startswith(("db.", "other.")):
                yield from self._judge_stored(name, old, new)
            elif new is None or str(self._folder / name) not in self._named:
                change = "removed" if new is None else "changed"
                yield self._finding("changed a file", name, f"{name} {change}")

    def _finding(self, oracle: str, name: str, words: str) -> Finding:
        return Finding(oracle, f"{self._command}: {shape(name)}", words)

    def _judge_log(self, name: str, old: Entry | None, new: Entry | None) -> Iterator[Finding]:
        # SQLite removes those that it cannot use, and a reader leaves an empty one.
        is_left = self._gentle and not self._writes and name.endswith("-wal")
        if (
            is_left
            and old is None
            and new is not None
            and new.content
            and str(self._folder / name) not in self._named
        ):
            yield self._finding("leftover", name, f"{name} of {len(new.content)} bytes")

    def _judge_new(self, name: str) -> Iterator[Finding]:
        if name.endswith(".tmp") or (name.startswith("tmp/") and not name.startswith(KEPT)):
            if self._gentle:
                yield self._finding("leftover", name, name)
            return
        if name.startswith(("cache", "home", "tmp", "db.traces", "db.sqlite", "other.traces")):
            return
        # With a database comes its folder of traces.
        path = str(self._folder / name)
        expected = {*self._named, str(self._folder / USUAL_OUTPUTS.get(self._outcome.arguments[0], "-"))}
        stems = tuple(f"{os.path.splitext(output)[0]}.traces" for output in expected)
        if path not in expected and not path.startswith(stems):
            yield self._finding("wrote a file", name, name)

    def _judge_stored(self, name: str, old: Entry, new: Entry | None) -> Iterator[Finding]:
        if not old.content and name == "db.sqlite" and new is not None:
            return  # an empty file is a new database
        was_database = old.content.startswith(b"SQLite")
        if new is None or new.kind != old.kind or (was_database and not new.content.startswith(b"SQLite")):
            if not (self._writes and ".traces" in name):
                yield self._finding("destroyed", name, f"{name} {'removed' if new is None else 'replaced'}")
        elif was_database and name.endswith(".sqlite"):
            yield from self._judge_rows(name, old.content, new.content)
        elif not self._writes:
            yield self._finding("changed a file", name, name)

    def _judge_rows(self, name: str, before: bytes, after: bytes) -> Iterator[Finding]:
        try:
            earlier, later = _rows(before), _rows(after)
        except (sqlite3.Error, UnicodeDecodeError):
            return  # damaged: nothing to compare
        if not earlier:
            return  # an empty database: whoever opens it first makes its tables
        for table in sorted(earlier.keys() | later.keys()):
            rows, now = earlier.get(table, []), later.get(table, [])
            if len(now) < len(rows) or (not self._writes and now != rows):
                words = f"{name}: {table} had {len(rows)} rows, has {len(now)}"
                yield self._finding("changed the database", table, words)


def _is_tempfiles_own(name: str, entry: Entry) -> bool:
    """Return whether a file is the one by which Python's tempfile learns that it may write; a signal may outrun it."""
    return re.fullmatch(r"tmp/[a-z0-9_]{8}", name) is not None and entry.content in (b"", b"blat")


def judge_database(path: Path) -> Iterator[Finding]:
    """Yield the findings of SQLite's own checks of a database."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            whole = connection.execute("PRAGMA integrity_check").fetchall()
            foreign = connection.execute("PRAGMA foreign_key_check").fetchall()
    except sqlite3.Error as error:
        yield Finding("damaged the database", str(error), str(error))
        return
    if whole != [("ok",)] or foreign:
        yield Finding("damaged the database", "integrity", f"{whole[:3]} {foreign[:3]}")


def _rows(raw: bytes) -> dict[str, list[tuple[object, ...]]]:
    """Return the rows of each table, without the columns that every opening may set."""
    rows = {}
    with closing(sqlite3.connect(":memory:")) as connection:
        # As one file without a log: two bytes of the header say otherwise.
        connection.deserialize(raw[:18] + b"\1\1" + raw[20:])
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
            columns = [column[1] for column in connection.execute(f'PRAGMA table_info("{table}")')]
            kept = ", ".join(f'"{column}"' for column in columns if column not in VOLATILE)
            rows[table] = connection.execute(f'SELECT {kept or 1} FROM "{table}"').fetchall()
    return rows
