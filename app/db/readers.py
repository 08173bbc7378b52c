"""The readers' lock of a trace folder: what was merged is deleted only when nobody can be about to read it.

A reader shares the lock from before it asks which chunks are registered until it needs their files no more
(`app.db.reading`). Whoever merged chunks registers the merged one in place of its parts, and then deletes the parts
only if it can have the lock alone, for an instant. A reader that had it before was perhaps told of the parts, and they
stay; one that comes after is told of the merged chunk. The operating system takes the lock from a killed process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "readers.lock"
"""The file in a trace folder that is locked; it is empty, and stays."""


@contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Hold the lock of a trace folder together with other readers.

    Where it cannot be had, it is read without: on a file system without locks nobody can have it alone either, so
    nothing is deleted there.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            _lock(descriptor)
        yield
    finally:
        _release(descriptor)


def delete_unread(folder: Path, files: Iterable[Path]) -> bool:
    """Delete files of chunks that are registered no more; return False, and delete none, while somebody reads.

    folder: the trace folder, whose lock it is.

    Raises:
        OSError: a file cannot be deleted.
    """
    if not _can_be_had_alone(folder):
        return False
    # The lock is free again: whoever begins to read now is told of the chunks that hold these.
    for file in files:
        file.unlink(missing_ok=True)
    return True


def _can_be_had_alone(folder: Path) -> bool:
    """Return whether nobody held the lock at some moment of this call; False where that cannot be known."""
    try:
        # To write: network file systems lock nothing alone otherwise.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return False
    try:
        _lock(descriptor, alone=True)
    except OSError:
        return False
    finally:
        _release(descriptor)
    return True


def _lock(descriptor: int, *, alone: bool = False) -> None:
    """Lock an open file with others, for which it waits, or at once alone.

    Raises:
        OSError: the file system has no locks, or the operating system has none of this kind, or somebody holds it.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError("no flock here") from error
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)


def _release(descriptor: int) -> None:
    # Not by closing alone: a process that was forked meanwhile has the same lock.
    with suppress(OSError, ImportError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
