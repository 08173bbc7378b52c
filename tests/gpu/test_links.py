"""Links, collectives and contention between GPUs that are told how long messages and kernels take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from app.services.costs.exchange_overhead import overhead_jobs
from profiler import contention
from profiler.contention import OverlapSizes, measure_overlaps
from profiler.devices import PhysicalDevice, available_devices
from profiler.link_patterns import Participant, Pattern
from profiler.link_worker import Exercise, ProbeRank
from profiler.link_worker import probe as send_probe
from profiler.links import (
    MESSAGES_AT_ONCE,
    LinkOptions,
    LinkProbe,
    contention_factor,
    groups_to_measure,
    pairs_to_measure,
    probe_links,
)
from profiler.process_groups import join_process_group
from profiler.rank_clock import RankClock
from tests.gpu.conftest import forget_devices
from tests.gpu.planted_clocks import NeverAsleep
from tests.gpu.ranks import run_ranks
from tests.gpu.virtual_device import Speeds
from tests.gpu.virtual_torch import virtual_gpus
from tests.profiler.kinds import datasheet_kind, slowest_link

KIB, MIB, GIB = 2**10, 2**20, 2**30
# The host takes six times as long to issue a kernel as the device takes to execute it.
SPEEDS = Speeds(most_computed=2**12, cache_bytes=MIB, names={"mm": 170e-6, "add": 150e-6})
SIZES = (KIB, 256 * KIB, 16 * MIB)


@pytest.fixture
def probe(speeds: Callable[[Speeds], None]) -> Iterator[Callable[[Speeds, LinkOptions], LinkProbe]]:
    """A function that measures between two GPUs of given speeds."""

    def probed(chosen: Speeds, options: LinkOptions, exercise: Exercise | None = None) -> LinkProbe:
        speeds(chosen)
        return probe_links(available_devices("cuda")[:2], options, exercise)

    with virtual_gpus():
        forget_devices()
        yield probed
    forget_devices()


def _median_s(probe: LinkProbe, pattern: Pattern, size: int) -> float:
    return next(
        sample.median_s for sample in slowest_link(probe, pattern).samples if sample.size_bytes == size
    )


def test_messages_and_collectives_take_what_the_devices_do_and_not_what_the_hosts_do(
    probe: Callable[..., LinkProbe],
) -> None:
    sizes = LinkOptions(p2p_sizes=SIZES, all_reduce_sizes=(*SIZES, GIB), exchange_sizes=SIZES)
    measured = probe(SPEEDS, replace(sizes, overlap_rounds=1))
    # The kernels beside a message: it is packed and put together, a gradient copied into its bucket.
    kernels: dict[Pattern, int] = {"p2p": 2, "all_reduce": 1, "all_gather": 2}
    for pattern, count in kernels.items():
        for size in (*SIZES, GIB) if pattern == "all_reduce" else SIZES:
            told_s = SPEEDS.message_s + size / SPEEDS.message_bytes_per_s + count * SPEEDS.kernel_s
            assert _median_s(measured, pattern, size) == pytest.approx(told_s, rel=0.02), (pattern, size)


@pytest.mark.parametrize("host_s", [2e-6, 30e-6, 1e-3])  # the last overtakes the first sleep
def test_an_exchange_in_a_step_takes_the_device_what_it_does_and_the_host_what_it_issues(
    probe: Callable[..., LinkProbe], host_s: float
) -> None:
    quick = LinkOptions(p2p_sizes=(KIB,), all_reduce_sizes=(KIB,), exchange_sizes=(KIB,), overlap_rounds=1)
    measured = probe(replace(SPEEDS, host_s=host_s), quick, overhead_jobs(60.0))
    # A message, and the sum of the moments that came and our own.
    told_s = SPEEDS.message_s + SPEEDS.names["add"]
    assert measured.exchange is not None
    assert measured.exchange.device_s == pytest.approx(told_s, rel=0.02)
    assert measured.issue_s == pytest.approx(2 * host_s, rel=0.02)


@pytest.mark.parametrize("lost", [0.1, 0.5, 0.9])
def test_contention_is_the_speed_that_a_device_loses(probe: Callable[..., LinkProbe], lost: float) -> None:
    none = LinkOptions(p2p_sizes=(KIB,), all_reduce_sizes=(KIB,), exchange_sizes=(KIB,), overlap_rounds=2)
    measured = probe(replace(SPEEDS, contention=lost), none)
    assert measured.contention * MESSAGES_AT_ONCE == pytest.approx(lost, rel=0.02)


def test_contention_of_arithmetic_and_of_memory_are_found_apart(probe: Callable[..., LinkProbe]) -> None:
    none = LinkOptions(p2p_sizes=(KIB,), all_reduce_sizes=(KIB,), exchange_sizes=(KIB,), overlap_rounds=2)
    measured = probe(replace(SPEEDS, contentions={"mm": 0.2, "add": 0.6}), none)
    factors = {of: factor * MESSAGES_AT_ONCE for of, factor in measured.contention_of.items()}
    assert factors == pytest.approx({"arithmetic": 0.2, "memory": 0.6}, rel=0.02)
    assert measured.contention * MESSAGES_AT_ONCE == pytest.approx(0.4, rel=0.02)


def test_a_probe_of_many_pairs_and_groups_may_take_longer() -> None:
    options = LinkOptions()
    two, eight = (
        options.plan(0, count, pairs_to_measure(gpus), groups_to_measure(gpus)).limit_s
        for count in (2, 8)
        for gpus in [[PhysicalDevice("cuda", index, datasheet_kind("K80")) for index in range(count)]]
    )
    assert two == options.limit_s
    assert eight > 10 * two


def _times_by_size(rank: int, count: int, meeting: str) -> dict[Pattern, dict[int, float]]:
    clock, options = _joined(rank, count, meeting), LinkOptions()
    gpus = available_devices("cuda")
    plan = options.plan(rank, count, ((0, 1),), ((0, 1),))
    # As long as a size may take where eight GPUs are measured.
    eight = options.plan(0, len(gpus), pairs_to_measure(gpus), groups_to_measure(gpus))
    probe = ProbeRank(clock.device, replace(plan, large_s=eight.large_s))
    probe._measure_pair((0, 1))
    probe._measure_patterns(("all_reduce",), Participant(rank, (0, 1), None, clock.device.torch_name))
    times: dict[Pattern, dict[int, float]] = {"p2p": {}, "all_reduce": {}}
    for (pattern, _, size), seconds in probe.report.times_s.items():
        times[pattern][size] = statistics.median(seconds)
    return times


def test_messages_to_256_mib_and_all_reduces_to_1_gib_are_measured(speeds: Callable[[Speeds], None]) -> None:
    speeds(replace(SPEEDS, message_bytes_per_s=25e9))
    for times in run_ranks(_times_by_size):
        for pattern, largest, kernels in (("p2p", 256 * MIB, 2), ("all_reduce", GIB, 1)):
            assert max(times[pattern]) == largest
            told_s = {
                size: SPEEDS.message_s + size / 25e9 + kernels * SPEEDS.kernel_s for size in times[pattern]
            }
            assert times[pattern] == pytest.approx(told_s, rel=0.02)


def _left(rank: int, count: int, meeting: str) -> list[str]:
    sent: list[object] = []

    def fails(_group: object = None) -> None:
        raise RuntimeError("NCCL aborted")

    torch.cuda.set_device(rank)
    plan = LinkOptions((KIB,), (KIB,), (KIB,), overlap_rounds=1).plan(
        rank, count, ((0, 1),), ((0, 1),), meeting
    )
    before = dist.destroy_process_group
    dist.destroy_process_group = fails  # type: ignore[assignment]
    try:
        send_probe(SimpleNamespace(send=sent.append), available_devices("cuda")[rank], plan)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group = before
    return [type(message).__name__ for message in sent]


def test_what_was_measured_is_sent_before_the_group_is_left(speeds: Callable[[Speeds], None]) -> None:
    speeds(SPEEDS)
    assert run_ranks(_left) == [["ProbeReport"]] * 2


def _joined(rank: int, count: int, meeting: str) -> RankClock:
    torch.cuda.set_device(rank)
    join_process_group(f"cuda:{rank}", 30.0, init_method=f"file://{meeting}", rank=rank, world_size=count)
    return RankClock(available_devices("cuda")[rank])


def _shares(rank: int, count: int, meeting: str) -> list[float]:
    overlaps = measure_overlaps(_joined(rank, count, meeting), rank, count, 1)
    assert {pattern for _, pattern in overlaps} == {"p2p", "all_reduce"}
    return [
        communication_s / compute_s
        for rounds in overlaps.values()
        for compute_s, communication_s, _ in rounds
    ]


@pytest.mark.parametrize("bytes_per_s", [12e9, 450e9])
def test_communication_is_a_good_part_of_the_computation_beside_it(
    speeds: Callable[[Speeds], None], bytes_per_s: float
) -> None:
    speeds(replace(SPEEDS, message_bytes_per_s=bytes_per_s))
    for shares in run_ranks(_shares):
        assert all(0.3 <= share <= 0.6 for share in shares)


def _late(rank: int, count: int, meeting: str) -> list[float]:
    clock = _joined(rank, count, meeting)
    value = clock.buffer(4)

    def late() -> None:
        time.sleep(0.02 * rank)  # longer than the first sleep lasts

    def work() -> None:
        dist.all_reduce(value)

    return [clock.seconds(work, clock.meet, clock.everywhere, before=late) for _ in range(3)]


def test_that_a_host_is_late_is_in_no_rank_s_time(speeds: Callable[[Speeds], None]) -> None:
    speeds(SPEEDS)
    for times in run_ranks(_late):
        assert times == pytest.approx([SPEEDS.message_s] * 3, rel=0.02)


def _joined_without_a_sleep(rank: int, count: int, meeting: str) -> tuple[RankClock, RankClock]:
    """Return a rank's clock and a planted one."""
    clock = _joined(rank, count, meeting)
    planted = RankClock(clock.device)
    planted._timer = NeverAsleep(torch.device(clock.device.torch_name))  # type: ignore[assignment]
    return clock, planted


def _times_by_both(rank: int, count: int, meeting: str) -> list[dict[Pattern, float]]:
    plan = LinkOptions((KIB,), (KIB,), ()).plan(rank, count, ((0, 1),), ((0, 1),))
    medians = []
    for clock in _joined_without_a_sleep(rank, count, meeting):
        probe = ProbeRank(clock.device, plan)
        probe.clock = clock
        probe._measure_pair((0, 1))
        probe.measure_collectives()
        times = probe.report.times_s.items()
        medians.append({pattern: statistics.median(seconds) for (pattern, _, _), seconds in times})
    return medians


def test_a_planted_clock_without_a_sleep_reads_the_host_s_time_in_messages(
    speeds: Callable[[Speeds], None],
) -> None:
    speeds(SPEEDS)
    message_s = SPEEDS.message_s + KIB / SPEEDS.message_bytes_per_s
    told_s = {"p2p": message_s + 2 * SPEEDS.kernel_s, "all_reduce": message_s + SPEEDS.kernel_s}
    for read_s, planted_s in run_ranks(_times_by_both):
        assert read_s == pytest.approx(told_s, rel=0.02)
        assert all(planted_s[pattern] > 2 * seconds for pattern, seconds in told_s.items())


def _factors_by_both(rank: int, count: int, meeting: str) -> list[list[float]]:
    contention.OF_GPUS = OverlapSizes(matrix_size=64, compute_s=2e-3, size_bytes=MIB, buffers=4)
    overlaps = [
        measure_overlaps(clock, rank, count, 1) for clock in _joined_without_a_sleep(rank, count, meeting)
    ]
    return [
        [contention_factor(rounds) * MESSAGES_AT_ONCE for rounds in of_clock.values()]
        for of_clock in overlaps
    ]


def test_a_planted_clock_without_a_sleep_takes_the_issuing_of_messages_for_contention(
    speeds: Callable[[Speeds], None],
) -> None:
    lost = 0.1
    speeds(replace(SPEEDS, contention=lost))
    for factors, planted in run_ranks(_factors_by_both):
        assert factors == pytest.approx([lost] * 4, rel=0.02)
        assert all(factor > 5 * lost for factor in planted)
