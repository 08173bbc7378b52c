"""A pool of processes for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.pool import LocalPool

PROCESSES = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    """Four processes of the module's tests; strategies of fewer devices use the first ones."""
    with LocalPool(PROCESSES, timeout_s=120) as processes:
        yield processes
