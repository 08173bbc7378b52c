"""Where to divide a network into pipeline stages, and over how many devices to split each: dynamic programming.

A network is a row of segments, a machine a row of devices. A stage is a run of segments on a run of devices, which are
split in one of several ways. Of M micro-batches a division is to take

    sum of stages and transfers + the most of (M - 1) stage + once, (M - 1) transfer

stage: forward and backward of a micro-batch; transfer: its activations and gradients over a cut, a server like the
stages as in PipeDream; once: what a stage does once a step, the sums of its gradients and the update. Every stage must
fit its devices' memories with as many micro-batches in flight as its schedule has.

For a bound on the most, the least sum is found from the last stage to the first, since a stage of 1f1b has as many
micro-batches in flight as there are stages from it on. Bounds go down from one division's most to the next.

Sources: PipeDream (SOSP 2019), section 3.1; Alpa (OSDI 2022), section 5.2, equation 3. Alpa goes through all bounds;
here those that change nothing are left out, which finds the same.

Shape letters: B boundaries between segments, from 0, before the first one, to behind the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from search.kernels.stage_division import RunCosts, StageLimits, Suffixes, put_stage_before

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class StageCosts:
    """What runs of segments take and keep on a stage's devices, in nanoseconds and bytes.

    micro_ns_B: forward and backward of a micro-batch, added up from the first segment on.
    once_ns_BB: sums of gradients, and update; rows are where a run begins, columns where it ends.
    static_bytes_BB: weights, gradients and optimizer state.
    kept_bytes_B: what one micro-batch leaves for its backward, added up from the first segment on.
    entering_bytes_B: what a stage that begins there gets of a micro-batch, and keeps as well.
    """

    micro_ns_B: Array
    once_ns_BB: Array
    static_bytes_BB: Array
    kept_bytes_B: Array
    entering_bytes_B: Array

    @cached_property
    def of_runs(self) -> RunCosts:
        """What every run of segments takes and keeps."""
        micro, kept = (np.subtract.outer(of_B, of_B) for of_B in (self.micro_ns_B, self.kept_bytes_B))
        of_runs = micro, self.once_ns_BB.T, self.static_bytes_BB.T, kept + self.entering_bytes_B
        return RunCosts(*(np.ascontiguousarray(each, np.float64) for each in of_runs))


@dataclass(frozen=True, slots=True, eq=False)
class StageOption:
    """A way to split a stage over `devices` devices; `label` says which. capacity_bytes: of its smallest device."""

    label: object
    devices: int
    costs: StageCosts
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage of a division: segments from `first` to before `last`, devices from `device` on, an option's number."""

    first: int
    last: int
    device: int
    option: int


@dataclass(frozen=True, slots=True)
class Division:
    """Stages, the sum of what they and their transfers take, the most of what repeats or is done once; in ns."""

    stages: tuple[StageChoice, ...]
    sum_ns: int
    most_ns: int

    @property
    def total_ns(self) -> int:
        """What a step is to take."""
        return self.sum_ns + self.most_ns


@dataclass(frozen=True, eq=False)
class StageTable:
    """Segments and devices to divide.

    options: for each device, the options of a stage that begins with it.
    transfer_ns_B: by the device that a stage begins with, the number of the option of the stage before, and its own,
        what a micro-batch takes to it over each boundary, there and back.
    micro_batches: M. keeps_all: whether all of them are in flight in every stage (gpipe).
    """

    options: Sequence[Sequence[StageOption]]
    transfer_ns_B: Mapping[tuple[int, int, int], Array]
    micro_batches: int
    keeps_all: bool = False
    segments: int = field(init=False)

    def __post_init__(self) -> None:
        costs = next(option.costs for options in self.options for option in options)
        object.__setattr__(self, "segments", len(costs.micro_ns_B) - 1)

    @cached_property
    def transfers_ns_OB(self) -> dict[tuple[int, int], Array]:  # noqa: N802 - the shape suffix
        """What a micro-batch takes to each option of a stage, by its first device and the option of the one before."""
        of_options: dict[tuple[int, int], list[Array]] = {}
        for (device, before, _), transfer_ns_B in sorted(
            self.transfer_ns_B.items(), key=lambda item: item[0]
        ):
            of_options.setdefault((device, before), []).append(transfer_ns_B)
        return {key: np.stack(arrays).astype(np.float64) for key, arrays in of_options.items()}

    @cached_property
    def nothing_ahead(self) -> tuple[Array, Array]:
        """The sums and transfers behind the last stage, of one option: there is nothing behind the last segment."""
        ahead_ns_OB = np.full((1, self.segments + 1), inf)
        ahead_ns_OB[0, -1] = 0
        return ahead_ns_OB, np.zeros_like(ahead_ns_OB)

    def in_flight(self, stages_from_it: int) -> int:
        """Return how many micro-batches a stage has in flight, by how many stages there are from it on."""
        return self.micro_batches if self.keeps_all else min(self.micro_batches, stages_from_it)


def divisions(table: StageTable, most_stages: int, *, step: float = 0.0) -> Iterator[Division]:
    """Give divisions of which each has a smaller most than the one before, and the least sum that goes with it.

    The least total is among them. Nothing is given where no division fits the memories.

    Args:
        table: what to divide.
        most_stages: how many stages there may be.
        step: by what share the most goes down at least; above 0 the total may exceed the least one by that share.
    """
    bound_ns, least_ns = inf, inf
    while (division := _of_least_sum(table, most_stages, bound_ns)) is not None:
        yield division
        least_ns = min(least_ns, division.total_ns)
        # The sum only grows from now on.
        if division.sum_ns >= least_ns:
            return
        bound_ns = division.most_ns * (1 - step)


def divided(table: StageTable, most_stages: int, *, step: float = 0.0) -> Division | None:
    """Return the division of the least total, the first of equals; None where none fits the memories."""
    return min(divisions(table, most_stages, step=step), key=lambda division: division.total_ns, default=None)


def _of_least_sum(table: StageTable, most_stages: int, bound_ns: float) -> Division | None:
    """Return the division of the least sum whose most is below a bound."""
    devices = len(table.options)
    # By the number of stages, and the device that the first of them begins with.
    suffixes: dict[tuple[int, int], Suffixes] = {}
    for stages in range(1, min(most_stages, devices, table.segments) + 1):
        for device in range(devices):
            if not table.options[device]:
                continue
            found = _suffixes(table, suffixes, stages, device, bound_ns)
            if found is not None:
                suffixes[stages, device] = found
    firsts = [
        (suffixes[stages, 0].sum_ns_OB[option, 0], stages, option)
        for stages in range(1, most_stages + 1)
        if (stages, 0) in suffixes
        for option in range(len(table.options[0]))
    ]
    least_ns, stages, option = min(firsts, default=(inf, 0, 0))
    if least_ns == inf:
        return None
    return _followed(table, suffixes, stages, option)


def _suffixes(
    table: StageTable, later: Mapping[tuple[int, int], Suffixes], stages: int, device: int, bound_ns: float
) -> Suffixes | None:
    """Return the least sums of so many stages from a device on; None where there are none."""
    options, boundaries = table.options[device], table.segments + 1
    found = Suffixes(
        np.full((len(options), boundaries), inf),
        *(np.zeros((len(options), boundaries), np.int64) for _ in range(2)),
    )
    for number, option in enumerate(options):
        next_device = device + option.devices
        if stages == 1 and next_device == len(table.options):
            ahead_ns_OB, transfer_ns_OB = table.nothing_ahead
        elif (stages - 1, next_device) in later:
            ahead_ns_OB = later[stages - 1, next_device].sum_ns_OB
            transfer_ns_OB = table.transfers_ns_OB[next_device, number]
        else:
            continue
        limits = StageLimits(
            float(table.in_flight(stages)), float(option.capacity_bytes), table.micro_batches - 1.0, bound_ns
        )
        put_stage_before(option.costs.of_runs, limits, ahead_ns_OB, transfer_ns_OB, found, number)
    return found if (found.sum_ns_OB < inf).any() else None


def _followed(
    table: StageTable, suffixes: Mapping[tuple[int, int], Suffixes], stages: int, option: int
) -> Division:
    """Return the division that begins with an option and has so many stages."""
    choices: list[StageChoice] = []
    segment = device = 0
    for left in range(stages, 0, -1):
        found = suffixes[left, device]
        end = int(found.end_OB[option, segment])
        choices.append(StageChoice(segment, end, device, option))
        device += table.options[device][option].devices
        option, segment = int(found.next_OB[option, end]), end
    return priced(table, choices)


def priced(table: StageTable, stages: Sequence[StageChoice]) -> Division:
    """Return a division with its sum and its most."""
    sum_ns = most_ns = 0
    before: StageChoice | None = None
    for stage in stages:
        costs = table.options[stage.device][stage.option].costs
        micro_ns, once_ns = (int(of_runs[stage.last, stage.first]) for of_runs in costs.of_runs[:2])
        sum_ns += micro_ns
        most_ns = max(most_ns, (table.micro_batches - 1) * micro_ns + once_ns)
        if before is not None:
            transfer_ns = int(table.transfer_ns_B[stage.device, before.option, stage.option][stage.first])
            sum_ns += transfer_ns
            most_ns = max(most_ns, (table.micro_batches - 1) * transfer_ns)
        before = stage
    return Division(tuple(stages), sum_ns, most_ns)
