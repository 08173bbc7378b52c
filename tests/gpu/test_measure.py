"""Times of operators on GPUs that are told how long their kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, repeat

import pytest
import torch

from profiler import clocks, measure
from profiler.devices import available_devices
from profiler.measure import Measurement, MeasureOptions, measure_call
from profiler.timers import CudaTimer
from tests.gpu.planted_clocks import NeverAsleep, OfTheHost, OfTheWaitingHost
from tests.gpu.virtual_device import CLOCK_HZ, QUEUE_LENGTH, Virtual
from tests.profiler.examples import matrix_product, rectifier

MIB = 2**20
BRIEF = MeasureOptions(repetitions=3, maximum_repetitions=5)


def _measured(call: object) -> list[Measurement]:
    outcomes = measure_call(call, available_devices("cuda")[0], BRIEF)  # type: ignore[arg-type]
    return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]


@pytest.mark.parametrize("kernel_s", [2e-6, 5e-6, 30e-6, 4e-3])
def test_the_time_of_an_operator_is_the_device_s_whatever_the_host_takes(
    gpus: Virtual, kernel_s: float
) -> None:
    gpus.speeds.kernel_s = kernel_s
    forward, backward = _measured(matrix_product(64, 32, 16))
    assert forward.median_s == pytest.approx(kernel_s, rel=0.02)
    assert backward.median_s == pytest.approx(2 * kernel_s, rel=0.02)  # two products


@pytest.mark.parametrize(
    ("planted", "kernel_s", "read_s"),
    [
        (NeverAsleep, 5e-6, 30e-6),
        (OfTheHost, 5e-6, 30e-6),
        (OfTheHost, 4e-3, 30e-6),
        (OfTheWaitingHost, 5e-6, 35e-6),
    ],
)
def test_a_planted_clock_without_a_sleep_reads_the_host_s_time(
    gpus: Virtual, monkeypatch: pytest.MonkeyPatch, planted: type[CudaTimer], kernel_s: float, read_s: float
) -> None:
    gpus.speeds.kernel_s = kernel_s
    call = matrix_product(64, 32, 16)
    (forward, _) = _measured(call)
    assert forward.median_s == pytest.approx(kernel_s, rel=0.02)
    monkeypatch.setattr(measure, "timer_for", lambda name, **_: planted(torch.device(name)))
    (forward, _) = _measured(call)
    assert forward.median_s == pytest.approx(read_s, rel=0.02)


@pytest.mark.parametrize("event_s", [0.0, 6e-6])
def test_the_host_s_time_to_issue_an_operator_stands_beside(gpus: Virtual, event_s: float) -> None:
    gpus.speeds.event_s = event_s
    # Of long kernels a batch is a single one, beside which an event is not little.
    gpus.speeds.kernel_s = 200e-6
    for forward, backward in (_measured(rectifier(1000)), _measured(rectifier(100_000))):
        assert forward.launch_s == pytest.approx(gpus.speeds.host_s, rel=0.02)
        assert backward.launch_s == pytest.approx(gpus.speeds.host_s, rel=0.02)


def test_a_queue_that_is_full_ends_the_sleeping(gpus: Virtual) -> None:
    timer = CudaTimer(torch.device("cuda:0"))
    tensor = torch.zeros(4, device="cuda:0")

    def fills() -> None:
        for _ in range(2 * QUEUE_LENGTH):
            tensor.add_(1.0)

    while (times := timer.time(fills)) is None:
        pass
    assert timer.waits
    # As in a step: the host issues more slowly than the device computes.
    assert times[0].device_s == pytest.approx(2 * QUEUE_LENGTH * gpus.speeds.host_s, rel=0.02)


def test_an_operator_whose_result_the_host_reads_is_timed_as_it_runs(gpus: Virtual) -> None:
    timer = CudaTimer(torch.device("cuda:0"))
    tensor = torch.zeros(4, device="cuda:0")

    def reads() -> None:
        float(tensor.sum())

    while (times := timer.time(reads)) is None:
        pass
    assert timer.waits
    host_and_device_s = gpus.speeds.host_s * 2 + gpus.speeds.kernel_s * 2
    assert times[0].device_s == pytest.approx(host_and_device_s, rel=0.2)


def test_the_clock_of_a_measurement_is_that_under_load(gpus: Virtual) -> None:
    forward, _ = _measured(rectifier(1000))
    assert forward.clock_hz == pytest.approx(CLOCK_HZ)
    assert forward.throttle == ""


def _clock_of_shares(gpus: Virtual, monkeypatch: pytest.MonkeyPatch, shares: Iterator[float]) -> list[float]:
    """Let the clock have another share of itself at each sample, and kernels take so much longer.

    Returns the readings of a clock that works, in Hz, as they are made.
    """
    kernel_s, library, readings = gpus.speeds.kernel_s, clocks._nvml(), list[float]()
    idle = library.nvmlDeviceGetClockInfo

    def read(handle: int, kind: int) -> float:
        if gpus.stream(handle).free_s <= gpus.now_s:
            return float(idle(handle, kind))
        readings.append(CLOCK_HZ * (kernel_s / gpus.speeds.kernel_s))
        gpus.speeds.kernel_s = kernel_s / next(shares)
        return readings[-1] / 1e6

    gpus.speeds.kernel_s = kernel_s / next(shares)
    monkeypatch.setattr(library, "nvmlDeviceGetClockInfo", read)
    return readings


# Of the first of five samples.
@pytest.mark.parametrize(("share", "is_repeated"), [(0.96, True), (0.98, False)])
def test_samples_are_taken_again_where_the_clock_differed_by_more_than_3_percent(
    gpus: Virtual, monkeypatch: pytest.MonkeyPatch, share: float, *, is_repeated: bool
) -> None:
    gpus.speeds.kernel_s = 200e-6
    readings = _clock_of_shares(gpus, monkeypatch, chain([share], repeat(1.0)))
    forward, _ = _measured(rectifier(1000))
    assert len(readings) == (10 if is_repeated else 5)
    first_s = 200e-6 if is_repeated else 200e-6 / share
    assert forward.samples_s == pytest.approx([first_s, *[200e-6] * 4])
    assert forward.clock_hz == pytest.approx(CLOCK_HZ)


def test_samples_of_a_clock_that_never_rests_are_taken_three_times(
    gpus: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.speeds.kernel_s = 200e-6
    readings = _clock_of_shares(gpus, monkeypatch, cycle([0.9, 1.0]))
    forward, _ = _measured(rectifier(1000))
    assert len(readings) == 15
    assert forward.samples_s == pytest.approx([200e-6 * CLOCK_HZ / hz for hz in readings[-5:]])


def test_operands_that_a_gpu_refuses_are_refused(gpus: Virtual) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="cuda:0") + torch.zeros(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="cuda:0") + torch.zeros(3, device="cuda:1")


@pytest.mark.parametrize("rows", [64, 4096])
def test_inputs_have_left_the_caches_and_the_time_with_them_there_stands_beside(
    gpus: Virtual, rows: int
) -> None:
    gpus.speeds.missed_bytes_per_s = 1e9
    gpus.speeds.cache_bytes = 2 * MIB
    forward, backward = _measured(matrix_product(rows, 32, 16))
    inputs = 4 * (rows * 32 + 32 * 16)
    assert forward.median_s == pytest.approx(gpus.speeds.kernel_s + inputs / 1e9, rel=0.02)
    assert forward.warm_s == pytest.approx(gpus.speeds.kernel_s, rel=0.02)
    assert backward.warm_s == pytest.approx(2 * gpus.speeds.kernel_s, rel=0.02)


def test_inputs_are_drawn_on_the_gpu(gpus: Virtual) -> None:
    _measured(matrix_product(64, 32, 16))
    assert not [name for name in gpus.host_waits if "copy" in name]
