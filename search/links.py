"""Prices of communication: transfers over a route, and all-reduces over a set of devices.

Source: specs "Communication systems", section 3 (alpha-beta model): a ring takes
2 (p - 1) alpha + 2 N (p - 1) / (p b), recursive halving and doubling the same bytes in 2 log2(p) latencies.
b is per concurrent flow: hops of one step that share a link share its bandwidth. Both prices are linear in N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from graph.topology import Topology
from search.costs import Origin, nanoseconds


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What is known about communication beside the topology's links.

    all_reduce: measured cost by group size, (latency in seconds, seconds per byte); it takes precedence over
        the formulas.
    transfers: what the topology's links rest on (MEASURED where they were probed).
    all_reduces: what `all_reduce` rests on.
    """

    all_reduce: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    transfers: Origin = Origin.DATASHEET
    all_reduces: Origin = Origin.MEASURED


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """An all-reduce of N bytes takes min(latency_s[k] + N * s_per_byte[k]) seconds over its algorithms k.

    links: the links that it holds, ascending.
    """

    latency_s: tuple[float, float]
    s_per_byte: tuple[float, float]
    links: tuple[int, ...]
    origin: Origin

    def duration_ns(self, size_bytes: int) -> int:
        """Return the nanoseconds of an all-reduce of `size_bytes`."""
        return nanoseconds(
            min(
                self.latency_s[0] + size_bytes * self.s_per_byte[0],
                self.latency_s[1] + size_bytes * self.s_per_byte[1],
            )
        )


def collective_price(topology: Topology, members: Sequence[int], costs: LinkCosts) -> CollectivePrice:
    """Return the price of an all-reduce over `members`, devices in ring order.

    The formulas take the cheaper of the ring and, where the group size is a power of two, recursive halving
    and doubling with the nearest partner first, so that the largest messages go the shortest way.
    """
    size = len(members)
    ring_hops = [(members[k], members[(k + 1) % size]) for k in range(size)]
    links = tuple(sorted({link for hop in ring_hops for link in topology.routes[hop]}))
    if size in costs.all_reduce:
        latency_s, s_per_byte = costs.all_reduce[size]
        return CollectivePrice((latency_s, latency_s), (s_per_byte, s_per_byte), links, costs.all_reduces)
    hop_latency_s, hop_s_per_byte = step_price(topology, ring_hops)
    ring = 2 * (size - 1) * hop_latency_s, 2 * (size - 1) / size * hop_s_per_byte
    halving = _halving_price(topology, members) if size & (size - 1) == 0 else (inf, inf)
    return CollectivePrice((ring[0], halving[0]), (ring[1], halving[1]), links, costs.transfers)


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
