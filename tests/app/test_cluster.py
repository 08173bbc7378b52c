"""The topology that ranks on several hosts form, from measurements between some of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.services.run.cluster import (
    RankDevice,
    measured_links,
    measured_topology,
    probed_algorithms,
    probed_groups,
    probed_pairs,
)
from graph.collective_algorithms import read_algorithm
from graph.topology import DeviceKind
from profiler.links import LinkMeasurement, LinkProbe
from runtime.ranks.ranks import nodes_of
from search.cost.collective_cost import Prices
from search.cost.cost_table import Origin

KIND = DeviceKind("core", "cpu", (("float32", 1e9),), 2**30, 1e9, 0.0)


def message(pair: tuple[int, int], bandwidth: float, latency: float) -> LinkMeasurement:
    return LinkMeasurement("p2p", pair, (), latency, bandwidth, 0.0)


def all_reduce(members: tuple[int, ...], latency: float) -> LinkMeasurement:
    return LinkMeasurement("all_reduce", members, (), latency, 1e9, 0.0)


def test_hosts_are_numbered_as_they_come() -> None:
    assert nodes_of(["b", "b", "a", "c", "a"]) == (0, 0, 1, 2, 1)


def test_two_ranks_of_each_host_and_each_host_with_the_first_are_measured() -> None:
    assert probed_pairs((0, 0, 0, 1, 2, 2)) == ((0, 1), (4, 5), (0, 3), (0, 4))
    assert probed_pairs((0, 1)) == ((0, 1),)


def test_collectives_of_each_host_across_hosts_and_of_all_are_measured() -> None:
    assert probed_groups((0, 0, 0, 1, 2, 2)) == ((0, 1, 2), (4, 5), (0, 3, 4), (0, 1, 2, 3, 4, 5))
    assert probed_groups((0, 1)) == ((0, 1),)


def test_a_group_within_a_host_says_nothing_of_others_of_its_size() -> None:
    ranks = [RankDevice(host, KIND) for host in ("a", "a", "b", "b")]
    probe = LinkProbe(
        (
            message((0, 1), 8e9, 1e-6),
            message((2, 3), 8e9, 1e-6),
            message((0, 2), 1e9, 3e-5),
            all_reduce((0, 1), 1e-3),
            all_reduce((2, 3), 2e-3),
            all_reduce((0, 1, 2, 3), 7e-3),
        ),
        (0.25,) * 4,
    )
    links = measured_links(ranks, probe)
    prices = Prices(measured_topology("hosts", ranks, probe), links.costs)
    assert [prices.of(group).duration_ns(0) for group in ((0, 1), (2, 3), (0, 1, 2, 3))] == [
        1_000_000,
        2_000_000,
        7_000_000,
    ]
    across = prices.of((1, 3))
    assert across.origin is Origin.ESTIMATED
    assert across.duration_ns(0) == 2 * 30_000


def test_measured_algorithms_compete_and_unknown_ones_are_left_out() -> None:
    ranks = [RankDevice(host, KIND) for host in ("a", "a", "b", "b")]
    everyone = (0, 1, 2, 3)
    by_leaders = replace(all_reduce(everyone, 3e-3), pattern="all_reduce/leaders-2x2")
    of_another_version = replace(all_reduce(everyone, 1e-3), pattern="all_reduce/unheard-of")
    inside = (message((0, 1), 8e9, 1e-6), message((2, 3), 8e9, 1e-6))
    measured = (*inside, message((0, 2), 1e9, 3e-5), all_reduce(everyone, 7e-3))
    probe = LinkProbe((*measured, by_leaders, of_another_version), (0.25,) * 4)
    prices = Prices(measured_topology("hosts", ranks, probe), measured_links(ranks, probe).costs)
    assert prices.choices(everyone) == ((0, read_algorithm("leaders-2x2", 4)),)
    assert prices.of(everyone).duration_ns(0) == 3_000_000


def test_all_ranks_algorithms_are_measured_where_hosts_are_alike() -> None:
    assert list(probed_algorithms((0, 0, 1, 1))) == [(0, 1, 2, 3)]
    assert probed_algorithms((0, 0, 1)) == {}
    assert probed_algorithms((0, 1)) == {}


def test_each_hosts_devices_have_the_contention_of_their_kind() -> None:
    other = replace(KIND, name="other core")
    ranks = [RankDevice("a", KIND), RankDevice("a", KIND), RankDevice("b", other)]
    probe = LinkProbe((message((0, 1), 8e9, 1e-6), message((0, 2), 1e9, 3e-5)), (0.2, 0.4, 0.9))
    topology = measured_topology("hosts", ranks, probe)
    assert topology.contention_of("core") == pytest.approx(0.3)
    assert topology.contention_of("other core") == 0.9


def test_messages_of_a_gpu_within_its_host_share_its_ports() -> None:
    gpu = replace(KIND, processor="cuda")
    ranks = [RankDevice(host, gpu) for host in ("a", "a", "a", "b")]
    probe = LinkProbe((message((0, 1), 8e9, 1e-6), message((0, 3), 1e9, 3e-5)), (0.25,) * 4)
    topology = measured_topology("hosts", ranks, probe)
    assert set(topology.route(0, 1)) & set(topology.route(0, 2))
    assert set(topology.route(0, 1)) & set(topology.route(2, 1))
    assert set(topology.route(0, 1)).isdisjoint(topology.route(1, 2))
    assert topology.transfer_time_s(0, 1, 8 * 10**9) == pytest.approx(1 + 1e-6)
    # Over the network their host's link counts.
    assert set(topology.route(0, 3)).isdisjoint(topology.route(0, 1))


def test_messages_of_a_host_share_its_network_link() -> None:
    ranks = [RankDevice(host, KIND) for host in ("a", "a", "b")]
    probe = LinkProbe((message((0, 1), 8e9, 1e-6), message((0, 2), 1e9, 3e-5)), (0.25, 0.25, 0.25))
    topology = measured_topology("hosts", ranks, probe)
    assert [(device.node, device.local_index) for device in topology.devices] == [(0, 0), (0, 1), (1, 0)]
    assert topology.transfer_time_s(0, 2, 10**9) == pytest.approx(1 + 3e-5)
    assert topology.transfer_time_s(0, 1, 8 * 10**9) == pytest.approx(1 + 1e-6)
    assert topology.route(0, 2) == topology.route(1, 2)
    assert set(topology.route(0, 2)).isdisjoint(topology.route(2, 0))
    assert topology.contention_of("core") == 0.25
