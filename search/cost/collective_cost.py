"""Prices of collectives over a set of devices.

Source: specs "Communication systems", section 3 (alpha-beta model): an all-reduce over a ring takes
2 (p - 1) alpha + 2 N (p - 1) / (p b), recursive halving and doubling the same bytes in 2 log2(p) latencies; an
all-gather or reduce-scatter half of that; a broadcast ceil(log2(p)) (alpha + N / b) along a binomial tree, or
(ceil(log2(p)) + p - 1) alpha + 2 N (p - 1) / (p b) by scatter and all-gather; a pairwise all-to-all
(p - 1) alpha + N (p - 1) / (p b). b is per concurrent flow: hops of one step that share a link share its bandwidth.
All of these are linear in N; of a measured collective its curve counts. The formulas are compiled:
`search.kernels.collective_formulas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from graph.collectives import CollectiveKind
from graph.topology import Topology
from search.cost.cost_table import ORIGIN_CODE, ORIGINS, Origin, nanoseconds
from search.cost.link_costs import COLLECTIVE_KINDS, HALVES, ROOTED, Curve, LinkCosts
from search.cost.routes import route_table
from search.kernels.collective_formulas import COLLECTIVE_ALGORITHMS, price_collectives
from search.kernels.records import Array, Routes


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """The price of a collective: N bytes take latency + N * seconds per byte, the least of all algorithms.

    lines: latency in seconds, and seconds per byte, of each algorithm.
    links: the links that it holds, ascending.
    curve: what was measured, which counts instead.
    """

    lines: tuple[tuple[float, float], ...]
    links: tuple[int, ...]
    origin: Origin
    curve: Curve | None = None

    def duration_ns(self, size_bytes: int) -> int:
        """Return the nanoseconds of a collective of `size_bytes`."""
        if self.curve is not None:
            return nanoseconds(self.curve.seconds(size_bytes))
        return nanoseconds(min(latency_s + size_bytes * s_per_byte for latency_s, s_per_byte in self.lines))


class PriceTable(NamedTuple):
    """Prices of K collectives, see `CollectivePrice`; the links of each by pointers, the origin by its code.

    line_KA2: of each of A algorithms latency, and seconds per byte; one that is none takes forever.
    """

    line_KA2: Array
    link_ptr: Array
    link: Array
    origin_K: Array
    curves: list[Curve | None]


class Prices:
    """Prices of collectives between the devices of one topology."""

    def __init__(self, topology: Topology, costs: LinkCosts) -> None:
        self._costs = costs
        self._routes = _routes(topology)
        self._formulas = ORIGIN_CODE[costs.formulas]

    def of(
        self,
        members: Sequence[int],
        kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
        root: int | None = None,
    ) -> CollectivePrice:
        """Return the price of a collective over `members`, devices in ring order.

        N is what one device holds in the end or, of a reduce-scatter or reduce, in the beginning; of an all-to-all,
        the bytes that one device sends, its own share with them. The formulas take the cheapest of these algorithms:

            all-reduce          the ring; where p is a power of two, recursive halving and doubling
            all-gather,         half of an all-reduce, which is the two of them one after the other
            reduce-scatter
            broadcast, reduce   a binomial tree; scatter and all-gather (van de Geijn), or their mirror
            all-to-all          pairwise exchange, p - 1 steps

        What was measured takes precedence. A measured all-reduce also stands, as an estimate, at half its cost for an
        all-gather or reduce-scatter that was not; of the others it says nothing. A collective holds the links of its
        ring, an all-to-all those of all pairs.
        """
        if kind in ROOTED and root is None:
            raise ValueError(f"price of a {kind.value}: no root given, must be one of {tuple(members)}")
        prices = self.table(
            [COLLECTIVE_KINDS.index(kind)], [-1 if root is None else root], [np.array(members, np.int64)]
        )
        return CollectivePrice(
            finite_lines(prices.line_KA2[0]),
            tuple(prices.link.tolist()),
            ORIGINS[prices.origin_K[0]],
            curve=prices.curves[0],
        )

    def table(self, codes: Sequence[int], roots: Sequence[int], members: Sequence[Array]) -> PriceTable:
        """Return the prices of several collectives, see `of`.

        Args:
            codes: what each of them is, by its place in `COLLECTIVE_KINDS`.
            roots: the device of each that is its root; -1 where it needs none.
            members: the devices of each, in ring order.
        """
        count = len(codes)
        member_ptr = np.zeros(count + 1, np.int64)
        np.cumsum([len(devices) for devices in members], out=member_ptr[1:])
        line, used = (
            np.empty((count, COLLECTIVE_ALGORITHMS, 2)),
            np.empty((count, len(self._routes.is_used)), np.bool_),
        )
        price_collectives(
            self._routes,
            np.array(codes, np.int64),
            np.array(roots, np.int64),
            member_ptr,
            np.concatenate(members),
            line,
            used,
        )
        number, link = used.nonzero()
        link_ptr = number.searchsorted(np.arange(count + 1))
        origin = np.full(count, self._formulas, np.int64)
        curves: list[Curve | None] = [None] * count
        if self._costs.by_size or self._costs.by_members:
            for collective, (code, devices_of) in enumerate(zip(codes, members, strict=True)):
                measured = self._measured(COLLECTIVE_KINDS[code], devices_of.tolist())
                if measured is not None:
                    curves[collective], source = measured
                    origin[collective] = ORIGIN_CODE[source]
        return PriceTable(line, link_ptr, link, origin, curves)

    def _measured(self, kind: CollectiveKind, members: Sequence[int]) -> tuple[Curve, Origin] | None:
        """Return the curve of what was measured, and what it rests on; None where nothing was."""
        curve = self._costs.measured(kind, members)
        if curve is not None:
            return curve, Origin.MEASURED
        whole = self._costs.measured(CollectiveKind.ALL_REDUCE, members) if kind in HALVES else None
        return None if whole is None else (whole.scaled(0.5), Origin.ESTIMATED)


def finite_lines(line_A2: Array) -> tuple[tuple[float, float], ...]:
    """Return latency and seconds per byte of the algorithms that there are, see `PriceTable`."""
    return tuple((latency_s, s_per_byte) for latency_s, s_per_byte in line_A2.tolist() if latency_s < inf)


def _routes(topology: Topology) -> Routes:
    table, devices, links = route_table(topology), len(topology.devices), topology.links
    return Routes(
        table.pointers_P1,
        table.link,
        table.latency_s_P,
        np.array([link.bandwidth_bytes_per_s for link in links], np.float64),
        np.zeros(len(links), np.int64),
        np.zeros(len(links), np.bool_),
        np.zeros(devices, np.int64),
        np.zeros(devices, np.int64),
    )
