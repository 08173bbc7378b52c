"""Moves of the walk: which group changes, and to what.

Most moves give one group a random configuration. Others keep the degrees and move the devices, or copy what a
like group (the same operator on the same shapes) or a neighbour (along an edge of the graph) does now.

Source: FlexFlow (arXiv:1807.05358) section 6.2 for the first; copying is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from graph.axes import tasks
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Configuration
from search.configurations import configured, random_draw
from search.groups import NO_AXIS, Group, find_groups, follow, inverted, shared_axes, through
from search.placements import Copied, Drawn, Origin, random_placement

# Shares of the kinds of moves; the rest, the larger part, draws a configuration afresh.
MOVE_DEVICES, COPY_LIKE, COPY_NEIGHBOUR = 0.1, 0.15, 0.15


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A group along an edge: for each axis of ours (replica left out) the axis of its head, or NO_AXIS."""

    group: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A group's head, the configurations that the move gives to all operators of the group, and whence."""

    head: int
    configuration: Configuration
    changed: Mapping[int, Configuration]
    origin: Origin


class Moves:
    """Draws moves for one graph and a number of devices."""

    def __init__(self, graph: OperatorGraph, device_count: int) -> None:
        self.graph = graph
        self.device_count = device_count
        self.groups = find_groups(graph)
        self._like = _like_groups(graph, self.groups)
        self._neighbours = _neighbours(graph, self.groups)

    def propose(self, configurations: Sequence[Configuration], rng: np.random.Generator) -> Move:
        """Return a random move from the current configurations of all operators."""
        place = int(rng.integers(len(self.groups)))
        group = self.groups[place]
        kind = rng.random()
        current = configurations[group.head]
        chosen: Configuration | None = None
        origin: Origin | None = None
        if kind < MOVE_DEVICES:
            drawn = Drawn(current.degrees, random_placement(self.device_count, rng))
            # Two tasks of a given start may share a device, and more than all devices have no distinct ones.
            if tasks(current.degrees) <= self.device_count:
                chosen, origin = configured(drawn, self.device_count), drawn
        elif kind < MOVE_DEVICES + COPY_LIKE and self._like[place]:
            other = self._like[place][int(rng.integers(len(self._like[place])))]
            head = self.groups[other].head
            chosen, origin = configurations[head], Copied(head, None)
        elif kind < MOVE_DEVICES + COPY_LIKE + COPY_NEIGHBOUR and self._neighbours[place]:
            neighbour = self._neighbours[place][int(rng.integers(len(self._neighbours[place])))]
            head = self.groups[neighbour.group].head
            chosen, origin = copied(neighbour.axes, configurations[head]), Copied(head, neighbour.axes)
        if chosen is None or origin is None or chosen == current:
            origin = random_draw(self.graph.operators[group.head], self.device_count, rng)
            chosen = configured(origin, self.device_count)
        return Move(group.head, chosen, follow(group, chosen), origin)


def copied(axes: Sequence[int], configuration: Configuration) -> Configuration:
    """Return a neighbour's configuration on shared axes; of what else splits it, the first part is taken."""
    degrees = configuration.degrees
    strides = [prod(degrees[axis + 1 :]) for axis in range(len(degrees))]
    sources = [0]
    for axis in axes:
        if axis != NO_AXIS:
            sources = [task + part * strides[axis] for task in sources for part in range(degrees[axis])]
    mine = tuple(degrees[axis] if axis != NO_AXIS else 1 for axis in axes)
    return Configuration((*mine, 1), tuple(configuration.devices[task] for task in sources))


def _like_groups(graph: OperatorGraph, groups: Sequence[Group]) -> list[list[int]]:
    """Return, for each group, the others whose heads are the same operator on the same shapes."""
    alike: dict[str, list[int]] = {}
    keys = []
    for place, group in enumerate(groups):
        head = graph.operators[group.head]
        key = repr((head.target, head.arguments, graph.input_specs(head), head.space))
        keys.append(key)
        alike.setdefault(key, []).append(place)
    return [[other for other in alike[key] if other != place] for place, key in enumerate(keys)]


def _neighbours(graph: OperatorGraph, groups: Sequence[Group]) -> list[list[Neighbour]]:
    """Return, for each group, those whose values its head reads or whose heads read its values."""
    place_of = {index: place for place, group in enumerate(groups) for index in group.operators}
    followed = {
        group.head: tuple(range(len(graph.operators[group.head].space.axes) - 1)) for group in groups
    } | {member.operator: member.axes for group in groups for member in group.members}
    found: list[dict[Neighbour, None]] = [{} for _ in groups]
    for place, group in enumerate(groups):
        head = graph.operators[group.head]
        for slot, name in enumerate(head.inputs):
            if graph.value_by_name[name].kind is not ValueKind.OPERATOR:
                continue
            producer, _ = graph.producer[name]
            other = place_of[producer]
            axes = through(shared_axes(graph, name, head, slot), followed[producer])
            if other == place or all(axis == NO_AXIS for axis in axes):
                continue
            found[place][Neighbour(other, axes)] = None
            back = inverted(axes, len(graph.operators[groups[other].head].space.axes) - 1)
            found[other][Neighbour(place, back)] = None
    return [list(neighbours) for neighbours in found]
