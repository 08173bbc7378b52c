"""Device locks: one measurement at a time uses a device, over all processes, since two at once would both be wrong.

A lock is a file of the user's (`graph.locks`).
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from graph import locks
from graph.errors import UsageError
from profiler.devices import PhysicalDevice, gpu_uuid


def _name(device: PhysicalDevice) -> str:
    # CPU devices share cores, however they are counted, and CUDA_VISIBLE_DEVICES numbers GPUs anew.
    return f"core-{device.core}" if device.processor == "cpu" else f"cuda-{gpu_uuid(device.index)}"


def _folder() -> Path:
    """Return the folder of the locks, the user's own, so that no other user can change it.

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
def held(devices: Sequence[PhysicalDevice]) -> Iterator[None]:
    """Lock `devices` while the context lasts, after waiting for other processes that measure on them.

    Raises:
        UsageError: the locks' folder is not this user's.
    """
    with ExitStack() as stack:
        # In one order for all processes, so that none wait for each other.
        for name in sorted({_name(device) for device in devices}):
            stack.enter_context(locks.exclusive(_folder() / name))
        yield
