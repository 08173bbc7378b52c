"""Commands on GPUs that are not there, through all of their own lines: measuring, searching, running."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.app.conftest import Command, brief_measurements, command, database  # noqa: F401 - fixtures
from tests.gpu.conftest import forget_devices
from tests.gpu.virtual_device import Speeds
from tests.gpu.virtual_torch import virtual_gpus

# Times are virtual: to compute would take minutes. Kernels and messages are long enough to be measured one by one.
UNCOMPUTED = Speeds(kernel_s=2e-3, message_s=2e-3, most_computed=2**12, cache_bytes=2**10)
INCEPTION = ("--gpus", "0-1", "--model", "inception", "--preset", "small", "--json")


@pytest.fixture
def measured_briefly() -> Iterator[None]:
    """Two GPUs for the commands of a test, and one sample of a call: times are virtual, the next is as the first."""
    with virtual_gpus(), brief_measurements(samples=1):
        forget_devices()
        yield
    forget_devices()


@pytest.mark.timeout(900)  # beside others it takes 260 s, on a slow machine longer
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


def test_weights_in_shares_are_those_of_one_device(
    measured_briefly: None,
    speeds: Callable[[Speeds], None],
    command: Command,  # noqa: F811
) -> None:
    network = ("--gpus", "0-1", "--model", "mlp", "--preset", "small", "--json")
    speeds(UNCOMPUTED)
    assert command("profile", *network).code == 0
    speeds(Speeds())
    once = ("--iterations", "1", "--warmup", "0", "--verify")
    # All-gathers of weights, of which most lie contiguous, and reduce-scatters of gradients.
    ran = command("run", *network, "--strategy", "fsdp", *once)
    assert (ran.code, ran.document["verified"]) == (0, True), ran.errors


@pytest.mark.timeout(900)  # beside others it takes 80 s, on a slow machine longer
def test_steps_of_short_kernels_are_predicted_by_what_their_hosts_take(
    measured_briefly: None,
    speeds: Callable[[Speeds], None],
    command: Command,  # noqa: F811
) -> None:
    # To issue a kernel takes six times as long as the kernel. Times are virtual, and large messages not computed.
    speeds(Speeds(cache_bytes=2**10, most_computed=2**12))
    network = ("--gpus", "0-1", "--model", "gpt2", "--preset", "small", "--json")
    assert command("profile", *network).code == 0
    searched = command("search", *network, "--proposals", "1", "--no-confirm").document["predictions"][0]
    assert searched["launch_s"] > 0.99 * searched["predicted_step_time_s"]
    once = ("--iterations", "2", "--warmup", "1")
    # Exchanges of values; sums of gradients, updates of shares, and gathers of weights.
    for strategy in ("single-device", "megatron", "fsdp"):
        ran = command("run", *network, "--strategy", strategy, *once)
        assert ran.code == 0, ran.errors
        assert ran.document["relative_error"] == pytest.approx(0.0, abs=0.07), strategy
    (row,) = command("query", "SELECT min(compute_s) AS device_s FROM simulations", "--json").document
    assert row["device_s"] < 0.3 * ran.document["median_s"]
