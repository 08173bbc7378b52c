"""Prices of collectives against closed formulas of the alpha-beta model, hand-computed values, and a slow reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from graph.collectives import CollectiveKind
from graph.topology import DeviceKind, Link, Topology, local_topology
from search.cost.collective_cost import CollectivePrice, Prices
from search.cost.cost_table import Origin
from search.cost.link_costs import COLLECTIVE_KINDS, HALVES, ROOTED, Curve, LinkCosts
from search.simulate.arrays import ResourceSetStore
from tests.reference import links as reference
from tests.search.builders import all_reduces, cluster, device_kind

ALPHA, BANDWIDTH = 2e-6, 1e9
BYTES = 1_000_000


def mesh(count: int) -> Topology:
    """Every pair of devices has its own link."""
    return local_topology(count, device_kind(), BANDWIDTH, ALPHA)


def collective_price(
    topology: Topology,
    members: Sequence[int],
    costs: LinkCosts,
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
    root: int | None = None,
) -> CollectivePrice:
    return Prices(topology, costs).of(members, kind, root)


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
    gather = collective_price(bus, range(3), LinkCosts(), CollectiveKind.ALL_GATHER)
    (line,) = gather.lines
    assert line == pytest.approx((2 * ALPHA, 2 / 3 * 3 / BANDWIDTH))


def test_slowest_hop_counts() -> None:
    topology = cluster()
    within = collective_price(topology, range(4), LinkCosts())
    across = collective_price(topology, range(2, 6), LinkCosts())
    assert across.duration_ns(BYTES) > within.duration_ns(BYTES)


def test_measured_sizes_take_precedence_over_formulas() -> None:
    costs = all_reduces({3: (0.5, 1e-3)}, transfers=Origin.ESTIMATED)
    measured = collective_price(mesh(4), (0, 1, 3), costs)
    assert measured.duration_ns(1000) == 1_500_000_000
    assert measured.origin is Origin.MEASURED
    assert collective_price(mesh(4), range(4), costs).origin is Origin.ESTIMATED


@pytest.mark.parametrize("kind", CollectiveKind)
def test_each_measured_kind_takes_precedence_over_formulas_and_halves(kind: CollectiveKind) -> None:
    lines = {(one, 4): Curve.line(0.5 + place, 1e-3) for place, one in enumerate(CollectiveKind)}
    root = 0 if kind in ROOTED else None
    price = collective_price(mesh(4), range(4), LinkCosts(lines), kind, root)
    assert price.duration_ns(1000) == (COLLECTIVE_KINDS.index(kind) * 1_000 + 1_500) * 10**6
    assert price.origin is Origin.MEASURED
    assert price.links == collective_price(mesh(4), range(4), LinkCosts(), kind, root).links


def test_what_just_these_devices_took_takes_precedence_over_what_as_many_did() -> None:
    reduction = CollectiveKind.ALL_REDUCE
    costs = LinkCosts({(reduction, 2): Curve.line(2.0, 0.0)}, {(reduction, (0, 3)): Curve.line(1.0, 0.0)})
    assert collective_price(mesh(4), (0, 3), costs).duration_ns(8) == 10**9
    assert collective_price(mesh(4), (3, 0), costs).duration_ns(8) == 10**9
    assert collective_price(mesh(4), (0, 1), costs).duration_ns(8) == 2 * 10**9


@pytest.mark.parametrize("kind", CollectiveKind)
def test_a_formula_over_measured_links_is_an_estimate(kind: CollectiveKind) -> None:
    root = 0 if kind in ROOTED else None
    for links, formula in [
        (Origin.MEASURED, Origin.ESTIMATED),
        (Origin.ESTIMATED, Origin.ESTIMATED),
        (Origin.DATASHEET, Origin.DATASHEET),
    ]:
        price = collective_price(mesh(4), range(4), LinkCosts(transfers=links), kind, root)
        assert price.origin is formula


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_meets_its_points_and_is_straight_between_them(seed: int) -> None:
    generator = random.Random(seed)
    sizes = sorted(generator.sample(range(1, 10**6), 5))
    times = sorted(generator.uniform(1e-5, 1.0) for _ in sizes)
    curve = Curve.through(dict(zip(sizes, times, strict=True)))
    for size in generator.sample(range(2 * 10**6), 200):
        below = [place for place in range(5) if sizes[place] <= size]
        first = min(below[-1], 3) if below else 0
        slope = (times[first + 1] - times[first]) / (sizes[first + 1] - sizes[first])
        expected_s = times[first] + (size - sizes[first]) * slope if below else times[0]
        assert curve.seconds(size) == pytest.approx(expected_s, rel=1e-9)
        assert curve.scaled(0.5).seconds(size) == pytest.approx(0.5 * expected_s, rel=1e-9)
        assert curve.later(2.0).seconds(size) == pytest.approx(expected_s + 2.0, rel=1e-9)


def test_a_smaller_message_never_takes_more_than_a_larger_one_that_was_measured() -> None:
    # The first was disturbed.
    curve = Curve.through({10: 2.0, 20: 1.0, 40: 4.0})
    times = [curve.seconds(size) for size in (0, 10, 15, 20, 30, 40, 60)]
    assert times == [1.0, 1.0, 1.0, 1.0, 2.5, 4.0, 7.0]


@pytest.mark.parametrize("seed", range(20))
def test_many_measured_times_at_once_are_those_of_each_curve_to_the_nanosecond(seed: int) -> None:
    generator = random.Random(seed)
    topology = mesh(4)
    links = random_costs(generator)
    store = ResourceSetStore(topology, links)
    kinds = [kind for kind in CollectiveKind if kind not in ROOTED]
    sets = [
        store.device_set(members, kind) for kind in kinds for members in ((0, 1), (0, 1, 2), (0, 1, 2, 3))
    ]
    sizes = [generator.randrange(10 ** generator.randint(1, 9)) for _ in sets]
    expected = [one.price.duration_ns(size) for one, size in zip(sets, sizes, strict=True)]
    numbers = [one.number for one in sets]
    assert store.durations_ns(numbers, np.array(sizes)).tolist() == expected


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_gather_and_scatter_are_half_an_all_reduce(kind: CollectiveKind, size: int) -> None:
    price = collective_price(mesh(size), range(size), LinkCosts(), kind)
    steps = {4: 2, 8: 3}.get(size, size - 1)
    expected_s = steps * ALPHA + BYTES * (size - 1) / (size * BANDWIDTH)
    assert price.duration_ns(BYTES) == round(expected_s * 1e9)
    assert price.links == collective_price(mesh(size), range(size), LinkCosts()).links


@pytest.mark.parametrize("size", [3, 4, 7])
def test_all_to_all_takes_a_step_for_every_other_device_and_holds_all_links(size: int) -> None:
    price = collective_price(mesh(size), range(size), LinkCosts(), CollectiveKind.ALL_TO_ALL)
    expected_s = (size - 1) * (ALPHA + BYTES / size / BANDWIDTH)
    assert price.duration_ns(BYTES) == round(expected_s * 1e9)
    assert len(price.links) == size * (size - 1)


@pytest.mark.parametrize("kind", ROOTED)
@pytest.mark.parametrize(("size", "steps"), [(3, 2), (4, 2), (5, 3), (8, 3)])
@pytest.mark.parametrize("root", [0, 2])
def test_a_small_broadcast_is_a_tree_a_large_one_is_scattered_and_gathered(
    kind: CollectiveKind, size: int, steps: int, root: int
) -> None:
    price = collective_price(mesh(size), range(size), LinkCosts(), kind, root)
    assert price.duration_ns(8) == round(steps * (ALPHA + 8 / BANDWIDTH) * 1e9)
    share = (size - 1) / size
    large_s = (steps + size - 1) * ALPHA + 2 * share * BYTES / BANDWIDTH
    tree_s = steps * (ALPHA + BYTES / BANDWIDTH)
    assert price.duration_ns(BYTES) == round(min(large_s, tree_s) * 1e9)


def test_a_tree_to_the_root_goes_the_links_the_other_way() -> None:
    """Links out of device 0 are slow; three devices, by hand: 0 to 2 and then 0 to 1, or back."""
    base = mesh(3)
    slow = tuple(
        Link(link.name, link.kind, BANDWIDTH / 10 if base.routes[0, 1] == (place,) else BANDWIDTH, ALPHA)
        for place, link in enumerate(base.links)
    )
    topology = Topology(base.name, base.kinds, base.devices, slow, base.routes)
    out = collective_price(topology, range(3), LinkCosts(), CollectiveKind.BROADCAST, 0)
    back = collective_price(topology, range(3), LinkCosts(), CollectiveKind.REDUCE, 0)
    tree_s = 2 * ALPHA + 8 / BANDWIDTH + 80 / BANDWIDTH
    assert out.duration_ns(8) == round(tree_s * 1e9)
    assert back.duration_ns(8) == round((2 * ALPHA + 16 / BANDWIDTH) * 1e9)


def test_a_measured_all_reduce_scales_its_halves_and_says_nothing_of_others() -> None:
    costs = all_reduces({4: (0.5, 1e-3)}, transfers=Origin.MEASURED)
    for kind in HALVES:
        price = collective_price(mesh(4), range(4), costs, kind)
        assert price.duration_ns(1000) == 750_000_000
        assert price.origin is Origin.ESTIMATED
    for kind, root in [*((kind, 0) for kind in ROOTED), (CollectiveKind.ALL_TO_ALL, None)]:
        price = collective_price(mesh(4), range(4), costs, kind, root)
        assert price.duration_ns(1000) < 1_000_000
        assert price.origin is Origin.ESTIMATED


def test_a_root_must_be_named() -> None:
    with pytest.raises(ValueError, match="no root given"):
        collective_price(mesh(3), range(3), LinkCosts(), CollectiveKind.BROADCAST)


def test_in_all_collectives_but_broadcast_and_reduce_every_device_is_the_end_of_two_messages() -> None:
    topology = mesh(4)
    store = ResourceSetStore(topology, LinkCosts())
    devices = routes = len(topology.devices)
    expected = [1] * (devices + routes**2)
    for kind in CollectiveKind:
        one_way = kind in (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
        store.device_set((0, 1, 3), kind, 1 if one_way else None)
        expected.append(1 if one_way else 2)
    assert store.arrays().flows.tolist() == expected


def random_topology(generator: random.Random) -> Topology:
    """Return up to nine devices; a route is any one to three of a few links, of unequal speeds."""
    base = mesh(generator.randint(2, 9))
    links = tuple(
        Link(f"l{place}", "pcie", generator.uniform(0.1, 2) * BANDWIDTH, generator.uniform(0, 3) * ALPHA)
        for place in range(generator.randint(3, 12))
    )
    routes = {
        pair: tuple(generator.sample(range(len(links)), generator.randint(1, 3)))
        for pair in sorted(base.routes)
    }
    return Topology(base.name, base.kinds, base.devices, links, routes)


def random_costs(generator: random.Random) -> LinkCosts:
    """Return measured curves, of some kinds and sizes and of some groups of their own."""

    def curve() -> Curve:
        if generator.random() < 0.3:
            return Curve.line(generator.uniform(0, 1e-4), generator.uniform(0, 5e-9))
        sizes = generator.sample(range(1, 10**7), generator.randint(2, 6))
        return Curve.through({size: generator.uniform(1e-5, 1e-1) for size in sizes})

    return LinkCosts(
        {(kind, generator.randint(2, 5)): curve() for kind in CollectiveKind if generator.random() < 0.5},
        {
            (kind, (0, generator.randint(1, 3))): curve()
            for kind in CollectiveKind
            if generator.random() < 0.5
        },
        generator.choice(tuple(Origin)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_prices_are_those_of_the_reference_to_the_last_bit_and_grow_with_the_bytes(seed: int) -> None:
    generator = random.Random(seed)
    topology = random_topology(generator)
    costs = random_costs(generator)
    prices = Prices(topology, costs)
    for _ in range(20):
        count = generator.randint(2, len(topology.devices))
        members = sorted(generator.sample(range(len(topology.devices)), count))
        kind = generator.choice(tuple(CollectiveKind))
        root = generator.choice(members) if kind in ROOTED else None
        expected = reference.collective_price(topology, members, costs, kind, root)
        price = prices.of(members, kind, root)
        assert price == expected
        times = [price.duration_ns(size) for size in (0, 1, 1000, 10**5, 10**7, 10**9)]
        assert times == sorted(times)
