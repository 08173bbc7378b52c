"""What is known of the cost of communication, and prices: seconds as a function of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graph.collectives import CollectiveKind
from search.costs import Origin, nanoseconds

# A collective's code in the kernels is its place here.
COLLECTIVE_KINDS = tuple(CollectiveKind)
ROOTED = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
RINGS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What is known about communication beside the topology's links.

    all_reduce: measured cost by group size, (latency in seconds, seconds per byte); it takes precedence over
        the formulas.
    transfers: what the topology's links rest on (MEASURED where they were probed).
    all_reduces: what `all_reduce` rests on, and what follows from it.
    large_all_reduce: by group size, as measured with large messages; it counts where it is more than `all_reduce`.
    """

    all_reduce: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    transfers: Origin = Origin.DATASHEET
    all_reduces: Origin = Origin.MEASURED
    large_all_reduce: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """A collective of N bytes takes latency_s[k] + N * s_per_byte[k] seconds: the less of two algorithms k.

    links: the links that it holds, ascending.
    is_measured: the two are lines fitted to small and to large messages instead, and the more counts.
    """

    latency_s: tuple[float, float]
    s_per_byte: tuple[float, float]
    links: tuple[int, ...]
    origin: Origin
    is_measured: bool = False

    def duration_ns(self, size_bytes: int) -> int:
        """Return the nanoseconds of a collective of `size_bytes`."""
        first = self.latency_s[0] + size_bytes * self.s_per_byte[0]
        second = self.latency_s[1] + size_bytes * self.s_per_byte[1]
        return nanoseconds(max(first, second) if self.is_measured else min(first, second))
