"""A strategy of one size of a network on one topology, made to fit another size on another.

Names of operators and axes must be the same, sizes need not. Degrees are clipped to the axes' sizes and to the
devices, and grow with the devices where all were used; devices keep their place among all. The result is legal,
and a start for a search: whether it is good the simulator says.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from graph.axes import AxisKind, Degrees, tasks
from graph.errors import StrategyError
from graph.operator_ranges import ranges_from_json
from graph.operators import Operator, OperatorGraph
from graph.strategy import FORMAT, Configuration, Sharding, Strategy
from search.space.groups import find_groups, following


def adapt(document: Mapping[str, Any], made_for: int, graph: OperatorGraph, device_count: int) -> Strategy:
    """Return the strategy of a document (`Strategy.to_json`), made for a graph of the same structure on other devices.

    made_for: how many devices it was found on.

    Raises:
        StrategyError: operators or axes have other names.
    """
    entries = document.get("operators", {})
    if document.get("format") != FORMAT or set(entries) != set(graph.operator_by_name):
        raise StrategyError(
            f"strategy: its operators are not those of {graph.name}, must have the same names; search afresh"
        )
    adapted = []
    for group in find_groups(graph):
        operator = graph.operators[group.head]
        adapted.append((group, _adapted(operator, entries[operator.name], made_for, device_count)))
    shared: Mapping[str, str] = document.get("sharding", {})
    places = {operator.name: index for index, operator in enumerate(graph.operators)}
    strategy = Strategy(
        graph.digest,
        following(graph, adapted).configurations,
        tuple(Sharding(shared.get(weight.name, Sharding.NONE)) for weight in graph.weights),
        ranges_from_json(document.get("recomputation", []), places, "recomputation"),
    )
    strategy.validate(graph, device_count)
    return strategy


def _adapted(operator: Operator, entry: Mapping[str, Any], made_for: int, device_count: int) -> Configuration:
    named: dict[str, int] = entry["degrees"]
    axes = operator.space.axes
    if unknown := set(named) - {axis.name for axis in axes}:
        raise StrategyError(
            f"operator {operator.name}: has no axis {min(unknown)}, must have it to take over its degree; search afresh"
        )
    clipped = [
        named.get(axis.name, 1) if axis.kind is AxisKind.REPLICA else min(named.get(axis.name, 1), axis.size)
        for axis in axes
    ]
    devices = tuple(entry["devices"])
    if len(devices) == made_for < device_count and prod(clipped) == made_for:
        _grow(operator, clipped, device_count // made_for)
    _shrink(clipped, device_count)
    return Configuration(tuple(clipped), _mapped(devices, made_for, tuple(clipped), device_count))


def _grow(operator: Operator, degrees: list[int], factor: int) -> None:
    """Multiply one degree: of samples if they suffice, else where most is left to split."""
    room = [
        (axis.kind is AxisKind.SAMPLE, axis.size // degrees[index], -index)
        for index, axis in enumerate(operator.space.axes)
        if axis.kind is not AxisKind.REPLICA and degrees[index] * factor <= axis.size
    ]
    if room:
        degrees[-max(room)[2]] *= factor


def _shrink(degrees: list[int], device_count: int) -> None:
    """Lower the largest degrees until there are no more tasks than devices."""
    while (count := prod(degrees)) > device_count:
        largest = degrees.index(max(degrees))
        others = count // degrees[largest]
        degrees[largest] = max(1, device_count // others) if others <= device_count else 1


def _mapped(devices: tuple[int, ...], made_for: int, degrees: Degrees, device_count: int) -> tuple[int, ...]:
    """Return distinct devices for all tasks, at the places among all devices where the given ones were."""
    count, before = tasks(degrees), len(devices)
    if count == before and max(devices) < device_count and made_for == device_count:
        return devices
    places = []
    for task in range(count):
        first = task * before // count
        # The tasks that took one task's place stand side by side.
        beside = task - -(-first * count // before)
        places.append((devices[first] * device_count // made_for + beside) % device_count)
    return tuple(places) if len(set(places)) == count else tuple(range(count))
