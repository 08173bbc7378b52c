"""What is known of a device's clock: read from files of the kind that Linux has, and from a GPU's driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from profiler import clocks
from profiler.clocks import REASONS, ClockWatch
from profiler.devices import PhysicalDevice, available_devices
from profiler.kinds import cpu_kind

CLOCK = "cpufreq/scaling_cur_freq"
THROTTLED = "thermal_throttle/core_throttle_count"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of core 3, in place of the system's; empty."""
    monkeypatch.setattr(clocks, "CPUS", tmp_path)
    core = tmp_path / "cpu3"
    core.mkdir()
    return core


def write(folder: Path, name: str, text: str) -> None:
    """Write a file as Linux does: with a line feed."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"{text}\n")


def watch(core: int | None = 3) -> ClockWatch:
    return ClockWatch(PhysicalDevice("cpu", 0, cpu_kind(), core))


def test_clock_is_the_median_of_what_was_read(folder: Path) -> None:
    write(folder, CLOCK, "2600000")
    with watch() as clock:
        write(folder, CLOCK, "3000000")
    assert clock.clock_hz == 2.8e9
    # Nothing tells about throttling.
    assert clock.throttle is None


def test_clock_that_is_told_once_is_taken(folder: Path) -> None:
    with watch() as clock:
        write(folder, CLOCK, "2600000")
    assert clock.clock_hz == 2.6e9


@pytest.mark.parametrize(("after", "throttle"), [("7", ""), ("8", "thermal limit")])
def test_throttling_is_a_count_that_went_up(folder: Path, after: str, throttle: str) -> None:
    write(folder, THROTTLED, "7")
    with watch() as clock:
        write(folder, THROTTLED, after)
    assert clock.throttle == throttle
    assert clock.clock_hz is None


def test_count_that_is_told_only_afterwards_says_nothing(folder: Path) -> None:
    with watch() as clock:
        write(folder, THROTTLED, "8")
    assert clock.throttle is None


def test_count_that_is_gone_afterwards_says_nothing(folder: Path) -> None:
    write(folder, THROTTLED, "8")
    with watch() as clock:
        (folder / THROTTLED).unlink()
    assert clock.throttle is None


@pytest.mark.parametrize("text", ["", "<unknown>", "2.6 GHz", "\x00"])
def test_what_is_no_number_says_nothing(folder: Path, text: str) -> None:
    write(folder, CLOCK, text)
    write(folder, THROTTLED, text)
    with watch() as clock:
        pass
    assert (clock.clock_hz, clock.throttle) == (None, None)


def test_bytes_that_are_no_text_say_nothing(folder: Path) -> None:
    write(folder, CLOCK, "")
    (folder / CLOCK).write_bytes(b"\xff\xfe\n")
    with watch() as clock:
        pass
    assert clock.clock_hz is None


def test_clock_that_stands_still_says_nothing(folder: Path) -> None:
    write(folder, CLOCK, "0")
    with watch() as clock:
        pass
    assert clock.clock_hz is None


def test_folder_in_place_of_a_file_says_nothing(folder: Path) -> None:
    (folder / CLOCK).mkdir(parents=True)
    with watch() as clock:
        pass
    assert clock.clock_hz is None


def test_silent_machine_says_nothing(folder: Path) -> None:
    with watch() as clock:
        pass
    assert (clock.clock_hz, clock.throttle) == (None, None)


def test_each_core_has_its_own_files(folder: Path) -> None:
    write(folder, CLOCK, "2600000")
    with watch(core=4) as other, watch(core=None) as unpinned, watch() as clock:
        pass
    assert (other.clock_hz, unpinned.clock_hz, clock.clock_hz) == (None, None, 2.6e9)


def test_a_failure_inside_is_not_kept(folder: Path) -> None:
    write(folder, CLOCK, "2600000")
    with pytest.raises(ValueError, match="inside"), watch() as clock:
        raise ValueError("inside")
    assert clock.clock_hz == 2.6e9


def test_this_machine_is_read_where_it_tells() -> None:
    device = available_devices("cpu")[0]
    with ClockWatch(device) as clock:
        pass
    told = (clocks.CPUS / f"cpu{device.core}" / CLOCK).is_file()
    assert (clock.clock_hz is not None) == told


def test_without_the_package_a_gpus_clock_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python says that a module is not installed.
    monkeypatch.setitem(sys.modules, "pynvml", None)
    clocks._nvml.cache_clear()
    try:
        with ClockWatch(PhysicalDevice("cuda", 0, cpu_kind())) as clock:
            pass
    finally:
        clocks._nvml.cache_clear()
    assert (clock.clock_hz, clock.throttle) == (None, None)


def test_without_a_driver_a_gpus_clock_is_unknown() -> None:
    pytest.importorskip("pynvml")
    if available_devices("cuda"):
        pytest.skip("this machine has a driver")
    with ClockWatch(PhysicalDevice("cuda", 0, cpu_kind())) as clock:
        pass
    assert (clock.clock_hz, clock.throttle) == (None, None)


@pytest.mark.cuda
def test_a_gpus_driver_tells_its_clock_and_what_slows_it() -> None:
    pytest.importorskip("pynvml")
    with ClockWatch(available_devices("cuda")[0]) as clock:
        pass
    assert clock.clock_hz is not None
    assert 1e8 < clock.clock_hz < 1e10
    assert clock.throttle is not None
    assert set(clock.throttle.split(", ")) <= {"", *REASONS.values()}
