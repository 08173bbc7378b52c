"""Which groups a move may treat alike: the same operator, the same weight, neighbours along an edge."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from graph.operators import OperatorGraph, ValueKind
from search.space.groups import NO_AXIS, Group, inverted, shared_axes, through


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A group along an edge: for each axis of ours (replica left out) the axis of its head, or NO_AXIS."""

    group: int
    axes: tuple[int, ...]


def like_groups(graph: OperatorGraph, groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Return, for each group, those whose heads are the same operator on the same shapes, itself among them."""
    heads = [graph.operators[group.head] for group in groups]
    return _classes(
        repr((head.target, head.arguments, graph.input_specs(head), head.space)) for head in heads
    )


def sharing_groups(graph: OperatorGraph, groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Return, for each group, those like it whose heads read the same weights (the steps of an unrolled layer)."""
    heads = [graph.operators[group.head] for group in groups]
    weights = [
        tuple(name for name in head.inputs if graph.value_by_name[name].kind is ValueKind.WEIGHT)
        for head in heads
    ]
    like = like_groups(graph, groups)
    # Without weights a group is by itself.
    return _classes((like[index][0], names or index) for index, names in enumerate(weights))


def _classes(keys: Iterable[Hashable]) -> list[tuple[int, ...]]:
    listed = list(keys)
    alike: dict[Hashable, list[int]] = {}
    for index, key in enumerate(listed):
        alike.setdefault(key, []).append(index)
    class_of = {key: tuple(places) for key, places in alike.items()}
    return [class_of[key] for key in listed]


def neighbours(
    graph: OperatorGraph, groups: Sequence[Group], *, of_heads: bool = False
) -> list[list[Neighbour]]:
    """Return, for each group, those whose values it reads or that read its values.

    of_heads: only where it is a head that reads, so not where branches join in an operator that follows another.
    """
    place_of = {index: group_index for group_index, group in enumerate(groups) for index in group.operators}
    followed = {group.head: tuple(range(_axes_of(graph, group))) for group in groups}
    followed |= {member.operator: member.axes for group in groups for member in group.members}
    neighbours_of: list[dict[Neighbour, None]] = [{} for _ in groups]
    for group_index, group in enumerate(groups):
        for index in (group.head,) if of_heads else group.operators:
            reader = graph.operators[index]
            mine = inverted(followed[index], _axes_of(graph, group))
            for slot, name in enumerate(reader.inputs):
                if graph.value_by_name[name].kind is not ValueKind.OPERATOR:
                    continue
                producer, _ = graph.producer[name]
                other = place_of[producer]
                theirs = through(shared_axes(graph, name, reader, slot), followed[producer])
                axes = through(mine, theirs)
                if other == group_index or all(axis == NO_AXIS for axis in axes):
                    continue
                neighbours_of[group_index][Neighbour(other, axes)] = None
                neighbours_of[other][
                    Neighbour(group_index, inverted(axes, _axes_of(graph, groups[other])))
                ] = None
    return [list(neighbours) for neighbours in neighbours_of]


def _axes_of(graph: OperatorGraph, group: Group) -> int:
    return len(graph.operators[group.head].space.axes) - 1
