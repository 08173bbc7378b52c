"""What people would use on a number of devices: worth proposing for parts of a network.

A hybrid gives every group of operators a configuration. On few devices it is a baseline, or data parallelism on some of
them; a walk by random configurations seldom meets these, since half of what they say must change at once.

Of a thousand devices a random configuration is hopeless: ten prime factors dealt to any axes send everything
everywhere. What people use there is a grid: samples over its rows, one more axis over its columns, a row being devices
side by side. There a hybrid gives every group such a configuration, the rows being as long everywhere.

Source: Megatron-LM (arXiv:1909.08053), section 3, and Narayanan et al. (arXiv:2104.04473) for tensor parallelism
within a node and data parallelism between nodes; giving parts of it to parts of a network is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph.axes import AxisKind, tasks
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration, Strategy
from search.space.baselines import (
    FEW_DEVICES,
    data_parallel,
    expert,
    first_axis,
    global_map,
    megatron,
    operator_placement,
    row_lengths,
)
from search.space.groups import Group
from search.space.placements import Drawn, Strided, recognized


@dataclass(frozen=True, slots=True)
class Hybrid:
    """What a hybrid gives to each group, by the group's place: a configuration, and what that is drawn as."""

    configurations: tuple[Configuration, ...]
    origins: tuple[Drawn, ...]


def hybrids(graph: OperatorGraph, groups: Sequence[Group], device_count: int) -> tuple[Hybrid, ...]:
    """Return hybrids of a graph, each once, without those that no family of device lists gives.

    On many devices these are data parallelism and Megatron's strategies with rows of every length.
    """
    strategies = (_on_few if device_count <= FEW_DEVICES else _on_many)(graph, device_count)
    hybrid_of: dict[tuple[Configuration, ...], Hybrid] = {}
    for strategy in strategies:
        given = tuple(strategy.configurations[group.head] for group in groups)
        placed = [recognized(configuration.devices, device_count) for configuration in given]
        origins = tuple(
            Drawn(configuration.degrees, placement)
            for configuration, placement in zip(given, placed, strict=True)
            if placement is not None
        )
        if len(origins) == len(given):
            hybrid_of.setdefault(given, Hybrid(given, origins))
    return tuple(hybrid_of.values())


def _on_many(graph: OperatorGraph, device_count: int) -> list[Strategy]:
    return [
        data_parallel(graph, device_count),
        *(megatron(graph, row, device_count // row) for row in row_lengths(device_count)),
    ]


def _on_few(graph: OperatorGraph, device_count: int) -> list[Strategy]:
    divisors = [divisor for divisor in range(2, device_count + 1) if device_count % divisor == 0]
    return [
        data_parallel(graph, device_count),
        expert(graph, device_count),
        operator_placement(graph, device_count),
        *(megatron(graph, row, device_count // row) for row in divisors),
        *(
            global_map(graph, kind, row, device_count // row)
            for kind in (AxisKind.PARAMETER, AxisKind.ATTRIBUTE)
            for row in divisors
        ),
        # On fewer of them exchanges are cheaper.
        *(data_parallel(graph, device_count // share) for share in divisors),
    ]


def random_grid(operator: Operator, device_count: int, rng: np.random.Generator) -> Drawn:
    """Return a configuration on a grid of all devices: samples over rows, any other axis over columns.

    Rows are of any length that fills the grid, one device included. What does not fit is not split.
    """
    axes = operator.space.axes
    row = int(rng.choice((1, *row_lengths(device_count))))
    sample = first_axis(operator, AxisKind.SAMPLE)
    others = [index for index, axis in enumerate(axes) if index != sample and axis.size >= row]
    others = [index for index in others if axes[index].kind is not AxisKind.REPLICA] or [len(axes) - 1]
    inner = others[int(rng.integers(len(others)))]
    degrees = [1] * len(axes)
    degrees[inner] = row
    if sample is not None:
        degrees[sample] = min(device_count // row, axes[sample].size)
    # Tasks are numbered with the last axis fastest: where that is the samples', columns are what is strided.
    stride = row if sample is not None and inner < sample else 1
    if tasks(tuple(degrees)) < device_count:
        stride = 1
    return Drawn(tuple(degrees), Strided(0, stride))
