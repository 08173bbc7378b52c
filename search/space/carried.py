"""A strategy carried over to the graph that substitutions make of its own."""

from __future__ import annotations

from dataclasses import replace

from graph.axes import REPLICA_NAME, AxisKind
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration, Strategy


def carried(strategy: Strategy, graph: OperatorGraph, rewritten: OperatorGraph) -> Strategy:
    """Return a strategy of configurations alone for a rewritten graph, on the same devices.

    Operators that stay keep theirs. One in place of several has that of whichever gave its first output; one whose
    output is new, that of the first of its readers whose output is not.

    Args:
        strategy: for `graph`.
        graph: as imported.
        rewritten: `graph` with substitutions applied.
    """
    configurations = []
    for operator in rewritten.operators:
        index, _ = graph.producer[_stood_for(operator, graph, rewritten)]
        own = strategy.configurations[index]
        before = graph.operators[index]
        configurations.append(own if before.name == operator.name else _fitted(before, own, operator))
    return replace(
        Strategy(rewritten.digest, tuple(configurations)),
        collective_algorithms=strategy.collective_algorithms,
        synchronization=strategy.synchronization,
    )


def _stood_for(operator: Operator, graph: OperatorGraph, rewritten: OperatorGraph) -> str:
    """Return the value of `graph` whose operator's configuration an operator of the rewritten graph has."""
    while operator.outputs[0] not in graph.producer:
        reader, _ = rewritten.consumers[operator.outputs[0]][0]
        operator = rewritten.operators[reader]
    return operator.outputs[0]


def _fitted(before: Operator, configuration: Configuration, operator: Operator) -> Configuration:
    """Return a configuration for an operator with some axes of another.

    A degree whose axis is gone is joined to that of the samples, where these are enough, else to that of replicas. It
    may change which part a device has.
    """
    wanted = {
        axis.name: degree for axis, degree in zip(before.space.axes, configuration.degrees, strict=True)
    }
    degrees = [wanted.pop(axis.name, 1) for axis in operator.space.axes]
    places = [
        index
        for index, axis in enumerate(operator.space.axes)
        if axis.kind is AxisKind.SAMPLE or axis.name == REPLICA_NAME
    ]
    for degree in wanted.values():
        place = next(index for index in places if degrees[index] * degree <= operator.space.axes[index].size)
        degrees[place] *= degree
    return Configuration(tuple(degrees), configuration.devices)
