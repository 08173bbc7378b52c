"""Strategies of which the first groups are chosen: a time that none of their completions is below.

Of what is chosen, durations and weights are exact; of the rest, the least over all its choices
(`search.bounds.critical_path`). A bucket with the gradients of what is chosen only grows when more is chosen, and so
does what a device updates.

Letters of shapes: O operators, E edges, P parts, T tasks, D devices, H sets of devices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graph.axes import tasks
from graph.operators import ValueKind
from graph.strategy import Configuration
from search.bounds.critical_path import CriticalPaths
from search.kernels.bounds import prefix_bound
from search.kernels.records import Prefix
from search.tables import NEVER, Array, Sync


class _WeightPlacement(NamedTuple):
    """The placement of a weight under some choices: its cells that several devices hold, and elements by device."""

    syncs: list[Sync]
    elements: dict[int, int]


class PartialStrategy:
    """Choices of the first groups, in the order of the space's groups."""

    def __init__(self, paths: CriticalPaths, bucket_bytes: int) -> None:
        self.paths, self.tables = paths, paths.tables
        self.space = self.tables.space
        graph, count = self.tables.graph, self.tables.problem.device_count
        self.chosen: list[int] = []
        configurations = [self.tables.configurations(index) for index in range(len(graph.operators))]
        parts = max(tasks(configuration.degrees[:-1]) for some in configurations for configuration in some)
        longest = max(tasks(configuration.degrees) for some in configurations for configuration in some)
        operators, edges = len(graph.operators), len(self.tables.edges)
        self.prefix = Prefix(
            forward_OP=np.full((operators, parts), NEVER, np.int64),
            backward_OP=np.full((operators, parts), NEVER, np.int64),
            inner_OPP=np.full((operators, parts, parts), NEVER, np.int64),
            device_OT=np.full((operators, longest), -1, np.int64),
            replicas_O=np.ones(operators, np.int64),
            head_OP=np.full((operators, parts), NEVER, np.int64),
            outer_OPP=np.full((operators, parts, parts), NEVER, np.int64),
            edge_ptr=_pointers(paths),
            edge=np.array([number for some in paths.edges_to for number in some], np.int64),
            producer_E=np.array([edge.producer for edge in self.tables.edges], np.int64),
            goes_back_E=np.array(
                [
                    edge.gradient and graph.has_backward(graph.operators[edge.producer])
                    for edge in self.tables.edges
                ],
                np.bool_,
            ),
            known_E=np.zeros(edges, np.bool_),
            there_EPP=np.full((edges, parts, parts), NEVER, np.int64),
            back_EPP=np.full((edges, parts, parts), NEVER, np.int64),
        )
        self._by_group = [sorted(group.operators) for group in self.space.groups]
        self._edges_of = self._edges_by_group()
        self._operators: list[Array] = []
        for group_index in range(len(self.space.groups)):
            chosen = sorted(index for some in self._by_group[: group_index + 1] for index in some)
            self._operators.append(np.array(chosen, np.int64))
        self._loads = [
            sum((self.tables.operator(index).load_ns_CD for index in some), np.zeros((1, count), np.int64))
            for some in self._by_group
        ]
        least = [int(load.sum(axis=1).min()) for load in self._loads]
        self._least_after = [sum(least[group_index + 1 :]) for group_index in range(len(least))]
        # For each group and choice, a bound of its own.
        self.least_ns = [
            np.max([(paths.inner[index] + paths.outer[index]).max(axis=(1, 2)) for index in some], axis=0)
            for some in self._by_group
        ]
        total_bytes = sum(value.spec.size_bytes for value in graph.values if value.kind is ValueKind.WEIGHT)
        # Then every set of devices has one bucket, with all that it shares.
        self._one_bucket = total_bytes < bucket_bytes
        self._weights = self.tables.trained
        self._complete: list[list[int]] = [[] for _ in self.space.groups]
        for weight, readers in self._weights:
            self._complete[max(readers)].append(weight)
        self._readers = dict(self._weights)
        self._held: dict[tuple[int, ...], _WeightPlacement] = {}
        self._state = [_State.empty(count)]

    def _edges_by_group(self) -> list[list[int]]:
        """Return, for each group, the edges that are known once it has its choice: both of their ends do."""
        edges_of: list[list[int]] = [[] for _ in self.space.groups]
        for number, edge in enumerate(self.tables.edges):
            ends = self.space.group_of[edge.producer], self.space.group_of[edge.reader]
            edges_of[max(ends)].append(number)
        return edges_of

    def forget(self, depth: int) -> None:
        """Forget the choices of the groups from `depth` on."""
        del self.chosen[depth:]
        del self._state[depth + 1 :]
        for number in (number for some in self._edges_of[depth:] for number in some):
            self.prefix.known_E[number] = False

    def choose(self, depth: int, number: int) -> None:
        """Choose a configuration for a group; those before it have theirs, those after it have none."""
        self.forget(depth)
        self.chosen.append(number)
        prefix, paths, tables = self.prefix, self.paths, self.tables
        for index in self._by_group[depth]:
            table = tables.operator(index)
            configuration = tables.configurations(index)[number]
            parts = table.forward_ns_CP.shape[1]
            prefix.forward_OP[index, :parts] = table.forward_ns_CP[number]
            prefix.backward_OP[index, :parts] = table.backward_ns_CP[number]
            prefix.inner_OPP[index, :parts, :parts] = paths.inner[index][number]
            prefix.device_OT[index, : len(configuration.devices)] = configuration.devices
            prefix.device_OT[index, len(configuration.devices) :] = -1
            prefix.replicas_O[index] = configuration.degrees[-1]
        for edge_number in self._edges_of[depth]:
            edge, edge_table = tables.edges[edge_number], paths.edges[edge_number]
            if edge_table.there_ns is None or edge_table.back_ns is None:
                continue
            row = edge_table.producer_C[self.chosen[self.space.group_of[edge.producer]]]
            column = edge_table.reader_C[self.chosen[self.space.group_of[edge.reader]]]
            there, back = edge_table.there_ns[row, column], edge_table.back_ns[row, column]
            prefix.known_E[edge_number] = True
            prefix.there_EPP[edge_number, : there.shape[0], : there.shape[1]] = there
            prefix.back_EPP[edge_number, : back.shape[0], : back.shape[1]] = back
        self._state.append(self._state[depth].after(self, depth, number))

    def bound_ns(self, depth: int) -> int:
        """Return a time that no completion is below, `depth` being the last group that was chosen."""
        state, count = self._state[depth + 1], self.tables.problem.device_count
        total = int(state.load_ns_D.sum()) + self._least_after[depth]
        update_ns_D = np.array(
            [
                self.tables.update_ns(held, device) if held else 0
                for device, held in enumerate(state.elements_D.tolist())
            ],
            np.int64,
        )
        after_OD = np.broadcast_to(update_ns_D, (len(self.prefix.replicas_O), count)).copy()
        for members, (size_bytes, users) in state.shared.items():
            after_ns = self.tables.sync_ns(Sync(members, size_bytes)) + int(update_ns_D[list(members)].max())
            rows = np.ix_(sorted(users), members)
            after_OD[rows] = np.maximum(after_OD[rows], after_ns)
        path_ns = int(prefix_bound(self.prefix, self._operators[depth], after_OD))
        load_ns = int((state.load_ns_D + update_ns_D).max())
        return max(path_ns, load_ns, -(-total // count))

    def held(self, weight: int) -> _WeightPlacement:
        """Return the placement of a weight all of whose readers have their choices."""
        readers = self._readers[weight]
        key = (weight, *(self.chosen[group] for group in readers))
        placement = self._held.get(key)
        if placement is None:
            chosen: dict[int, Configuration] = {
                index: self.tables.configurations(index)[self.chosen[group]]
                for group in readers
                for index in self._by_group[group]
            }
            placement = self._held[key] = _WeightPlacement(*self.tables.syncs([weight], chosen))
        return placement


class _State(NamedTuple):
    """Loads and weights of the first groups.

    load_ns_D: of forwards. elements_D: to update. shared: by set of devices, the bytes that one of its buckets has at
    least, and the operators that it waits for.
    """

    load_ns_D: Array
    elements_D: Array
    shared: dict[tuple[int, ...], tuple[int, frozenset[int]]]

    @classmethod
    def empty(cls, device_count: int) -> _State:
        """Return the state before any choice."""
        return cls(np.zeros(device_count, np.int64), np.zeros(device_count, np.int64), {})

    def after(self, partial: PartialStrategy, depth: int, number: int) -> _State:
        """Return the state with one more group."""
        elements_D, shared = self.elements_D, self.shared
        complete = partial._complete[depth]
        if complete:
            elements_D, shared = elements_D.copy(), dict(shared)
        for weight in complete:
            held = partial.held(weight)
            for device, elements in held.elements.items():
                elements_D[device] += elements
            users = frozenset(
                index
                for index in partial.tables.readers_of_weight(weight)
                if partial.tables.graph.has_backward(partial.tables.graph.operators[index])
            )
            for sync in held.syncs:
                size_bytes, others = shared.get(sync.devices, (0, frozenset()))
                if partial._one_bucket:
                    shared[sync.devices] = size_bytes + sync.size_bytes, others | users
                elif sync.size_bytes > size_bytes:
                    # Only this weight is surely in the same bucket.
                    shared[sync.devices] = sync.size_bytes, users
        return _State(self.load_ns_D + partial._loads[depth][number], elements_D, shared)


def _pointers(paths: CriticalPaths) -> Array:
    return np.cumsum([0, *(len(some) for some in paths.edges_to)])
