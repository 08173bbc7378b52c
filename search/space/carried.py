"""A strategy carried over from a graph to one that substitutions make of it, or back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graph.axes import REPLICA_NAME, AxisKind
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration, Strategy


def carried(strategy: Strategy, graph: OperatorGraph, other: OperatorGraph) -> Strategy:
    """Return a strategy of configurations alone for another graph of the network, on the same devices.

    Operators of both graphs keep their configuration. One in place of others, or of which another is in place, has
    that of whichever makes its first output in `graph`; where none does, of the nearest operator, by the values
    between them, of which that is so, readers first.

    Args:
        strategy: for `graph`.
        graph: as imported, or with substitutions applied.
        other: the same network as imported, or with other substitutions applied.
    """
    return replace(
        Strategy(
            other.digest,
            tuple(_configuration(strategy, graph, other, operator) for operator in other.operators),
        ),
        collective_algorithms=strategy.collective_algorithms,
        synchronization=strategy.synchronization,
    )


def _configuration(
    strategy: Strategy, graph: OperatorGraph, other: OperatorGraph, operator: Operator
) -> Configuration:
    index = graph.index_by_name.get(operator.name)
    if index is None:
        index = next(
            (
                graph.producer[name][0]
                for near in _by_distance(other, operator)
                for name in near.outputs
                if name in graph.producer
            ),
            0,
        )
    before, own = graph.operators[index], strategy.configurations[index]
    return own if before.space.axes == operator.space.axes else _fitted(before, own, operator)


def _by_distance(graph: OperatorGraph, operator: Operator) -> Iterator[Operator]:
    """Go through an operator, those that read what it makes, and theirs; then those before it."""
    yield operator
    for forward in (True, False):
        border, met = [operator], {operator.name}
        while border:
            near = border.pop(0)
            names = near.outputs if forward else near.inputs
            indexes = (
                [index for name in names for index, _ in graph.readers[name]]
                if forward
                else [graph.producer[name][0] for name in names if name in graph.producer]
            )
            for index in indexes:
                following = graph.operators[index]
                if following.name not in met:
                    met.add(following.name)
                    border.append(following)
                    yield following


def _fitted(before: Operator, configuration: Configuration, operator: Operator) -> Configuration:
    """Return a configuration for an operator with some axes of another.

    A degree whose axis is gone, or is too short, is joined to that of the samples, where these are enough, else to that
    of replicas. It may change which part a device has.
    """
    wanted = {
        axis.name: degree for axis, degree in zip(before.space.axes, configuration.degrees, strict=True)
    }
    axes = operator.space.axes
    degrees = [
        wanted.pop(axis.name) if wanted.get(axis.name, axis.size + 1) <= axis.size else 1 for axis in axes
    ]
    places = [
        index for index, axis in enumerate(axes) if axis.kind is AxisKind.SAMPLE or axis.name == REPLICA_NAME
    ]
    for degree in wanted.values():
        place = next(index for index in places if degrees[index] * degree <= axes[index].size)
        degrees[place] *= degree
    return Configuration(tuple(degrees), configuration.devices)
