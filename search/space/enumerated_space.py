"""Spaces that are listed: for every group of operators, the configurations that an exact algorithm chooses from.

The whole space has, for every head, all degrees whose product is at most the number of devices, on all ordered lists
of distinct devices: what the walk of `search.algorithms.mcmc` draws from. A compact space has fewer lists or fewer
degrees; what was left out is said in its name. All other operators follow their heads (`search.space.groups`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import perm, prod

from graph.axes import Axis, AxisKind, Degrees, tasks
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration, Strategy
from search.space.groups import Group, find_groups, following
from search.space.placements import strided_devices


@dataclass(frozen=True)
class Space:
    """The configurations of every group's head, in the order of `groups`.

    name: what the space is, for messages. whole: whether the walk can reach nothing else from a start within it.
    """

    graph: OperatorGraph
    device_count: int
    groups: tuple[Group, ...]
    choices: tuple[tuple[Configuration, ...], ...]
    name: str
    whole: bool

    @property
    def size(self) -> int:
        """Number of strategies."""
        return prod(len(choices) for choices in self.choices)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """For each operator, the place of its group."""
        return {
            index: group_index for group_index, group in enumerate(self.groups) for index in group.operators
        }

    def strategy(self, chosen: Sequence[int]) -> Strategy:
        """Return the strategy that takes, of every group, the configuration of that number."""
        heads = (choices[number] for choices, number in zip(self.choices, chosen, strict=True))
        return following(self.graph, zip(self.groups, heads, strict=True))


def all_degrees(operator: Operator, most: int) -> list[Degrees]:
    """Return all degrees of an operator with at most `most` tasks, replicas among them; the single task first."""
    vectors: list[Degrees] = [()]
    for axis in operator.space.axes:
        limit = _most_parts(axis, most)
        vectors = [
            (*degrees, degree)
            for degrees in vectors
            for degree in range(1, min(limit, most // tasks(degrees)) + 1)
        ]
    return vectors


def dividing_degrees(operator: Operator, device_count: int) -> list[Degrees]:
    """Return those of all degrees whose number of tasks divides the number of devices, in the same order."""
    vectors: list[Degrees] = [()]
    for axis in operator.space.axes:
        parts = range(1, _most_parts(axis, device_count) + 1)
        vectors = [
            (*degrees, degree)
            for degrees in vectors
            for rest in [device_count // tasks(degrees)]
            for degree in parts
            if rest % degree == 0
        ]
    return vectors


def _most_parts(axis: Axis, most: int) -> int:
    return most if axis.kind is AxisKind.REPLICA else min(axis.size, most)


def count_degrees(axes: Sequence[Axis], most: int) -> dict[int, int]:
    """Return, by number of tasks up to `most`, how many degrees of some axes have so many; none is listed for it."""
    ways_of = {1: 1}
    for axis in axes:
        limit, before = _most_parts(axis, most), ways_of
        ways_of = {}
        for count, ways in before.items():
            for degree in range(1, min(limit, most // count) + 1):
                ways_of[count * degree] = ways_of.get(count * degree, 0) + ways
    return ways_of


def count_whole(operator: Operator, device_count: int) -> int:
    """Return how many configurations the whole space has for a head."""
    counted = count_degrees(operator.space.axes, device_count)
    return sum(ways * perm(device_count, count) for count, ways in counted.items())


def count_contiguous(operator: Operator, device_count: int) -> int:
    """Return how many configurations `contiguous_space` has for a head."""
    counted = count_degrees(operator.space.axes, device_count)
    return sum(ways * (device_count // count) for count, ways in counted.items() if device_count % count == 0)


def whole_space(graph: OperatorGraph, device_count: int) -> Space:
    """Return the whole space; its size is that of `count_whole`, multiplied."""

    def choices(head: Operator) -> Iterator[Configuration]:
        for degrees in all_degrees(head, device_count):
            for devices in itertools.permutations(range(device_count), tasks(degrees)):
                yield Configuration(degrees, devices)

    return _space(graph, device_count, choices, "all degrees on all lists of devices", whole=True)


def contiguous_space(graph: OperatorGraph, device_count: int) -> Space:
    """Return all degrees that use 1 device, all of them, or a divisor of them, on lists of neighbours.

    A list starts at any multiple of its length, so that lists of one length are the same or disjoint.
    """

    def choices(head: Operator) -> Iterator[Configuration]:
        for degrees in dividing_degrees(head, device_count):
            count = tasks(degrees)
            for start in range(0, device_count, count):
                yield Configuration(degrees, strided_devices(start, 1, count, device_count))

    name = "all degrees on a divisor of the devices, on aligned lists of neighbours"
    return _space(graph, device_count, choices, name, whole=False)


def leading_space(graph: OperatorGraph, device_count: int) -> Space:
    """Return all degrees without replicas that use 1 device, all of them, or a divisor of them: the first ones."""

    def choices(head: Operator) -> Iterator[Configuration]:
        for degrees in dividing_degrees(head, device_count):
            if degrees[-1] == 1:
                yield Configuration(degrees, tuple(range(tasks(degrees))))

    name = "degrees on a divisor of the devices, the first of them, without replicas"
    return _space(graph, device_count, choices, name, whole=False)


def smallest_space(graph: OperatorGraph, device_count: int, most: int) -> Space:
    """Return the whole space where every group has at most `most` configurations, else aligned lists of neighbours."""
    heads = [graph.operators[group.head] for group in find_groups(graph)]
    few = all(count_whole(head, device_count) <= most for head in heads)
    return (whole_space if few else contiguous_space)(graph, device_count)


def _space(
    graph: OperatorGraph,
    device_count: int,
    choices: Callable[[Operator], Iterable[Configuration]],
    name: str,
    *,
    whole: bool,
) -> Space:
    """Return the space in which every group's head has these choices, which are the same for the same axes."""
    groups = find_groups(graph)
    made: dict[tuple[tuple[int, AxisKind], ...], tuple[Configuration, ...]] = {}
    of_groups = []
    for group in groups:
        head = graph.operators[group.head]
        axes = tuple((axis.size, axis.kind) for axis in head.space.axes)
        if axes not in made:
            made[axes] = tuple(choices(head))
        of_groups.append(made[axes])
    return Space(graph, device_count, groups, tuple(of_groups), name, whole=whole)
