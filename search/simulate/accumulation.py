"""What it takes to add the gradients of micro-batches: each backward adds to those of the micro-batches before.

A sum of gradients reads two tensors and writes one, as an update by plain SGD does, whose time it takes
(`CostTable.backward_ns`, which has the sums within one micro-batch). The first micro-batch's gradients are copied
into the buckets, which counts as a sum; so does each one's copy, where each is summed over replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from graph.axes import Degrees
from graph.operators import OperatorGraph
from graph.strategy import Configuration
from search.cost.calls_to_profile import LocalCalls
from search.kernels.records import BACKWARD, Tasks

IntArray = np.ndarray[Any, np.dtype[Any]]


class GradientAccumulation:
    """The elements of weights' gradients that tasks of one graph add up; those of equal configurations are kept."""

    def __init__(self, graph: OperatorGraph, local_calls: LocalCalls) -> None:
        """Take the graph of a micro-batch."""
        self._graph = graph
        self._local_calls = local_calls
        self._elements: dict[tuple[int, Degrees], IntArray] = {}

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """For each operator: the input slots of weights whose first gradient in a micro-batch it gives."""
        graph = self._graph
        slots: list[list[int]] = [[] for _ in graph.operators]
        for weight in graph.weights:
            for index, slot in graph.gradient_readers.get(weight.name, ())[-1:]:
                slots[index].append(slot)
        return tuple(map(tuple, slots))

    @cached_property
    def most_slots(self) -> int:
        """Of one operator."""
        return max(map(len, self.slots), default=0)

    def _of(self, index: int, degrees: Degrees) -> IntArray:
        """Return the elements that each part of an operator adds, [parts, slots]; zeros where there are fewer slots."""
        key = (index, degrees)
        if key not in self._elements:
            calls = self._local_calls(self._graph, self._graph.operators[index], degrees)
            rows = [
                [call.inputs[slot].elements if call.gradients[slot] else 0 for slot in self.slots[index]]
                for call in calls
            ]
            elements = np.zeros((len(rows), self.most_slots), np.int64)
            elements[:, : len(self.slots[index])] = rows
            self._elements[key] = elements
        return self._elements[key]

    def added(
        self,
        tasks: Tasks,
        configurations: Sequence[Configuration],
        seconds_D: IntArray,
        launch_ns_D: IntArray,
    ) -> tuple[IntArray, IntArray]:
        """Return by how long each task takes longer than in a step of one micro-batch, and its host to issue it.

        seconds_D: in which each device adds two elements. launch_ns_D: in which its host issues a sum.
        """
        added_ns, launch_ns = np.zeros((2, len(tasks.kind)), np.int64)
        reading = [index for index, slots in enumerate(self.slots) if slots]
        if not reading:
            return added_ns, launch_ns
        parts = [self._of(index, configurations[index].degrees) for index in reading]
        first_O = np.full(len(configurations), -1, np.int64)
        first_O[reading] = np.cumsum([0, *map(len, parts[:-1])])
        backwards = np.flatnonzero((tasks.kind == BACKWARD) & (first_O[tasks.subject % len(first_O)] >= 0))
        elements = np.concatenate(parts)[first_O[tasks.subject[backwards]] + tasks.part[backwards]]
        devices = tasks.resource_set[backwards]
        seconds = seconds_D[devices][:, None]
        # The same expression as `search.cost.cost_table.nanoseconds`.
        added_ns[backwards] = (elements * seconds * 1e9 + 0.5).astype(np.int64).sum(axis=1)
        launch_ns[backwards] = np.count_nonzero(elements, axis=1) * launch_ns_D[devices]
        return added_ns, launch_ns
