"""Moves of the walk: which groups change, and to what.

A move draws a group, something to give to it (mostly a random configuration; its own degrees on other devices; what a
like group or a neighbour does now), and how far it reaches: that group alone, groups like it at once, the uses of the
same weight at once, or from neighbour to neighbour as far as the split carries over. Where it reaches further, others
may also take what the group does already. `MoveShares` says how often each is drawn.

Source: FlexFlow (arXiv:1807.05358) section 6.2 for one operator at random; all else is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod

import numpy as np

from graph.axes import Degrees, tasks
from graph.errors import UsageError
from graph.operators import OperatorGraph
from graph.strategy import Configuration
from search.space.baselines import FEW_DEVICES
from search.space.configurations import configured, random_draw
from search.space.groups import NO_AXIS, find_groups, follow
from search.space.hybrids import hybrids, random_grid
from search.space.neighbours import like_groups, neighbours, sharing_groups
from search.space.placements import Copied, Drawn, ProposalOrigin, random_placement

# Of moves to a hybrid, those that reach over a run of groups, and over groups like one; the rest is one group's.
HYBRID_RUNS, HYBRID_ALIKE = 0.4, 0.3
# Configurations of heads after which it is forgotten what their groups were given.
MOST_GIVEN = 1 << 11


@dataclass(frozen=True, slots=True)
class MoveShares:
    """How often a move is of a kind; each between 0 and 1.

    devices, copy_like, copy_neighbour: what the group is given; the rest, the larger part, is drawn afresh.
    alike, sharing, spread: how far it reaches, over groups like it, uses of its weights, or neighbours; the rest
    changes the group alone.
    keep: of moves that reach further, those that give the others what the group does already.
    hybrid: of all moves, those that give groups what they have in a hybrid (`search.space.hybrids`); the others are
    as above. grid: of what is drawn afresh, that which fills a grid of devices.

    Raises:
        UsageError: a share, or a sum of shares that exclude each other, is not between 0 and 1.
    """

    devices: float = 0.1
    copy_like: float = 0.15
    copy_neighbour: float = 0.15
    alike: float = 0.25
    sharing: float = 0.15
    spread: float = 0.25
    keep: float = 0.5
    hybrid: float = 0.0
    grid: float = 0.0

    def __post_init__(self) -> None:
        shares = {field.name: getattr(self, field.name) for field in fields(self)}
        shares["devices, copy_like and copy_neighbour"] = self.devices + self.copy_like + self.copy_neighbour
        shares["alike, sharing and spread"] = self.alike + self.sharing + self.spread
        for name, share in shares.items():
            if not 0 <= share <= 1 + 1e-9:
                raise UsageError(
                    f"moves: share of {name} is {share:g}, must be between 0 and 1; choose others"
                )


ONE_GROUP = MoveShares(devices=0.1, copy_like=0.15, copy_neighbour=0.15, alike=0.0, sharing=0.0, spread=0.0)
"""The moves of searches that were begun before there were any that reach further."""


def shares_for(device_count: int) -> MoveShares:
    """Return how often a move is of a kind on so many devices."""
    return MoveShares(hybrid=0.25) if device_count <= FEW_DEVICES else MoveShares(hybrid=0.5, grid=0.75)


@dataclass(frozen=True, slots=True)
class Part:
    """The change of some groups alike: their heads, the configuration of these, and its origin."""

    heads: tuple[int, ...]
    configuration: Configuration
    origin: ProposalOrigin


@dataclass(frozen=True, slots=True)
class Move:
    """A group's head, its configuration, the configurations of all operators that change, and its origin.

    others: changes of further groups. A copy is of its source's configuration after the changes that come before.
    """

    head: int
    configuration: Configuration
    changed: Mapping[int, Configuration]
    origin: ProposalOrigin
    others: tuple[Part, ...] = ()


class Moves:
    """Draws moves for one graph and a number of devices."""

    def __init__(self, graph: OperatorGraph, device_count: int, shares: MoveShares | None = None) -> None:
        self.graph = graph
        self.device_count = device_count
        self.shares = shares if shares is not None else MoveShares()
        self.groups = find_groups(graph)
        self._group_of = {group.head: group for group in self.groups}
        self._operators_of = {group.head: group.operators for group in self.groups}
        shapes: dict[tuple[tuple[int, ...], ...], int] = {}
        self._shape_of = {
            group.head: shapes.setdefault(tuple(member.axes for member in group.members), len(shapes))
            for group in self.groups
        }
        self._like = like_groups(graph, self.groups)
        self._sharing = sharing_groups(graph, self.groups)
        self._read_by_head = neighbours(graph, self.groups, of_heads=True)
        self._neighbours = neighbours(graph, self.groups)
        # Members that follow their heads alike are given the same: of forty steps one is worked out.
        self._followed: dict[Configuration, dict[int, tuple[Configuration, ...]]] = {}
        # Of a group and a neighbour: the axes of the edges between them.
        self._axes_between: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for group_index, near in enumerate(self._neighbours):
            for neighbour in near:
                self._axes_between.setdefault((group_index, neighbour.group), []).append(neighbour.axes)
        self._hybrids = hybrids(graph, self.groups, device_count) if self.shares.hybrid else ()

    def propose(
        self,
        configurations: Sequence[Configuration],
        rng: np.random.Generator,
        among: Sequence[int] | None = None,
    ) -> Move:
        """Return a random move from the current configurations of all operators.

        among: places of the groups from which the first to change is drawn; None: all.
        """
        places = range(len(self.groups)) if among is None else among
        group_index = places[int(rng.integers(len(places)))]
        shares = self.shares
        # Without hybrids nothing is drawn for them, here and below.
        if self._hybrids and rng.random() < shares.hybrid:
            return self._hybrid(group_index, rng)
        # Without moves that reach further nothing is drawn for them: older searches go on as they would have.
        reach = rng.random() if shares.alike + shares.sharing + shares.spread else 1.0
        if reach < shares.alike:
            others = self._some(self._like[group_index], group_index, rng)
            return self._to_all(group_index, others, configurations, rng)
        if reach < shares.alike + shares.sharing:
            return self._to_all(group_index, self._sharing[group_index], configurations, rng)
        if reach < shares.alike + shares.sharing + shares.spread:
            return self._spread(group_index, configurations, rng)
        return self._move(self._chosen(group_index, configurations, rng))

    def _chosen(
        self, group_index: int, configurations: Sequence[Configuration], rng: np.random.Generator
    ) -> Part:
        """Return a random change of a group."""
        head, shares = self.groups[group_index].head, self.shares
        kind = rng.random()
        current = configurations[head]
        chosen: Configuration | None = None
        origin: ProposalOrigin | None = None
        if kind < shares.devices:
            drawn = Drawn(current.degrees, random_placement(self.device_count, rng))
            # Two tasks of a given start may share a device, and more than all devices have no distinct ones.
            if tasks(current.degrees) <= self.device_count:
                chosen, origin = configured(drawn, self.device_count), drawn
        elif kind < shares.devices + shares.copy_like and len(self._like[group_index]) > 1:
            like = self._like[group_index]
            drawn_place = int(rng.integers(len(like) - 1))
            source = self.groups[like[drawn_place + (drawn_place >= like.index(group_index))]].head
            chosen, origin = configurations[source], Copied(source, None)
        elif (
            kind < shares.devices + shares.copy_like + shares.copy_neighbour
            and self._read_by_head[group_index]
        ):
            near = self._read_by_head[group_index]
            neighbour = near[int(rng.integers(len(near)))]
            source = self.groups[neighbour.group].head
            chosen, origin = copied(neighbour.axes, configurations[source]), Copied(source, neighbour.axes)
        if chosen is None or origin is None or chosen == current:
            draw = random_grid if shares.grid and rng.random() < shares.grid else random_draw
            origin = draw(self.graph.operators[head], self.device_count, rng)
            chosen = configured(origin, self.device_count)
        return Part((head,), chosen, origin)

    def _given(
        self, group_index: int, configurations: Sequence[Configuration], rng: np.random.Generator
    ) -> Part:
        """Return the change of a group that others are to follow: its own configuration, or another one."""
        if rng.random() < self.shares.keep:
            head = self.groups[group_index].head
            return Part((head,), configurations[head], Copied(head, None))
        return self._chosen(group_index, configurations, rng)

    def _some(self, places: Sequence[int], group_index: int, rng: np.random.Generator) -> Sequence[int]:
        """Return all of these places, or as many neighbours in their order, one's own among them."""
        if len(places) <= 2 or rng.random() < 0.5:
            return places
        count = _some_number(len(places), rng)
        mine = places.index(group_index)
        first = int(rng.integers(max(0, mine - count + 1), min(mine, len(places) - count) + 1))
        return places[first : first + count]

    def _to_all(
        self,
        group_index: int,
        others: Sequence[int],
        configurations: Sequence[Configuration],
        rng: np.random.Generator,
    ) -> Move:
        """Return a move of several groups to one configuration."""
        if len(others) == 1:
            return self._move(self._chosen(group_index, configurations, rng))
        given = self._given(group_index, configurations, rng)
        heads = tuple(self.groups[other].head for other in others if other != group_index)
        return self._move(given, Part(heads, given.configuration, Copied(given.heads[0], None)))

    def _spread(
        self, group_index: int, configurations: Sequence[Configuration], rng: np.random.Generator
    ) -> Move:
        """Return a move of a group and of its neighbours, and theirs, where all of the split carries over."""
        given = self._given(group_index, configurations, rng)
        wanted = _some_number(len(self.groups), rng)
        parts = {group_index: given}
        count = tasks(given.configuration.degrees)
        border = [(group_index, neighbour) for neighbour in self._neighbours[group_index]]
        while border and len(parts) < wanted:
            drawn = int(rng.integers(len(border)))
            border[drawn], border[-1] = border[-1], border[drawn]
            source, neighbour = border.pop()
            if neighbour.group in parts:
                continue
            part = self._along(parts[source], source, neighbour.group, count)
            if part is not None:
                parts[neighbour.group] = part
                border += [(neighbour.group, other) for other in self._neighbours[neighbour.group]]
        return self._move(*parts.values())

    def _along(self, part: Part, source: int, target: int, count: int) -> Part | None:
        """Return a copy of a part for a neighbour of its group, or None where none has so many tasks."""
        for axes in self._axes_between[target, source]:
            if len(_carried(axes, part.configuration.degrees)[1]) == count:
                copy = copied(axes, part.configuration)
                return Part((self.groups[target].head,), copy, Copied(part.heads[0], axes))
        return None

    def _hybrid(self, group_index: int, rng: np.random.Generator) -> Move:
        """Return a move of a group, some like it, or a run of groups to their configurations in a hybrid."""
        hybrid = self._hybrids[int(rng.integers(len(self._hybrids)))]
        reach = rng.random()
        run: Sequence[int] = range(len(self.groups))
        if reach < HYBRID_RUNS:
            places = self._some(run, group_index, rng)
        elif reach < HYBRID_RUNS + HYBRID_ALIKE:
            places = self._some(self._like[group_index], group_index, rng)
        else:
            places = (group_index,)
        # Groups of one configuration are one part.
        alike: dict[Configuration, list[int]] = {hybrid.configurations[group_index]: [group_index]}
        for other in places:
            if other != group_index:
                alike.setdefault(hybrid.configurations[other], []).append(other)
        changes = []
        for configuration, given in alike.items():
            head = self.groups[given[0]].head
            changes.append(Part((head,), configuration, hybrid.origins[given[0]]))
            if len(given) > 1:
                heads = tuple(self.groups[other].head for other in given[1:])
                changes.append(Part(heads, configuration, Copied(head, None)))
        return self._move(*changes)

    def _move(self, first: Part, *others: Part) -> Move:
        changed: dict[int, Configuration] = {}
        if len(self._followed) > MOST_GIVEN:
            self._followed.clear()
        for part in (first, *others):
            by_shape = self._followed.setdefault(part.configuration, {})
            for head in part.heads:
                shape = self._shape_of[head]
                given = by_shape.get(shape)
                if given is None:
                    given = by_shape[shape] = tuple(follow(self._group_of[head], part.configuration).values())
                changed.update(zip(self._operators_of[head], given, strict=True))
        return Move(first.heads[0], first.configuration, changed, first.origin, others)


def _some_number(most: int, rng: np.random.Generator) -> int:
    """Return a number from 2 to `most`, small ones more often: its logarithm is uniform."""
    return min(most, int(2 ** (1 + rng.random() * np.log2(most))) if most > 2 else most)


@lru_cache(maxsize=1 << 12)
def copied(axes: tuple[int, ...], configuration: Configuration) -> Configuration:
    """Return a neighbour's configuration on shared axes; of what else splits it, the first part is taken."""
    degrees, sources = _carried(axes, configuration.degrees)
    return Configuration(degrees, tuple(map(configuration.devices.__getitem__, sources)))


@lru_cache(maxsize=1 << 12)
def keeps_order(axes: tuple[int, ...], degrees: Degrees) -> bool:
    """Return whether `copied` gives the first devices of a configuration so split, in their order."""
    sources = _carried(axes, degrees)[1]
    return sources == tuple(range(len(sources)))


@lru_cache(maxsize=1 << 12)
def _carried(axes: tuple[int, ...], degrees: Degrees) -> tuple[Degrees, tuple[int, ...]]:
    """Return the degrees that are carried over, and for each task the neighbour's whose device it gets."""
    strides = [prod(degrees[axis + 1 :]) for axis in range(len(degrees))]
    sources = [0]
    for axis in axes:
        if axis != NO_AXIS:
            sources = [task + part * strides[axis] for task in sources for part in range(degrees[axis])]
    mine = tuple(degrees[axis] if axis != NO_AXIS else 1 for axis in axes)
    return (*mine, 1), tuple(sources)
