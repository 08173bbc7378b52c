"""Devices that one measurement at a time uses, whichever processes measure: two at once would both be wrong.

A lock is a file of the user's that the operating system frees when its holder dies (flock); elsewhere than on Unix
there is none, and nothing is held.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from graph.errors import UsageError
from profiler.devices import PhysicalDevice


def _name(device: PhysicalDevice) -> str:
    # A core is what CPU devices share, however they are counted.
    return f"core-{device.core}" if device.processor == "cpu" else f"cuda-{device.index}"


def _folder() -> Path:
    """Return the folder of the locks, the user's own, so that nobody else decides what is there.

    Raises:
        UsageError: somebody else made it, or it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"soapstone-devices-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UsageError(
            f"folder {folder}: cannot be made ({error.strerror}), must be; name another place by TMPDIR"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(
            f"folder {folder}: is somebody else's, must be yours; remove it, or name another place by TMPDIR"
        )
    return folder


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Neither through a link nor emptied: only its lock is used.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def held(devices: Sequence[PhysicalDevice]) -> Iterator[None]:
    """Wait until no other process measures on `devices`, and keep others from it meanwhile.

    Raises:
        UsageError: the locks' folder is not this user's.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with ExitStack() as stack:
        # In one order for all, so that two that want several never wait for each other.
        for name in sorted({_name(device) for device in devices}):
            # Waiting costs no time on the device, and who waits comes before who asks again.
            fcntl.flock(stack.enter_context(_opened(_folder() / name)), fcntl.LOCK_EX)
        yield
