"""A pool of processes for the tests of a module."""

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


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    """Four processes of the module's tests, from a server; strategies of fewer devices use the first ones."""
    with warm_processes():
        processes = LocalPool(PROCESSES, timeout_s=120)
    with processes:
        yield processes
