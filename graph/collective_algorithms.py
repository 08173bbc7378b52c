"""Algorithms of an all-reduce: the steps of each, the groups of its devices, its name in a strategy.

    library                what torch.distributed does by itself
    ring                   one ring: a reduce-scatter in p - 1 steps, then an all-gather
    halving-doubling       recursive halving and doubling, where p is a power of two
    leaders-4x2            two levels with leaders: groups of 4 reduce to their first device, these 2 make a ring among
                           them, each broadcasts in its group
    blueconnect-4x2        BlueConnect: reduce-scatters along the levels from the innermost on, here rings of 4 and then
                           of 2, and all-gathers back

The devices of a group are numbered from 0 on in ascending order; levels are the radices of that number's digits, the
innermost first, and the rings of a level are the devices that differ in its digit alone. A ring is BlueConnect of one
level, recursive halving and doubling BlueConnect of levels of two.

Source: BlueConnect (SysML 2019), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph.axes import prime_factors
from graph.errors import StrategyError
from graph.texts import shown

LIBRARY, RING, HALVING, LEADERS, BLUECONNECT = (
    "library",
    "ring",
    "halving-doubling",
    "leaders",
    "blueconnect",
)


@dataclass(frozen=True, slots=True)
class AllReduceAlgorithm:
    """An algorithm for a group of devices: its `kind` and its `levels`, innermost first; the library's has none."""

    kind: str
    levels: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The algorithm as strategies name it."""
        if self.kind in (LEADERS, BLUECONNECT):
            return f"{self.kind}-{'x'.join(map(str, self.levels))}"
        return self.kind

    def rings(self, level: int) -> list[tuple[int, ...]]:
        """Return the places, in the group, of the devices of each of a level's rings: all run at the same time."""
        stride, size = math.prod(self.levels[:level]), self.levels[level]
        count = math.prod(self.levels)
        firsts = [place for place in range(count) if place // stride % size == 0]
        return [tuple(first + digit * stride for digit in range(size)) for first in firsts]

    def ring_of(self, place: int, level: int) -> tuple[int, ...]:
        """Return the ring of a level that the device at a place is of."""
        stride, size = math.prod(self.levels[:level]), self.levels[level]
        first = place - place // stride % size * stride
        return tuple(first + digit * stride for digit in range(size))


BY_LIBRARY = AllReduceAlgorithm(LIBRARY)

Choices = tuple[tuple[int, AllReduceAlgorithm], ...]
"""The algorithm of a group's all-reduces by the bytes from which it counts, ascending, the first from 0."""


def algorithm_for(choices: Choices, size_bytes: int) -> AllReduceAlgorithm:
    """Return the algorithm of an all-reduce of so many bytes."""
    return next(algorithm for first, algorithm in reversed(choices) if size_bytes >= first)


def blueconnect(levels: Sequence[int]) -> AllReduceAlgorithm:
    """Return BlueConnect along some levels, under the name that its special cases have."""
    if len(levels) == 1:
        return AllReduceAlgorithm(RING, tuple(levels))
    if set(levels) == {2}:
        return AllReduceAlgorithm(HALVING, tuple(levels))
    return AllReduceAlgorithm(BLUECONNECT, tuple(levels))


def read_algorithm(text: object, size: int) -> AllReduceAlgorithm:
    """Return the algorithm of a group of `size` devices that a strategy names.

    Raises:
        StrategyError: there is none of that name, or it is not for as many devices.
    """
    kind, _, named = text.partition("-") if isinstance(text, str) else ("", "", "")
    if text == LIBRARY:
        return BY_LIBRARY
    if text == RING:
        return AllReduceAlgorithm(RING, (size,))
    if text == HALVING and size & (size - 1) == 0:
        return AllReduceAlgorithm(HALVING, (2,) * (size.bit_length() - 1))
    if kind in (LEADERS, BLUECONNECT) and all(part.isdecimal() for part in named.split("x")):
        levels = tuple(int(part) for part in named.split("x"))
        fits = math.prod(levels) == size and min(levels) > 1 and (kind == BLUECONNECT or len(levels) == 2)
        if fits:
            return blueconnect(levels) if kind == BLUECONNECT else AllReduceAlgorithm(LEADERS, levels)
    raise StrategyError(
        f"collective_algorithms: {shown(text)} is no algorithm of an all-reduce over {size} devices, must be "
        f"{LIBRARY}, {RING}, {HALVING} (of a power of two), {LEADERS}-AxB or {BLUECONNECT}-AxB... whose product is "
        f"{size}; correct the strategy"
    )


def measured_algorithms(inside: int, nodes: int) -> tuple[AllReduceAlgorithm, ...]:
    """Return the algorithms that a probe of nodes of as many devices measures beside the library's own.

    BlueConnect with one level inside the nodes and one between them, BlueConnect along the prime factors of both, and
    leaders.
    """
    coarse, fine = (
        blueconnect((inside, nodes)),
        blueconnect((*prime_factors(inside), *prime_factors(nodes))),
    )
    return tuple(dict.fromkeys((coarse, fine, AllReduceAlgorithm(LEADERS, (inside, nodes)))))


def node_levels(nodes: Sequence[int]) -> tuple[int, int] | None:
    """Return how many devices of a group each node has, and how many nodes there are, by each device's node in order.

    None where the nodes' shares differ, where a node's devices do not follow each other, and where there is one node
    or one device a node: such a group has no hierarchy.
    """
    inside = next((place for place, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    count = len(nodes) // inside
    if inside == 1 or count == 1 or len(nodes) % inside:
        return None
    shares = [set(nodes[first : first + inside]) for first in range(0, len(nodes), inside)]
    if any(len(share) > 1 for share in shares) or len(set().union(*shares)) < count:
        return None
    return inside, count


# ---- as a part of strategies

CollectiveAlgorithms = tuple[tuple[tuple[int, ...], AllReduceAlgorithm], ...]
"""Groups of devices (ascending, and the groups too), and the algorithm of each one's all-reduces."""


def chosen_algorithms(algorithms: CollectiveAlgorithms) -> dict[tuple[int, ...], Choices]:
    """Return the algorithms that a strategy chooses, by devices."""
    return {devices: ((0, algorithm),) for devices, algorithm in algorithms}


def algorithms_to_json(algorithms: CollectiveAlgorithms) -> list[dict[str, Any]]:
    """Return chosen algorithms as a document."""
    return [{"devices": list(devices), "algorithm": algorithm.text} for devices, algorithm in algorithms]


def algorithms_from_json(document: object) -> CollectiveAlgorithms:
    """Return the algorithms of a document that `algorithms_to_json` (or a person) wrote.

    Raises:
        StrategyError: it is malformed, or an algorithm is unknown.
    """
    if not isinstance(document, list) or not all(isinstance(entry, Mapping) for entry in document):
        raise StrategyError(
            f"collective_algorithms: is {shown(document)}, must be a list of devices with an algorithm each; correct "
            "the strategy"
        )
    return tuple(sorted(_entries(document), key=lambda entry: entry[0]))


def _entries(document: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[int, ...], AllReduceAlgorithm]]:
    for entry in document:
        if set(entry) != {"devices", "algorithm"}:
            raise StrategyError(
                f"collective_algorithms: an entry has {', '.join(map(str, sorted(entry))) or 'nothing'}, must have "
                "algorithm and devices; correct the strategy"
            )
        devices = entry["devices"]
        if not isinstance(devices, list) or not all(type(device) is int for device in devices):
            raise StrategyError(
                f"collective_algorithms: devices are {shown(devices)}, must list whole numbers; correct the strategy"
            )
        yield tuple(devices), read_algorithm(entry["algorithm"], len(devices))


def check_algorithms(algorithms: CollectiveAlgorithms, device_count: int) -> None:
    """Check that groups are of two or more devices that exist, ascending, and each named once.

    Raises:
        StrategyError: naming the group and what does not fit.
    """
    for devices, _ in algorithms:
        ascending = list(devices) == sorted(set(devices))
        if len(devices) < 2 or not ascending or devices[0] < 0 or devices[-1] >= device_count:
            raise StrategyError(
                f"collective_algorithms: devices are {shown(list(devices))}, must be two or more of 0 to "
                f"{device_count - 1}, ascending; correct the strategy"
            )
    groups = [devices for devices, _ in algorithms]
    twice = next((devices for devices in groups if groups.count(devices) > 1), None)
    if twice is not None:
        raise StrategyError(
            f"collective_algorithms: devices {', '.join(map(str, twice))} are there twice, must have one algorithm; "
            "correct the strategy"
        )
