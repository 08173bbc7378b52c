"""Devices that one measurement at a time uses, whichever processes measure: two at once would both be wrong.

A lock is a file of the user's that the operating system frees when its holder dies (flock); elsewhere than on Unix
there is none, and nothing is held.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from profiler.devices import PhysicalDevice


def _name(device: PhysicalDevice) -> str:
    # A core is what CPU devices share, however they are counted.
    return f"core-{device.core}" if device.processor == "cpu" else f"cuda-{device.index}"


def _folder() -> Path:
    # Of the user's own, so that nobody else decides what is there.
    folder = Path(tempfile.gettempdir()) / f"soapstone-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def held(devices: Sequence[PhysicalDevice]) -> Iterator[None]:
    """Wait until no other process measures on `devices`, and keep others from it meanwhile."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with ExitStack() as stack:
        # In one order for all, so that two that want several never wait for each other.
        for name in sorted({_name(device) for device in devices}):
            # Waiting costs no time on the device, and who waits comes before who asks again.
            fcntl.flock(stack.enter_context((_folder() / name).open("w")), fcntl.LOCK_EX)
        yield
