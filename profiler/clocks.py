"""The clock of a device while it is measured, and the reasons of throttling, as far as the driver reports them.

A GPU's driver reports through NVML (package nvidia-ml-py, extra `gpu`), a CPU's through Linux' sysfs. Where neither
does, in a virtual machine for example, the values are None, never a guess.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Self

from profiler.devices import PhysicalDevice, gpu_uuid

CPUS = Path("/sys/devices/system/cpu")
# Reasons of NVML (nvml.h, nvmlClocksEventReason...) that disturb a measurement: the rest is normal (idle,
# clocks set by the user, ...).
REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class ClockWatch:
    """Reads a device's clock when it is entered and left, and by `read`; a context manager.

    A GPU's clock is that of its work only while it works: where there was such a reading, the others do not count.

    `clock_hz`: the median of the readings, None where there are none. `throttle`: the reasons of throttling as text,
    "" for none; None where they are unknown.
    """

    def __init__(self, device: PhysicalDevice) -> None:
        self._reader = _reader(device)
        self._clocks: list[float] = []
        self._busy_clocks: list[float] = []
        self._reasons: set[str] | None = None
        self._throttled_before: int | None = None

    def __enter__(self) -> Self:
        self._throttled_before = self._reader.throttle_count()
        self._read(self._clocks)
        return self

    def __exit__(self, *_: object) -> None:
        self._read(self._clocks)
        now = self._reader.throttle_count()
        if now is not None and self._throttled_before is not None:
            self._reasons = (self._reasons or set()) | (
                {"thermal limit"} if now > self._throttled_before else set()
            )

    def read(self) -> None:
        """Read the clock; call it while the device works."""
        self._read(self._busy_clocks)

    def _read(self, clocks: list[float]) -> None:
        clock_hz, reasons = self._reader.clock_hz(), self._reader.reasons()
        # Some drivers report a clock of 0 where it is unknown.
        if clock_hz is not None and clock_hz > 0:
            clocks.append(clock_hz)
        if reasons is not None:
            self._reasons = (self._reasons or set()) | reasons

    @property
    def clock_hz(self) -> float | None:
        """The clock in Hz."""
        clocks = self._busy_clocks or self._clocks
        return median(clocks) if clocks else None

    @property
    def spread(self) -> float:
        """How far the clock's readings while the device worked differ, as a share of the lowest; 0 where unknown."""
        clocks = self._busy_clocks
        return max(clocks) / min(clocks) - 1 if clocks else 0.0

    @property
    def throttle(self) -> str | None:
        """The reasons of throttling."""
        return None if self._reasons is None else ", ".join(sorted(self._reasons))


class _CoreReader:
    """The readings of Linux for one core."""

    def __init__(self, core: int | None) -> None:
        self._folder = None if core is None else CPUS / f"cpu{core}"

    def _number(self, name: str) -> int | None:
        if self._folder is None:
            return None
        try:
            return int((self._folder / name).read_text())
        except (OSError, ValueError):
            return None

    def clock_hz(self) -> float | None:
        kilohertz = self._number("cpufreq/scaling_cur_freq")
        return None if kilohertz is None else kilohertz * 1e3

    def throttle_count(self) -> int | None:
        return self._number("thermal_throttle/core_throttle_count")

    def reasons(self) -> set[str] | None:
        return None


class _GpuReader:
    """The readings of NVML for one GPU."""

    def __init__(self, index: int) -> None:
        self._library, self._handle = _nvml(), None
        if self._library is not None:
            self._handle = _handle(self._library, index)

    def clock_hz(self) -> float | None:
        if self._library is None or self._handle is None:
            return None
        try:
            return (
                float(self._library.nvmlDeviceGetClockInfo(self._handle, self._library.NVML_CLOCK_SM)) * 1e6
            )
        except self._library.NVMLError:
            return None

    def throttle_count(self) -> int | None:
        return None

    def reasons(self) -> set[str] | None:
        if self._library is None or self._handle is None:
            return None
        try:
            active = int(self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        except self._library.NVMLError:
            return None
        return {name for bit, name in REASONS.items() if active & bit}


def _reader(device: PhysicalDevice) -> _CoreReader | _GpuReader:
    return _CoreReader(device.core) if device.processor == "cpu" else _GpuReader(device.index)


@lru_cache(maxsize=1)
def _nvml() -> Any:
    """Return the initialized NVML; None without the package or the driver."""
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handle(library: Any, index: int) -> Any:
    """Return NVML's handle of a GPU; of a MIG slice that of the whole GPU, whose clock it has. None where unknown."""
    uuid = gpu_uuid(index)
    with suppress(library.NVMLError):
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    with suppress(library.NVMLError, AttributeError):
        part = library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        return library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
    return None
