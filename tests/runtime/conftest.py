"""One pool of processes for all tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.pool import LocalPool
from tests.servers import warm_processes

PROCESSES = 4


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Start processes from a server, other than the pool's."""
    with warm_processes():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[LocalPool]:
    """Four processes; strategies of fewer devices use the first ones."""
    with LocalPool(PROCESSES, timeout_s=120) as processes:
        yield processes
