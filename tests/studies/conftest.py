"""What the study's tests share."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Wait until something is so; pytest's own limit ends a wait in vain."""

    def wait(happened: Callable[[], bool]) -> None:
        while not happened():
            time.sleep(0.1)

    return wait
