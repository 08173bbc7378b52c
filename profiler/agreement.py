"""Do devices of one kind agree? The same few calls, measured on each of them in turn.

Costs belong to a kind of device, so one card that throttles, or a core that something else occupies, would give the
kind its own times. Devices are measured one after another, never at once: cores share memory bandwidth, GPUs a power
supply, and a device must not seem slow because its neighbours work. Calls bound by arithmetic are judged apart from
calls bound by memory, since either may be what a device lacks. A device is compared with the median of its kind; of an
even number, with the lower of the two in the middle, so that of two devices the slower one can be told.

One round is enough where all agree. Where one does not, `ROUNDS` rounds in alternating order decide: a device is slow
that is more than `SLOW_SHARE` above the median in each of them, so that a disturbance that passes accuses nobody.
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

Bound = Literal["arithmetic", "memory"]
BOUNDS: tuple[Bound, ...] = ("arithmetic", "memory")

SLOW_SHARE = 0.10
ROUNDS = 3
# Samples longer than a scheduler's time slice, so that what takes turns on a core shows in each of them.
OPTIONS = MeasureOptions(repetitions=5, budget_s=0.05, maximum_s=0.5, batch_below_s=0.02)

# Rows and columns of square matrices, and elements of a vector: large enough to fill the device, and beyond the caches
# of its own, small enough to be measured in less than a second.
SQUARES: dict[Processor, tuple[tuple[str, int], ...]] = {
    "cpu": (("float32", 768),),
    "cuda": (("float32", 4096), ("float16", 8192)),
}
ELEMENTS: dict[Processor, int] = {"cpu": 2**21, "cuda": 2**26}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a device compares with the median of its kind.

    `excesses`: for each bound, a number a round: by what share the device takes longer (negative: less long) than the
    median. Empty where a call failed on it, with the reason in `failure`.
    """

    device: PhysicalDevice
    excesses: Mapping[Bound, tuple[float, ...]]
    failure: str | None = None

    def excess(self, bound: Bound) -> float:
        """By what share the device takes longer than the median of its kind: the median over the rounds."""
        return statistics.median(self.excesses[bound])

    @property
    def slow_in(self) -> tuple[Bound, ...]:
        """The bounds by which the device is slow."""
        return tuple(bound for bound, found in self.excesses.items() if min(found) > SLOW_SHARE)

    @property
    def is_sound(self) -> bool:
        """True where the device is neither slow nor fails."""
        return self.failure is None and not self.slow_in

    def describe(self) -> str:
        """Return in one line what is wrong with the device."""
        label = self.device.label
        if self.failure is not None:
            return f"{label}: failed a call that devices of its kind are compared by ({self.failure})"
        shares = " and ".join(
            f"{100 * self.excess(bound):.0f} % longer for calls bound by {bound}" for bound in self.slow_in
        )
        return f"{label}: takes {shares} than the median of its kind ({self.device.kind.name})"


def compared_calls(processor: Processor) -> dict[Bound, tuple[LocalCall, ...]]:
    """Return the calls that devices are compared by: products of matrices, and the rectifier of a long vector."""
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
    rectifier = LocalCall("aten.relu.default", (("self", Slot(0)),), (vector,), (vector,), (True,))
    return {"arithmetic": tuple(products), "memory": (rectifier,)}


def compare(pool: WorkerPool, devices: Sequence[PhysicalDevice]) -> tuple[Agreement, ...]:
    """Measure the same calls on each of some devices of one kind, all of them in the pool; return how they compare."""
    pool.wait_until_ready()
    rounds: list[dict[PhysicalDevice, dict[Bound, float]]] = []
    failures: dict[PhysicalDevice, str] = {}
    for number in range(ROUNDS):
        times: dict[PhysicalDevice, dict[Bound, float]] = {}
        # There and back, so that a drift of the machine's speed does not fall on the same devices.
        for device in devices if number % 2 == 0 else reversed(devices):
            if device not in failures:
                measured = _measure(pool, device)
                if isinstance(measured, str):
                    failures[device] = measured
                else:
                    times[device] = measured
        rounds.append(times)
        if not any(one.slow_in for one in judged(devices, rounds, failures)):
            break
    return judged(devices, rounds, failures)


def judged(
    devices: Sequence[PhysicalDevice],
    rounds: Sequence[Mapping[PhysicalDevice, Mapping[Bound, float]]],
    failures: Mapping[PhysicalDevice, str],
) -> tuple[Agreement, ...]:
    """Return how devices compare, from the seconds that each took in each round; `failures`: the reasons by device."""
    sound = [device for device in devices if device not in failures]
    medians = [
        {bound: statistics.median_low(taken[device][bound] for device in sound) for bound in BOUNDS}
        for taken in rounds
        if sound
    ]
    return tuple(
        Agreement(device, {}, failures[device])
        if device in failures
        else Agreement(
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


def _measure(pool: WorkerPool, device: PhysicalDevice) -> dict[Bound, float] | str:
    """Return the seconds (geometric mean over calls and phases) of each bound on a device, or why one failed."""
    found: dict[Bound, float] = {}
    try:
        for bound, calls in compared_calls(device.processor).items():
            outcomes = [
                outcome
                for result in pool.measure(calls, on=[device], options=OPTIONS)
                for outcome in result.outcomes
            ]
            for outcome in outcomes:
                if isinstance(outcome, FailedMeasurement):
                    return outcome.reason
            times = [outcome.median_s for outcome in outcomes if not isinstance(outcome, FailedMeasurement)]
            found[bound] = exp(statistics.mean(log(time_s) for time_s in times))
    except RuntimeFailure as error:  # its worker does not start
        return str(error)
    return found
