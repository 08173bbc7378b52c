"""Dividing a network into stages: the dynamic program against all divisions there are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest

from search.bounds.stage_division import (
    Array,
    Division,
    StageChoice,
    StageCosts,
    StageOption,
    StageTable,
    divided,
    divisions,
)


def random_table(seed: int) -> StageTable:
    """Return up to five segments and five devices, memories that many stages exceed, times that often tie."""
    rng = np.random.default_rng(seed)
    segments, devices = int(rng.integers(1, 6)), int(rng.integers(1, 6))

    def sums(most: int) -> Array:
        return np.concatenate([[0], np.cumsum(rng.integers(0, most, segments))])

    options = [
        [
            StageOption(
                (device, size, way),
                size,
                StageCosts(
                    sums(9),
                    rng.integers(0, 30, (segments + 1, segments + 1)),
                    rng.integers(0, 15, (segments + 1, segments + 1)),
                    sums(4),
                    rng.integers(0, 3, segments + 1),
                ),
                int(rng.integers(6, 30)),
            )
            for size in (1, 2, 4)
            if device + size <= devices
            for way in range(int(rng.integers(1, 3)))
        ]
        for device in range(devices)
    ]
    transfers = {
        (device + option.devices, number, after): rng.integers(0, 5, segments + 1)
        for device in range(devices)
        for number, option in enumerate(options[device])
        if device + option.devices < devices
        for after in range(len(options[device + option.devices]))
    }
    return StageTable(options, transfers, int(rng.integers(1, 7)), keeps_all=bool(rng.random() < 0.5))


def all_stages(table: StageTable, device: int, sizes: tuple[int, ...]) -> Iterator[tuple[StageChoice, ...]]:
    """Give every way to put runs of segments of these sizes on devices from one on."""
    begin = table.segments - sum(sizes)
    if not sizes:
        if device == len(table.options):
            yield ()
        return
    if device == len(table.options):
        return
    for number, option in enumerate(table.options[device]):
        for rest in all_stages(table, device + option.devices, sizes[1:]):
            yield (StageChoice(begin, begin + sizes[0], device, number), *rest)


def total_ns(table: StageTable, stages: tuple[StageChoice, ...]) -> int | None:
    """Return what a division takes, as the module says it; None where a stage does not fit."""
    sum_ns, busy_ns = 0, [0]
    for place, stage in enumerate(stages):
        option = table.options[stage.device][stage.option]
        costs = option.costs
        micro, kept = (
            int(of_B[stage.last] - of_B[stage.first]) for of_B in (costs.micro_ns_B, costs.kept_bytes_B)
        )
        once, static = (
            int(of_BB[stage.first, stage.last]) for of_BB in (costs.once_ns_BB, costs.static_bytes_BB)
        )
        in_flight = table.micro_batches if table.keeps_all else min(table.micro_batches, len(stages) - place)
        kept += int(costs.entering_bytes_B[stage.first])
        if static + in_flight * kept > option.capacity_bytes:
            return None
        sum_ns += micro
        busy_ns.append((table.micro_batches - 1) * micro + once)
        if place:
            transfer = int(
                table.transfer_ns_B[stage.device, stages[place - 1].option, stage.option][stage.first]
            )
            sum_ns += transfer
            busy_ns.append((table.micro_batches - 1) * transfer)
    return sum_ns + max(busy_ns)


def brute_force(table: StageTable, most_stages: int) -> int | None:
    """Return the least total of all boundaries and all options."""
    totals = []
    for count in range(1, min(most_stages, table.segments) + 1):
        for cuts in combinations(range(1, table.segments), count - 1):
            ends = (0, *cuts, table.segments)
            sizes = tuple(ends[place + 1] - ends[place] for place in range(count))
            totals += [total_ns(table, stages) for stages in all_stages(table, 0, sizes)]
    return min((total for total in totals if total is not None), default=None)


@pytest.mark.parametrize("seed", range(150))
def test_the_least_total_is_that_of_all_boundaries_and_all_devices(seed: int) -> None:
    table = random_table(seed)
    division = divided(table, 5)
    expected = brute_force(table, 5)
    assert (division.total_ns if division else None) == expected
    if division is not None:
        assert total_ns(table, division.stages) == expected


@pytest.mark.parametrize("seed", range(40))
def test_no_more_stages_are_made_than_may_be(seed: int) -> None:
    table = random_table(seed)
    division = divided(table, 2)
    assert (division.total_ns if division else None) == brute_force(table, 2)


@pytest.mark.parametrize("seed", range(40))
def test_with_a_step_the_total_is_at_most_that_share_above_the_least(seed: int) -> None:
    table = random_table(seed)
    exact, rough = divided(table, 5), divided(table, 5, step=0.1)
    assert (exact is None) == (rough is None)
    if exact is not None and rough is not None:
        assert exact.total_ns <= rough.total_ns <= exact.total_ns / 0.9


@pytest.mark.parametrize("seed", range(20))
def test_from_one_division_to_the_next_the_most_goes_down_and_the_sum_does_not(seed: int) -> None:
    given: list[Division] = list(divisions(random_table(seed), 5))
    for before, after in pairwise(given):
        assert after.most_ns < before.most_ns
        assert after.sum_ns >= before.sum_ns
