"""GPUs that are not there, for the tests of this folder, and processes that see them too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import pytest

from profiler import clocks
from profiler.devices import available_devices
from profiler.environment import environment
from profiler.pinning import child_variables, started_with
from profiler.processes import PRELOADED
from tests.gpu.virtual_device import VARIABLE, Speeds, Virtual
from tests.gpu.virtual_torch import virtual_gpus

HERE = Path(__file__).parent


@contextmanager
def seeing_gpus() -> Iterator[Virtual]:
    """See eight virtual GPUs with default speeds while the context lasts; this thread computes on the first."""
    import torch

    with virtual_gpus() as virtual:
        forget_devices()
        torch.cuda.set_device(0)
        yield virtual
    forget_devices()


@pytest.fixture
def gpus() -> Iterator[Virtual]:
    """Eight virtual GPUs with default speeds, of which this thread computes on the first."""
    with seeing_gpus() as virtual:
        yield virtual


def forget_devices() -> None:
    available_devices.cache_clear()
    environment.cache_clear()
    clocks._nvml.cache_clear()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[forkserver.ForkServer, Path]]:
    """A server of processes that see virtual GPUs and NCCL, and the file with these GPUs' speeds."""
    file = tmp_path_factory.mktemp("gpus") / "speeds.json"
    variables = {
        VARIABLE: str(file),
        "PYTHONPATH": os.pathsep.join((str(HERE / "start"), str(HERE.parents[1]))),
        **child_variables(),
    }
    started = forkserver.ForkServer()
    started.set_forkserver_preload([*PRELOADED, "tests.gpu.ranks", "tests.gpu.preloaded"])
    with started_with(variables):
        started.ensure_running()
    yield started, file
    started._stop()  # type: ignore[attr-defined]


@pytest.fixture
def speeds(
    server: tuple[forkserver.ForkServer, Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Speeds], None]:
    """Let processes come from the server; a function that sets the speeds of their GPUs from now on."""
    started, file = server

    monkeypatch.setattr(forkserver, "ensure_running", started.ensure_running)
    monkeypatch.setattr(forkserver, "connect_to_new_process", started.connect_to_new_process)
    Speeds().write(file)
    return lambda chosen: chosen.write(file)
