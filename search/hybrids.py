"""Data and tensor parallelism on one grid of devices: what is worth proposing where there are many of them.

Of a thousand devices a random configuration is hopeless: ten prime factors dealt to any axes send everything
everywhere. What people use there is a grid: samples over its rows, one more axis over its columns, a row being devices
side by side. A hybrid gives every group such a configuration, the rows being as long everywhere.

Source: Megatron-LM (arXiv:1909.08053), section 3, and Narayanan et al. (arXiv:2104.04473) for tensor parallelism
within a node and data parallelism between nodes; giving parts of it to parts of a network is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph.axes import AxisKind, tasks
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration
from search.baselines import data_parallel, first_axis, megatron, row_lengths
from search.groups import Group
from search.placements import Drawn, Strided, recognized


@dataclass(frozen=True, slots=True)
class Hybrid:
    """What a hybrid gives to each group, by the group's place: a configuration, and what that is drawn as."""

    configurations: tuple[Configuration, ...]
    origins: tuple[Drawn, ...]


def hybrids(graph: OperatorGraph, groups: Sequence[Group], device_count: int) -> tuple[Hybrid, ...]:
    """Return data parallelism and Megatron's strategies with rows of every length, each once."""
    strategies = [
        data_parallel(graph, device_count),
        *(megatron(graph, row, device_count // row) for row in row_lengths(device_count)),
    ]
    found: dict[tuple[Configuration, ...], Hybrid] = {}
    for strategy in strategies:
        given = tuple(strategy.configurations[group.head] for group in groups)
        placed = [recognized(one.devices, device_count) for one in given]
        origins = tuple(
            Drawn(one.degrees, place) for one, place in zip(given, placed, strict=True) if place is not None
        )
        if len(origins) == len(given):
            found.setdefault(given, Hybrid(given, origins))
    return tuple(found.values())


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
