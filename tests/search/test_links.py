"""Prices of all-reduces against the closed formulas of the alpha-beta model."""

import pytest

from graph.topology import DeviceKind, Link, Topology, local_topology
from search.costs import Origin
from search.links import LinkCosts, collective_price, step_price
from tests.search.builders import cluster, device_kind

ALPHA, BANDWIDTH = 2e-6, 1e9
BYTES = 1_000_000


def mesh(count: int) -> Topology:
    """Every pair of devices has its own link."""
    return local_topology(count, device_kind(), BANDWIDTH, ALPHA)


@pytest.mark.parametrize("size", [3, 5, 6])
def test_ring_on_a_mesh(size: int) -> None:
    price = collective_price(mesh(size), range(size), LinkCosts())
    expected_s = 2 * (size - 1) * ALPHA + 2 * BYTES * (size - 1) / (size * BANDWIDTH)
    assert price.duration_ns(BYTES) == round(expected_s * 1e9)
    assert len(price.links) == size


@pytest.mark.parametrize(("size", "steps"), [(2, 1), (4, 2), (8, 3)])
def test_halving_on_a_mesh_has_fewer_latencies_and_the_same_bytes(size: int, steps: int) -> None:
    price = collective_price(mesh(size), range(size), LinkCosts())
    expected_s = 2 * steps * ALPHA + 2 * BYTES * (size - 1) / (size * BANDWIDTH)
    assert price.duration_ns(BYTES) == round(expected_s * 1e9)


def test_hops_that_share_a_link_share_its_bandwidth() -> None:
    kind = DeviceKind("k", "cpu", (("float32", 1.0),), 1, 1.0, 0.0)
    base = local_topology(3, kind, BANDWIDTH, ALPHA)
    bus = Topology(
        "bus",
        (kind,),
        base.devices,
        (Link("bus", "pcie", BANDWIDTH, ALPHA),),
        dict.fromkeys(base.routes, (0,)),
    )
    assert step_price(bus, [(0, 1), (1, 2), (2, 0)]) == (ALPHA, 3 / BANDWIDTH)


def test_slowest_hop_counts() -> None:
    topology = cluster()
    within = collective_price(topology, range(4), LinkCosts())
    across = collective_price(topology, range(2, 6), LinkCosts())
    assert across.duration_ns(BYTES) > within.duration_ns(BYTES)


def test_measured_sizes_take_precedence_over_formulas() -> None:
    costs = LinkCosts({3: (0.5, 1e-3)}, transfers=Origin.ESTIMATED)
    measured = collective_price(mesh(4), (0, 1, 3), costs)
    assert measured.duration_ns(1000) == 1_500_000_000
    assert measured.origin is Origin.MEASURED
    assert collective_price(mesh(4), range(4), costs).origin is Origin.ESTIMATED
