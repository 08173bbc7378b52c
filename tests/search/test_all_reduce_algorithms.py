"""Prices of an all-reduce's algorithms: the specification's figures, a slow reference, and the choice among them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from graph.collective_algorithms import (
    BY_LIBRARY,
    AllReduceAlgorithm,
    algorithm_for,
    blueconnect,
    read_algorithm,
)
from graph.collectives import CollectiveKind
from graph.strategy import Strategy
from graph.topology import Device, Link, Topology, local_topology
from graph.training import Training
from search.bounds.lower_bound import lower_bound
from search.cost.collective_cost import Prices
from search.cost.cost_table import CostTable, Origin
from search.cost.link_costs import Curve, LinkCosts, cheapest
from search.problem import Problem
from search.simulate.simulator import simulate
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import data_parallel
from tests.reference import links as reference
from tests.search.builders import MadeUpCosts, branches, device_kind, local_calls, two_layers

MB = 1_000_000


def hosts(
    nodes: int,
    inside: int,
    *,
    within: tuple[float, float] = (150e9, 3e-6),
    network: tuple[float, float] = (25e9, 8e-6),
) -> Topology:
    """Nodes of as many devices: a link a pair inside, one NIC a node; (bytes per second, seconds of a message)."""
    count, kind = nodes * inside, device_kind()
    links = [
        Link(f"nic/{node}/{way}", "nic", network[0], network[1] / 2)
        for node in range(nodes)
        for way in ("out", "in")
    ]
    routes: dict[tuple[int, int], tuple[int, ...]] = {}
    for source in range(count):
        for to in range(count):
            if source // inside != to // inside:
                routes[source, to] = (2 * (source // inside), 2 * (to // inside) + 1)
            elif source != to:
                routes[source, to] = (len(links),)
                links.append(Link(f"nvlink/{source}->{to}", "nvlink", *within))
    devices = tuple(Device(d, kind.name, d // inside, d % inside) for d in range(count))
    return Topology("hosts", (kind,), devices, tuple(links), routes)


def factorizations(number: int) -> list[tuple[int, ...]]:
    """Return all ways to write a number as a product of ordered factors of two or more; of 1 the empty one."""
    if number == 1:
        return [()]
    return [
        (first, *rest)
        for first in range(2, number + 1)
        if number % first == 0
        for rest in factorizations(number // first)
    ]


def aligned(topology: Topology) -> list[AllReduceAlgorithm]:
    """Return leaders, and BlueConnect along each split of the devices of a node and of the nodes."""
    nodes = topology.node_count
    inside = len(topology.devices) // nodes
    composed = [blueconnect((*a, *b)) for a in factorizations(inside) for b in factorizations(nodes)]
    return [*composed, AllReduceAlgorithm("leaders", (inside, nodes))]


def line_of(topology: Topology, algorithm: AllReduceAlgorithm) -> tuple[float, float]:
    """Return latency and seconds per byte of an algorithm over all devices, as priced where it is chosen."""
    members = tuple(range(len(topology.devices)))
    curve = Prices(topology, LinkCosts(chosen={members: algorithm})).of(members).curve
    assert curve is not None
    (segment,) = curve.segments
    return segment[1], segment[2]


@pytest.mark.parametrize(
    ("levels", "steps", "of_levels"),
    [((8,), 14, [1.75]), ((4, 2), 8, [1.5, 0.25]), ((2, 4), 8, [1, 0.75]), ((2, 2, 2), 6, [1, 0.5, 0.25])],
)
def test_steps_and_bytes_of_eight_devices_are_those_of_the_specification(
    levels: tuple[int, ...], steps: int, of_levels: list[float]
) -> None:
    alpha, bandwidth = 2e-6, 1e9
    latency_s, s_per_byte = line_of(local_topology(8, device_kind(), bandwidth, alpha), blueconnect(levels))
    assert latency_s == pytest.approx(steps * alpha)
    assert s_per_byte * bandwidth == pytest.approx(sum(of_levels))
    assert sum(of_levels) == 2 * 7 / 8


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_every_ordered_factorization_sends_as_many_bytes_as_a_ring(size: int) -> None:
    topology = local_topology(size, device_kind(), 1e9, 2e-6)
    for levels in factorizations(size):
        latency_s, s_per_byte = line_of(topology, blueconnect(levels))
        assert s_per_byte == pytest.approx(2 * (size - 1) / size / 1e9)
        assert latency_s == pytest.approx(2 * sum(length - 1 for length in levels) * 2e-6)


@pytest.mark.parametrize(
    ("nodes", "flat_ms", "leaders_ms", "blueconnect_ms"), [(2, 7.74, 5.39, 5.23), (64, 16.16, 10.26, 10.09)]
)
def test_100_mb_over_nodes_of_eight_gpus_take_what_the_specification_says(
    nodes: int, flat_ms: float, leaders_ms: float, blueconnect_ms: float
) -> None:
    topology = hosts(nodes, 8)
    times_ms = []
    for name in ("ring", f"leaders-8x{nodes}", f"blueconnect-8x{nodes}"):
        latency_s, s_per_byte = line_of(topology, read_algorithm(name, 8 * nodes))
        times_ms.append(1e3 * (latency_s + 100 * MB * s_per_byte))
    assert times_ms == pytest.approx([flat_ms, leaders_ms, blueconnect_ms], abs=0.006)


def random_hosts(draw: random.Random) -> Topology:
    nodes, inside = draw.choice([(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 4)])
    topology = hosts(nodes, inside)
    links = tuple(
        replace(link, bandwidth_bytes_per_s=draw.uniform(1e8, 1e10), latency_s=draw.uniform(1e-6, 1e-4))
        for link in topology.links
    )
    return replace(topology, links=links)


@pytest.mark.parametrize("seed", range(40))
def test_prices_are_those_of_the_slow_reference(seed: int) -> None:
    topology = random_hosts(random.Random(seed))
    members = range(len(topology.devices))
    for algorithm in aligned(topology):
        expected = reference.all_reduce_line(topology, members, algorithm)
        assert line_of(topology, algorithm) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_without_a_choice_the_cheapest_of_the_measured_counts_for_every_size(seed: int) -> None:
    draw = random.Random(seed)
    topology = random_hosts(draw)
    members = tuple(range(len(topology.devices)))
    lines = {
        algorithm: reference.all_reduce_line(topology, members, algorithm) for algorithm in aligned(topology)
    }
    by_library = reference.collective_price(topology, members, LinkCosts()).lines
    measured = {algorithm: Curve.line(*line) for algorithm, line in lines.items()}
    prices = Prices(topology, LinkCosts(algorithms={members: measured}))
    price, choices = prices.of(members), prices.choices(members)
    for size in (1, 1000, *(int(10 ** draw.uniform(0, 9)) for _ in range(50))):
        library_s = min(latency_s + size * slope for latency_s, slope in by_library)
        times_s = {algorithm: latency_s + size * slope for algorithm, (latency_s, slope) in lines.items()}
        times_s[BY_LIBRARY] = library_s
        least_s = min(times_s.values())
        assert price.duration_ns(size) == pytest.approx(1e9 * least_s, abs=1)
        assert times_s[algorithm_for(choices, size)] <= least_s * (1 + 1e-6) + 1e-9
    assert [first for first, _ in choices] == sorted({first for first, _ in choices})


def test_where_nothing_was_measured_it_is_left_to_the_library() -> None:
    topology = hosts(2, 4)
    prices = Prices(topology, LinkCosts())
    for members in [(0, 1, 2, 3), (0, 4), (0, 1, 4, 5), tuple(range(8))]:
        assert prices.choices(members) == ((0, BY_LIBRARY),)
        assert prices.of(members).curve is None


def test_what_is_no_better_than_the_librarys_own_does_not_take_its_place() -> None:
    topology, members = hosts(2, 4, within=(1e9, 1e-6), network=(1e12, 1e-6)), tuple(range(8))
    halving = blueconnect((2, 2, 2))
    same = Curve.line(*reference.all_reduce_line(topology, members, halving))
    # On links that are all alike the library's formula has recursive halving and doubling as well.
    links = LinkCosts(algorithms={members: {halving: same}})
    assert Prices(topology, links).choices(members) == ((0, BY_LIBRARY),)


def test_measured_algorithms_compete_with_what_was_measured_of_the_library_alone() -> None:
    topology, members = hosts(2, 2), (0, 1, 2, 3)
    leaders, halving = read_algorithm("leaders-2x2", 4), blueconnect((2, 2))
    library = {(CollectiveKind.ALL_REDUCE, 4): Curve.through({1000: 1e-3, MB: 10e-3})}
    assert Prices(topology, LinkCosts(library)).choices(members) == ((0, BY_LIBRARY),)
    both = LinkCosts(
        library,
        algorithms={members: {leaders: Curve.line(2e-3, 5e-9), halving: Curve.line(5e-3, 0.0)}},
    )
    prices = Prices(topology, both)
    choices = prices.choices(members)
    assert [algorithm for _, algorithm in choices] == [BY_LIBRARY, leaders, halving]
    for size in (0, 500, 1000, 10_000, 123_456, 300_000, 599_999, 600_001, 10 * MB):
        curves = [library[CollectiveKind.ALL_REDUCE, 4], *both.algorithms[members].values()]
        assert prices.of(members).duration_ns(size) == pytest.approx(
            1e9 * min(curve.seconds(size) for curve in curves), abs=1
        )
    assert prices.of(members).origin is Origin.MEASURED
    chosen = Prices(topology, replace(both, chosen={members: halving}))
    assert chosen.choices(members) == ((0, halving),)
    assert chosen.of(members).duration_ns(1) == 5_000_000


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_of_curves_is_their_least_at_every_size(seed: int) -> None:
    draw = random.Random(seed)

    def curve() -> Curve:
        sizes = sorted(draw.sample(range(1, 2000), draw.randint(2, 5)))
        return Curve.through({size: draw.uniform(1e-3, 2e-3) * (1 + size / 1000) for size in sizes})

    curves = [curve() if draw.random() < 0.7 else Curve.line(1e-3, draw.uniform(0, 3e-6)) for _ in range(4)]
    least, which = cheapest(curves)
    for size in range(2100):
        times_s = [of.seconds(size) for of in curves]
        assert least.seconds(size) == pytest.approx(min(times_s), rel=1e-8)
        number = next(number for first, number in reversed(which) if size >= first)
        assert times_s[number] == pytest.approx(min(times_s), rel=1e-8)
    assert all(before[1] != after[1] for before, after in itertools.pairwise(which))


def step_s(strategy: Strategy, topology: Topology, links: LinkCosts) -> float:
    graph = two_layers()
    return simulate(
        graph,
        strategy,
        topology,
        CostTable(MadeUpCosts()),
        Training(8),
        links=links,
        local_calls=local_calls,
    ).step_time_s


def test_a_strategys_choice_is_simulated_and_leaves_others_as_they_are() -> None:
    topology = hosts(2, 2, network=(1e6, 1e-4))
    plain = data_parallel(two_layers(), 4)
    members = (0, 1, 2, 3)
    links = LinkCosts(algorithms={members: {blueconnect((2, 2)): Curve.line(7.0, 0.0)}})
    chosen = replace(plain, collective_algorithms=((members, blueconnect((2, 2))),))
    assert step_s(plain, topology, links) < 1.0
    assert 7.0 < step_s(chosen, topology, links) < 8.0
    builder = TaskGraphBuilder(
        two_layers(), topology, CostTable(MadeUpCosts()), Training(8), links=links, local_calls=local_calls
    )
    before = builder.build(plain).run_ns_T
    builder.build(chosen)
    assert np.array_equal(builder.build(plain).run_ns_T, before)


@pytest.mark.parametrize("seed", range(10))
def test_the_lower_bound_is_below_data_parallelism_by_measured_algorithms(seed: int) -> None:
    draw = random.Random(seed)
    topology = random_hosts(draw)
    members = tuple(range(len(topology.devices)))
    quick = {blueconnect((len(members),)): Curve.line(draw.uniform(0, 1e-6), 0.0)}
    links = LinkCosts(algorithms={members: quick} if draw.random() < 0.7 else {})
    graph = branches()
    problem = Problem(graph, topology, CostTable(MadeUpCosts()), Training(8), links, local_calls)
    simulated = simulate(
        graph,
        data_parallel(graph, len(members)),
        topology,
        CostTable(MadeUpCosts()),
        Training(8),
        links=links,
        local_calls=local_calls,
    )
    assert lower_bound(problem).seconds <= simulated.step_time_s
