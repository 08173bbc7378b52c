"""Devices of one kind are compared: a slow one is named, a passing disturbance accuses nobody."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.device_consistency import (
    BOUNDS,
    ROUNDS,
    SLOW_SHARE,
    BoundBy,
    DeviceConsistency,
    compare,
    consistency_of,
)
from profiler.devices import PhysicalDevice, available_devices, cpu_devices
from profiler.pinning import usable_cores
from profiler.workers import WorkerPool
from tests.profiler.examples import CrampedDevice, OccupiedDevice, as_device

DEVICES = cpu_devices(4)
Times = Mapping[PhysicalDevice, Mapping[BoundBy, float]]


def _round(*times: float, memory: tuple[float, ...] | None = None) -> Times:
    """Return one round's seconds, of the first devices."""
    return {
        device: {"arithmetic": time_s, "memory": time_s if memory is None else memory[place]}
        for place, (device, time_s) in enumerate(zip(DEVICES, times, strict=False))
    }


def _slow(agreements: tuple[DeviceConsistency, ...]) -> dict[str, tuple[BoundBy, ...]]:
    return {one.device.label: one.slow_in for one in agreements if one.slow_in}


def test_of_two_devices_the_slower_is_named_with_its_share() -> None:
    found = consistency_of(DEVICES[:2], [_round(1.0, 1.2), _round(1.1, 1.32), _round(1.0, 1.5)], {})
    assert _slow(found) == {"cpu:1": BOUNDS}
    assert found[1].excess("memory") == pytest.approx(0.2)
    assert found[1].describe() == (
        "cpu:1: takes 20 % longer for calls bound by arithmetic and 20 % longer for calls bound by memory than the "
        f"median of its kind ({DEVICES[1].kind.name})"
    )


def test_half_of_the_devices_may_be_slow() -> None:
    assert list(_slow(consistency_of(DEVICES, [_round(1.3, 1.0, 1.01, 1.4)] * ROUNDS, {}))) == [
        "cpu:0",
        "cpu:3",
    ]


def test_a_fast_device_accuses_nobody() -> None:
    assert _slow(consistency_of(DEVICES[:3], [_round(1.0, 0.5, 1.02)] * ROUNDS, {})) == {}


def test_a_disturbance_in_one_round_accuses_nobody() -> None:
    assert (
        _slow(consistency_of(DEVICES[:2], [_round(1.0, 2.0), _round(1.0, 1.05), _round(1.0, 2.0)], {})) == {}
    )


def test_slow_memory_is_told_from_slow_arithmetic() -> None:
    found = consistency_of(DEVICES[:3], [_round(1.0, 1.0, 1.0, memory=(2.0, 2.0, 3.0))] * ROUNDS, {})
    assert _slow(found) == {"cpu:2": ("memory",)}
    assert "takes 50 % longer for calls bound by memory than" in found[2].describe()


def test_a_device_that_fails_is_named_and_the_others_are_compared() -> None:
    found = consistency_of(DEVICES[:3], [_round(1.0, 1.0, 1.0)], {DEVICES[0]: "broken"})
    assert [one.is_sound for one in found] == [False, True, True]
    assert found[0].describe().endswith("by (broken)")
    assert consistency_of(DEVICES[:1], [_round()], {DEVICES[0]: "broken"})[0].excesses == {}


@given(
    st.lists(
        st.lists(st.floats(1.0, 1.0 + SLOW_SHARE - 1e-9), min_size=4, max_size=4), min_size=1, max_size=ROUNDS
    ),
    st.floats(1e-6, 1e3),
)
def test_noise_below_the_threshold_accuses_nobody_at_any_speed(
    noise: list[list[float]], seconds: float
) -> None:
    rounds = [_round(*(seconds * share for share in shares)) for shares in noise]
    assert _slow(consistency_of(DEVICES, rounds, {})) == {}


def test_real_devices_are_compared_and_one_that_fails_is_named() -> None:
    first, second = cpu_devices(2)
    devices = (first, as_device(CrampedDevice, second))
    with WorkerPool(devices) as pool:
        found = compare(pool, devices)
        assert pool.running == {}
    assert [one.device for one in found] == list(devices)
    assert found[0].excesses == dict.fromkeys(BOUNDS, (0.0,))
    assert found[1].failure is not None
    assert "memory" in found[1].failure


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core cannot be slower than another")
def test_a_core_that_somebody_else_occupies_is_named() -> None:
    first, second = cpu_devices(2)
    devices = (first, as_device(OccupiedDevice, second))
    with WorkerPool(devices) as pool:
        found = compare(pool, devices)
    assert _slow(found) == {"cpu:1": BOUNDS}
    assert [len(shares) for shares in found[1].excesses.values()] == [ROUNDS] * 2


@pytest.mark.cuda
def test_a_gpu_agrees_with_itself() -> None:
    device = available_devices("cuda")[0]
    with WorkerPool([device]) as pool:
        (found,) = compare(pool, [device])
    assert found.failure is None
    assert found.excesses == dict.fromkeys(BOUNDS, (0.0,))
