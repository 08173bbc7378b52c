"""Which process runs a search or an execution, and whether it still does.

A killed process cannot say that it ended; its row would stay `running` for ever. So a row names its process: the
machine since its last start, the process number, and when the process started (a number is used again). On the
same machine the operating system knows whether that process lives. Of processes elsewhere (another machine or
container on one database) it is known only when they last said so: they say it every `HEARTBEAT_S`, and one that
was silent for `LEASE_S` is taken for dead. Who keeps others from writing to a SQLite file the system tells, too.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from app.db.failures import MALFORMED
from graph.canonical import canonical_json
from graph.texts import shown

HEARTBEAT_S = 30.0
LEASE_S = 600.0
LONGEST_COMMAND = 80
# Byte of the index of a write-ahead log: https://sqlite.org/walformat.html, WAL locks.
_WAL_WRITE_LOCK = 120


def this_process() -> str:
    """Return the owner that rows of this process name, as canonical JSON."""
    return canonical_json({**_machine(), "pid": os.getpid(), "started": _start(os.getpid())})


def is_dead(owner: str | None, alive_at: datetime | None, now: datetime) -> bool:
    """Return whether a row's process has ended: known on this machine, presumed after a lease elsewhere."""
    import psutil

    try:
        named = json.loads(owner or "")
        number = int(named["pid"])
        if not 0 < number < 2**31:
            return True
    except MALFORMED:
        return True  # nobody can ever finish a row of nobody
    if not isinstance(named, dict) or any(named.get(key) != value for key, value in _machine().items()):
        # SQLite may hold anything there.
        return not isinstance(alive_at, datetime) or now - alive_at > timedelta(seconds=LEASE_S)
    return not psutil.pid_exists(number) or _start(number) != named.get("started")


class Heartbeat:
    """Calls `beat` regularly, in a thread of its own, while something is under way."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End; a second call does nothing."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._beat()


def writer_of(path: Path) -> str:
    """Return the process that has the lock to write to a SQLite file, in words, as far as the system tells (Linux)."""
    import psutil

    # SQLite's lock of a write-ahead log is on a byte of its index; without such a log it is on the file itself.
    file = path.resolve()
    places = {_locked_file(Path(f"{file}-shm")): _WAL_WRITE_LOCK, _locked_file(file): None}
    for line in _text(Path("/proc/locks")).splitlines():
        fields = line.split()
        if len(fields) != 8 or fields[3] != "WRITE" or fields[5] not in places:
            continue  # of one that waits there is an arrow more
        byte, number = places[fields[5]], int(fields[4])
        last = float("inf") if fields[7] == "EOF" else int(fields[7])
        if byte is None or int(fields[6]) <= byte <= last:
            if number == os.getpid():
                return "another thread of this process"
            with suppress(psutil.Error, ValueError):  # locks of no process have the number -1
                return (
                    f"process {number} ({shown(' '.join(psutil.Process(number).cmdline()), LONGEST_COMMAND)})"
                )
    return "another process"


def _locked_file(path: Path) -> str:
    """Return a file as /proc/locks names it; "" where it is not there."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"


def _machine() -> dict[str, str]:
    """Return host, boot and process namespace: containers see processes of their own only."""
    return {
        "host": platform.node(),
        "boot": _text(Path("/proc/sys/kernel/random/boot_id")),
        "processes": _link(Path("/proc/self/ns/pid")),
    }


def _start(number: int) -> str:
    """Return when a process started, in ticks since the machine did; "" where the system does not tell."""
    # The name, in parentheses, may hold anything.
    fields = _text(Path(f"/proc/{number}/stat")).rpartition(")")[2].split()
    # A process that ended, and whose parent has not asked yet, does nothing any more.
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
