"""Formulas of collectives: latency and seconds per byte of an all-reduce and the others on the links that they use.

Algorithms: the ring, recursive halving and doubling, the binomial tree, pairwise exchange; of an all-reduce also
BlueConnect and two levels with leaders (`graph.collective_algorithms`). Prices of whole collectives, and what was
measured of them: `search.cost.collective_cost`.
"""

from __future__ import annotations

import numpy as np

from search.kernels.cache import inner, quick_entry
from search.kernels.records import ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE, Array, ResourceSets, Routes

# Algorithms of the library for one kind of collective, at most; the one that takes least time for its bytes counts.
LIBRARY_FORMULAS = 2


@inner
def curve_s(curve: Array, first: int, last: int, size_bytes: int) -> float:
    """Return the seconds of a size on the segments `first` to `last`, as `search.cost.link_costs.Curve.seconds`."""
    segment = last - 1
    while segment > first and size_bytes < curve[segment, 0]:
        segment -= 1
    return float(curve[segment, 1] + (size_bytes - curve[segment, 0]) * curve[segment, 2])


@inner
def collective_ns(sets: ResourceSets, resource_set: int, size_bytes: int) -> int:
    """Return the nanoseconds of a device set's collective, as `search.cost.collective_cost.CollectivePrice` does."""
    begin, end = sets.segments[resource_set, 0], sets.segments[resource_set, 1]
    if begin < end:
        return int(curve_s(sets.curve, begin, end, size_bytes) * 1e9 + 0.5)
    least_s = np.inf
    for algorithm in range(LIBRARY_FORMULAS):
        seconds = (
            sets.latency_s[resource_set, algorithm] + size_bytes * sets.s_per_byte[resource_set, algorithm]
        )
        least_s = min(least_s, seconds)
    return int(least_s * 1e9 + 0.5)


@quick_entry
def collectives_ns(sets: ResourceSets, resource_set: Array, size_bytes: Array, run_ns: Array) -> None:
    """Write the nanoseconds of collectives by the numbers of their device sets, see `collective_ns`."""
    for number in range(len(resource_set)):
        run_ns[number] = collective_ns(sets, resource_set[number], size_bytes[number])


@inner
def price_step(routes: Routes, hops: int) -> tuple[float, float]:
    """Return seconds and seconds per byte of one step in which all hops send at the same time.

    The slowest hop counts; a link's bandwidth is divided by the hops that use it.
    """
    devices = len(routes.source_D)
    for hop in range(hops):
        pair = routes.source_D[hop] * devices + routes.destination_D[hop]
        for at in range(routes.route_ptr[pair], routes.route_ptr[pair + 1]):
            routes.flows[routes.route_link[at]] += 1
    latency_s = s_per_byte = 0.0
    for hop in range(hops):
        pair = routes.source_D[hop] * devices + routes.destination_D[hop]
        latency_s = max(latency_s, routes.latency_s[pair])
        for at in range(routes.route_ptr[pair], routes.route_ptr[pair + 1]):
            link = routes.route_link[at]
            s_per_byte = max(s_per_byte, routes.flows[link] / routes.bandwidth[link])
    for hop in range(hops):
        pair = routes.source_D[hop] * devices + routes.destination_D[hop]
        for at in range(routes.route_ptr[pair], routes.route_ptr[pair + 1]):
            routes.flows[routes.route_link[at]] = 0
    return latency_s, s_per_byte


@inner
def use_links(routes: Routes, hops: int) -> None:
    """Mark the links of a step's hops as used."""
    devices = len(routes.source_D)
    for hop in range(hops):
        pair = routes.source_D[hop] * devices + routes.destination_D[hop]
        for at in range(routes.route_ptr[pair], routes.route_ptr[pair + 1]):
            routes.is_used[routes.route_link[at]] = True


@inner
def shift(routes: Routes, members: Array, distance: int) -> int:
    """Write the hops of a step in which every device sends to the one so far after it; return how many."""
    size = len(members)
    for k in range(size):
        routes.source_D[k] = members[k]
        routes.destination_D[k] = members[(k + distance) % size]
    return size


@inner
def price_pairwise(routes: Routes, members: Array) -> tuple[float, float]:
    """Return the price of a pairwise all-to-all: p - 1 steps, in the k-th every device sends to the k-th after it."""
    size = len(members)
    latency_s = s_per_byte = 0.0
    for distance in range(1, size):
        hops = shift(routes, members, distance)
        use_links(routes, hops)
        step_latency_s, step_s_per_byte = price_step(routes, hops)
        latency_s += step_latency_s
        s_per_byte += step_s_per_byte / size
    return latency_s, s_per_byte


@inner
def price_halving(routes: Routes, members: Array) -> tuple[float, float]:
    """Return the price of an all-reduce by recursive halving and doubling among 2^k devices."""
    size = len(members)
    latency_s = s_per_byte = 0.0
    distance, share = 1, 0.5
    while distance < size:
        for k in range(size):
            routes.source_D[k] = members[k]
            routes.destination_D[k] = members[k ^ distance]
        step_latency_s, step_s_per_byte = price_step(routes, size)
        latency_s += 2 * step_latency_s
        s_per_byte += 2 * share * step_s_per_byte
        distance, share = distance * 2, share / 2
    return latency_s, s_per_byte


@inner
def price_tree(routes: Routes, members: Array, root: int, kind: int) -> tuple[float, float, float, float]:
    """Return the prices of a binomial tree from (or, of a reduce, to) the member at place `root`.

    First of one that carries all N bytes along every hop, then of one that scatters (or gathers) them: at distance d
    a hop carries what lies behind it.
    """
    size = len(members)
    distance = 1
    while 2 * distance < size:
        distance *= 2
    latency_s = s_per_byte = part_s_per_byte = 0.0
    while distance > 0:
        hops = 0
        for offset in range(0, size - distance, 2 * distance):
            here, there = members[(root + offset) % size], members[(root + offset + distance) % size]
            routes.source_D[hops] = there if kind == REDUCE else here
            routes.destination_D[hops] = here if kind == REDUCE else there
            hops += 1
        step_latency_s, step_s_per_byte = price_step(routes, hops)
        latency_s += step_latency_s
        s_per_byte += step_s_per_byte
        part_s_per_byte += min(distance, size - distance) / size * step_s_per_byte
        distance //= 2
    return latency_s, s_per_byte, latency_s, part_s_per_byte


@inner
def price_rings(routes: Routes, members: Array, stride: int, length: int, apart: int) -> tuple[float, float]:
    """Return the price of one step of all rings of a level at once (`graph.collective_algorithms`).

    apart: only devices at multiples of this place take part.
    """
    hops = 0
    for place in range(0, len(members), apart):
        digit = place // stride % length
        routes.source_D[hops] = members[place]
        routes.destination_D[hops] = members[place + ((digit + 1) % length - digit) * stride]
        hops += 1
    return price_step(routes, hops)


@inner
def price_chains(routes: Routes, members: Array, length: int) -> tuple[float, float]:
    """Return the price of a step of chains of so many devices: each but the first sends to the one before."""
    hops = 0
    for place in range(len(members)):
        if place % length:
            routes.source_D[hops], routes.destination_D[hops] = members[place], members[place - 1]
            hops += 1
    return price_step(routes, hops)


@quick_entry
def price_all_reduce(routes: Routes, members: Array, levels: Array, leads: Array, line_2: Array) -> None:
    """Write latency and seconds per byte of an all-reduce along some levels, innermost first.

    leads: one flag, whether it has leaders; else it is BlueConnect. Source: specs "Communication systems", section 3.
    """
    latency_s = s_per_byte = 0.0
    first, stride, share, apart = 0, 1, 1.0, 1
    if leads[0]:
        # All bytes go over each hop, piece by piece; then only the leaders are left.
        step_latency_s, step_s_per_byte = price_chains(routes, members, levels[0])
        latency_s = 2 * (levels[0] - 1) * step_latency_s
        s_per_byte = 2 * step_s_per_byte
        stride = apart = levels[0]
        first = 1
    for level in range(first, len(levels)):
        length = levels[level]
        step_latency_s, step_s_per_byte = price_rings(routes, members, stride, length, apart)
        latency_s += 2 * (length - 1) * step_latency_s
        s_per_byte += 2 * share * (length - 1) / length * step_s_per_byte
        share, stride = share / length, stride * length
    line_2[0], line_2[1] = latency_s, s_per_byte


@quick_entry
def price_collectives(
    routes: Routes,
    kind_K: Array,
    root_K: Array,
    member_ptr: Array,
    member: Array,
    line_KA2: Array,
    used_KL: Array,
) -> None:
    """Write latency and seconds per byte of all algorithms of K collectives, and which links each collective holds.

    Of the library's own algorithms each has a place along A; a place that a collective does not use holds a time
    without end. Who adds a formula writes it here and raises `LIBRARY_FORMULAS`. Algorithms that are composed of
    others (BlueConnect, leaders) are priced by `price_all_reduce`.

    kind_K: codes. root_K: the device that is a broadcast's or reduce's root, else any. member: the devices of each, in
    ring order, and pointers. line_KA2: see `search.cost.collective_cost.CollectivePrice`.
    """
    line_KA2[:, :, 0] = np.inf
    line_KA2[:, :, 1] = 0.0
    for number in range(len(kind_K)):
        kind, members, line = (
            kind_K[number],
            member[member_ptr[number] : member_ptr[number + 1]],
            line_KA2[number],
        )
        size = len(members)
        routes.is_used[:] = False
        if kind == ALL_TO_ALL:
            line[0, 0], line[0, 1] = price_pairwise(routes, members)
        else:
            hops = shift(routes, members, 1)
            use_links(routes, hops)
            latency_s, s_per_byte = price_step(routes, hops)
            ring_s, ring_s_per_byte = (size - 1) * latency_s, (size - 1) / size * s_per_byte
            if kind in (BROADCAST, REDUCE):
                root = 0
                while members[root] != root_K[number]:
                    root += 1
                line[0, 0], line[0, 1], line[1, 0], line[1, 1] = price_tree(routes, members, root, kind)
                line[1, 0] += ring_s
                line[1, 1] += ring_s_per_byte
            else:
                share = 1.0 if kind == ALL_REDUCE else 0.5
                line[0, 0], line[0, 1] = 2 * share * ring_s, 2 * share * ring_s_per_byte
                if size & (size - 1) == 0:
                    halving_s, halving_s_per_byte = price_halving(routes, members)
                    line[1, 0], line[1, 1] = share * halving_s, share * halving_s_per_byte
        for link in range(len(routes.is_used)):
            used_KL[number, link] = routes.is_used[link]
