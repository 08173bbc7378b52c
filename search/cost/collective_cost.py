"""Prices of collectives over a set of devices.

Source: specs "Communication systems", section 3 (alpha-beta model): an all-reduce over a ring takes
2 (p - 1) alpha + 2 N (p - 1) / (p b), recursive halving and doubling the same bytes in 2 log2(p) latencies; an
all-gather or reduce-scatter half of that; a broadcast ceil(log2(p)) (alpha + N / b) along a binomial tree, or
(ceil(log2(p)) + p - 1) alpha + 2 N (p - 1) / (p b) by scatter and all-gather; a pairwise all-to-all
(p - 1) alpha + N (p - 1) / (p b). b is per concurrent flow: hops of one step that share a link share its bandwidth.
All of these are linear in N; of a measured collective its curve counts. The formulas are compiled:
`search.kernels.collective_formulas`.

That is what an all-reduce costs with the library's own algorithm. Of devices between which others were measured the
cheapest algorithm counts, of those for which a strategy chooses one that one (`graph.collective_algorithms`). One that
was not measured costs, of BlueConnect, 2 sum_i [(p_i - 1) alpha_i + (N / prod_{j<i} p_j) (p_i - 1) / (p_i b_i)], of two
levels with leaders 2 [(p_1 - 1) alpha_1 + N / b_1] and the ring of p_2 leaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from graph.collective_algorithms import (
    BY_LIBRARY,
    LEADERS,
    AllReduceAlgorithm,
    Choices,
)
from graph.collectives import CollectiveKind
from graph.topology import Topology
from search.cost.cost_table import ORIGIN_CODE, ORIGINS, Origin, nanoseconds
from search.cost.link_costs import COLLECTIVE_KINDS, HALVES, ROOTED, Curve, LinkCosts, cheapest
from search.cost.routes import route_table
from search.kernels.collective_formulas import LIBRARY_FORMULAS, price_all_reduce, price_collectives
from search.kernels.records import Array, Routes

ALL_REDUCE_CODE = COLLECTIVE_KINDS.index(CollectiveKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class AlgorithmPrice:
    """The price of an all-reduce by one algorithm, and what it rests on."""

    algorithm: AllReduceAlgorithm
    curve: Curve
    origin: Origin


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """The price of a collective: N bytes take latency + N * seconds per byte, the least of all algorithms.

    lines: latency in seconds, and seconds per byte, of each of the library's algorithms.
    links: the links that it holds, ascending.
    curve: what was measured, or comes of several algorithms, which counts instead.
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

        What was measured takes precedence, of an all-reduce by whichever algorithm is the cheapest; before all, that
        which is chosen. A measured all-reduce also stands, as an estimate, at half its cost for an
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
            np.empty((count, LIBRARY_FORMULAS, 2)),
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
        for collective, (code, devices) in enumerate(zip(codes, members, strict=True)):
            priced = self._curve(code, devices.tolist(), line[collective])
            if priced is not None:
                curves[collective], source = priced
                origin[collective] = ORIGIN_CODE[source]
        return PriceTable(line, link_ptr, link, origin, curves)

    def _curve(self, code: int, members: Sequence[int], line_A2: Array) -> tuple[Curve, Origin] | None:
        """Return the curve that counts in place of the formulas' lines, and what it rests on; None where they count."""
        measured = self._measured(COLLECTIVE_KINDS[code], members)
        if code != ALL_REDUCE_CODE:
            return measured
        others = self._others(members)
        chosen = self._costs.chosen.get(tuple(members))
        if not others and chosen in (None, BY_LIBRARY):
            return measured
        by_library = self._by_library(measured, line_A2)
        if chosen is None:
            return self._cheapest([by_library, *others])[:2]
        price = by_library if chosen == BY_LIBRARY else self._price(members, chosen)
        return price.curve, price.origin

    def choices(self, members: Sequence[int]) -> Choices:
        """Return the algorithm of all-reduces over `members`, ascending: the chosen one, else the cheapest by size."""
        chosen = self._costs.chosen.get(tuple(members))
        if chosen is not None:
            return ((0, chosen),)
        line = self.table([ALL_REDUCE_CODE], [-1], [np.array(members, np.int64)]).line_KA2[0]
        by_library = self._by_library(self._measured(CollectiveKind.ALL_REDUCE, members), line)
        return self._cheapest([by_library, *self._others(members)])[2]

    def _cheapest(self, prices: Sequence[AlgorithmPrice]) -> tuple[Curve, Origin, Choices]:
        """Return the curve of the cheapest of some algorithms, what it rests on at the least, and which it is."""
        curve, which = cheapest([price.curve for price in prices])
        origins = {prices[number].origin for _, number in which}
        return (
            curve,
            max(origins, key=ORIGINS.index),
            tuple((first, prices[number].algorithm) for first, number in which),
        )

    def _by_library(self, measured: tuple[Curve, Origin] | None, line_A2: Array) -> AlgorithmPrice:
        """Return the price of the library's all-reduce: measured, else the least of its formulas."""
        if measured is not None:
            return AlgorithmPrice(BY_LIBRARY, *measured)
        curve, _ = cheapest([Curve.line(*line) for line in finite_lines(line_A2)])
        return AlgorithmPrice(BY_LIBRARY, curve, ORIGINS[self._formulas])

    def _others(self, members: Sequence[int]) -> list[AlgorithmPrice]:
        """Return the prices of the other algorithms that compete: those that were measured. A formula never does."""
        known = self._costs.algorithms.get(tuple(members), {})
        return [AlgorithmPrice(algorithm, curve, Origin.MEASURED) for algorithm, curve in known.items()]

    def _price(self, members: Sequence[int], algorithm: AllReduceAlgorithm) -> AlgorithmPrice:
        """Return the price of an algorithm that is not the library's: measured, else by its formula."""
        curve = self._costs.algorithms.get(tuple(members), {}).get(algorithm)
        if curve is not None:
            return AlgorithmPrice(algorithm, curve, Origin.MEASURED)
        line = np.empty(2)
        levels, leads = np.array(algorithm.levels, np.int64), np.array([algorithm.kind == LEADERS])
        price_all_reduce(self._routes, np.array(members, np.int64), levels, leads, line)
        return AlgorithmPrice(algorithm, Curve.line(*line.tolist()), ORIGINS[self._formulas])

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
