"""Strategies that need no search: what others do by default, and random ones."""

from __future__ import annotations

import numpy as np

from graph.axes import AxisKind, Degrees
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration, Strategy
from search.configurations import random_configuration
from search.groups import base_name, find_groups, follow

FULLY_CONNECTED = frozenset({"linear", "addmm", "mm"})


def first_axis(operator: Operator, kind: AxisKind) -> int | None:
    """Return the first axis of a kind, or None."""
    for index, axis in enumerate(operator.space.axes):
        if axis.kind is kind:
            return index
    return None


def split(operator: Operator, axis: int, degree: int) -> Configuration:
    """Return a configuration that splits one axis over the first devices, as far as its size allows."""
    size = operator.space.axes[axis].size
    parts = min(degree, size)
    degrees = tuple(parts if index == axis else 1 for index in range(len(operator.space.axes)))
    return Configuration(degrees, tuple(range(parts)))


def whole(operator: Operator, device: int = 0) -> Configuration:
    """Return the configuration of one task on one device."""
    return Configuration(ones(operator), (device,))


def ones(operator: Operator) -> Degrees:
    """Return the degrees of a single task."""
    return (1,) * len(operator.space.axes)


def single_device(graph: OperatorGraph, device: int = 0) -> Strategy:
    """Return the strategy that runs everything on one device."""
    return Strategy(graph.digest, tuple(whole(operator, device) for operator in graph.operators))


def data_parallel(graph: OperatorGraph, device_count: int) -> Strategy:
    """Return data parallelism, as DistributedDataParallel does it.

    Every operator is split by its sample axis, as far as its size allows. Of those without one, scalars (the
    division of a loss by its count) are computed on device 0, the others (running statistics, functions of
    weights) by every device that has samples.
    """
    return Strategy(graph.digest, tuple(_data_parallel(graph, device_count)))


def _data_parallel(graph: OperatorGraph, device_count: int) -> list[Configuration]:
    sample_axes = [first_axis(operator, AxisKind.SAMPLE) for operator in graph.operators]
    sizes = [
        operator.space.axes[axis].size
        for operator, axis in zip(graph.operators, sample_axes, strict=True)
        if axis is not None
    ]
    width = min(device_count, max(sizes, default=1))
    configurations = []
    for operator, axis in zip(graph.operators, sample_axes, strict=True):
        if axis is not None:
            configurations.append(split(operator, axis, width))
        elif all(spec.shape == () for spec in graph.output_specs(operator)):
            configurations.append(whole(operator))
        else:
            configurations.append(Configuration((*ones(operator)[:-1], width), tuple(range(width))))
    return configurations


def expert(graph: OperatorGraph, device_count: int) -> Strategy:
    """Return the experts' strategy: fully connected layers by output channel, all else data parallel.

    Source: "One weird trick for parallelizing convolutional neural networks" (arXiv:1404.5997).
    """
    configurations = _data_parallel(graph, device_count)
    for group in find_groups(graph):
        head = graph.operators[group.head]
        channel = first_axis(head, AxisKind.PARAMETER)
        if base_name(head.target) in FULLY_CONNECTED and channel is not None:
            for index, configuration in follow(group, split(head, channel, device_count)).items():
                configurations[index] = configuration
    return Strategy(graph.digest, tuple(configurations))


def random_strategy(graph: OperatorGraph, device_count: int, rng: np.random.Generator) -> Strategy:
    """Return a strategy with a random legal configuration of every head, which the other operators follow."""
    chosen: dict[int, Configuration] = {}
    for group in find_groups(graph):
        configuration = random_configuration(graph.operators[group.head], device_count, rng)
        chosen.update(follow(group, configuration))
    return Strategy(graph.digest, tuple(chosen[index] for index in range(len(graph.operators))))
