"""The fit of links on synthetic samples, and real probes between processes."""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import profiler.link_worker as link_worker
from graph.errors import CostError, RuntimeFailure, UsageError
from graph.topology import local_topology
from profiler.devices import PhysicalDevice, available_devices, cpu_devices
from profiler.fits import LinkFit, fit_link
from profiler.link_patterns import (
    COLLECTIVE_PATTERNS,
    SUCCESSIVE,
    SUCCESSIVE_SUMS,
    Participant,
    Pattern,
    prepare,
)
from profiler.link_worker import (
    FEWEST,
    HUGE_BYTES,
    HUGE_FEWEST,
    ExchangeTime,
    Members,
    ProbePlan,
    ProbeRank,
    ProbeReport,
    process_group,
)
from profiler.link_worker import probe as probe_as_rank
from profiler.links import (
    KIB,
    MIB,
    LinkMeasurement,
    LinkOptions,
    LinkProbe,
    contention_factor,
    groups_to_measure,
    measurement,
    pairs_to_measure,
    probe_links,
    summarize,
)
from profiler.others import OthersMeter
from profiler.processes import DeviceProcess
from tests.profiler.kinds import datasheet_kind, slowest_link

# Computes on one core until it is ended.
BUSY = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("ready", flush=True)
while True:
    sum(range(10_000))
"""
SIZES = [2**power for power in range(10, 25, 2)]
QUICK = LinkOptions(
    p2p_sizes=(1024, 65536),
    all_reduce_sizes=(1024, 65536),
    exchange_sizes=(1024,),
    limit_s=60.0,
    most_again=0,
)


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_fit_recovers_latency_and_bandwidth(latency_s: float, bandwidth: float) -> None:
    fit = fit_link(SIZES, [latency_s + size / bandwidth for size in SIZES])
    for size in SIZES:
        assert fit.time_s(size) == pytest.approx(latency_s + size / bandwidth, rel=1e-6)
    assert fit.residual < 1e-6


def test_one_disturbed_sample_does_not_move_the_line() -> None:
    times = [1e-5 + size / 1e9 for size in SIZES]
    times[3] *= 50
    fit = fit_link(SIZES, times)
    assert fit.latency_s == pytest.approx(1e-5)
    assert fit.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert fit.residual == pytest.approx((49 / 50) / len(SIZES))


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1.0)), min_size=1, max_size=6))
def test_fit_is_no_worse_than_any_line_of_a_grid(points: list[tuple[int, float]]) -> None:
    sizes, times = zip(*points, strict=True)
    fit = fit_link(sizes, times)
    assert fit.latency_s >= 0
    assert fit.bandwidth_bytes_per_s > 0
    for latency in (0.0, 1e-6, 1e-4, 1e-2, 0.5):
        for bandwidth in (1e3, 1e5, 1e7, 1e9):
            other = LinkFit(latency, bandwidth, 0.0)
            error = sum(abs(other.time_s(size) - time) / time for size, time in points) / len(points)
            assert fit.residual <= error + 1e-9


@pytest.mark.parametrize(
    ("sizes", "times"), [((), ()), ((1, 2), (1.0,)), ((1,), (0.0,)), ((0,), (1.0,)), ((1,), (float("nan"),))]
)
def test_unusable_points_are_refused(sizes: tuple[int, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(CostError, match="link fit: "):
        fit_link(sizes, times)


def test_measurement_keeps_samples_and_fits_medians() -> None:
    taken = {1000: [3.0, 1.0, 2.0], 3000: [4.0, 3.0, 9.0]}
    link = measurement("p2p", (0, 1), taken)
    assert [(sample.minimum_s, sample.median_s) for sample in link.samples] == [(1.0, 2.0), (3.0, 4.0)]
    assert link.samples[0].samples_s == (3.0, 1.0, 2.0)
    assert (link.latency_s, link.bandwidth_bytes_per_s) == pytest.approx((1.0, 1000.0))


def test_contention_is_the_extra_time_a_second_of_each_of_two_messages() -> None:
    assert contention_factor([(0.1, 0.05, 0.18), (0.11, 0.06, 0.175)]) == pytest.approx(0.75)
    assert contention_factor([(0.2, 0.05, 0.19)]) == 0.0


def test_slowest_pair_stands_for_messages_and_each_pair_for_itself() -> None:
    def link(members: tuple[int, int], bandwidth: float) -> LinkMeasurement:
        return LinkMeasurement("p2p", members, (), 1e-6, bandwidth, 0.0)

    probe = LinkProbe((link((0, 1), 5e9), link((0, 2), 1e9), link((1, 2), 5e9)), (0.5, 0.7, 0.1))
    assert probe.contention == 0.5
    assert slowest_link(probe, "p2p").members == (0, 2)
    topology = local_topology(3, datasheet_kind("K80"), 1e9, 1e-6, probe.contention, measured=probe.pairs)
    assert topology.transfer_time_s(1, 0, 10**9) == pytest.approx(0.2, rel=1e-4)
    assert topology.transfer_time_s(2, 0, 10**9) == pytest.approx(1.0, rel=1e-4)


def test_all_pairs_of_gpus_and_one_of_cores_are_measured() -> None:
    gpus = [PhysicalDevice("cuda", index, datasheet_kind("K80")) for index in range(3)]
    assert pairs_to_measure(gpus) == ((0, 1), (0, 2), (1, 2))
    assert pairs_to_measure(cpu_devices(3)) == ((0, 1),)


def test_groups_are_powers_of_two_and_all_and_of_gpus_beside_each_other_and_far_apart() -> None:
    gpus = [PhysicalDevice("cuda", index, datasheet_kind("K80")) for index in range(8)]
    assert groups_to_measure(cpu_devices(2)) == ((0, 1),)
    assert groups_to_measure(cpu_devices(6)) == ((0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5))
    assert groups_to_measure(gpus[:2]) == ((0, 1),)
    assert groups_to_measure(gpus) == (
        *((0, 1), (2, 3), (4, 5), (6, 7), (0, 4)),
        *((0, 1, 2, 3), (4, 5, 6, 7), (0, 2, 4, 6)),
        tuple(range(8)),
    )


def test_one_device_has_no_links() -> None:
    with pytest.raises(UsageError, match=r"links: 1 devices \[cpu:0\], must be two or more"):
        probe_links(cpu_devices(1))


def test_two_probes_at_once_measure_every_size() -> None:
    probes: list[LinkProbe] = []

    def run() -> None:
        probes.append(probe_links(cpu_devices(2), QUICK))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(probes) == 2
    for probe in probes:
        assert [link.pattern for link in probe.links] == ["p2p", *COLLECTIVE_PATTERNS]
        for link in probe.links:
            assert link.members == (0, 1)
            sizes = [1024, 65536] if link.pattern in ("p2p", "all_reduce") else [1024]
            assert [sample.size_bytes for sample in link.samples] == sizes
            assert all(FEWEST <= len(sample.samples_s) <= 30 for sample in link.samples)
            assert all(0 < sample.minimum_s <= sample.median_s for sample in link.samples)
            assert link.bandwidth_bytes_per_s > 0
        assert probe.contention >= 0
        assert (probe.exchange, probe.overhead_s, probe.issue_s) == (None, 0.0, None)


@pytest.fixture(scope="module")
def of_three() -> LinkProbe:
    """A probe of three devices; `moved_by_patterns` is what its ranks do at last."""
    return probe_links(cpu_devices(3), QUICK, moved_by_patterns)


def test_what_all_ranks_do_together_at_last_is_in_the_probe(of_three: LinkProbe) -> None:
    assert of_three.overhead_s == pytest.approx(RIGHT - slowest_link(of_three, "p2p").latency_s)


def test_three_devices_are_measured_together_and_two_of_them(of_three: LinkProbe) -> None:
    assert len(of_three.contentions) == 3
    measured = {(link.pattern, link.members) for link in of_three.links}
    groups = {(pattern, members) for pattern in COLLECTIVE_PATTERNS for members in ((0, 1), (0, 1, 2))}
    assert measured == groups | {("p2p", (0, 1))}
    assert slowest_link(of_three, "all_reduce").group_size == 3
    assert slowest_link(of_three, "p2p").group_size == 2


def test_what_patterns_do_is_what_they_are_called(of_three: LinkProbe) -> None:
    """In three real ranks N bytes arrive where they must, and sums are sums."""
    assert of_three.exchange == ExchangeTime(RIGHT)


def test_each_rank_times_the_groups_that_it_is_in_and_without_time_the_fewest_repetitions() -> None:
    """Groups that overlap and groups that do not, in processes of their own."""
    options = LinkOptions(
        p2p_sizes=(1024,), all_reduce_sizes=(1024,), exchange_sizes=(1024,), limit_s=60.0, most_again=0
    )
    groups = ((0, 1), (2, 3), (0, 2), (0, 1, 2, 3))
    reports = run_plans(options, ((0, 3), (1, 2)), groups)
    for rank, report in enumerate(reports):
        for pattern in COLLECTIVE_PATTERNS:
            assert [members for known, members, _ in report.times_s if known == pattern] == [
                members for members in groups if rank in members
            ]
    links = summarize(reports).links
    assert [link.members for link in links if link.pattern == "p2p"] == [(0, 3), (1, 2)]
    assert {link.members for link in links if link.pattern == "reduce"} == set(groups)
    assert all(FEWEST <= len(sample.samples_s) <= 30 for link in links for sample in link.samples)
    assert {len(sample.samples_s) for link in links if link.pattern != "p2p" for sample in link.samples} == {
        FEWEST
    }


def test_of_sizes_that_take_too_long_or_too_much_memory_the_first_ends_a_pattern() -> None:
    sizes = (1024, MIB, HUGE_BYTES + 1024, 2**50, 2**51)
    options = LinkOptions(
        p2p_sizes=sizes, all_reduce_sizes=sizes, exchange_sizes=(1024,), limit_s=60.0, most_again=0
    )
    (first, second) = run_plans(options, ((0, 1),), ((0, 1),))
    assert list(first.times_s) == list(second.times_s)
    for pattern in ("p2p", "all_reduce"):
        times_s = {size: times for (known, _, size), times in first.times_s.items() if known == pattern}
        assert list(times_s) == list(sizes[:3])
        assert len(times_s[HUGE_BYTES + 1024]) == HUGE_FEWEST


def run_plans(
    options: LinkOptions, pairs: tuple[Members, ...], groups: tuple[Members, ...]
) -> list[ProbeReport]:
    """Return what each rank reports of a plan of its own choice of pairs and groups, over gloo."""
    ranks = sorted({rank for group in groups for rank in group})
    devices = cpu_devices(len(ranks))
    with TemporaryDirectory() as folder:
        plans = [
            replace(options.plan(rank, len(ranks), pairs, groups, f"{folder}/meet"), measurement_s=0.0)
            for rank in ranks
        ]
        processes = [
            DeviceProcess(probe_as_rank, device, plan) for device, plan in zip(devices, plans, strict=True)
        ]
        try:
            reports = [process.connection.recv() for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert all(isinstance(report, ProbeReport) for report in reports), reports
    return reports


RIGHT = 3.0


def moved_by_patterns(device: PhysicalDevice) -> ExchangeTime | None:
    """An exercise: every pattern on tensors of ones; it takes RIGHT if all results on all ranks are."""
    import torch
    import torch.distributed as dist

    class Ones(Participant):
        def zeros(self, *sizes: int) -> torch.Tensor:
            return torch.ones(sizes) * (self.rank + 1)

    rank, count, size = dist.get_rank(), dist.get_world_size(), 9600
    whole, part = size // 4, size // 4 // count
    ranks = [float(one + 1) for one in range(count)]
    right = []
    successive = [SUCCESSIVE + text for text in ("library", "ring")]
    for pattern in (*COLLECTIVE_PATTERNS, *successive):
        place = Ones(rank, tuple(range(count)), None, device.torch_name)
        result = prepare(pattern, place, size)(0)
        assert isinstance(result, torch.Tensor)
        expected = {
            "all_reduce": [sum(ranks)] * whole,
            "all_gather": [one for one in ranks for _ in range(part)],
            "reduce_scatter": [sum(ranks)] * part,
            "all_to_all": [one for one in ranks for _ in range(part)],
            "broadcast": [1.0] * whole,
            "reduce": [sum(ranks)] * whole,
            **dict.fromkeys(successive, [sum(ranks)] * whole * SUCCESSIVE_SUMS),
        }[pattern]
        right.append((pattern == "reduce" and rank > 0) or sorted(result.flatten().tolist()) == expected)
    agreed = torch.tensor([float(all(right))])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return ExchangeTime(RIGHT * float(agreed))


def test_probe_past_its_limit_is_given_up() -> None:
    with pytest.raises(RuntimeFailure, match="no answer from cpu:0, cpu:1 in time"):
        probe_links(cpu_devices(2), LinkOptions(limit_s=0.05))


class DisturbedAtFirst(OthersMeter):
    """A meter by which others work beside the links in the first so many of all measurements, and then rest."""

    remaining = 0

    def share(self) -> float | None:
        DisturbedAtFirst.remaining -= 1
        return 1.0 if DisturbedAtFirst.remaining >= 0 else 0.0


def disturbed_at_first(count: int, connection: Connection, device: PhysicalDevice, plan: ProbePlan) -> None:
    """Send the sizes of all-reduces in the order in which they were prepared, those with times, and what stayed."""
    order: list[int] = []

    def preparing(pattern: Pattern, participant: Participant, size: int) -> Callable[[int], object]:
        order.append(size)
        return prepare(pattern, participant, size)

    DisturbedAtFirst.remaining = count
    vars(link_worker).update(
        OthersMeter=DisturbedAtFirst, prepare=preparing, COLLECTIVE_PATTERNS=("all_reduce",)
    )
    with process_group(device, plan):
        rank = ProbeRank(device, plan)
        rank.measure_collectives()
        connection.send((order, list(rank.report.times_s), rank.report.disturbed))


@pytest.mark.parametrize(
    ("first", "most_again", "again", "stays"),
    [
        (3, 3, (KIB, 4 * KIB, KIB), 0),
        (3, 1, (KIB, 4 * KIB), 1),
        (3, 0, (), 2),
        # Others that do not rest are not waited for.
        (1000, 3, (KIB, 4 * KIB), 2),
    ],
)
def test_what_others_disturbed_is_measured_again_after_all_sizes(
    first: int, most_again: int, again: tuple[int, ...], stays: int, tmp_path: Path
) -> None:
    sizes = (KIB, 4 * KIB)
    options = LinkOptions((), sizes, (), limit_s=60.0, most_again=most_again)
    order, timed, disturbed = sent_by_one_rank(partial(disturbed_at_first, first), options, tmp_path)
    assert order == [*sizes, *again]
    assert timed == [("all_reduce", (0,), size) for size in sizes]
    assert len(disturbed) == stays


def sent_by_one_rank(target: Callable[..., None], options: LinkOptions, folder: Path) -> Any:
    """Return what a process sends that is the only rank of a group."""
    (device, *_) = cpu_devices(1)
    process = DeviceProcess(target, device, options.plan(0, 1, (), ((0,),), str(folder / "meet")))
    try:
        return process.connection.recv()
    finally:
        process.kill()


def timed_as_told(
    told_s: Mapping[int, tuple[float, ...]], connection: Connection, device: PhysicalDevice, plan: ProbePlan
) -> None:
    """Send how often each size of all-reduces was timed, by a clock that tells the seconds of each size in turn."""
    sizes: list[int] = []

    def preparing(_pattern: Pattern, _participant: Participant, size: int) -> Callable[[int], object]:
        sizes.append(size)
        return lambda repetition: repetition

    def told(work: Callable[[], int], *_: object, **_before: object) -> float:
        of_size = told_s[sizes[-1]]
        return of_size[work() % len(of_size)]

    vars(link_worker).update(prepare=preparing, COLLECTIVE_PATTERNS=("all_reduce",))
    with process_group(device, plan):
        rank = ProbeRank(device, plan)
        rank.clock.seconds = told  # type: ignore[method-assign,assignment]
        rank.measure_collectives()
        connection.send({size: len(times) for (_, _, size), times in rank.report.times_s.items()})


def test_a_size_is_timed_until_its_median_is_known(tmp_path: Path) -> None:
    told_s = {KIB: (1e-3,), 4 * KIB: (1e-3, 2e-3), MIB: (3e-3, 3.1e-3)}
    options = LinkOptions((), tuple(told_s), (), limit_s=60.0, most_again=0)
    counts = sent_by_one_rank(partial(timed_as_told, told_s), options, tmp_path)
    assert (counts[KIB], counts[4 * KIB], counts[MIB]) == (FEWEST, 30, FEWEST)


@pytest.mark.parametrize(
    ("bent_s", "last"), [(0.0, 16 * MIB), (0.06, 64 * MIB)], ids=["straight to 16 MiB", "from 16 MiB on"]
)
def test_large_sizes_are_left_out_where_the_line_already_leads_to_them(
    bent_s: float, last: int, tmp_path: Path
) -> None:
    sizes = (KIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    slope_s, bent_slope_s = 0.1 / (16 * MIB), (0.075 + bent_s) / (12 * MIB)
    told_s = {size: (slope_s * size,) for size in sizes[:2]}
    told_s |= {size: (told_s[4 * MIB][0] + bent_slope_s * (size - 4 * MIB),) for size in sizes[2:]}
    options = LinkOptions((), sizes, (), limit_s=60.0, most_again=0)
    counts = sent_by_one_rank(partial(timed_as_told, told_s), options, tmp_path)
    assert list(counts) == [size for size in sizes if size <= last]


def test_a_process_that_works_on_a_device_all_the_time_is_reported() -> None:
    devices = cpu_devices(2)
    if devices[1].core is None:
        pytest.skip("processes cannot be pinned here")
    with subprocess.Popen([sys.executable, "-c", BUSY, str(devices[1].core)], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        try:
            probe = probe_links(devices, replace(QUICK, most_again=1))
        finally:
            busy.kill()
    assert probe.disturbed == sum(len(link.samples) for link in probe.links)


@pytest.mark.cuda
def test_gpu_links_are_measured() -> None:
    devices = available_devices("cuda")
    if len(devices) < 2:
        pytest.skip("one GPU has no links")
    probe = probe_links(devices)
    for pattern in COLLECTIVE_PATTERNS:
        link = slowest_link(probe, pattern)
        assert link.group_size == len(devices)
        assert link.bandwidth_bytes_per_s > 0
    assert len(probe.pairs) == len(devices) * (len(devices) - 1)


@pytest.mark.cuda
def test_every_pattern_runs_over_nccl_on_one_gpu(tmp_path: Path) -> None:
    """A group of one GPU: no link is measured, but every call is made, timed and waited for as between several."""
    (device, *_) = available_devices("cuda")
    sizes = (KIB, MIB)
    options = LinkOptions(
        p2p_sizes=(), all_reduce_sizes=sizes, exchange_sizes=sizes, limit_s=120.0, most_again=0
    )
    process = DeviceProcess(one_gpu, device, options.plan(0, 1, (), ((0,),), str(tmp_path / "meet")))
    try:
        report = process.connection.recv()
    finally:
        process.kill()
    assert list(report) == [(pattern, (0,), size) for pattern in COLLECTIVE_PATTERNS for size in sizes]
    assert all(min(times) > 0 for times in report.values())


def one_gpu(connection: Connection, device: PhysicalDevice, plan: ProbePlan) -> None:
    """Send the times of a group of one."""
    with process_group(device, plan):
        rank = ProbeRank(device, plan)
        rank.measure_collectives()
        connection.send(rank.report.times_s)
