"""Workers of the profiler's tests come from a server of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import warm_processes


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Start processes from a server."""
    with warm_processes():
        yield
