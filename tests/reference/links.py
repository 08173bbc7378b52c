"""Prices of collectives, from the formulas as they are written: the slow reference of `search.cost.collective_cost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graph.collective_algorithms import LEADERS, AllReduceAlgorithm
from graph.collectives import CollectiveKind
from graph.topology import Topology
from search.cost.collective_cost import CollectivePrice
from search.cost.cost_table import Origin
from search.cost.link_costs import Curve, LinkCosts


def collective_price(
    topology: Topology,
    members: Sequence[int],
    costs: LinkCosts,
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
    root: int | None = None,
) -> CollectivePrice:
    """Return the price of a collective over `members` (in ring order), as `search.cost.collective_cost.Prices.of`."""
    price = _formula_price(topology, members, costs, kind, root)
    curve = _measured(costs, kind, members)
    if curve is not None:
        return replace(price, curve=curve, origin=Origin.MEASURED)
    # An all-reduce is a reduce-scatter and an all-gather, which cost the same.
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        whole = _measured(costs, CollectiveKind.ALL_REDUCE, members)
        if whole is not None:
            half = Curve(tuple((start, time_s / 2, slope / 2) for start, time_s, slope in whole.segments))
            return replace(price, curve=half, origin=Origin.ESTIMATED)
    return price


def message_s(topology: Topology, costs: LinkCosts, source: int, destination: int, size_bytes: int) -> float:
    """Return the seconds of a message: measured, else over the links of its route."""
    curve = costs.messages.get((source, destination))
    if curve is None:
        return topology.transfer_time_s(source, destination, size_bytes)
    return curve.seconds(size_bytes)


def _formula_price(
    topology: Topology, members: Sequence[int], costs: LinkCosts, kind: CollectiveKind, root: int | None
) -> CollectivePrice:
    size = len(members)
    # A formula over measured links is an estimate.
    origin = costs.transfers if costs.transfers is not Origin.MEASURED else Origin.ESTIMATED
    ring_hops = [(members[k], members[(k + 1) % size]) for k in range(size)]
    links = _links_of(topology, ring_hops)
    if kind is CollectiveKind.ALL_TO_ALL:
        pairwise = _pairwise_price(topology, members)
        return CollectivePrice((pairwise,), _links_of(topology, _pairs(members)), origin)
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.REDUCE):
        assert root is not None
        start = list(members).index(root)
        ordered = [*members[start:], *members[:start]]
        tree = _tree_price(topology, ordered, inwards=kind is CollectiveKind.REDUCE)
        halves = _scatter_price(topology, ordered, inwards=kind is CollectiveKind.REDUCE)
        ring = _ring_price(topology, ring_hops)
        return CollectivePrice((tree, (halves[0] + ring[0], halves[1] + ring[1])), links, origin)
    share = 1.0 if kind is CollectiveKind.ALL_REDUCE else 0.5
    ring = _ring_price(topology, ring_hops)
    lines = [(2 * share * ring[0], 2 * share * ring[1])]
    if size & (size - 1) == 0:
        halving = _halving_price(topology, members)
        lines.append((share * halving[0], share * halving[1]))
    return CollectivePrice(tuple(lines), links, origin)


def _measured(costs: LinkCosts, kind: CollectiveKind, members: Sequence[int]) -> Curve | None:
    """Return what was measured of just these members, else of as many."""
    for (known, devices), curve in costs.by_members.items():
        if known is kind and set(devices) == set(members):
            return curve
    for (known, size), curve in costs.by_size.items():
        if known is kind and size == len(members):
            return curve
    return None


def _pairs(members: Sequence[int]) -> list[tuple[int, int]]:
    return [(here, there) for here in members for there in members if here != there]


def _links_of(topology: Topology, hops: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sorted({link for hop in hops for link in topology.routes[hop]}))


def _ring_price(topology: Topology, hops: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the price of an all-gather or a reduce-scatter over a ring."""
    size = len(hops)
    latency_s, s_per_byte = step_price(topology, hops)
    return (size - 1) * latency_s, (size - 1) / size * s_per_byte


def _pairwise_price(topology: Topology, members: Sequence[int]) -> tuple[float, float]:
    """Return the price of p - 1 steps, in the k-th of which every device sends to the k-th after it."""
    size = len(members)
    latency_s = s_per_byte = 0.0
    for distance in range(1, size):
        hops = [(members[k], members[(k + distance) % size]) for k in range(size)]
        step_latency_s, step_s_per_byte = step_price(topology, hops)
        latency_s += step_latency_s
        s_per_byte += step_s_per_byte / size
    return latency_s, s_per_byte


def _tree_steps(ordered: Sequence[int], *, inwards: bool) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return the steps of a binomial tree from (or to) the first device: (distance, hops), distances halving.

    At distance d the devices at multiples of 2 d send to those d further on.
    """
    steps = []
    distance = 1 << ((len(ordered) - 1).bit_length() - 1)
    while distance:
        hops = [
            (ordered[place], ordered[place + distance])
            for place in range(0, len(ordered) - distance, 2 * distance)
        ]
        steps.append((distance, [(there, here) for here, there in hops] if inwards else hops))
        distance //= 2
    return steps


def _tree_price(topology: Topology, ordered: Sequence[int], *, inwards: bool) -> tuple[float, float]:
    """Return the price of sending all N bytes along a binomial tree."""
    latency_s = s_per_byte = 0.0
    for _, hops in _tree_steps(ordered, inwards=inwards):
        step_latency_s, step_s_per_byte = step_price(topology, hops)
        latency_s += step_latency_s
        s_per_byte += step_s_per_byte
    return latency_s, s_per_byte


def _scatter_price(topology: Topology, ordered: Sequence[int], *, inwards: bool) -> tuple[float, float]:
    """Return the price of scattering (or gathering) N bytes along a binomial tree: each hop carries what lies
    behind it."""
    size = len(ordered)
    latency_s = s_per_byte = 0.0
    for distance, hops in _tree_steps(ordered, inwards=inwards):
        step_latency_s, step_s_per_byte = step_price(topology, hops)
        latency_s += step_latency_s
        s_per_byte += min(distance, size - distance) / size * step_s_per_byte
    return latency_s, s_per_byte


def step_price(topology: Topology, hops: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return (latency in seconds, seconds per byte) of one step in which all `hops` send at the same time.

    The slowest hop counts; a link's bandwidth is divided by the hops that use it.
    """
    flows: dict[int, int] = {}
    for hop in hops:
        for link in topology.routes[hop]:
            flows[link] = flows.get(link, 0) + 1
    latency_s = max(sum(topology.links[link].latency_s for link in topology.routes[hop]) for hop in hops)
    s_per_byte = max(count / topology.links[link].bandwidth_bytes_per_s for link, count in flows.items())
    return latency_s, s_per_byte


def _halving_price(topology: Topology, members: Sequence[int]) -> tuple[float, float]:
    latency_s = s_per_byte = 0.0
    distance, share = 1, 0.5
    while distance < len(members):
        hops = [(members[k], members[k ^ distance]) for k in range(len(members))]
        step_latency_s, step_s_per_byte = step_price(topology, hops)
        latency_s += 2 * step_latency_s
        s_per_byte += 2 * share * step_s_per_byte
        distance, share = distance * 2, share / 2
    return latency_s, s_per_byte


def all_reduce_line(
    topology: Topology, members: Sequence[int], algorithm: AllReduceAlgorithm
) -> tuple[float, float]:
    """Return latency and seconds per byte of an all-reduce by an algorithm of several levels."""
    leaders = algorithm.kind == LEADERS
    latency_s = s_per_byte = 0.0
    share = 1.0
    for level, length in enumerate(algorithm.levels):
        rings = [[members[place] for place in ring] for ring in algorithm.rings(level)]
        if leaders and level == 0:
            hops = [(ring[k], ring[k - 1]) for ring in rings for k in range(1, length)]
            step_latency_s, step_s_per_byte = step_price(topology, hops)
            latency_s += 2 * (length - 1) * step_latency_s
            s_per_byte += 2 * step_s_per_byte
            continue
        if leaders:
            rings = rings[:1]
        hops = [(ring[k], ring[(k + 1) % length]) for ring in rings for k in range(length)]
        step_latency_s, step_s_per_byte = step_price(topology, hops)
        latency_s += 2 * (length - 1) * step_latency_s
        s_per_byte += 2 * share * (length - 1) / length * step_s_per_byte
        share /= length
    return latency_s, s_per_byte
