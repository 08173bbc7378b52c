"""Judges how a command ended: what must hold of every command, whatever it is given."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.fuzzing.corpus import Corpus, Entry
from scripts.fuzzing.running import Outcome

# Commands that write into the database; others must leave it as it is.
WRITERS = (
    ("search",), ("run",), ("profile",), ("db", "upgrade"), ("db", "import"), ("strategy", "import"), ("strategy", "rebuild"),
    ("topology", "probe"), ("topology", "show"), ("db", "check"),
)  # fmt: skip
# In whole numbers of the rule (docs/cli.md): done, failure, bad input, interrupted, terminated.
CODES = (0, 1, 2, 130, 143)
# Set whenever a database is opened, for work whose process is gone.
VOLATILE = ("status", "owner", "alive_at", "finished_at")
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_WARNING = re.compile(r"^\S+:\d+: \w*Warning|Exception ignored in|^Fatal Python error|: resource_tracker:", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """Something that a command must not do."""

    oracle: str
    detail: str  # tells findings of one oracle apart; says nothing of the case
    words: str

    @property
    def key(self) -> tuple[str, str]:
        """What two findings of one defect share."""
        return self.oracle, self.detail


def judge(outcome: Outcome, stop: signal.Signals | None, *, damaged: bool) -> Iterator[Finding]:
    """Give what is wrong with the end of a command and with what it printed."""
    command = " ".join(name for name in outcome.arguments[:2] if re.fullmatch("[a-z]+", name))
    errors = outcome.errors
    last = errors.strip().splitlines()[-1:] or [""]
    if outcome.timed_out:
        yield Finding("does not end", _frame(errors) or command, last[0])
        return
    if "Traceback (most recent call last)" in errors:
        yield Finding("traceback", _frame(errors), last[0][:300])
    elif warning := _WARNING.search(errors):
        line = errors[warning.start() :].splitlines()[0]
        yield Finding("warning", re.sub(r"\d+", "N", line)[:120], line[:300])
    sent = outcome.stopped and stop
    allowed = {0, 2} | ({1} if damaged or _may_fail(outcome) else set())
    if sent:
        allowed |= {128 + sent} | ({-sent} if sent == signal.SIGKILL else set()) | {1}
    code = outcome.code
    # Before the application has set what it does with signals, the system's own end is as good.
    if sent == signal.SIGTERM and code == -sent and not outcome.output and not errors:
        return
    if code not in allowed and not (code == 1 and "Traceback" in errors):  # which is said already
        told = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        yield Finding(told, _frame(errors) or f"{command}: {_shape(last[0])}", last[0][:300])
    messages = [line for line in errors.splitlines() if line.startswith("error:")]
    if len(messages) > 1 or (messages and messages[-1] != last[0]):
        yield Finding("more than one line of error", command, " | ".join(errors.splitlines()[-3:])[:300])
    if code in (1, 2) and not messages and not errors.lstrip().startswith("Usage:") and "Traceback" not in errors:
        yield Finding(f"exit code {code} without a reason", _shape(last[0]), (last[0] or "nothing on standard error")[:300])
    if code == 0 and messages:
        yield Finding("an error and exit code 0", command, last[0][:300])
    if messages and len(messages[-1]) > 1500:
        yield Finding("an endless line", command, f"{last[0][:160]}... of {len(messages[-1])}")
    yield from _printed(outcome, command)
    for line in outcome.orphans:
        yield Finding("left a process", f"{command}: {re.sub(r'[0-9]+', 'N', line)[:60]}", line)
    if outcome.ran and not _named_by_user(outcome.arguments):
        yield Finding("ran code", f"{command}: {outcome.ran.splitlines()[0]}", "the tripwire was imported")


def judge_files(before: Corpus, after: Corpus, outcome: Outcome, folder: Path, *, gentle: bool) -> Iterator[Finding]:
    """Give what a command changed or left that it must not; `gentle`: it could end in its own way."""
    command = " ".join(name for name in outcome.arguments[:2] if re.fullmatch("[a-z]+", name))
    writes = any(outcome.arguments[: len(names)] == names for names in WRITERS)
    outputs = {os.path.realpath(folder / name) for argument in outcome.arguments for name in (argument, argument.partition("=")[2]) if name and "\0" not in name and len(name) < 200}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new or name.endswith("readers.lock"):
            continue
        if name.endswith(("-wal", "-shm", "-journal")):
            # SQLite removes those that it cannot use. A reader cannot remove them; what is in no log is of no use to anybody.
            if gentle and old is None and new is not None and name.endswith("-wal") and new.content and not writes:
                yield Finding("leftover", f"{command}: {_kind(name)}", f"{name} of {len(new.content)} bytes")
            continue
        if old is None and new is not None:
            yield from _new(name, new, outcome, command, outputs, folder, gentle=gentle)
        elif name.startswith("cache/") or name == "tmp":
            continue  # a cache: made again where it does not fit
        elif _of_database(name):
            yield from _changed(name, old, new, command, folder, writes=writes)
        elif str(folder / name) not in outputs or new is None:
            yield Finding("changed a file", f"{command}: {_kind(name)}", f"{name} {'removed' if new is None else 'changed'}")


def judge_database(folder: Path) -> Iterator[Finding]:
    """Give what is wrong with the database as SQLite sees it, after a kill."""
    try:
        with sqlite3.connect(folder / "db.sqlite") as connection:
            whole = connection.execute("PRAGMA integrity_check").fetchall()
            foreign = connection.execute("PRAGMA foreign_key_check").fetchall()
        connection.close()
    except sqlite3.Error as error:
        yield Finding("damaged the database", str(error), str(error))
        return
    if whole != [("ok",)] or foreign:
        yield Finding("damaged the database", "integrity", f"{whole[:3]} {foreign[:3]}")


def _frame(errors: str) -> str:
    """Return file and function of the last frame of ours, and the kind of error."""
    frames = [(file, name) for file, _, name in _FRAME.findall(errors) if "/scripts/fuzzing/" not in file]
    ours = [pair for pair in frames if "site-packages" not in pair[0] and "/lib/python" not in pair[0]]
    if not frames:
        return ""
    file, name = (ours or frames)[-1]
    kind = next((line.split(":")[0] for line in reversed(errors.splitlines()) if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit|Failure)?\b(:|$)", line)), "")
    return f"{'/'.join(Path(file).parts[-3:])}:{name} {kind[:60]}"


def _shape(line: str) -> str:
    return re.sub(r"'[^']*'|\d+|\S*/\S*", "~", line)[:80]


def _may_fail(outcome: Outcome) -> bool:
    """Return whether a failure that is no mistake of the user's is to be expected."""
    return outcome.arguments[:1] in (("run",), ("profile",)) or (
        outcome.arguments[:1] == ("query",) and any("--timeout" in argument for argument in outcome.arguments)
    ) or any("/dev/full" in argument or "postgresql:" in argument for argument in outcome.arguments)


def _printed(outcome: Outcome, command: str) -> Iterator[Finding]:
    try:
        output = outcome.output.decode()
    except UnicodeDecodeError as error:
        yield Finding("output is not UTF-8", command, str(error))
        output = outcome.output.decode("utf-8", "replace")
    # CSV is data: a cell holds what the database holds.
    as_csv = command.startswith("query") and any("csv" in argument for argument in outcome.arguments)
    for name, text in (("standard output", "" if as_csv else output), ("standard error", outcome.errors)):
        if steering := _CONTROL.search(text):
            around = text[max(0, steering.start() - 40) : steering.end() + 20]
            yield Finding("raw control characters", f"{command}: {name}", repr(around))


def _named_by_user(arguments: Sequence[str]) -> bool:
    return any(part in argument for argument in arguments for part in ("tripwire:", "runtime:"))


def _of_database(name: str) -> bool:
    return name.startswith(("db.sqlite", "db.traces", "other.sqlite", "other.traces"))


def _kind(name: str) -> str:
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", name)


def _new(
    name: str, entry: Entry, outcome: Outcome, command: str, outputs: set[str], folder: Path, *, gentle: bool
) -> Iterator[Finding]:
    kept = ("tmp/soapstone-devices", "tmp/torchinductor_")  # locks, that stay; a cache of torch's
    temporary = name.endswith(".tmp") or (name.startswith("tmp/") and not name.startswith(kept))
    if temporary:
        if gentle:
            yield Finding("leftover", f"{command}: {_kind(name)}", name)
        return
    if name.startswith(("cache", "home", "tmp", "db.traces", "db.sqlite", "other.traces", "new.traces")):
        return
    usual = {"trace": "trace.json", "report": "report.html"}.get(outcome.arguments[0] if outcome.arguments else "")
    path = str(folder / name)
    if path in outputs or name == usual or any(path.startswith(output.rpartition(".")[0]) for output in outputs if output.startswith(str(folder) + "/")):
        return
    # A database that did not exist is made under the name that was given.
    if any(argument.startswith("--database") for argument in outcome.arguments) and entry.kind in ("file", "folder"):
        return
    yield Finding("wrote a file", f"{command}: {_kind(name)}", name)


def _changed(
    name: str, old: Entry | None, new: Entry | None, command: str, folder: Path, *, writes: bool
) -> Iterator[Finding]:
    assert old is not None
    if new is None or new.kind != old.kind or not new.content.startswith(b"SQLite") and old.content.startswith(b"SQLite"):
        if not (writes and "traces" in name):
            yield Finding("destroyed", f"{command}: {_kind(name)}", f"{name} {'removed' if new is None else 'replaced'}")
        return
    if not name.endswith(".sqlite"):
        if not writes:
            yield Finding("changed a file", f"{command}: {_kind(name)}", name)
        return
    try:
        earlier, later = _content(old.content), _content(new.content)
    except (sqlite3.Error, UnicodeDecodeError):
        return  # damaged: nothing to compare
    if not earlier:
        return  # an empty database: whoever opens it first makes its tables
    for table in earlier.keys() | later.keys():
        one, other = earlier.get(table, []), later.get(table, [])
        if (not writes and one != other) or len(other) < len(one):
            yield Finding("changed the database", f"{command}: {table}", f"{name}: {len(one)} rows, now {len(other)}")


def _content(raw: bytes) -> dict[str, list[tuple[object, ...]]]:
    """Return the rows of each table, but for what every opening may set."""
    with sqlite3.connect(":memory:") as connection:
        # As one file without its log: the header's numbers say WAL.
        connection.deserialize(raw[:18] + b"\1\1" + raw[20:])
        rows = {}
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
            columns = [f'"{column[1]}"' for column in connection.execute(f'PRAGMA table_info("{table}")') if column[1] not in VOLATILE]
            rows[table] = connection.execute(f'SELECT {", ".join(columns) or 1} FROM "{table}"').fetchall()
    connection.close()
    return rows
