"""The topology that ranks on several hosts form, from measurements between some of them."""

from __future__ import annotations

import pytest

from app.services.cluster import Member, measured_topology, probed_pairs
from graph.topology import DeviceKind
from profiler.links import LinkMeasurement, LinkProbe
from runtime.ranks import nodes_of

KIND = DeviceKind("core", "cpu", (("float32", 1e9),), 2**30, 1e9, 0.0)


def measurement(pair: tuple[int, int], bandwidth: float, latency: float) -> LinkMeasurement:
    return LinkMeasurement("p2p", pair, (), latency, bandwidth, 0.0)


def test_hosts_are_numbered_as_they_come() -> None:
    assert nodes_of(["b", "b", "a", "c", "a"]) == (0, 0, 1, 2, 1)


def test_two_ranks_of_each_host_and_each_host_with_the_first_are_measured() -> None:
    assert probed_pairs((0, 0, 0, 1, 2, 2)) == ((0, 1), (4, 5), (0, 3), (0, 4))
    assert probed_pairs((0, 1)) == ((0, 1),)


def test_messages_of_a_host_share_its_network_link() -> None:
    ranks = [Member(host, KIND) for host in ("a", "a", "b")]
    probe = LinkProbe((measurement((0, 1), 8e9, 1e-6), measurement((0, 2), 1e9, 3e-5)), 0.25)
    topology = measured_topology(ranks, nodes_of([member.host for member in ranks]), probe)
    assert [(device.node, device.local_index) for device in topology.devices] == [(0, 0), (0, 1), (1, 0)]
    assert topology.transfer_time_s(0, 2, 10**9) == pytest.approx(1 + 3e-5)
    assert topology.transfer_time_s(0, 1, 8 * 10**9) == pytest.approx(1 + 1e-6)
    assert topology.route(0, 2) == topology.route(1, 2)
    assert set(topology.route(0, 2)).isdisjoint(topology.route(2, 0))
    assert topology.contention_of("core") == 0.25
