"""GPUs that are not there, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from profiler import clocks
from profiler.devices import available_devices
from profiler.environment import environment
from tests.gpu.virtual_device import Virtual, virtual_gpus


@contextmanager
def seeing_gpus() -> Iterator[Virtual]:
    """See two virtual GPUs with default speeds while the context lasts; this thread computes on the first."""
    import torch

    with virtual_gpus() as virtual:
        _forget_devices()
        torch.cuda.set_device(0)
        yield virtual
    _forget_devices()


@pytest.fixture
def gpus() -> Iterator[Virtual]:
    """Two virtual GPUs with default speeds, of which this thread computes on the first."""
    with seeing_gpus() as virtual:
        yield virtual


def _forget_devices() -> None:
    available_devices.cache_clear()
    environment.cache_clear()
    clocks._nvml.cache_clear()
