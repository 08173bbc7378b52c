"""Device consistency: whether devices of one kind take the same time for the same few calls.

Costs belong to a kind of device, so one card that throttles, or a core that something else occupies, would give the
kind its own times. Devices are measured one after another, never at once: cores share memory bandwidth, GPUs a power
supply, and a device must not seem slow because its neighbours work. Calls bound by arithmetic are compared apart
from calls bound by memory, since a device may be slow in either. A device is compared with the median of its
kind; of an even number, with the lower of the two in the middle, so that of two devices the slower one can be told.

One round is enough where all agree. Where one does not, `ROUNDS` rounds in alternating order decide: a device is slow
that is more than `SLOW_SHARE` above the median in each of them, so that a passing disturbance does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Literal

from graph.calls import LocalCall
from graph.errors import RuntimeFailure
from graph.operators import Slot, TensorSpec
from graph.topology import Processor
from profiler.devices import PhysicalDevice
from profiler.measure import FailedMeasurement, MeasureOptions
from profiler.workers import WorkerPool

BoundBy = Literal["arithmetic", "memory"]
BOUNDS: tuple[BoundBy, ...] = ("arithmetic", "memory")

SLOW_SHARE = 0.10
ROUNDS = 3
# Samples longer than a scheduler's time slice, so that a process that shares the core shows in each of them.
OPTIONS = MeasureOptions(repetitions=5, budget_s=0.05, maximum_s=0.5, batch_below_s=0.02, wall=True)

# Rows and columns of square matrices, and elements of a vector: large enough to fill the device, and beyond the caches
# of its own, small enough to be measured in less than a second.
SQUARES: dict[Processor, tuple[tuple[str, int], ...]] = {
    "cpu": (("float32", 768),),
    "cuda": (("float32", 4096), ("float16", 8192)),
}
ELEMENTS: dict[Processor, int] = {"cpu": 2**21, "cuda": 2**26}


@dataclass(frozen=True, slots=True)
class DeviceConsistency:
    """The deviation of a device from the median of its kind.

    `excesses`: for each bound, a number a round: the share by which the device takes longer than the median (negative:
    less long). Empty where a call failed on it, with the reason in `failure`.
    """

    device: PhysicalDevice
    excesses: Mapping[BoundBy, tuple[float, ...]]
    failure: str | None = None

    def excess(self, bound: BoundBy) -> float:
        """Return the share by which the device takes longer than the median of its kind: the median over the rounds."""
        return statistics.median(self.excesses[bound])

    @property
    def slow_in(self) -> tuple[BoundBy, ...]:
        """The bounds by which the device is slow."""
        return tuple(bound for bound, excesses in self.excesses.items() if min(excesses) > SLOW_SHARE)

    @property
    def is_sound(self) -> bool:
        """True where the device is neither slow nor fails."""
        return self.failure is None and not self.slow_in

    def describe(self) -> str:
        """Return the device's defect in one line."""
        label = self.device.label
        if self.failure is not None:
            return f"{label}: failed a call that devices of its kind are compared by ({self.failure})"
        shares = " and ".join(
            f"{100 * self.excess(bound):.0f} % longer for calls bound by {bound}" for bound in self.slow_in
        )
        return f"{label}: takes {shares} than the median of its kind ({self.device.kind.name})"


def calls_to_compare(processor: Processor) -> dict[BoundBy, tuple[LocalCall, ...]]:
    """Return the calls to compare devices by: matrix products, and the ReLU of a long vector."""
    products = [
        LocalCall(
            target="aten.mm.default",
            arguments=(("self", Slot(0)), ("mat2", Slot(1))),
            inputs=(TensorSpec((size, size), dtype),) * 2,
            outputs=(TensorSpec((size, size), dtype),),
            gradients=(True, True),
        )
        for dtype, size in SQUARES[processor]
    ]
    vector = TensorSpec((ELEMENTS[processor],), "float32")
    relu = LocalCall("aten.relu.default", (("self", Slot(0)),), (vector,), (vector,), (True,))
    return {"arithmetic": tuple(products), "memory": (relu,)}


def compare(pool: WorkerPool, devices: Sequence[PhysicalDevice]) -> tuple[DeviceConsistency, ...]:
    """Return the consistency of devices of one kind, all in the pool, measured by the same calls on each of them."""
    pool.wait_until_ready()
    rounds: list[dict[PhysicalDevice, dict[BoundBy, float]]] = []
    failures: dict[PhysicalDevice, str] = {}
    for number in range(ROUNDS):
        times: dict[PhysicalDevice, dict[BoundBy, float]] = {}
        # There and back, so that a drift of the machine's speed does not fall on the same devices.
        for device in devices if number % 2 == 0 else reversed(devices):
            if device not in failures:
                measured = _measure(pool, device)
                if isinstance(measured, str):
                    failures[device] = measured
                else:
                    times[device] = measured
        rounds.append(times)
        if not any(device.slow_in for device in consistency_of(devices, rounds, failures)):
            break
    return consistency_of(devices, rounds, failures)


def consistency_of(
    devices: Sequence[PhysicalDevice],
    rounds: Sequence[Mapping[PhysicalDevice, Mapping[BoundBy, float]]],
    failures: Mapping[PhysicalDevice, str],
) -> tuple[DeviceConsistency, ...]:
    """Return the consistency of devices from the seconds of each in each round; `failures`: the reasons by device."""
    sound = [device for device in devices if device not in failures]
    medians = [
        {bound: statistics.median_low(taken[device][bound] for device in sound) for bound in BOUNDS}
        for taken in rounds
        if sound
    ]
    return tuple(
        DeviceConsistency(device, {}, failures[device])
        if device in failures
        else DeviceConsistency(
            device,
            {
                bound: tuple(
                    taken[device][bound] / median[bound] - 1.0
                    for taken, median in zip(rounds, medians, strict=True)
                )
                for bound in BOUNDS
            },
        )
        for device in devices
    )


def _measure(pool: WorkerPool, device: PhysicalDevice) -> dict[BoundBy, float] | str:
    """Return the seconds (geometric mean over calls and phases) of each bound on a device, or why one failed."""
    seconds: dict[BoundBy, float] = {}
    try:
        for bound, calls in calls_to_compare(device.processor).items():
            outcomes = [
                outcome
                for result in pool.measure(calls, on=[device], options=OPTIONS)
                for outcome in result.outcomes
            ]
            for outcome in outcomes:
                if isinstance(outcome, FailedMeasurement):
                    return outcome.reason
            times = [outcome.median_s for outcome in outcomes if not isinstance(outcome, FailedMeasurement)]
            seconds[bound] = exp(statistics.mean(log(time_s) for time_s in times))
    except RuntimeFailure as error:  # its worker does not start
        return str(error)
    return seconds
