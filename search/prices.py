"""Prices of collectives over a set of devices.

Source: specs "Communication systems", section 3 (alpha-beta model): an all-reduce over a ring takes
2 (p - 1) alpha + 2 N (p - 1) / (p b), recursive halving and doubling the same bytes in 2 log2(p) latencies; an
all-gather or reduce-scatter half of that; a broadcast ceil(log2(p)) (alpha + N / b) along a binomial tree, or
(ceil(log2(p)) + p - 1) alpha + 2 N (p - 1) / (p b) by scatter and all-gather; a pairwise all-to-all
(p - 1) alpha + N (p - 1) / (p b). b is per concurrent flow: hops of one step that share a link share its bandwidth.
All of these are linear in N; of a measured collective the higher of two lines counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graph.collectives import CollectiveKind
from graph.topology import Topology
from search.costs import Origin
from search.kernels import Routes, price_collective
from search.links import COLLECTIVE_KINDS, HALVES, ROOTED, CollectivePrice, LinkCosts
from search.routes import route_table


class Prices:
    """Prices of collectives between the devices of one topology."""

    def __init__(self, topology: Topology, costs: LinkCosts) -> None:
        self._costs = costs
        self._routes = _routes(topology)

    def of(
        self,
        members: Sequence[int],
        kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
        root: int | None = None,
    ) -> CollectivePrice:
        """Return the price of a collective over `members`, devices in ring order.

        N is what one device holds in the end or, of a reduce-scatter or reduce, in the beginning; of an all-to-all,
        the bytes that one device sends, its own share with them. The formulas take the cheaper of two algorithms:

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
        place = list(members).index(root) if kind in ROOTED and root is not None else 0
        first_s, first_s_per_byte, second_s, second_s_per_byte = price_collective(
            self._routes, COLLECTIVE_KINDS.index(kind), np.array(members, np.int64), place
        )
        links = tuple(np.flatnonzero(self._routes.is_used).tolist())
        share, origin = 1.0, Origin.MEASURED
        measured = self._costs.measured(kind, members)
        if measured is None and kind in HALVES:
            share, origin = 0.5, Origin.ESTIMATED
            measured = self._costs.measured(CollectiveKind.ALL_REDUCE, members)
        if measured is not None:
            line = measured.line
            large = line if measured.large is None else measured.large
            return CollectivePrice(
                (share * line[0], share * large[0]),
                (share * line[1], share * large[1]),
                links,
                origin,
                is_measured=True,
            )
        return CollectivePrice(
            (first_s, second_s), (first_s_per_byte, second_s_per_byte), links, self._costs.formulas
        )


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
