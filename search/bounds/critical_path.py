"""The longest path that no choice avoids: through forward, loss and backward, under listed configurations.

A path goes forward through some operators, turns at the loss and goes back through some. What precedes and what
follows an operator's part on it is found by recursion, for every choice of its group:

    inner[o][c, s, t]   from the start of part s's forward to the end of part t's backward, by way of the loss
    head[o][c, s]       until the start of part s's forward
    outer[o][c, s, t]   until the start of part s's forward, and from the end of part t's backward to the step's end

Neighbours in the group have the same choice. Of a neighbour in another group the least over its choices is taken, for
every pair of parts by itself. So none of them is longer than the path in the task graph of any strategy of the space:
that has an edge (`search.simulate.task_graph`) for each step of the recursion, takes at least its time for it, and
chooses once what the recursion may choose anew at each step. `NEVER` where some choice has no such path.

All of it speaks of what waits for what, and not of who is served first: it holds in every order of simulation.
"""

from __future__ import annotations

import numpy as np

from search.space.groups import follow
from search.tables import NEVER, Array, EdgeTable, Tables


class CriticalPaths:
    """The three recursions over all choices."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.graph = tables.graph
        self.edges = [tables.edge(number, by_part=True) for number in range(len(tables.edges))]
        self.edges_from: list[list[int]] = [[] for _ in self.graph.operators]
        self.edges_to: list[list[int]] = [[] for _ in self.graph.operators]
        for number, edge in enumerate(tables.edges):
            self.edges_from[edge.producer].append(number)
            self.edges_to[edge.reader].append(number)
        self.tail = [self._tail(index) for index in range(len(self.graph.operators))]
        self.inner = self._all_inner()
        self.head: list[Array] = []
        self.outer: list[Array] = []
        for index in range(len(self.graph.operators)):
            self._add_head_and_outer(index)

    def bound_ns(self) -> int:
        """Return a time that no strategy of the space is below."""
        least = 0
        for inner, outer in zip(self.inner, self.outer, strict=True):
            least = max(least, int((inner + outer).max(axis=(1, 2)).min()))
        return least

    def _tail(self, operator: int) -> Array:
        """Return the time that follows each part's backward: all-reduces of the operator's own weights, the update.

        The least over a part's replicas, of which any may be the one that has a backward. Weights that other groups
        read are left out: these decide who shares them.
        """
        tables = self.tables
        table = tables.operator(operator)
        tail = np.where(table.backward_ns_CP == NEVER, NEVER, 0)
        group_number = tables.space.group_of[operator]
        read = {
            weight
            for weight, readers in tables.trained
            if readers == (group_number,) and operator in tables.readers_of_weight(weight)
        }
        if not read or not self.graph.has_backward(self.graph.operators[operator]):
            return tail
        group = tables.space.groups[group_number]
        for number, choice in enumerate(tables.space.choices[group_number]):
            chosen = follow(group, choice)
            by_device: dict[int, int] = {}
            for weight in read:
                # One at a time: a bucket holds a weight's cell whole, and perhaps nothing else.
                syncs, elements = tables.syncs([weight], chosen)
                updates = {device: tables.update_ns(held, device) for device, held in elements.items()}
                for device, update_ns in updates.items():
                    by_device[device] = max(by_device.get(device, 0), update_ns)
                for sync in syncs:
                    after_ns = tables.sync_ns(sync) + max(updates[device] for device in sync.devices)
                    for device in sync.devices:
                        by_device[device] = max(by_device[device], after_ns)
            devices = np.array(chosen[operator].devices).reshape(table.parts_C[number], -1)
            for part, replicas in enumerate(devices.tolist()):
                tail[number, part] = min(by_device.get(device, 0) for device in replicas)
        return tail

    def _all_inner(self) -> list[Array]:
        graph, tables = self.graph, self.tables
        inner: list[Array] = [np.empty(0, np.int64)] * len(graph.operators)
        loss = graph.producer[graph.loss][0]
        for index in range(len(graph.operators) - 1, -1, -1):
            table = tables.operator(index)
            choices, parts = table.forward_ns_CP.shape
            after = np.full((choices, parts, parts), NEVER, np.int64)
            if index == loss:
                # A part's backward waits for its own forward alone.
                after[:, range(parts), range(parts)] = 0
            for number in self.edges_from[index]:
                if tables.edges[number].gradient:
                    after = np.maximum(after, self._through(number, inner[tables.edges[number].reader]))
            inner[index] = _clamped(
                table.forward_ns_CP[:, :, None] + after + table.backward_ns_CP[:, None, :]
            )
        return inner

    def _through(self, number: int, inner: Array) -> Array:
        """Return the way there, through the reader, and back, for every choice of the producer's group."""
        table = self.edges[number]
        there_ns, back_ns = _parts(table)
        if self._same_group(number):
            rows = table.producer_C, table.reader_C
            return _clamped(joined(joined(there_ns[rows], inner), back_ns[rows]))
        by_choice = [
            joined(joined(there_ns[row, table.reader_C], inner), back_ns[row, table.reader_C]).min(axis=0)
            for row in range(len(there_ns))
        ]
        return _clamped(np.stack(by_choice)[table.producer_C])

    def _same_group(self, number: int) -> bool:
        edge, group_of = self.tables.edges[number], self.tables.space.group_of
        return group_of[edge.producer] == group_of[edge.reader]

    def _add_head_and_outer(self, operator: int) -> None:
        """Add head and outer of an operator for all choices of its group; those of its producers are there."""
        table, edges = self.tables.operator(operator), self.tables.edges
        padding = np.where(table.forward_ns_CP == NEVER, NEVER, 0)
        head = padding
        for number in self.edges_to[operator]:
            head = np.maximum(head, self._head_through(number))
        outer = _clamped(head[:, :, None] + self.tail[operator][:, None, :])
        for number in self.edges_to[operator]:
            producer = self.graph.operators[edges[number].producer]
            if edges[number].gradient and self.graph.has_backward(producer):
                outer = np.maximum(outer, self._outer_through(number))
        self.head.append(head + padding)
        self.outer.append(_clamped(outer))

    def _head_through(self, number: int) -> Array:
        """Return the head of an edge's reader by way of its producer."""
        edge, table = self.tables.edges[number], self.edges[number]
        there_ns, _ = _parts(table)
        before = self.head[edge.producer] + self.tables.operator(edge.producer).forward_ns_CP
        if self._same_group(number):
            return _clamped((before[:, :, None] + there_ns[table.producer_C, table.reader_C]).max(axis=1))
        by_choice = [
            (before[:, :, None] + there_ns[table.producer_C, column]).max(axis=1).min(axis=0)
            for column in range(there_ns.shape[1])
        ]
        return _clamped(np.stack(by_choice))[table.reader_C]

    def _outer_through(self, number: int) -> Array:
        """Return the outer of an edge's reader by way of its producer."""
        edge, table = self.tables.edges[number], self.edges[number]
        there_ns, back_ns = _parts(table)
        own = self.tables.operator(edge.producer)
        around = self.outer[edge.producer] + own.forward_ns_CP[:, :, None] + own.backward_ns_CP[:, None, :]
        if self._same_group(number):
            rows = table.producer_C, table.reader_C
            return _around(there_ns[rows], around, back_ns[rows])
        by_choice = [
            _around(there_ns[table.producer_C, column], around, back_ns[table.producer_C, column]).min(axis=0)
            for column in range(there_ns.shape[1])
        ]
        return np.stack(by_choice)[table.reader_C]


def joined(left: Array, right: Array) -> Array:
    """Return the max-plus products of matrices, those of the first dim one by one."""
    return np.asarray((left[:, :, :, None] + right[:, None, :, :]).max(axis=2))


def _around(there_ns: Array, around: Array, back_ns: Array) -> Array:
    """Return the time around parts (s, t) of a reader by way of a producer whose parts have `around`."""
    before = joined(np.swapaxes(there_ns, 1, 2), _clamped(around))  # s, producer's t'
    return _clamped(joined(before, np.swapaxes(back_ns, 1, 2)))


def _parts(table: EdgeTable) -> tuple[Array, Array]:
    if table.there_ns is None or table.back_ns is None:
        raise ValueError("edge table: has no parts, must have been made with them")
    return table.there_ns, table.back_ns


def _clamped(time_ns: Array) -> Array:
    """Return times with all that no path takes at `NEVER`."""
    return np.where(time_ns < NEVER // 2, NEVER, time_ns)
