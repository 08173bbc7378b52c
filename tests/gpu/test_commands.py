"""Commands on GPUs that are not there, through all of their own lines: measuring, searching, running."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.app.conftest import Command, brief_measurements, command, database  # noqa: F401 - fixtures
from tests.gpu.conftest import forget_devices
from tests.gpu.virtual_device import Speeds, virtual_gpus

# Times are virtual: to compute would take minutes. Kernels are long enough to be measured in one round, one by one.
UNCOMPUTED = Speeds(kernel_s=2e-3, most_computed=2**12, cache_bytes=2**10)
INCEPTION = ("--gpus", "0-1", "--model", "inception", "--preset", "small", "--json")


@pytest.fixture
def measured_briefly() -> Iterator[None]:
    """Two GPUs and few samples for the commands of a test."""
    with virtual_gpus(), brief_measurements():
        forget_devices()
        yield
    forget_devices()


def test_a_network_is_profiled_searched_and_run(
    measured_briefly: None,
    speeds: Callable[[Speeds], None],
    command: Command,  # noqa: F811
) -> None:
    speeds(UNCOMPUTED)
    profiled = command("profile", *INCEPTION)
    assert (profiled.code, profiled.document["devices"], profiled.document["failed"]) == (0, 2, 0), (
        profiled.errors
    )
    searched = command("search", *INCEPTION, "--proposals", "20", "--no-confirm")
    assert searched.code == 0, searched.errors
    speeds(Speeds())
    once = ("--strategy", "data-parallel", "--iterations", "1", "--warmup", "0", "--verify")
    ran = command("run", *INCEPTION, *once)
    assert (ran.code, ran.document["verified"]) == (0, True), ran.errors
