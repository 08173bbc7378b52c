"""What the configurations of a listed space cost: one by one, and two by two along every edge.

All from the same fragments as the simulator's task graphs (`search.simulate.fragment_cache`), so that exact
algorithms and bounds speak of the same tasks: a forward and a backward of every part of an operator, and what an
exchange between two operators takes by itself. A part is a task or, where there are replicas, all tasks that compute
the same.

Letters of shapes: C choices of an operator, P parts (padded to the most of any choice), D devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from graph.axes import Degrees, tasks
from graph.errors import UsageError
from graph.strategy import Configuration
from search.cost.collective_cost import CollectivePrice
from search.kernels.fragments import OPERATOR_WORDS, TASK, TASK_WORDS
from search.kernels.messages import exchange_by_part
from search.problem import Problem
from search.simulate.fragment_cache import Holdings, UnitStore
from search.simulate.fragment_classes import ValueClass
from search.space.enumerated_space import Space
from search.space.groups import follow

Array = np.ndarray[Any, np.dtype[Any]]

# A time that no path takes: there is none. Sums of a few hundred of them do not overflow.
NEVER = -(1 << 52)
# Entries of all pairs of choices of an edge, beyond which a space is too large to be tabulated.
MOST_PAIRS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTable:
    """An operator under each of its group's choices.

    forward_ns_CP, backward_ns_CP: of every part, that of its fastest replica; NEVER for padding.
    load_ns_CD: what the forward of all tasks takes on each device.
    parts_C: how many.
    """

    forward_ns_CP: Array
    backward_ns_CP: Array
    load_ns_CD: Array
    parts_C: Array


@dataclass(frozen=True, slots=True)
class Edge:
    """An operator that reads another's value, in a slot. `gradient`: whether its gradient flows back."""

    value: int
    reading: int
    producer: int
    reader: int
    gradient: bool


@dataclass(frozen=True, slots=True, eq=False)
class EdgeTable:
    """An edge under all pairs of distinct configurations of its two ends.

    alone_ns: what the exchange takes by itself, forward and, where a gradient flows, back.
    there_ns: from every part of the producer to every part of the reader (NEVER: it needs nothing of it).
    back_ns: the gradient's way, from every part of the reader to every part of the producer.
    producer_C, reader_C: for each choice, the row or column of its configuration.
    """

    alone_ns: Array
    there_ns: Array | None
    back_ns: Array | None
    producer_C: Array
    reader_C: Array


class Sync(NamedTuple):
    """Gradients that the same devices hold: who they are, and how many bytes."""

    devices: tuple[int, ...]
    size_bytes: int


class Tables:
    """Tables of a space, made when they are asked for and kept."""

    def __init__(self, problem: Problem, space: Space, made: Tables | None = None) -> None:
        """Take a space; `made`: tables of another space of the problem, whose costs of single choices are kept."""
        self.problem = problem
        self.space = space
        self.graph = problem.graph
        self._store: UnitStore = (
            UnitStore(problem.graph, problem.topology, problem.costs, problem.links, problem.local_calls)
            if made is None
            else made._store
        )
        self._configurations = _by_operator(space)
        lists: dict[tuple[Configuration, ...], int] = {}
        # Operators whose lists are equal have equal numbers.
        self._list_of = [lists.setdefault(of, len(lists)) for of in self._configurations]
        self._distinct = [_distinct(configurations) for configurations in lists]
        self.edges = _edges(self._store)
        self._single = _single_readings(self._store, self.edges)
        self._edge_tables: dict[tuple[object, ...], tuple[Array, Array | None, Array | None]] = {}
        self._operator_tables: dict[tuple[object, ...], OperatorTable] = {}
        self._kinds = [device.kind_name for device in problem.topology.devices]
        self._longest_ns: dict[tuple[int, Configuration], int] = {} if made is None else made._longest_ns
        self._first_ns: dict[tuple[int, str, Degrees], int] = {} if made is None else made._first_ns
        self._weights_ns: dict[tuple[object, ...], int] = {} if made is None else made._weights_ns
        self._own_ns: dict[tuple[object, ...], int] = {} if made is None else made._own_ns
        self._price_of: dict[tuple[int, ...], CollectivePrice] = {}

    def configurations(self, operator: int) -> Sequence[Configuration]:
        """Return an operator's configuration under each of its group's choices."""
        return self._configurations[operator]

    def operator(self, operator: int) -> OperatorTable:
        """Return the table of an operator.

        Raises:
            CostError: a local call has no cost.
        """
        key = self._operator_class(operator)
        table = self._operator_tables.get(key)
        if table is None:
            table = self._operator_tables[key] = self._make_operator(operator, self._configurations[operator])
        return table

    def _operator_class(self, operator: int) -> tuple[int, int]:
        """Return the class of an operator and of its configurations: equal ones have equal tables."""
        return self._store.classes.operators[operator], self._list_of[operator]

    def _make_operator(self, operator: int, configurations: Sequence[Configuration]) -> OperatorTable:
        most = max(tasks(configuration.degrees[:-1]) for configuration in configurations)
        shape = (len(configurations), most)
        forward, backward = np.full(shape, NEVER, np.int64), np.full(shape, NEVER, np.int64)
        load = np.zeros((len(configurations), self.problem.device_count), np.int64)
        made: dict[Configuration, int] = {}
        for number, configuration in enumerate(configurations):
            if configuration in made:
                same = made[configuration]
                for array in (forward, backward, load):
                    array[number] = array[same]
                continue
            made[configuration] = number
            rows = self._tasks(operator, configuration)
            forward_ns, backward_ns = rows["forward_ns"], rows["backward_ns"]
            parts = tasks(configuration.degrees[:-1])
            forward[number, :parts] = forward_ns.reshape(parts, -1).min(axis=1)
            backward[number, :parts] = backward_ns.reshape(parts, -1).min(axis=1)
            np.add.at(load[number], rows["device"], forward_ns)
        return OperatorTable(
            forward,
            backward,
            load,
            np.array([tasks(configuration.degrees[:-1]) for configuration in configurations], np.int64),
        )

    def least_ns(self, operator: int) -> Array:
        """Return nanoseconds that `longest_ns` is never below, for every choice of an operator; 0 where none are known.

        Raises:
            CostError: the operator's call as a whole has no cost.
        """
        graph = self.graph
        of = graph.operators[operator]
        together_ns = self.problem.least_together_ns(of, set(self._kinds), backward=graph.has_backward(of))
        tasks_C = [tasks(configuration.degrees) for configuration in self._configurations[operator]]
        least_ns: Array = together_ns // np.array(tasks_C, np.int64)
        return least_ns

    def first_ns(self, operator: int, numbers: Sequence[int]) -> Array:
        """Return the nanoseconds of the first task, forward and backward, under some choices of an operator.

        They are no more than `longest_ns`, and made sooner.

        Raises:
            CostError: a local call has no cost.
        """
        of, known = self._store.classes.operators[operator], self._first_ns
        configurations = [self._configurations[operator][number] for number in numbers]
        keys = [
            (of, self._kinds[configuration.devices[0]], configuration.degrees)
            for configuration in configurations
        ]
        new = dict.fromkeys(key for key in keys if key not in known)
        for kind in dict.fromkeys(kind for _, kind, _ in new):
            degrees_of = [degrees for _, of_kind, degrees in new if of_kind == kind]
            calls = [
                self.problem.call_of_first(self.graph.operators[operator], degrees) for degrees in degrees_of
            ]
            costs_ns = self._store.task_costs.both_ns(operator, calls, kind)
            known.update(zip([(of, kind, degrees) for degrees in degrees_of], costs_ns, strict=True))
        return np.array([known[key] for key in keys], np.int64)

    def longest_ns(self, operator: int, number: int) -> int:
        """Return the nanoseconds of the slowest forward and of the slowest backward under a choice of an operator.

        Raises:
            CostError: a local call has no cost.
        """
        configuration = self._configurations[operator][number]
        key = self._store.classes.operators[operator], configuration
        longest_ns = self._longest_ns.get(key)
        if longest_ns is None:
            rows = self._tasks(operator, configuration)
            longest_ns = self._longest_ns[key] = int(rows["forward_ns"].max() + rows["backward_ns"].max())
        return longest_ns

    def _tasks(self, operator: int, configuration: Configuration) -> Array:
        """Return the records of an operator's tasks; valid until the next derivation."""
        self._store.make_room()
        begin = self._store.derive_operator(operator, configuration) + OPERATOR_WORDS
        return self._store.arena[begin : begin + TASK_WORDS * tasks(configuration.degrees)].view(TASK)

    def own_ns(self, group_number: int, number: int) -> int:
        """Return the nanoseconds of a group under one of its choices, without exchanges.

        Raises:
            CostError: a local call has no cost.
        """
        key = self._own_key(group_number, number)
        known_ns = self._own_ns.get(key)
        if known_ns is None:
            operators = self.space.groups[group_number].operators
            longest_ns = sum(self.longest_ns(operator, number) for operator in operators)
            known_ns = self._own_ns[key] = self.weights_ns(group_number, number) + longest_ns
        return known_ns

    def learn_own_ns(self, group_number: int, costs_ns: Mapping[int, int]) -> None:
        """Keep the costs of some choices of a group, which a copy of this process has found."""
        known = {self._own_key(group_number, number): own_ns for number, own_ns in costs_ns.items()}
        self._own_ns.update(known)

    def _own_key(self, group_number: int, number: int) -> tuple[object, ...]:
        """Return all that the cost of a group's choice depends on, in any space."""
        operators = self.space.groups[group_number].operators
        return (
            *(self._store.classes.operators[operator] for operator in operators),
            *(self._configurations[operator][number] for operator in operators),
            self._read_weights[group_number],
        )

    def distinct_edges(self) -> list[int]:
        """Return the edges, one of each class of equal tables, those of most pairs of configurations first."""
        number_of = {self._edge_class(number): number for number in reversed(range(len(self.edges)))}
        pairs = {number: len(of[2]) * len(of[3]) for of, number in number_of.items()}
        return sorted(pairs, key=lambda number: (-pairs[number], number))

    def learn_edge(self, number: int, alone_ns: Array) -> None:
        """Take an edge's `alone_ns`, as a copy of this process has found it."""
        self._edge_tables[(*self._edge_class(number), False)] = alone_ns, None, None

    def edge(self, number: int, *, by_part: bool) -> EdgeTable:
        """Return the table of an edge, with `there_ns` and `back_ns` if asked.

        Raises:
            UsageError: there are too many pairs.
        """
        edge = self.edges[number]
        producer, producer_rows = self._distinct[self._list_of[edge.producer]]
        reader, reader_rows = self._distinct[self._list_of[edge.reader]]
        key = (*self._edge_class(number), by_part)
        table = self._edge_tables.get(key)
        if table is None:
            if len(producer) * len(reader) > MOST_PAIRS:
                raise UsageError(
                    f"search: {self.graph.operators[edge.producer].name} and its reader have "
                    f"{len(producer)} x {len(reader)} configurations, must be at most {MOST_PAIRS} pairs; take fewer "
                    "devices"
                )
            table = self._edge_tables[key] = self._make_edge(number, producer, reader, by_part=by_part)
        return EdgeTable(*table, producer_rows, reader_rows)

    @property
    def pair_count(self) -> int:
        """How many pairs of configurations the tables of all edges have together, equal tables once."""
        classes = {self._edge_class(number) for number in range(len(self.edges))}
        return sum(len(producer) * len(reader) for _, _, producer, reader in classes)

    def _edge_class(
        self, number: int
    ) -> tuple[int, bool, tuple[Configuration, ...], tuple[Configuration, ...]]:
        """Return the key of an edge's table: edges of equal keys have equal tables."""
        edge = self.edges[number]
        producer, _ = self._distinct[self._list_of[edge.producer]]
        reader, _ = self._distinct[self._list_of[edge.reader]]
        return self._single[number], edge.gradient, producer, reader

    def _make_edge(
        self,
        number: int,
        producer: Sequence[Configuration],
        reader: Sequence[Configuration],
        *,
        by_part: bool,
    ) -> tuple[Array, Array | None, Array | None]:
        edge, store = self.edges[number], self._store
        alone = np.zeros((len(producer), len(reader)), np.int64)
        there = back = None
        if by_part:
            shape = (
                len(producer),
                len(reader),
                max(tasks(configuration.degrees[:-1]) for configuration in producer),
                max(tasks(configuration.degrees[:-1]) for configuration in reader),
            )
            there = np.full(shape, NEVER, np.int64)
            back = np.full((*shape[:2], shape[3], shape[2]), NEVER, np.int64)
        # With other readers of the value some exchanges are another collective, or part of one.
        sure = len(store.classes.values[edge.value].readers) == 1 or self.problem.device_count < 3
        of = self._single_class(number)
        generation, reading = -1, np.empty((0, 2), np.int64)
        for row, made_by in enumerate(producer):
            store.make_room()
            if store.generation != generation:
                generation, reading = store.generation, store.ports(of.readers[0], reader)
            made = np.broadcast_to(store.ports(of.producer, [made_by]), reading.shape)
            at_C = store.derive_values(of, np.concatenate([made, reading], axis=1))
            ns_C2 = store.exchanges_ns(at_C)
            alone[row] = ns_C2.sum(axis=1) if edge.gradient else ns_C2[:, 0]
            if there is None or back is None:
                continue
            for column, (at, read_by) in enumerate(zip(at_C.tolist(), reader, strict=True)):
                exchange_by_part(
                    store.arena,
                    at,
                    made_by.degrees[-1],
                    read_by.degrees[-1],
                    int(sure),
                    there[row, column],
                    back[row, column],
                )
        return alone, there, back

    def _single_class(self, number: int) -> ValueClass:
        edge = self.edges[number]
        of = self._store.classes.values[edge.value]
        return ValueClass(
            self._single[number], of.producer, (of.readers[edge.reading],), of.item_bytes, of.summable
        )

    def syncs(
        self, weights: Sequence[int], chosen: Mapping[int, Configuration]
    ) -> tuple[list[Sync], dict[int, int]]:
        """Return the gradients of some weights that devices sum up and, by device, how many of their elements it holds.

        Args:
            weights: their places among the graph's.
            chosen: the configurations of the operators that read them; a reader that is not among them counts as if
                it did not read.
        """
        shared: dict[tuple[int, ...], int] = {}
        elements: dict[int, int] = {}
        held_by: dict[tuple[object, ...], Holdings] = {}
        for weight in weights:
            of = self._store.classes.statics[weight]
            mine = [port for port in of.readers if port.operator in chosen]
            read_by = [chosen[port.operator] for port in mine]
            # Scales and shifts, and those of all steps of an unrolled network, are held alike.
            key = (*(port.number for port in mine), *read_by)
            if key not in held_by:
                held_by[key] = self._store.holdings(mine, read_by, synchronized=True)
            holders, cells = held_by[key]
            for device, held in holders:
                elements[device] = elements.get(device, 0) + held
            for members, held in cells:
                shared[members] = shared.get(members, 0) + held * of.item_bytes
        return [Sync(members, size) for members, size in shared.items()], elements

    def weights_ns(self, group_number: int, number: int) -> int:
        """Return the nanoseconds of all-reduces and updates of the weights of a group under one of its choices."""
        operators = self.space.groups[group_number].operators
        chosen = {operator: self._configurations[operator][number] for operator in operators}
        key = self._layouts(group_number, chosen)
        known_ns = self._weights_ns.get(key)
        if known_ns is not None:
            return known_ns
        weights = [weight for weight, readers in self.trained if group_number in readers]
        syncs, elements = self.syncs(weights, chosen)
        by_device: dict[int, int] = {}
        for sync in syncs:
            sync_ns = self.sync_ns(sync)
            for device in sync.devices:
                by_device[device] = by_device.get(device, 0) + sync_ns
        # Of those of one kind that hold as many one stands for all.
        updated = {(held, self._kinds[device]): device for device, held in elements.items()}
        update_ns = max((self.update_ns(held, device) for (held, _), device in updated.items()), default=0)
        weights_ns = self._weights_ns[key] = max(by_device.values(), default=0) + update_ns
        return weights_ns

    def _layouts(
        self, group_number: int, chosen: Mapping[int, Configuration]
    ) -> tuple[tuple[object, ...], ...]:
        """Return all that sums and updates of a group's weights depend on: the place and size of every part."""
        operators = self.space.groups[group_number].operators
        layouts = []
        for item_bytes, readings in self._read_weights[group_number]:
            layout: list[object] = [item_bytes]
            for port, place in readings:
                of = chosen[operators[place]]
                layout += port, of.devices, self._store.followed_degrees(port, of.degrees)
            layouts.append(tuple(layout))
        return tuple(layouts)

    @cached_property
    def trained(self) -> list[tuple[int, tuple[int, ...]]]:
        """The weights that some operator with a backward reads, with the places of all groups that read them."""
        graph, trained = self.graph, []
        for weight in range(len(graph.weights)):
            readers = [port.operator for port in self._store.classes.statics[weight].readers]
            if any(graph.has_backward(graph.operators[index]) for index in readers):
                trained.append((weight, tuple(sorted({self.space.group_of[index] for index in readers}))))
        return trained

    @cached_property
    def like_groups(self) -> list[int]:
        """For each group, the first whose choices cost the same by themselves, which depends on its class.

        That is its operators with their configurations, and of its weights what they read of each.
        """
        first_of: dict[tuple[object, ...], int] = {}
        return [
            first_of.setdefault((*map(self._operator_class, group.operators), read), number)
            for number, (group, read) in enumerate(zip(self.space.groups, self._read_weights, strict=True))
        ]

    @cached_property
    def _read_weights(self) -> list[tuple[tuple[int, tuple[tuple[int, int], ...]], ...]]:
        """For each group, of every weight its bytes an element, and the operands that the group's operators read it by.

        An operand: the number of its map, and the place of its operator in the group.
        """
        statics = self._store.classes.statics
        read = []
        for number, group in enumerate(self.space.groups):
            place = {operator: number for number, operator in enumerate(group.operators)}
            weights = [
                (
                    statics[weight].item_bytes,
                    tuple(
                        (port.number, place[port.operator])
                        for port in statics[weight].readers
                        if port.operator in place
                    ),
                )
                for weight, readers in self.trained
                if number in readers
            ]
            read.append(tuple(weights))
        return read

    def readers_of_weight(self, weight: int) -> set[int]:
        """Return the operators that read a weight, by its place among the graph's."""
        return {port.operator for port in self._store.classes.statics[weight].readers}

    def sync_ns(self, sync: Sync) -> int:
        """Return the nanoseconds of an all-reduce."""
        price = self._price_of.get(sync.devices)
        if price is None:
            price = self._price_of[sync.devices] = self._store.resource_sets.device_set(sync.devices).price
        return price.duration_ns(sync.size_bytes)

    def update_ns(self, elements: int, device: int) -> int:
        """Return the nanoseconds in which a device updates that many elements."""
        problem = self.problem
        optimizer, dtype = problem.training.optimizer, problem.graph.weight_dtype
        return problem.costs.update_ns(elements, optimizer, dtype, self._kinds[device])[0]


def _by_operator(space: Space) -> list[tuple[Configuration, ...]]:
    """Return every operator's configuration under each of its group's choices; groups of one form have the same."""
    configurations_of: list[tuple[Configuration, ...]] = [()] * len(space.graph.operators)
    made: dict[tuple[object, ...], list[tuple[Configuration, ...]]] = {}
    for group, choices in zip(space.groups, space.choices, strict=True):
        form = choices, *(member.axes for member in group.members)
        if form not in made:
            followed = [follow(group, choice).values() for choice in choices]
            made[form] = list(zip(*followed, strict=True))
        for index, configurations in zip(group.operators, made[form], strict=True):
            configurations_of[index] = configurations
    return configurations_of


def _distinct(configurations: Sequence[Configuration]) -> tuple[tuple[Configuration, ...], Array]:
    """Return distinct configurations in the order of their first, and for each one its place among them."""
    places: dict[Configuration, int] = {}
    rows = [places.setdefault(configuration, len(places)) for configuration in configurations]
    return tuple(places), np.array(rows, np.int64)


def _edges(store: UnitStore) -> list[Edge]:
    """Return the edges from values to their readers; readers that renew buffers are left out."""
    graph, wiring = store.graph, store.wiring
    edges = []
    for value in range(wiring.value_count):
        of = store.classes.values[value]
        first = wiring.reading_ptr[value]
        for reading, port in enumerate(of.readers):
            gradient = bool(wiring.reading_gradient[first + reading]) and graph.has_backward(
                graph.operators[port.operator]
            )
            edges.append(Edge(value, reading, of.producer.operator, port.operator, gradient))
    return edges


def _single_readings(store: UnitStore, edges: Sequence[Edge]) -> list[int]:
    """Return a class for the exchange of every edge by itself; equal numbers, equal exchanges.

    They are beyond the classes of whole values, since fragments are kept under either.
    """
    numbers: dict[tuple[int, ...], int] = {}
    first = 1 << 40
    classes = []
    for edge in edges:
        of = store.classes.values[edge.value]
        key = (of.producer.number, of.readers[edge.reading].number, of.item_bytes, int(of.summable))
        # With other readers a remote piece may travel otherwise (`Tables._make_edge`).
        classes.append(first + 2 * numbers.setdefault(key, len(numbers)) + (len(of.readers) > 1))
    return classes
