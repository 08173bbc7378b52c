"""File locks between processes: the operating system takes them from a process that ends, however it ends.

A lock is a file that stays, and of which nothing but the lock is used. It is not followed where it is a link.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

POLL_S = 0.01


@contextmanager
def exclusive(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Hold a lock alone; wait for it so long, below 0 without an end.

    Raises:
        OSError: the file cannot be opened or locked, or (`TimeoutError`) somebody else has it.
    """
    # A file system without locks must not pretend to have them by a file that a killed process leaves behind.
    with FileLock(path, timeout=timeout_s, poll_interval=POLL_S, fallback_to_soft=False):
        yield


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """Hold a lock together with others that share it; wait for one that has it alone.

    Not by `filelock`, whose shared lock nobody but the file's owner may take.

    Raises:
        OSError: the file cannot be opened or locked.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError("this system has no shared file locks") from error
    # To read: whoever may read what the lock protects may share it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        # Not by closing alone: a process that was forked meanwhile has the same lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
