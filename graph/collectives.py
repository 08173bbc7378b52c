"""Exchanges of a value that are collectives: one operation of all their devices, instead of many messages.

An exchange (`graph.exchange`) lists pieces. Here the assemblies whose pieces form one of six patterns over a set of
devices D are recognized; all others stay point-to-point. With a piece, partial sums over one region add up:

    all-reduce      on each of D the same region, of which each of D has a partial sum
    reduce-scatter  on each of D its own region, all of one size, of which each of D has a partial sum
    all-gather      on each of D the same region, of which each of D has a piece, all of one size
    all-to-all      on each of D a region, of which each of D has one piece; sizes may differ, and partial sums are
                    added up by who assembles them: so it serves uneven gathers and scatters too
    broadcast       on all but one of D the same region, of which that one has the piece
    reduce          on one of D a region, of which the others, and perhaps it, have partial sums

The backward of each is one again: what was sent receives a gradient, what was received sends one.

Which assemblies belong together: those with the same first reader's input slot, connected by who sends to whom. So
the rows of a two-dimensional split are recognized one by one, and so are replicas' own copies. Every reader of a
piece is behind it; `graph.plan` says which gradients become complete together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from graph.exchange import Assembly, Piece
from graph.intervals import Region, volume

# Between two devices the direct exchange is what every algorithm for these patterns comes down to, and a library's
# collective only adds latency to it (gloo, 1 KB: 0.1 ms for messages, 0.2 to 1.5 ms for collectives).
FEWEST_DEVICES = 3


class CollectiveKind(StrEnum):
    """The kinds of collectives, in the order of the codes in `search.kernels`."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"


BACKWARD: Mapping[CollectiveKind, CollectiveKind] = {
    CollectiveKind.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER: CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.REDUCE_SCATTER: CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
    CollectiveKind.BROADCAST: CollectiveKind.REDUCE,
    CollectiveKind.REDUCE: CollectiveKind.BROADCAST,
}
# Each of these sums pieces; one region arrives. The others only move pieces.
SUMMING = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE})
# Dtypes that communication libraries sum; others (bool) are added up by the device that assembles them.
SUMMABLE = frozenset({"float64", "float32", "bfloat16", "float16", "int64", "int32"})


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a value's exchange.

    devices: all that take part, ascending.
    root: the device that sends (broadcast) or receives (reduce); else None.
    assemblies: the numbers of the assemblies that it serves, ascending by their device.
    """

    kind: CollectiveKind
    devices: tuple[int, ...]
    root: int | None
    assemblies: tuple[int, ...]


def recognize(assemblies: Sequence[Assembly], *, summable: bool) -> tuple[Collective, ...]:
    """Return the collectives of one value's exchange, ordered by the first assembly that each serves.

    Args:
        assemblies: of one value, as `graph.exchange.exchange` returns them.
        summable: whether the value's dtype is one of `SUMMABLE`.
    """
    collectives = (_match(assemblies, numbers, summable=summable) for numbers in _connected(assemblies))
    return tuple(collective for collective in collectives if collective is not None)


def _connected(assemblies: Sequence[Assembly]) -> list[list[int]]:
    """Return the numbers of the assemblies that read from other devices, by slot and connected devices."""
    leader: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def find(node: tuple[int, int, int]) -> tuple[int, int, int]:
        while leader.setdefault(node, node) != node:
            node = leader[node]
        return node

    remote = [number for number, assembly in enumerate(assemblies) if assembly.remote_pieces]
    for number in remote:
        first = assemblies[number].readers[0]
        for piece in assemblies[number].pieces:
            reader = find((first.operator, first.slot, assemblies[number].device))
            source = find((first.operator, first.slot, piece.source_device))
            leader[source] = reader
    groups: dict[tuple[int, int, int], list[int]] = {}
    for number in remote:
        first = assemblies[number].readers[0]
        node = find((first.operator, first.slot, assemblies[number].device))
        groups.setdefault(node, []).append(number)
    return list(groups.values())


def _match(assemblies: Sequence[Assembly], numbers: Sequence[int], *, summable: bool) -> Collective | None:
    """Return the collective that serves exactly these connected assemblies, if there is one."""
    numbers = sorted(numbers, key=lambda number: assemblies[number].device)
    members = [assemblies[number] for number in numbers]
    readers = [member.device for member in members]
    if len(set(readers)) < len(readers):
        return None
    sources = {piece.source_device for member in members for piece in member.pieces}
    devices = tuple(sorted(sources.union(readers)))
    if len(devices) < FEWEST_DEVICES:
        return None
    kind = _kind(members, sources, summable=summable)
    if kind is None:
        return None
    root = None
    if kind is CollectiveKind.BROADCAST:
        (root,) = sources
    elif kind is CollectiveKind.REDUCE:
        (root,) = readers
    return Collective(kind, devices, root, tuple(numbers))


def _kind(members: Sequence[Assembly], sources: set[int], *, summable: bool) -> CollectiveKind | None:
    tasks = [{piece.source_device: piece.source_task for piece in member.pieces} for member in members]
    if any(len(by_device) < len(member.pieces) for by_device, member in zip(tasks, members, strict=True)):
        return None
    same_tasks = all(by_device == tasks[0] for by_device in tasks)
    same_region = all(member.region == members[0].region for member in members)
    sums = summable and all(piece.region == member.region for member in members for piece in member.pieces)
    if len(members) == 1:
        return CollectiveKind.REDUCE if sums else None
    if len(sources) == 1:
        return CollectiveKind.BROADCAST if same_tasks and same_region else None
    readers = {member.device for member in members}
    if readers != sources or any(by_device.keys() != sources for by_device in tasks):
        return None
    if sums and same_tasks and same_region:
        return CollectiveKind.ALL_REDUCE
    # Replicas must not read sums that were made in different orders: each region once.
    once = len({member.region for member in members}) == len(members)
    if sums and same_tasks and once and len({volume(member.region) for member in members}) == 1:
        return CollectiveKind.REDUCE_SCATTER
    even = len({volume(piece.region) for piece in members[0].pieces}) == 1
    if same_tasks and same_region and even:
        return CollectiveKind.ALL_GATHER
    return CollectiveKind.ALL_TO_ALL


def sent(collective: Collective, assemblies: Sequence[Assembly], device: int) -> tuple[Piece, ...]:
    """Return the pieces that a device contributes to a collective, in the order of its devices.

    Backward, these are what its gradient comes back for.
    """
    pieces = [
        piece
        for number in collective.assemblies
        for piece in assemblies[number].pieces
        if piece.source_device == device
    ]
    if collective.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return tuple(pieces)
    return tuple(pieces[:1])


def received(collective: Collective, assemblies: Sequence[Assembly], device: int) -> tuple[Region, ...]:
    """Return the regions that a collective gives to a device, in the order of its devices.

    Backward, these are the parts of its assembly's gradient that it puts in.
    """
    assembly = assembly_on(collective, assemblies, device)
    if assembly is None:
        return ()
    if collective.kind in SUMMING:
        return (assembly.region,)
    return tuple(piece.region for piece in by_source(assembly))


def by_source(assembly: Assembly) -> list[Piece]:
    """Return an assembly's pieces in the order of the devices that they come from."""
    return sorted(assembly.pieces, key=lambda piece: piece.source_device)


def assembly_on(collective: Collective, assemblies: Sequence[Assembly], device: int) -> Assembly | None:
    """Return the assembly on a device that a collective serves, if there is one."""
    for number in collective.assemblies:
        if assemblies[number].device == device:
            return assemblies[number]
    return None
