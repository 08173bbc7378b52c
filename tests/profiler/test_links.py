"""The fit of links on synthetic samples, and a real probe between two processes."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.errors import CostError, RuntimeFailure, UsageError
from graph.topology import local_topology
from profiler.devices import PhysicalDevice, available_devices, cpu_devices
from profiler.fits import LinkFit, fit_link
from profiler.kinds import datasheet_kind
from profiler.links import (
    KIB,
    LARGE_BYTES,
    MIB,
    LinkMeasurement,
    LinkOptions,
    LinkProbe,
    contention_factor,
    measurement,
    pairs_to_measure,
    probe_links,
)

SIZES = [2**power for power in range(10, 25, 2)]
QUICK = LinkOptions(p2p_sizes=(1024, 65536), all_reduce_sizes=(1024, 65536), limit_s=60.0)


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

    probe = LinkProbe((link((0, 1), 5e9), link((0, 2), 1e9), link((1, 2), 5e9)), 0.5)
    assert probe.find("p2p").members == (0, 2)
    topology = local_topology(3, datasheet_kind("K80"), 1e9, 1e-6, probe.contention, measured=probe.pairs)
    assert topology.transfer_time_s(1, 0, 10**9) == pytest.approx(0.2, rel=1e-4)
    assert topology.transfer_time_s(2, 0, 10**9) == pytest.approx(1.0, rel=1e-4)
    with pytest.raises(UsageError, match="all_reduce was not measured"):
        probe.find("all_reduce")


def test_large_messages_have_a_line_of_their_own_where_two_sizes_of_them_were_measured() -> None:
    small = {KIB: [1e-4], 64 * KIB: [1.2e-4], MIB: [5e-4]}
    assert measurement("all_reduce", (0, 1), {**small, LARGE_BYTES: [3e-3]}).large is None
    link = measurement("all_reduce", (0, 1), {**small, LARGE_BYTES: [3e-3], 16 * LARGE_BYTES: [48e-3]})
    assert link.large is not None
    assert link.large.time_s(4 * LARGE_BYTES) == pytest.approx(12e-3)
    assert link.latency_s + 16 * LARGE_BYTES / link.bandwidth_bytes_per_s < 48e-3


def test_all_pairs_of_gpus_and_one_of_cores_are_measured() -> None:
    gpus = [PhysicalDevice("cuda", index, datasheet_kind("K80")) for index in range(3)]
    assert pairs_to_measure(gpus) == ((0, 1), (0, 2), (1, 2))
    assert pairs_to_measure(cpu_devices(3)) == ((0, 1),)


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
        assert [link.pattern for link in probe.links] == ["p2p", "all_reduce"]
        for link in probe.links:
            assert link.members == (0, 1)
            assert [sample.size_bytes for sample in link.samples] == [1024, 65536]
            assert all(len(sample.samples_s) == 30 for sample in link.samples)
            assert all(0 < sample.minimum_s <= sample.median_s for sample in link.samples)
            assert link.bandwidth_bytes_per_s > 0
        assert probe.contention >= 0


def seconds_by_place(device: PhysicalDevice) -> float | None:
    """An exercise: a real all-reduce of all ranks' places."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(device.index + 1)])
    dist.all_reduce(total)
    return float(total) if dist.get_rank() == 0 else None


def test_what_all_ranks_do_together_at_last_is_in_the_probe() -> None:
    probe = probe_links(cpu_devices(3), QUICK, seconds_by_place)
    assert probe.exercise_s == 6.0
    assert probe.overhead_s == pytest.approx(6.0 - probe.find("p2p").latency_s)


def test_three_devices_reduce_together() -> None:
    probe = probe_links(cpu_devices(3), QUICK)
    assert (probe.exercise_s, probe.overhead_s) == (None, 0.0)
    assert probe.find("all_reduce").group_size == 3
    assert probe.find("p2p").group_size == 2


def test_probe_past_its_limit_is_given_up() -> None:
    with pytest.raises(RuntimeFailure, match="no answer from cpu:0, cpu:1 in time"):
        probe_links(cpu_devices(2), LinkOptions(limit_s=0.05))


@pytest.mark.cuda
def test_gpu_links_are_measured() -> None:
    devices = available_devices("cuda")
    if len(devices) < 2:
        pytest.skip("one GPU has no links")
    probe = probe_links(devices[:2])
    assert probe.find("all_reduce").bandwidth_bytes_per_s > 0
