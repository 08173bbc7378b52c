"""Memo units of a task graph: what an operator, a value or a weight contributes under given configurations.

A proposal changes few operators, so nearly all units are found again. Units are keyed by what they depend on, not
by names: equal layers, and equal steps of an unrolled network, share them. They live in one arena; when it is full
it is emptied, and its users make their units anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from graph.axes import Degrees, tasks
from graph.calls import LocalCall
from graph.collectives import BACKWARD, SUMMABLE, CollectiveKind
from graph.holdings import cells, cover, share_elements
from graph.intervals import shape, volume
from graph.operators import OperatorGraph
from graph.recomputation import Recomputation
from graph.strategy import Configuration, Sharding
from graph.topology import Topology
from search import kernels
from search.arrays import (
    HoldStore,
    graph_arrays,
    operator_values,
    static_values,
)
from search.costs import CostTable
from search.kept import Lasting, kept_bytes, kept_outputs, lasting_outputs
from search.links import COLLECTIVE_KINDS, LinkCosts
from search.needed import LocalCalls
from search.regions import IntArray, Overlaps, Regions, Side, stacked
from search.routes import route_table

# Words of the arena (8 bytes each) after which it is emptied.
ARENA_WORDS = 1 << 25
# Of the kernels.
SHARING_CODE = {level: code for code, level in enumerate(Sharding)}
# More regions than there ever are.
_REGIONS = 1 << 32
# Instead of a class, in the keys of units of which most is left out; codes of their operators are not positive.
_EMPTY = -1


@dataclass(frozen=True, slots=True)
class Port:
    """An operand of an operator: the operator, its class, and the operand map's number."""

    operator: int
    kind: int
    number: int


@dataclass(frozen=True, slots=True)
class ValueClass:
    """What a value unit depends on beside configurations."""

    number: int
    producer: Port
    readers: tuple[Port, ...]
    item_bytes: int
    summable: bool


@dataclass(frozen=True, slots=True)
class StaticClass:
    """What the unit of a weight, buffer or input depends on beside configurations."""

    number: int
    readers: tuple[Port, ...]
    item_bytes: int
    synchronized: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """An exchange but for devices: arguments of `kernels.write_exchange`, for the readings one after the other."""

    source_region: IntArray
    reader_ptr: IntArray
    reader_region: IntArray
    reader_row: IntArray
    row_elements: IntArray
    common: Overlaps


@dataclass(frozen=True, slots=True)
class Held:
    """What distinct holders of a weight hold: elements of each, and sizes of cells, by the places of their holders."""

    elements: tuple[int, ...]
    cells: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class UnitStore:
    """All memo units met so far, for one graph on one topology."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostTable,
        links: LinkCosts,
        local_calls: LocalCalls,
    ) -> None:
        self.graph = graph
        self.topology = topology
        self.costs = costs
        self.links = links
        self.wiring = graph_arrays(graph)
        self.generation = 0
        self._local_calls = local_calls
        self._regions = Regions()
        self._kinds = [device.kind_name for device in topology.devices]
        self._node_D = np.array([device.node for device in topology.devices], np.int64)
        routes = route_table(topology)
        self._latency_s_DD, self._bandwidth_DD = routes.latency_s_P, routes.bandwidth_P
        self._call_costs: dict[tuple[int, Degrees, str, int], IntArray] = {}
        self._lasting: dict[Recomputation, tuple[Lasting | None, ...]] = {}
        self._lasting_number: dict[Lasting | None, int] = {None: 0}
        self._classify()
        # Pages of it are taken as they are written, and kept.
        self.arena = np.zeros(ARENA_WORDS + (ARENA_WORDS >> 2), np.int64)
        self._empty()

    def _empty(self) -> None:
        self.generation += 1
        # To list the routes takes seconds where there are a million.
        self.holds: HoldStore = (
            HoldStore(self.topology, self.links) if self.generation == 1 else self.holds.emptied()
        )
        self._end = 0
        self._regions.clear()
        self._held: dict[tuple[tuple[int, ...], ...], Held] = {}
        self._held_by_side: dict[int, tuple[Held, list[int]]] = {}
        self._patterns: dict[tuple[int, Degrees, tuple[Degrees, ...]], Pattern] = {}
        self._configurations: dict[Configuration, int] = {}
        self._units: dict[tuple[int, ...], int] = {}
        self._set_sizes: dict[int, frozenset[int]] = {}

    def make_room(self) -> None:
        """Empty the arena if it is full; `generation` then changes."""
        if self._end > ARENA_WORDS:
            self._empty()

    def _classify(self) -> None:
        """Number the classes of operators, values and static tensors: equal numbers, equal units."""
        graph = self.graph
        numbers: dict[object, int] = {}
        self._kept = kept_outputs(graph)

        def number(key: object) -> int:
            return numbers.setdefault(key, len(numbers))

        self.operator_class = [
            number(
                repr(
                    (
                        operator.target,
                        operator.arguments,
                        graph.input_specs(operator),
                        graph.output_specs(operator),
                        graph.gradient_inputs(operator),
                        graph.has_backward(operator),
                        operator.space,
                        graph.summed_slots[index],
                        self._kept[index],
                    )
                )
            )
            for index, operator in enumerate(graph.operators)
        ]

        def port(index: int, axes_map: int, *, is_input: bool) -> Port:
            space = graph.operators[index].space
            operand = space.inputs[axes_map] if is_input else space.outputs[axes_map]
            return Port(index, self.operator_class[index], self._regions.port(space.axes, operand))

        def readers(name: str) -> tuple[Port, ...]:
            return tuple(port(index, slot, is_input=True) for index, slot in graph.readers[name])

        self.value_classes = []
        pairs = [(value.name, value.name) for value in operator_values(graph)] + list(graph.buffer_updates)
        for read_name, made_name in pairs:
            index, output = graph.producer[made_name]
            producer, reading = port(index, output, is_input=False), readers(read_name)
            spec = graph.value_by_name[made_name].spec
            summable = spec.dtype in SUMMABLE
            key = ("value", producer.number, tuple(p.number for p in reading), spec.item_bytes, summable)
            self.value_classes.append(ValueClass(number(key), producer, reading, spec.item_bytes, summable))
        self.static_classes = []
        for place, value in enumerate(static_values(graph)):
            reading = readers(value.name)
            weight = place < len(graph.weights)
            static_key = ("static", tuple(p.number for p in reading), value.spec.item_bytes, weight)
            self.static_classes.append(
                StaticClass(number(static_key), reading, value.spec.item_bytes, weight)
            )

    def configuration(self, configuration: Configuration) -> int:
        """Return the number of a configuration, valid within a generation."""
        return self._configurations.setdefault(configuration, len(self._configurations))

    def _place(self, key: tuple[int, ...], words: Sequence[int] | IntArray) -> int:
        at = self._reserve(len(words))
        self.arena[at : at + len(words)] = words
        self._units[key] = at
        return at

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

    def lasting(self, recomputation: Recomputation) -> tuple[Lasting | None, ...]:
        """Return, for each operator, what lasts of its outputs where groups are made again; None: the same as else."""
        known = self._lasting.get(recomputation)
        if known is None:
            known = tuple(
                None if one.again is None and one.kept == kept else one
                for one, kept in zip(lasting_outputs(self.graph, recomputation), self._kept, strict=True)
            )
            self._lasting[recomputation] = known
            for one in known:
                self._lasting_number.setdefault(one, len(self._lasting_number))
        return known

    def operator_unit(self, index: int, configuration: Configuration, lasting: Lasting | None = None) -> int:
        """Return where an operator's unit starts; `lasting`: see there.

        Raises:
            CostError: a local call has no cost on its device's kind.
        """
        key = (
            self.operator_class[index],
            self.configuration(configuration),
            *(() if lasting is None else (self._lasting_number[lasting], _EMPTY)),
        )
        known = self._units.get(key)
        if known is not None:
            return known
        count = tasks(configuration.degrees)
        words = np.empty((count, kernels.OPERATOR_STRIDE), np.int64)
        words[:, 0] = configuration.devices
        kinds = [self._kinds[device] for device in configuration.devices]
        for kind in dict.fromkeys(kinds):
            costs = self._costs(index, configuration.degrees, kind, lasting)
            here = np.array([one == kind for one in kinds], np.bool_)
            words[here, 1:] = costs[here]
        header = np.array([count, configuration.degrees[-1]], np.int64)
        return self._place(key, np.concatenate([header, words.reshape(-1)]))

    def empty_operator_unit(self, configuration: Configuration, code: int) -> int:
        """Return where the unit of an operator starts that takes no time; the code stands for its costs' origin."""
        key = (_EMPTY + code, self.configuration(configuration))
        known = self._units.get(key)
        if known is None:
            words = np.zeros((len(configuration.devices), kernels.OPERATOR_STRIDE), np.int64)
            words[:, 0] = configuration.devices
            words[:, 4] = code
            header = np.array([len(words), configuration.degrees[-1]], np.int64)
            known = self._place(key, np.concatenate([header, words.reshape(-1)]))
        return known

    def empty_value_unit(self) -> int:
        """Return where the unit of a value starts that goes nowhere."""
        known = self._units.get((_EMPTY,))
        return self._place((_EMPTY,), [0] * kernels.VALUE_HEADER) if known is None else known

    def empty_static_unit(self) -> int:
        """Return where the unit of a weight starts that nobody holds."""
        known = self._units.get((_EMPTY, _EMPTY))
        return self._place((_EMPTY, _EMPTY), [0] * kernels.STATIC_HEADER) if known is None else known

    def _costs(self, index: int, degrees: Degrees, kind: str, lasting: Lasting | None) -> IntArray:
        """Return what the arena's operator unit has of every task (rows), but for its device."""
        if degrees[-1] > 1:
            return np.repeat(self._costs(index, (*degrees[:-1], 1), kind, lasting), degrees[-1], axis=0)
        key = (self.operator_class[index], degrees, kind, self._lasting_number[lasting])
        known = self._call_costs.get(key)
        if known is None:
            operator = self.graph.operators[index]
            calls = self._local_calls(self.graph, operator, degrees)
            keys, distinct = _distinct(calls)
            by_call = dict(zip(distinct, self.costs.costs(list(distinct.values()), kind), strict=True))
            outputs = Lasting(self._kept[index]) if lasting is None else lasting
            summed = self.graph.summed_slots[index]
            rows = {}
            for one, call in distinct.items():
                kept, again = kept_bytes(outputs, call)
                rows[one] = (
                    by_call[one].forward_ns,
                    self.costs.backward_ns(by_call[one], call, summed, kind),
                    kept,
                    by_call[one].origin,
                    again,
                )
            known = np.array([rows[one] for one in keys], np.int64)
            self._call_costs[key] = known
        return known

    def value_unit(self, place: int, configurations: Sequence[Configuration]) -> int:
        """Return where the unit of a value starts (value numbers as in `search.arrays`, renewed buffers last).

        Args:
            place: the value's number.
            configurations: those of all operators of the graph.
        """
        of = self.value_classes[place]
        made_by = configurations[of.producer.operator]
        read_by = [configurations[port.operator] for port in of.readers]
        key = (of.number, self.configuration(made_by), *(self.configuration(c) for c in read_by))
        known = self._units.get(key)
        if known is not None:
            return known
        pattern = self._pattern(of, made_by.degrees, tuple(c.degrees for c in read_by))
        arguments = (
            np.array(made_by.devices, np.int64),
            pattern.source_region,
            made_by.degrees[-1],
            pattern.reader_ptr,
            np.array([device for c in read_by for device in c.devices], np.int64),
            pattern.reader_region,
            pattern.reader_row,
            pattern.row_elements,
            *pattern.common,
            self._node_D,
            self._latency_s_DD,
            self._bandwidth_DD,
            of.item_bytes,
            int(of.summable),
        )
        words = kernels.write_exchange(self.arena, self._end, *arguments)
        if words < 0:
            self._grow(self._end - words)
            words = kernels.write_exchange(self.arena, self._end, *arguments)
        at = self._reserve(words)
        if self.arena[at + kernels.VALUE_COLLECTIVES]:
            self._price_collectives(at, made_by.devices)
        self._units[key] = at
        return at

    def _pattern(self, of: ValueClass, made: Degrees, read: tuple[Degrees, ...]) -> Pattern:
        """Return what a value's exchange depends on beside devices."""
        key = (of.number, made, read)
        known = self._patterns.get(key)
        if known is None:
            source = self._regions.side(of.producer.number, made)
            sides = [
                self._regions.side(port.number, degrees)
                for port, degrees in zip(of.readers, read, strict=True)
            ]
            common = [self._regions.overlaps(side, source, made[-1]) for side in sides]
            rows = np.cumsum([0, *(len(side.row_task) for side in sides)])
            known = self._patterns[key] = Pattern(
                source.region,
                np.cumsum([0, *(len(side.row) for side in sides)]),
                _joined([side.region for side in sides]),
                _joined([side.row + first for side, first in zip(sides, rows, strict=False)]),
                _joined([side.row_elements for side in sides]),
                stacked(common),
            )
        return known

    def _price_collectives(self, at: int, source_devices: Sequence[int]) -> None:
        """Write holds and durations of a value unit's collectives, forward and backward."""
        arena = self.arena
        stride = kernels.COLLECTIVE_STRIDE
        found = int(arena[at + kernels.VALUE_COLLECTIVES])
        start = int(kernels.collectives_of(arena, at))
        rows = arena[start : start + stride * (found + 1)].reshape(found + 1, stride)
        assembly_at = start + stride * (found + 1)
        task_at = assembly_at + int(rows[found, 4])
        for row, following in itertools.pairwise(rows):
            code, root, _, priced_bytes, first_assembly, first_task = row[:6].tolist()
            served = arena[assembly_at + first_assembly : assembly_at + int(following[4])]
            sources = arena[task_at + first_task : task_at + int(following[5])]
            readers = arena[at + kernels.VALUE_HEADER + kernels.ASSEMBLY_STRIDE * served]
            members = {source_devices[task] for task in sources.tolist()}.union(readers.tolist())
            devices, kind = tuple(sorted(members)), COLLECTIVE_KINDS[code]
            there = self.holds.device_set(devices, kind, root if root >= 0 else None)
            back = self.holds.device_set(devices, BACKWARD[kind], root if root >= 0 else None)
            row[6:] = (
                there.number,
                there.price.duration_ns(priced_bytes),
                back.number,
                back.price.duration_ns(priced_bytes),
            )

    def static_unit(
        self, place: int, configurations: Sequence[Configuration], sharing: Sharding = Sharding.NONE
    ) -> int:
        """Return where the unit of a weight, buffer or input starts; `sharing`: what a weight's holders share."""
        of = self.static_classes[place]
        read_by = [configurations[port.operator] for port in of.readers]
        code = SHARING_CODE[sharing] if of.synchronized else 0
        key = (of.number, code, *(self.configuration(c) for c in read_by))
        known = self._units.get(key)
        if known is not None:
            return known
        elements_of, held_by_several = self._holdings(of.readers, read_by, synchronized=of.synchronized)
        # Of each device the elements that it keeps, and those that it updates.
        kept, updated = dict(elements_of), dict(elements_of)
        cell_words: list[int] = []
        for members, sizes in held_by_several:
            if sharing is Sharding.NONE:
                summed, gathered = self.holds.device_set(members).number, -1
                travelling = prod(sizes)
            else:
                summed = self.holds.device_set(members, CollectiveKind.REDUCE_SCATTER).number
                gathered = self.holds.device_set(members, CollectiveKind.ALL_GATHER).number
                shares = share_elements(sizes, len(members))
                travelling = len(members) * shares[0]
                for device, own in zip(members, shares, strict=True):
                    others = prod(sizes) - own
                    updated[device] -= others
                    if sharing is Sharding.PARAMETERS:
                        kept[device] -= others
            cell_words += [summed, travelling * of.item_bytes, gathered]
        words = [len(elements_of), len(held_by_several), code]
        for device in elements_of:
            words += [device, kept[device], updated[device]]
        return self._place(key, words + cell_words)

    def set_size(self, place: int, configurations: Sequence[Configuration]) -> int | None:
        """Return how many devices sum the gradient of each part of a weight; None where that takes its unit to tell."""
        readers = self.static_classes[place].readers
        if len(readers) > 1:
            return None
        axes = self._regions.cutting_axes(readers[0].number)
        configuration = configurations[readers[0].operator]
        devices = configuration.devices
        if axes is None or len(set(devices)) < len(devices):
            return None
        return len(devices) // prod(configuration.degrees[axis] for axis in axes)

    def set_sizes(self, at: int) -> frozenset[int]:
        """Return how many devices there are in each of the sums of a weight whose unit starts there."""
        known = self._set_sizes.get(at)
        if known is None:
            holders, cells = self.arena[at : at + 2].tolist()
            start = at + kernels.STATIC_HEADER + kernels.HOLDER_STRIDE * holders
            holds = self.arena[start : start + kernels.CELL_STRIDE * cells : kernels.CELL_STRIDE]
            known = self._set_sizes[at] = frozenset(self.holds.member_counts(holds).tolist())
        return known

    def holdings(
        self, ports: Sequence[Port], read_by: Sequence[Configuration], *, synchronized: bool
    ) -> tuple[list[tuple[int, int]], list[tuple[tuple[int, ...], int]]]:
        """Return (device, elements) of all holders, and (devices, elements) of all cells that several hold."""
        elements_of, shared = self._holdings(ports, read_by, synchronized=synchronized)
        return list(elements_of.items()), [(members, prod(sizes)) for members, sizes in shared]

    def _holdings(
        self, ports: Sequence[Port], read_by: Sequence[Configuration], *, synchronized: bool
    ) -> tuple[dict[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Return elements by holder, and (devices, sizes) of all cells that several hold."""
        sides = [self._regions.side(port.number, c.degrees) for port, c in zip(ports, read_by, strict=True)]
        if len(sides) == 1 and len(set(read_by[0].devices)) == len(read_by[0].devices):
            return self._held_by_one(sides[0], read_by[0].devices, synchronized=synchronized)
        numbers = _joined([side.region for side in sides])
        devices = np.array([device for c in read_by for device in c.devices], np.int64)
        # Of every device the distinct regions that it needs; devices that need the same hold the same.
        device_P, number_P = np.divmod(np.unique(devices * _REGIONS + numbers), _REGIONS)
        needed: dict[int, list[int]] = {}
        for device, number in zip(device_P.tolist(), number_P.tolist(), strict=True):
            needed.setdefault(device, []).append(number)
        alike: dict[tuple[int, ...], list[int]] = {}
        for device, regions in needed.items():
            alike.setdefault(tuple(regions), []).append(device)
        keys = tuple(sorted(alike))
        known = self._held.get(keys)
        if known is None:
            known = self._held[keys] = self._hold(keys)
        elements_of = dict(zip(keys, known.elements, strict=True))
        holders = {device: elements_of[tuple(regions)] for device, regions in needed.items()}
        if not synchronized:
            return holders, []
        shared = [
            (tuple(sorted(device for place in places for device in alike[keys[place]])), sizes)
            for places, sizes in known.cells
        ]
        return holders, [(members, sizes) for members, sizes in shared if len(members) > 1]

    def _held_by_one(
        self, side: Side, devices: Sequence[int], *, synchronized: bool
    ) -> tuple[dict[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Return holders and cells as `_holdings` does, of one reading whose tasks are on different devices."""
        known = self._held_by_side.get(side.number)
        if known is None:
            numbers = side.region[side.row_task].tolist()
            place_of = {number: place for place, number in enumerate(sorted(numbers))}
            held = self._hold([(number,) for number in place_of])
            known = self._held_by_side[side.number] = held, [place_of[number] for number in numbers]
        held, place_of_row = known
        places = [place_of_row[row] for row in side.row.tolist()]
        holders = {
            device: held.elements[place] for device, place in sorted(zip(devices, places, strict=True))
        }
        if not synchronized:
            return holders, []
        alike: list[list[int]] = [[] for _ in place_of_row]
        for device, place in zip(devices, places, strict=True):
            alike[place].append(device)
        shared = [
            (tuple(sorted(device for place in cell for device in alike[place])), sizes)
            for cell, sizes in held.cells
        ]
        return holders, [(members, sizes) for members, sizes in shared if len(members) > 1]

    def _hold(self, keys: Sequence[tuple[int, ...]]) -> Held:
        """Return what holders of these sets of regions (numbers) hold, each set by a holder of its own."""
        held = {
            place: cover([self._regions.region(number) for number in numbers])
            for place, numbers in enumerate(keys)
        }
        found = cells(held) if held else ()
        return Held(
            tuple(volume(region) for region in held.values()),
            tuple((cell.devices, shape(cell.region)) for cell in found),
        )


def _joined(pieces: Sequence[IntArray]) -> IntArray:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _distinct(calls: Sequence[LocalCall]) -> tuple[list[int], dict[int, LocalCall]]:
    """Return a key for each call, and the first call of each key: calls of one key are equal."""
    known: dict[tuple[object, ...], int] = {}
    first: dict[int, LocalCall] = {}
    by_object: dict[int, int] = {}
    keys = []
    for call in calls:
        key = by_object.get(id(call))
        if key is None:
            # Within one operator's calls this is as good as the digest, and much cheaper.
            what = (call.arguments, call.inputs, call.outputs, call.gradients)
            key = known.setdefault(what, len(known))
            by_object[id(call)] = key
            first.setdefault(key, call)
        keys.append(key)
    return keys, first
