"""Measured costs of communication: lines, seconds as a function of bytes. `search.cost.collective_cost` has prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graph.collectives import CollectiveKind
from search.cost.cost_table import Origin

# A collective's code in the kernels is its place here.
COLLECTIVE_KINDS = tuple(CollectiveKind)
ROOTED = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
# An all-reduce is the two of them one after the other.
HALVES = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)

# Latency in seconds, seconds per byte.
Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Lines:
    """What was measured of a collective: `line`, and `large` of large messages, which counts where it is more."""

    line: Line
    large: Line | None = None


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What is known about communication beside the topology's links.

    by_size: collectives measured, by kind and number of devices; they take precedence over the formulas.
    by_members: collectives measured between just these devices, ascending; they take precedence over `by_size`.
    transfers: what the topology's links rest on (MEASURED where they were probed).
    """

    by_size: Mapping[tuple[CollectiveKind, int], Lines] = field(default_factory=dict)
    by_members: Mapping[tuple[CollectiveKind, tuple[int, ...]], Lines] = field(default_factory=dict)
    transfers: Origin = Origin.DATASHEET

    def measured(self, kind: CollectiveKind, members: Sequence[int]) -> Lines | None:
        """Return what was measured of a kind of collective between `members`, or between as many; else None."""
        exact = self.by_members.get((kind, tuple(sorted(members))))
        return exact if exact is not None else self.by_size.get((kind, len(members)))

    def measured_over(self, kind: CollectiveKind, size: int) -> list[Lines]:
        """Return all that was measured of a kind of collective between `size` devices, whichever they are."""
        found = [
            lines for (of, members), lines in self.by_members.items() if (of, len(members)) == (kind, size)
        ]
        if (kind, size) in self.by_size:
            found.append(self.by_size[kind, size])
        return found

    @property
    def formulas(self) -> Origin:
        """What a collective's formula over the topology's links rests on: never MEASURED, even where these are."""
        return Origin.ESTIMATED if self.transfers is Origin.MEASURED else self.transfers
