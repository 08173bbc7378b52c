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

from graph.axes import Degrees
from graph.calls import LocalCall
from graph.collectives import BACKWARD, SUMMABLE, CollectiveKind
from graph.operators import OperatorGraph
from graph.recomputation import Recomputation
from graph.strategy import Configuration, Sharding
from graph.topology import Topology
from graph.weight_placement import share_elements
from search.cost.calls_to_profile import LocalCalls
from search.cost.cost_table import CallCost, CostTable
from search.cost.link_costs import COLLECTIVE_KINDS, LinkCosts
from search.cost.routes import route_table
from search.kernels.exchange import write_exchange
from search.kernels.fragments import (
    ASSEMBLY_WORDS,
    CELL,
    CELL_WORDS,
    COLLECTIVE,
    COLLECTIVE_WORDS,
    HOLDER,
    HOLDER_WORDS,
    OPERATOR_WORDS,
    STATIC_WORDS,
    TASK,
    TASK_WORDS,
    VALUE,
    VALUE_WORDS,
    word_of,
)
from search.kernels.records import ExchangeLinks, Overlaps, Readers, Sources
from search.simulate.arrays import (
    HoldStore,
    graph_arrays,
    operator_values,
    static_values,
)
from search.simulate.regions import IntArray, Regions, stacked
from search.simulate.saved_tensors import Lasting, kept_bytes, kept_outputs, lasting_outputs
from search.simulate.weight_placement import REGIONS, Holders, SharedCell

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
COLLECTIVES_WORD, COLLECTIVES_AT_WORD = word_of(VALUE, "collectives"), word_of(VALUE, "collectives_at")
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
    """An exchange but for devices: arguments of `write_exchange`, for the readings one after the other."""

    source_region: IntArray
    reader_ptr: IntArray
    reader_region: IntArray
    reader_row: IntArray
    row_elements: IntArray
    common: Overlaps


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
        self._holders = Holders(self._regions)
        kinds = [device.kind_name for device in topology.devices]
        self._kind_names = list(dict.fromkeys(kinds))
        self._kind_D = np.array([self._kind_names.index(kind) for kind in kinds], np.int64)
        node_D = np.array([device.node for device in topology.devices], np.int64)
        routes = route_table(topology)
        self._exchange_links = ExchangeLinks(node_D, routes.latency_s_P, routes.bandwidth_P)
        self._call_costs: dict[tuple[int, Degrees, str, int], IntArray] = {}
        self._cost_rows: dict[tuple[int, str, str, int], tuple[int, int, int, int, int]] = {}
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
        self._holders.clear()
        self._patterns: dict[tuple[int, Degrees, tuple[Degrees, ...]], Pattern] = {}
        self._configurations: dict[Configuration, int] = {}
        self._objects: dict[int, tuple[Configuration, int]] = {}
        self._devices: list[IntArray] = []
        self._needs: dict[tuple[int, int], IntArray] = {}
        self._units: dict[tuple[int, ...], int] = {}
        self._set_sizes: dict[int, frozenset[int]] = {}
        self._static_units: dict[tuple[int, int, bool, bytes], int] = {}

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
        met = self._objects.get(id(configuration))
        if met is not None:
            return met[1]
        number = self._configurations.setdefault(configuration, len(self._configurations))
        if number == len(self._devices):
            self._devices.append(np.array(configuration.devices, np.int64))
        if len(self._objects) >= MOST_OBJECTS:
            self._objects.clear()
        # An object that is kept is the only one of its id.
        self._objects[id(configuration)] = configuration, number
        return number

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
        devices = self._devices[key[1]]
        words = OPERATOR_WORDS + TASK_WORDS * len(devices)
        kinds = self._kind_D[devices]
        costs = self._costs(index, configuration.degrees, self._kind_names[kinds[0]], lasting)
        if (kinds != kinds[0]).any():
            costs = costs.copy()
            for kind in dict.fromkeys(kinds.tolist()):
                of_kind = self._costs(index, configuration.degrees, self._kind_names[kind], lasting)
                costs[kinds == kind] = of_kind[kinds == kind]
        at = self._units[key] = self._reserve(words)
        unit = self.arena[at : at + words]
        unit[:OPERATOR_WORDS] = len(devices), configuration.degrees[-1]
        rows = unit[OPERATOR_WORDS:].reshape(len(devices), TASK_WORDS)
        rows[:, 0], rows[:, 1:] = devices, costs
        return at

    def empty_operator_unit(self, configuration: Configuration, code: int) -> int:
        """Return where the unit of an operator starts that takes no time; the code stands for its costs' origin."""
        key = (_EMPTY + code, self.configuration(configuration))
        known = self._units.get(key)
        if known is None:
            devices = self._devices[key[1]]
            words = OPERATOR_WORDS + TASK_WORDS * len(devices)
            known = self._units[key] = self._reserve(words)
            unit = self.arena[known : known + words]
            unit[:] = 0
            unit[:OPERATOR_WORDS] = len(devices), configuration.degrees[-1]
            tasks = unit[OPERATOR_WORDS:].view(TASK)
            tasks["device"], tasks["origin"] = devices, code
        return known

    def empty_value_unit(self) -> int:
        """Return where the unit of a value starts that goes nowhere."""
        known = self._units.get((_EMPTY,))
        return self._place((_EMPTY,), [0] * VALUE_WORDS) if known is None else known

    def empty_static_unit(self) -> int:
        """Return where the unit of a weight starts that nobody holds."""
        known = self._units.get((_EMPTY, _EMPTY))
        return self._place((_EMPTY, _EMPTY), [0] * STATIC_WORDS) if known is None else known

    def _costs(self, index: int, degrees: Degrees, kind: str, lasting: Lasting | None) -> IntArray:
        """Return what the arena's operator unit has of every task (rows), but for its device."""
        if degrees[-1] > 1:
            return np.repeat(self._costs(index, (*degrees[:-1], 1), kind, lasting), degrees[-1], axis=0)
        key = (self.operator_class[index], degrees, kind, self._lasting_number[lasting])
        known = self._call_costs.get(key)
        if known is None:
            calls = self._local_calls(self.graph, self.graph.operators[index], degrees)
            # Equal calls are one object, as a rule.
            distinct = {id(call): call for call in calls}
            found = self.costs.costs(list(distinct.values()), kind)
            rows = np.array(
                [
                    self._cost_row(index, call, cost, kind, lasting)
                    for call, cost in zip(distinct.values(), found, strict=True)
                ],
                np.int64,
            )
            if len(distinct) == 1:
                known = np.repeat(rows, len(calls), axis=0)
            else:
                place = {one: number for number, one in enumerate(distinct)}
                known = rows[[place[id(call)] for call in calls]]
            self._call_costs[key] = known
        return known

    def _cost_row(
        self, index: int, call: LocalCall, cost: CallCost, kind: str, lasting: Lasting | None
    ) -> tuple[int, int, int, int, int]:
        """Return what the arena's operator unit has of a task that executes a call."""
        key = (self.operator_class[index], call.digest, kind, self._lasting_number[lasting])
        known = self._cost_rows.get(key)
        if known is None:
            outputs = Lasting(self._kept[index]) if lasting is None else lasting
            kept, again = kept_bytes(outputs, call)
            backward_ns = self.costs.backward_ns(cost, call, self.graph.summed_slots[index], kind)
            known = self._cost_rows[key] = cost.forward_ns, backward_ns, kept, cost.origin, again
        return known

    def value_unit(self, place: int, configurations: Sequence[Configuration]) -> int:
        """Return where the unit of a value starts (value numbers as in `search.simulate.arrays`, renewed buffers last).

        Args:
            place: the value's number.
            configurations: those of all operators of the graph.
        """
        of = self.value_classes[place]
        made_by = configurations[of.producer.operator]
        read_by = [configurations[port.operator] for port in of.readers]
        key = (of.number, self.configuration(made_by), *[self.configuration(c) for c in read_by])
        known = self._units.get(key)
        if known is not None:
            return known
        source_devices = self._devices[key[1]]
        pattern = self._pattern(of, made_by.degrees, tuple(c.degrees for c in read_by))
        arguments = (
            Sources(source_devices, pattern.source_region, made_by.degrees[-1]),
            Readers(
                pattern.reader_ptr,
                _joined([self._devices[number] for number in key[2:]]),
                pattern.reader_region,
                pattern.reader_row,
                pattern.row_elements,
            ),
            pattern.common,
            self._exchange_links,
            of.item_bytes,
            int(of.summable),
        )
        words = write_exchange(self.arena, self._end, *arguments)
        if words < 0:
            self._grow(self._end - words)
            words = write_exchange(self.arena, self._end, *arguments)
        at = self._reserve(words)
        if self.arena[at + COLLECTIVES_WORD]:
            self._price_collectives(at, source_devices)
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
            known = self._patterns[key] = Pattern(
                source.region,
                _ends([len(side.row) for side in sides]),
                _joined([side.region for side in sides]),
                _stacked([side.row for side in sides], [len(side.rows.region) for side in sides]),
                _joined([side.rows.elements for side in sides]),
                stacked(common),
            )
        return known

    def _price_collectives(self, at: int, source_devices: IntArray) -> None:
        """Write holds and durations of a value unit's collectives, forward and backward."""
        arena = self.arena
        found, start = int(arena[at + COLLECTIVES_WORD]), at + int(arena[at + COLLECTIVES_AT_WORD])
        assembly_at = start + COLLECTIVE_WORDS * (found + 1)
        rows = arena[start:assembly_at].view(COLLECTIVE)
        task_at = assembly_at + int(rows["first_assembly"][found])
        served = arena[assembly_at:task_at]
        sources = source_devices[arena[task_at : task_at + int(rows["first_source"][found])]]
        readers = arena[at + VALUE_WORDS + ASSEMBLY_WORDS * served]
        # Of every collective the distinct devices, ascending.
        devices = len(self._kind_D)
        number = np.arange(found)
        members = np.unique(
            np.concatenate(
                [
                    np.repeat(number, np.diff(rows["first_assembly"])) * devices + readers,
                    np.repeat(number, np.diff(rows["first_source"])) * devices + sources,
                ]
            )
        )
        bounds = np.searchsorted(members, np.arange(found + 1) * devices).tolist()
        members %= devices
        rows = rows[:found]
        sets = []
        for code, root, (first, last) in zip(
            rows["kind"].tolist(), rows["root"].tolist(), itertools.pairwise(bounds), strict=True
        ):
            sets += [(code, root, members[first:last]), (BACKWARD_CODE[code], root, members[first:last])]
        holds = self.holds.numbers(sets)
        rows["hold"], rows["back_hold"] = holds[::2], holds[1::2]
        durations_ns = self.holds.durations_ns(holds, np.repeat(rows["priced_bytes"], 2))
        rows["run_ns"], rows["back_ns"] = durations_ns[::2], durations_ns[1::2]

    def static_unit(
        self, place: int, configurations: Sequence[Configuration], sharing: Sharding = Sharding.NONE
    ) -> int:
        """Return where the unit of a weight, buffer or input starts; `sharing`: what a weight's holders share."""
        of = self.static_classes[place]
        read_by = [configurations[port.operator] for port in of.readers]
        code = SHARING_CODE[sharing] if of.synchronized else 0
        key = (of.number, code, *[self.configuration(c) for c in read_by])
        known = self._units.get(key)
        if known is None:
            needed = self._needed(of.readers, read_by)
            # Many configurations, of many operators, need the same of the same devices; more hold the same.
            held = needed
            need_key = held_key = (of.item_bytes, code, of.synchronized, needed.tobytes())
            known = self._static_units.get(need_key)
            if known is None:
                held = self._holders.covered(needed)
                if held is not needed:
                    held_key = (*need_key[:3], held.tobytes())
                    known = self._static_units.get(held_key)
            if known is None:
                found = self._found(of.readers, read_by, needed, held)
                known = self._make_static_unit(of, code, *found)
            self._units[key] = self._static_units[need_key] = self._static_units[held_key] = known
        return known

    def _make_static_unit(
        self, of: StaticClass, code: int, devices: IntArray, elements: IntArray, cells: list[SharedCell]
    ) -> int:
        if not of.synchronized:
            cells = []
        # Of each device the elements that it keeps, and those that it updates.
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
        holds = self.holds.numbers(sets)
        cells_at = STATIC_WORDS + HOLDER_WORDS * len(devices)
        words = cells_at + CELL_WORDS * len(cells)
        at = self._reserve(words)
        unit = self.arena[at : at + words]
        unit[:STATIC_WORDS] = len(devices), len(cells), code
        rows = unit[STATIC_WORDS:cells_at].view(HOLDER)
        rows["device"], rows["kept"], rows["updated"] = devices, kept, updated
        if cells:
            rows = unit[cells_at:].view(CELL)
            rows["size_bytes"] = np.array(travelling) * of.item_bytes
            rows["hold"], rows["gather_hold"] = (holds, -1) if code == 0 else (holds[::2], holds[1::2])
        return at

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
            start = at + STATIC_WORDS + HOLDER_WORDS * holders
            holds = self.arena[start : start + CELL_WORDS * cells].view(CELL)["hold"]
            known = self._set_sizes[at] = frozenset(self.holds.member_counts(holds).tolist())
        return known

    def holdings(
        self, ports: Sequence[Port], read_by: Sequence[Configuration], *, synchronized: bool
    ) -> tuple[list[tuple[int, int]], list[tuple[tuple[int, ...], int]]]:
        """Return (device, elements) of all holders, and (devices, elements) of all cells that several hold."""
        needed = self._needed(ports, read_by)
        devices, elements, cells = self._found(ports, read_by, needed, self._holders.covered(needed))
        return (
            list(zip(devices.tolist(), elements.tolist(), strict=True)),
            [(tuple(cell.devices.tolist()), cell.elements) for cell in cells] if synchronized else [],
        )

    def _found(
        self, ports: Sequence[Port], read_by: Sequence[Configuration], needed: IntArray, held: IntArray
    ) -> tuple[IntArray, IntArray, list[SharedCell]]:
        """Return devices, elements of each and cells that several hold; `needed`, `held`: of `Holders.covered`."""
        if len(ports) == 1 and held is needed and len(held) == len(read_by[0].devices):
            side = self._regions.side(ports[0].number, read_by[0].degrees)
            if side.rows.is_apart:
                return self._holders.by_rows(self._devices[self.configuration(read_by[0])], side)
        return self._holders.find(held)

    def _needed(self, ports: Sequence[Port], read_by: Sequence[Configuration]) -> IntArray:
        """Return what devices need: distinct codes, device * `holders.REGIONS` + region, ascending."""
        # Steps of an unrolled network often read alike.
        found = {
            (port.number, self.configuration(configuration)): configuration.degrees
            for port, configuration in zip(ports, read_by, strict=True)
        }
        needs = []
        for key, degrees in found.items():
            known = self._needs.get(key)
            if known is None:
                region = self._regions.side(key[0], degrees).region
                known = self._needs[key] = _ascending(self._devices[key[1]] * REGIONS + region)
            needs.append(known)
        return needs[0] if len(needs) == 1 else _ascending(_joined(needs))


def _joined(pieces: Sequence[IntArray]) -> IntArray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _stacked(pieces: Sequence[IntArray], sizes: Sequence[int]) -> IntArray:
    """Return numbers below these sizes, piece after piece, each counted on from where the one before ends."""
    ends = itertools.accumulate(sizes, initial=0)
    return _joined([piece + end if end else piece for piece, end in zip(pieces, ends, strict=False)])


def _ends(sizes: Sequence[int]) -> IntArray:
    return np.array([*itertools.accumulate(sizes, initial=0)], np.int64)


def _ascending(codes: IntArray) -> IntArray:
    """Return distinct codes, ascending."""
    codes = np.sort(codes)
    is_next = codes[1:] != codes[:-1]
    return codes if is_next.all() else codes[np.concatenate(([True], is_next))]
