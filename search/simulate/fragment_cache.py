"""Fragments of task graphs: what an operator, a value or a weight contributes under given configurations.

A proposal changes few operators, so nearly all fragments are found again, in compiled code. They go by what they depend
on, not by names: equal layers, and equal steps of an unrolled network, share them. They live in one arena; when it is
full it is emptied, and its users derive theirs anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from graph.axes import Degrees
from graph.collectives import BACKWARD, CollectiveKind
from graph.operators import OperatorGraph
from graph.strategy import Configuration, Sharding
from graph.topology import Topology
from graph.weight_placement import share_elements
from search.cost.calls_to_profile import LocalCalls
from search.cost.cost_table import CostTable
from search.cost.link_costs import COLLECTIVE_KINDS, LinkCosts
from search.cost.routes import route_table
from search.kernels.collective_list import CollectiveList
from search.kernels.fragment_table import (
    FragmentKeys,
    FragmentLookup,
    FragmentTable,
    fill_slots,
    find_fragments,
    find_touched,
    hold_lookup,
)
from search.kernels.fragment_writing import (
    COST_WORDS,
    DEVICES_BEHIND,
    ELSEWHERE,
    HOLDERS,
    SUMS,
    FragmentSources,
    FragmentWriting,
    ValueSources,
    hold_writing,
    write_fragments,
    write_values,
)
from search.kernels.fragments import (
    CELL,
    CELL_WORDS,
    HOLDER_WORDS,
    OPERATOR_WORDS,
    STATIC_WORDS,
    TASK_WORDS,
    VALUE_WORDS,
)
from search.kernels.held import LatestHeld
from search.kernels.messages import exchanges_ns
from search.kernels.records import ExchangeLinks
from search.simulate.arrays import GrowingArray, ResourceSetStore, graph_arrays, message_curves
from search.simulate.call_costs import TaskCosts
from search.simulate.fragment_classes import FragmentClasses, Port, StaticClass, ValueClass
from search.simulate.gradient_sets import GradientSets
from search.simulate.regions import FEWEST_DEGREES, FollowedDegrees, IntArray, Regions
from search.simulate.saved_tensors import Lasting
from search.simulate.weight_placement import REGIONS, Holders

# Words of the arena (8 bytes each) after which it is emptied.
ARENA_WORDS = 1 << 25
# Of the kernels.
SHARING_CODE = {level: code for code, level in enumerate(Sharding)}
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = (
    COLLECTIVE_KINDS.index(kind)
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
)
# Of each kind, by its code, the code of its backward.
BACKWARD_CODE = tuple(COLLECTIVE_KINDS.index(BACKWARD[kind]) for kind in COLLECTIVE_KINDS)
# Configurations after which it is forgotten which objects were met; equal ones keep their number.
MOST_OBJECTS = 1 << 14
# Collectives of new fragments that are priced together; there is room for those of any one fragment at least.
LISTED_COLLECTIVES = 1 << 12

Holdings = tuple[list[tuple[int, int]], list[tuple[tuple[int, ...], int]]]
"""(device, elements) of all holders, and (devices, elements) of all cells that several hold."""


@dataclass(slots=True)
class Chosen:
    """What the fragments of one strategy are derived from (configurations, saved tensors, sharding), looked up in."""

    configurations: list[Configuration]
    lasting: tuple[Lasting | None, ...]
    sharding: list[Sharding]
    keys: FragmentKeys
    lookup: LatestHeld[FragmentLookup] = field(default_factory=partial(LatestHeld, hold_lookup))


class UnitStore:
    """All fragments met so far, for one graph on one topology."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostTable,
        links: LinkCosts,
        local_calls: LocalCalls,
        resource_sets: ResourceSetStore | None = None,
    ) -> None:
        """Begin without fragments, with the resource sets of another graph on the topology, if any are given."""
        self.graph = graph
        self.topology = topology
        self.links = links
        self.wiring = graph_arrays(graph)
        self.generation = 0
        self._regions = Regions()
        self._holders = Holders(self._regions)
        self.classes = FragmentClasses.of(graph, self._regions)
        self.subjects = self.classes.subjects()
        self.task_costs = TaskCosts(graph, self.classes.operators, costs, local_calls)
        kinds = [device.kind_name for device in topology.devices]
        self._kind_names = list(dict.fromkeys(kinds))
        self._kind_D = np.array([self._kind_names.index(kind) for kind in kinds], np.int64)
        node_D = np.array([device.node for device in topology.devices], np.int64)
        routes = route_table(topology)
        self.exchange_links = ExchangeLinks(
            node_D, routes.latency_s_P, routes.bandwidth_P, *message_curves(topology, links),
            routes.pointers_P1, routes.link, np.zeros((2, len(topology.links)), np.int64),
        )  # fmt: skip
        count = len(self.subjects.class_S)
        # The words of the keys of all subjects: more than one look-up adds to the table.
        self._key_words = 2 * count + len(self.subjects.port)
        self._table = _new_table(count, self._key_words)
        self._missing = np.zeros((count, 2), np.int64)
        self._state = np.zeros(3, np.int64)
        # Not one for each strategy, which would keep an arena that has grown since.
        self._writing = LatestHeld(hold_writing)
        values, statics, none = self.classes.values, self.classes.statics, np.zeros(0, np.int64)
        self._listed = _new_list(
            max((len(value.readers) for value in values), default=1) * len(kinds), len(kinds)
        )
        operands = [port.number for value in values for port in (value.producer, *value.readers)]
        operands += [port.number for static in statics for port in static.readers]
        self._sources = FragmentSources(
            words=none,
            common_K3=self._regions.common_K3,
            port=np.array(operands, np.int64),
            operands=max(operands, default=-1) + 1,
            item_bytes=np.array(
                [*(value.item_bytes for value in values), *(static.item_bytes for static in statics)],
                np.int64,
            ),
            form=np.array([*(value.summable for value in values), *map(self._form, statics)], np.int64),
            degrees_C=none,
            devices_at_C=none,
            at_PD=np.zeros((0, 0), np.int64),
            one_kind=int(len(self._kind_names) == 1),
            links=self.exchange_links,
            unknown_N3=np.zeros((self._key_words, 3), np.int64),
        )
        rows = self._sources.operands + max(self.classes.operators) + 1
        self._at_PD = np.full((rows, FEWEST_DEGREES), -1, np.int64)
        self._gradient_sets = GradientSets(self._regions, statics[: len(graph.weights)])
        # Pages of it are taken as they are written, and kept.
        self.arena = np.zeros(ARENA_WORDS + (ARENA_WORDS >> 2), np.int64)
        # To list the routes takes seconds where there are a million.
        self.resource_sets = resource_sets if resource_sets is not None else ResourceSetStore(topology, links)
        self._empty()

    def _empty(self) -> None:
        self.generation += 1
        if self.generation > 1:
            self.resource_sets = self.resource_sets.emptied()
        self._end = 0
        self._regions.clear()
        self._holders.clear()
        self._configurations: dict[Configuration, int] = {}
        self._objects: dict[int, tuple[Configuration, int]] = {}
        self._degrees: dict[Degrees, int] = {}
        self._degrees_by_number: list[Degrees] = []
        self._degrees_of, self._devices_at = GrowingArray(np.int64), GrowingArray(np.int64)
        self._at_PD[:] = -1
        self._gradient_sets.clear()
        self._needs: dict[tuple[int, int], IntArray] = {}
        self._static_fragments: dict[tuple[int, int, bool, bytes], int] = {}
        self._table.slot[:] = -1
        self._table.counts[0] = 0
        # A value that goes nowhere, and a static tensor that nobody holds.
        self._no_value_at, self._no_static_at = self._reserve(VALUE_WORDS), self._reserve(STATIC_WORDS)
        self.arena[: self._end] = 0

    def make_room(self) -> None:
        """Empty the arena if it is full; `generation` then changes."""
        if self._end > ARENA_WORDS:
            self._empty()

    def configuration_numbers(self, configurations: Iterable[Configuration]) -> list[int]:
        """Return the numbers of configurations, valid within a generation."""
        met, number = self._objects.get, self.configuration_number
        return [
            entry[1] if (entry := met(id(configuration))) is not None else number(configuration)
            for configuration in configurations
        ]

    def configuration_number(self, configuration: Configuration) -> int:
        """Return the number of a configuration, valid within a generation."""
        met = self._objects.get(id(configuration))
        if met is not None:
            return met[1]
        number = self._configurations.setdefault(configuration, len(self._configurations))
        if number == len(self._devices_at):
            degrees, devices = configuration.degrees, configuration.devices
            code = self._degrees.setdefault(degrees, len(self._degrees))
            if code == len(self._degrees_by_number):
                self._degrees_by_number.append(degrees)
                if code == self._at_PD.shape[1]:
                    self._at_PD = np.concatenate([self._at_PD, np.full_like(self._at_PD, -1)], axis=1)
            self._degrees_of.extend((code,))
            at = self._regions.write((len(devices), degrees[-1], *devices))
            self._devices_at.extend([at + DEVICES_BEHIND])
            self._gradient_sets.add(devices)
        if len(self._objects) >= MOST_OBJECTS:
            self._objects.clear()
        # An object that is kept is the only one of its id.
        self._objects[id(configuration)] = configuration, number
        return number

    def _devices(self, number: int) -> IntArray:
        """Return the devices of the tasks of a configuration, by its number."""
        at, words = self._devices_at.items[number], self._regions.words.items
        return words[at : at + words[at - DEVICES_BEHIND]]

    def _reserve(self, words: int) -> int:
        at = self._end
        self._grow(at + words)
        self._end = at + words
        return at

    def _grow(self, words: int) -> None:
        if words > len(self.arena):
            arena = np.zeros(max(2 * len(self.arena), words), np.int64)
            arena[: self._end] = self.arena[: self._end]
            self.arena = arena

    def touched(self, chosen: Chosen, operators: IntArray, limit: int) -> IntArray:
        """Return the subjects below `limit` that some operators' configurations change, ascending."""
        count = find_touched(chosen.lookup.of(self._lookup(chosen)), operators, limit)
        return chosen.keys.touched_S[:count].copy()

    def find(self, chosen: Chosen, subjects: IntArray) -> None:
        """Write where the fragments of some subjects (ascending) start, of which those that are missing are derived.

        Raises:
            CostError: a local call has no cost on its device's kind.
        """
        self._make_entries(len(subjects))
        lookup = chosen.lookup.of(self._lookup(chosen))
        missing = find_fragments(lookup, subjects, self._no_value_at, self._no_static_at)
        if missing and (left := self._write(chosen, missing)):
            self._find_out()
            while left := self._write(chosen, left):
                self._derive(chosen, left)
                if self._state[2]:
                    self._grow(2 * len(self.arena))

    def _lookup(self, chosen: Chosen) -> FragmentLookup:
        return FragmentLookup(self.subjects, self._table, chosen.keys, self._missing)

    def _write(self, chosen: Chosen, missing: int) -> int:
        """Write missing fragments of which all is known; return how many are left."""
        state = self._state
        state[:] = self._end, 0, 0
        sources = self._sources._replace(
            words=self._regions.words.room,
            degrees_C=self._degrees_of.room,
            devices_at_C=self._devices_at.room,
            at_PD=self._at_PD,
        )
        writing = FragmentWriting(self._lookup(chosen), sources, self.arena, self._listed, state)
        left = write_fragments(self._writing.of(writing), missing)
        self._end = int(state[0])
        self._price_collectives()
        return left

    def _price_collectives(self) -> None:
        """Write resource sets and durations of the collectives that are listed, and empty the list."""
        listed = self._listed
        if not listed.counts[0]:
            return
        rows_K7, member = listed.row_K7[: listed.counts[0]], listed.member
        numbers = np.array(
            self.resource_sets.numbers(
                [(kind, root, member[first:last]) for kind, root, first, last in rows_K7[:, 2:6].tolist()]
            ),
            np.int64,
        )
        self.arena[rows_K7[:, 0]] = numbers
        is_timed = rows_K7[:, 1] >= 0
        timed_K7 = rows_K7[is_timed]
        self.arena[timed_K7[:, 1]] = self.resource_sets.durations_ns(numbers[is_timed], timed_K7[:, 6])
        listed.counts[:] = 0

    def _find_out(self) -> None:
        """Find out sides of operands and costs of tasks, as listed.

        Raises:
            CostError: a local call has no cost on its device's kind.
        """
        operands, write, side = self._sources.operands, self._regions.write, self._regions.side
        at_PD, kind, unknown_N3 = self._at_PD, self._kind_names[0], self._sources.unknown_N3[: self._state[1]]
        try:
            for row, column, operator in unknown_N3.tolist():
                degrees = self._degrees_by_number[column]
                if row < operands:
                    at_PD[row, column] = side(row, degrees)
                else:
                    rows, call_of = self.task_costs.of_calls(operator, (*degrees[:-1], 1), kind, None)
                    row_at = [len(call_of) + COST_WORDS * call for call in call_of]
                    at_PD[row, column] = write([*row_at, *itertools.chain(*rows)])
        except BaseException:
            # What is still unknown is asked for again.
            at_PD[at_PD == -2] = -1
            raise

    def _derive(self, chosen: Chosen, left: int) -> None:
        """Write the fragments that kernels leave: operators of several costs, and static tensors.

        Raises:
            CostError: a local call has no cost on its device's kind.
        """
        at, statics_at, values_at = self._table.at, self.subjects.statics_at, self.subjects.values_at
        for subject, entry in self._missing[:left].tolist():
            if at[entry] >= 0:
                continue
            if subject >= statics_at:
                static_index = subject - statics_at
                at[entry] = self._derive_static(
                    self.classes.statics[static_index], chosen.configurations, chosen.sharding[static_index]
                )
            elif subject < values_at:
                lasting = chosen.lasting[subject]
                if lasting is not None or not self._sources.one_kind:
                    at[entry] = self.derive_operator(subject, chosen.configurations[subject], lasting)

    def _make_entries(self, count: int) -> None:
        table = self._table
        entries = int(table.counts[0])
        words = int(table.key_ptr[entries]) + self._key_words
        if entries + count > len(table.at) or words > len(table.key):
            self._table = _new_table(2 * max(len(table.at), count), 2 * len(table.key))
            for new, old in zip(self._table, table, strict=True):
                if new is not self._table.slot:
                    new[: len(old)] = old
            fill_slots(self._table)

    def derive_operator(
        self, index: int, configuration: Configuration, lasting: Lasting | None = None
    ) -> int:
        """Write the fragment of an operator; return where it starts. `lasting`: of `TaskCosts`.

        Raises:
            CostError: a local call has no cost on its device's kind.
        """
        devices = self._devices(self.configuration_number(configuration))
        words = OPERATOR_WORDS + TASK_WORDS * len(devices)
        kinds = self._kind_D[devices]
        costs = self.task_costs.rows(index, configuration.degrees, self._kind_names[kinds[0]], lasting)
        if (kinds != kinds[0]).any():
            costs = costs.copy()
            for kind in dict.fromkeys(kinds.tolist()):
                of_kind = self.task_costs.rows(index, configuration.degrees, self._kind_names[kind], lasting)
                costs[kinds == kind] = of_kind[kinds == kind]
        at = self._reserve(words)
        fragment = self.arena[at : at + words]
        fragment[:OPERATOR_WORDS] = len(devices), configuration.degrees[-1]
        rows = fragment[OPERATOR_WORDS:].reshape(len(devices), TASK_WORDS)
        rows[:, 0], rows[:, 1:] = devices, costs
        return at

    def derive_value(self, of: ValueClass, made_by: Configuration, read_by: Sequence[Configuration]) -> int:
        """Write the fragment of a value; return where it starts."""
        pairs = zip((of.producer, *of.readers), (made_by, *read_by), strict=True)
        ports = [self.ports(port, [configuration]) for port, configuration in pairs]
        return int(self.derive_values(of, np.concatenate(ports, axis=1))[0])

    def ports(self, port: Port, configurations: Sequence[Configuration]) -> IntArray:
        """Return, of each configuration, where an operand's side and the devices of its tasks are (N, 2).

        They are valid within a generation.
        """
        ports = []
        for configuration in configurations:
            number = self.configuration_number(configuration)
            ports.append(
                (self._regions.side(port.number, configuration.degrees), self._devices_at.items[number])
            )
        return np.array(ports, np.int64)

    def derive_values(self, of: ValueClass, ports_NP: IntArray) -> IntArray:
        """Write the fragments of a value, each under other configurations; return where each starts.

        ports_NP: of each, `ports` of the producer and of every reading, beside each other.
        """
        sources = ValueSources(
            self._regions.words.items,
            self._regions.common_K3,
            self.exchange_links,
            of.item_bytes,
            int(of.summable),
        )
        at_N = np.zeros(len(ports_NP), np.int64)
        state = np.array([self._end, 0, 0], np.int64)
        while state[1] < len(at_N):
            write_values(self.arena, sources, ports_NP, self._listed, at_N, state)
            self._end = int(state[0])
            self._price_collectives()
            self._grow(int(state[2]))
        return at_N

    def exchanges_ns(self, at_N: IntArray) -> IntArray:
        """Return the nanoseconds that exchanges of values take by themselves, forward and back (N, 2).

        at_N: where the fragments of the values start.
        """
        ns_N2 = np.empty((len(at_N), 2), np.int64)
        sets = self.resource_sets.arrays()
        link_ns = np.zeros(len(self.topology.links), np.int64)
        exchanges_ns(
            self.arena, at_N, sets.resource_ptr, sets.resource, len(self.topology.devices), link_ns, ns_N2
        )
        return ns_N2

    def _form(self, of: StaticClass) -> int:
        """Return whether kernels write a static tensor: one operator reads it, and regions of weights are apart."""
        if len(of.readers) != 1:
            return ELSEWHERE
        if not of.synchronized:
            return HOLDERS
        return SUMS if self._regions.cutting_axes(of.readers[0].number) is not None else ELSEWHERE

    def _derive_static(
        self, of: StaticClass, configurations: Sequence[Configuration], sharding: Sharding
    ) -> int:
        """Return where the fragment of a static tensor starts; `sharding`: what a weight's holders share."""
        read_by = [configurations[port.operator] for port in of.readers]
        code = SHARING_CODE[sharding] if of.synchronized else 0
        needed = self._needed(of.readers, read_by)
        # Many configurations, of many operators, need the same of the same devices; more hold the same.
        held = needed
        need_key = held_key = (of.item_bytes, code, of.synchronized, needed.tobytes())
        fragment = self._static_fragments.get(need_key)
        if fragment is None:
            held = self._holders.covered(needed)
            if held is not needed:
                held_key = (*need_key[:3], held.tobytes())
                fragment = self._static_fragments.get(held_key)
        if fragment is None:
            is_cut = held is needed and self._is_cut(of.readers)
            fragment = self._make_static_fragment(of, code, held, is_cut=is_cut)
        self._static_fragments[need_key] = self._static_fragments[held_key] = fragment
        return fragment

    def _make_static_fragment(self, of: StaticClass, code: int, held: IntArray, *, is_cut: bool) -> int:
        devices, elements = self._holders.elements(held)
        cells = self._holders.shared_cells(held, is_cut=is_cut) if of.synchronized else []
        # Of each device the elements that it keeps, and those that it updates, of those that it reads.
        kept = updated = elements
        if code:
            kept, updated = elements.copy(), elements.copy()
        sets: list[tuple[int, int, IntArray]] = []
        travelling = []
        for cell in cells:
            if code == 0:
                sets.append((ALL_REDUCE, -1, cell.devices))
                travelling.append(cell.elements)
                continue
            sets += [(REDUCE_SCATTER, -1, cell.devices), (ALL_GATHER, -1, cell.devices)]
            shares = share_elements(cell.sizes(), len(cell.devices))
            travelling.append(len(shares) * shares[0])
            others = cell.elements - np.array(shares, np.int64)
            places = np.searchsorted(devices, cell.devices)
            updated[places] -= others
            if code == SHARING_CODE[Sharding.PARAMETERS]:
                kept[places] -= others
        resource_sets = self.resource_sets.numbers(sets) if sets else []
        cells_at = STATIC_WORDS + HOLDER_WORDS * len(devices)
        words = cells_at + CELL_WORDS * len(cells)
        at = self._reserve(words)
        fragment = self.arena[at : at + words]
        fragment[:STATIC_WORDS] = len(devices), len(cells), code
        holders = fragment[STATIC_WORDS:cells_at].reshape(len(devices), HOLDER_WORDS)
        holders[:, 0], holders[:, 1], holders[:, 2], holders[:, 3] = devices, kept, updated, elements
        if cells:
            rows = fragment[cells_at:].view(CELL)
            rows["size_bytes"] = np.array(travelling) * of.item_bytes
            rows["resource_set"], rows["gather_resource_set"] = (
                (resource_sets, -1) if code == 0 else (resource_sets[::2], resource_sets[1::2])
            )
        return at

    def set_sizes(self, weights: IntArray, numbers: IntArray) -> IntArray:
        """Return how many devices sum the gradient of each part of some weights; 0 where its fragment must tell.

        numbers: of each weight, that of the configuration of the one operator that reads it; any, where there is none.
        """
        degrees = self._degrees_of.items[numbers]
        return self._gradient_sets.sizes(weights, numbers, degrees, self._degrees_by_number)

    def set_sizes_at(self, at: int) -> IntArray:
        """Return how many devices there are in each of the sums of a weight whose fragment starts there."""
        holders, cells = self.arena[at : at + 2].tolist()
        start = at + STATIC_WORDS + HOLDER_WORDS * holders
        resource_sets = self.arena[start : start + CELL_WORDS * cells].view(CELL)["resource_set"]
        return self.resource_sets.member_counts(resource_sets)

    def holdings(
        self, ports: Sequence[Port], read_by: Sequence[Configuration], *, synchronized: bool
    ) -> Holdings:
        """Return what devices hold of a weight, buffer or input; of cells nothing, where these are not synchronized."""
        needed = self._needed(ports, read_by)
        held = self._holders.covered(needed)
        devices, elements = self._holders.elements(held)
        is_cut = held is needed and self._is_cut(ports)
        cells = self._holders.shared_cells(held, is_cut=is_cut) if synchronized else []
        return (
            list(zip(devices.tolist(), elements.tolist(), strict=True)),
            [(tuple(cell.devices.tolist()), cell.elements) for cell in cells],
        )

    def followed_degrees(self, port_number: int, degrees: Degrees) -> FollowedDegrees:
        """Return what the regions that tasks have of an operand depend on, as `Regions.followed_degrees`."""
        return self._regions.followed_degrees(port_number, degrees)

    def _is_cut(self, ports: Sequence[Port]) -> bool:
        """Return whether what the tasks of all readers have of an operand is apart or equal."""
        return len(ports) == 1 and self._regions.cutting_axes(ports[0].number) is not None

    def _needed(self, ports: Sequence[Port], read_by: Sequence[Configuration]) -> IntArray:
        """Return what devices need: distinct codes, device * `holders.REGIONS` + region, ascending."""
        # Steps of an unrolled network often read alike.
        degrees_of = {
            (port.number, self.configuration_number(configuration)): configuration.degrees
            for port, configuration in zip(ports, read_by, strict=True)
        }
        needs = []
        for key, degrees in degrees_of.items():
            needed = self._needs.get(key)
            if needed is None:
                region = self._regions.numbers(key[0], degrees)
                needed = self._needs[key] = _ascending(self._devices(key[1]) * REGIONS + region)
            needs.append(needed)
        return needs[0] if len(needs) == 1 else _ascending(np.concatenate(needs))


def _new_list(members: int, devices: int) -> CollectiveList:
    """Return room for the collectives of a fragment that has so many members, and for many of smaller ones."""
    return CollectiveList(
        np.zeros((max(LISTED_COLLECTIVES, 2 * members), 7), np.int64),
        np.zeros(max(LISTED_COLLECTIVES * devices, members), np.int64),
        np.zeros(2, np.int64),
        np.array(BACKWARD_CODE, np.int64),
        np.zeros(devices, np.int64),
    )


def _new_table(entries: int, words: int) -> FragmentTable:
    slots = 2 << max(entries, 1).bit_length()
    return FragmentTable(
        np.full(slots, -1, np.int64),
        np.zeros(entries + 1, np.int64),
        np.zeros(words, np.int64),
        np.full(entries, -1, np.int64),
        np.zeros(1, np.int64),
    )


def _ascending(codes: IntArray) -> IntArray:
    """Return distinct codes, ascending."""
    codes = np.sort(codes)
    is_next = codes[1:] != codes[:-1]
    return codes if is_next.all() else codes[np.concatenate(([True], is_next))]
