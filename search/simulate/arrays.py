"""The wiring of an operator graph and the links of a topology, as flat arrays for the kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph.collectives import CollectiveKind
from graph.operators import OperatorGraph, Value, ValueKind
from graph.topology import Topology
from search.cost.collective_cost import CollectivePrice, Prices, finite_lines
from search.cost.cost_table import ORIGIN_CODE, ORIGINS, nanoseconds
from search.cost.link_costs import COLLECTIVE_KINDS, ROOTED, Curve, LinkCosts
from search.cost.routes import route_table
from search.kernels.collective_formulas import LIBRARY_FORMULAS, collectives_ns
from search.kernels.records import Array, GraphArrays, ResourceSets


def csr(rows: Iterable[Sequence[int]]) -> tuple[Array, Array]:
    """Return (pointers, items) of a list of lists."""
    listed = [list(row) for row in rows]
    pointers = np.zeros(len(listed) + 1, np.int64)
    np.cumsum([len(row) for row in listed], out=pointers[1:])
    return pointers, np.array([item for row in listed for item in row], np.int64)


def operator_values(graph: OperatorGraph) -> list[Value]:
    """Return the values that operators make, in the graph's order: value k of the kernels."""
    return [value for value in graph.values if value.kind is ValueKind.OPERATOR]


def static_values(graph: OperatorGraph) -> list[Value]:
    """Return what is in place at step start and read: weights first, then buffers and inputs."""
    others = [
        value
        for value in graph.values
        if value.kind in (ValueKind.BUFFER, ValueKind.INPUT) and graph.consumers[value.name]
    ]
    return [*graph.weights, *others]


def graph_arrays(graph: OperatorGraph) -> GraphArrays:
    """Return the wiring of a graph as arrays."""
    values = operator_values(graph)
    number = {value.name: index for index, value in enumerate(values)}
    renewed = graph.buffer_updates
    readings = [graph.readers[value.name] for value in values]
    readings += [graph.readers[buffer] for buffer, _ in renewed]
    position = [{pair: reading for reading, pair in enumerate(graph.readers[value.name])} for value in values]
    gradient = [graph.gradient_inputs(operator) for operator in graph.operators]
    slots = [
        [
            (number[name], position[number[name]][index, slot]) if name in number else (-1, -1)
            for slot, name in enumerate(operator.inputs)
        ]
        for index, operator in enumerate(graph.operators)
    ]
    output_ptr, output_value = csr([number[name] for name in op.outputs] for op in graph.operators)
    slot_ptr, slot_value = csr([value for value, _ in row] for row in slots)
    read_ptr, read_value = csr(sorted({value for value, _ in row if value >= 0}) for row in slots)
    reading_ptr, reading_operator = csr([index for index, _ in row] for row in readings)
    statics = static_values(graph)
    weight_number = {weight.name: weight_index for weight_index, weight in enumerate(graph.weights)}
    weight_ptr, weight_user = csr(
        sorted({index for index, _ in graph.consumers[weight.name]}) for weight in graph.weights
    )
    reader_ptr, reader = csr(graph.weight_readers[weight.name] for weight in graph.weights)
    behind_ptr, behind_weight = csr(
        sorted(weight_number[name] for name in names) for names in graph.weights_read
    )
    return GraphArrays(
        output_ptr=output_ptr,
        output_value=output_value,
        slot_ptr=slot_ptr,
        slot_value=slot_value,
        slot_reading=np.array([reading for row in slots for _, reading in row], np.int64),
        read_ptr=read_ptr,
        read_value=read_value,
        producer=np.array(
            [graph.producer[value.name][0] for value in values]
            + [graph.producer[value_name][0] for _, value_name in renewed],
            np.int64,
        ),
        reading_ptr=reading_ptr,
        reading_operator=reading_operator,
        reading_gradient=np.array(
            [gradient[index][slot] for row in readings for index, slot in row], np.bool_
        ),
        needs_gradient=np.array([value.requires_gradient for value in values], np.bool_),
        order=np.array(graph.order.of_loss + graph.order.of_buffers, np.int64),
        loss_operators=len(graph.order.of_loss),
        buffer_count=len(renewed),
        weight_ptr=weight_ptr,
        weight_user=weight_user,
        reader_ptr=reader_ptr,
        reader=reader,
        behind_ptr=behind_ptr,
        behind_weight=behind_weight,
        static_item_bytes=np.array([value.spec.item_bytes for value in statics], np.int64),
        loss_value=number[graph.loss],
        value_count=len(values),
        weight_count=len(graph.weights),
        static_count=len(statics),
    )


class GrowingArray:
    """An array that is appended to in place."""

    def __init__(self, dtype: type[np.generic], width: int = 1) -> None:
        self._items = np.zeros((64, width) if width > 1 else 64, dtype)
        self._size = 0

    def extend(self, items: Sequence[Any] | Array) -> None:
        """Append items (rows, where the width is more than one)."""
        size = self._size + len(items)
        while size > len(self._items):
            self._items = np.concatenate([self._items, np.zeros_like(self._items)])
        if len(items):
            self._items[self._size : size] = items
        self._size = size

    def first(self, count: int) -> GrowingArray:
        """Return a copy of the first items."""
        copied = copy.copy(self)
        copied._items = self._items[: max(count, 64)].copy()
        copied._size = count
        return copied

    @property
    def items(self) -> Array:
        """What was appended so far; valid until the next append."""
        return self._items[: self._size]

    @property
    def room(self) -> Array:
        """The array that begins with the items, another one only where it grew: for kernels that take no length."""
        return self._items

    def __len__(self) -> int:
        return self._size


# Of every kind of collective, by its code, how many messages each device is an end of at once: in all but those with a
# root every device sends and receives at the same time.
FLOWS = tuple(1 if kind in ROOTED else 2 for kind in COLLECTIVE_KINDS)


class CurveStore:
    """The segments of curves as arrays, each curve once."""

    def __init__(self) -> None:
        self.segments = GrowingArray(np.float64, 3)
        self._spans: dict[Curve, tuple[int, int]] = {}

    def span(self, curve: Curve | None) -> tuple[int, int]:
        """Return a curve's first segment and the one after its last; (0, 0) where there is none."""
        if curve is None:
            return 0, 0
        if curve not in self._spans:
            first = len(self.segments)
            self.segments.extend(curve.segments)
            self._spans[curve] = first, len(self.segments)
        return self._spans[curve]

    def curve(self, first: int, last: int) -> Curve | None:
        """Return the curve of a span."""
        return next((curve for curve, span in self._spans.items() if span == (first, last)), None)


def message_curves(topology: Topology, links: LinkCosts) -> tuple[Array, Array]:
    """Return segments and curve of all pairs of devices, see `ExchangeLinks`: both empty where none was measured."""
    curves, count = CurveStore(), len(topology.devices)
    spans = np.zeros((count * count if links.messages else 0, 2), np.int64)
    for (source, destination), curve in links.messages.items():
        if (source, destination) in topology.routes:
            spans[source * count + destination] = curves.span(curve)
    return spans, curves.segments.items


@dataclass(frozen=True, slots=True)
class PricedResourceSet:
    """The resource set of one kind of collective over a set of devices: its number, and its price."""

    number: int
    price: CollectivePrice


class ResourceSetStore:
    """The resource sets that tasks hold: every device, every route, and the links of every collective so far."""

    def __init__(self, topology: Topology, links: LinkCosts) -> None:
        self.topology = topology
        self._prices = Prices(topology, links)
        self._resource_ptr, self._end_ptr = GrowingArray(np.int64), GrowingArray(np.int64)
        self._resource, self._end = GrowingArray(np.int64), GrowingArray(np.int64)
        self._latency_s = GrowingArray(np.float64, LIBRARY_FORMULAS)
        self._s_per_byte = GrowingArray(np.float64, LIBRARY_FORMULAS)
        self._segments, self._curves = GrowingArray(np.int64, 2), CurveStore()
        self._origin = GrowingArray(np.int64)
        self._operation, self._flows = GrowingArray(np.int64), GrowingArray(np.int64)
        self._issue_ns = GrowingArray(np.int64)
        # An exchange between two devices is a message each way.
        self._message_ns, self._collective_ns = nanoseconds(links.issue_s / 2), nanoseconds(links.issue_s)
        self._sets: dict[tuple[int, int, bytes], int] = {}
        self._arrays: ResourceSets | None = None
        self._resource_ptr.extend([0])
        self._end_ptr.extend([0])
        self._add_devices_and_routes(ORIGIN_CODE[links.transfers])

    def emptied(self) -> ResourceSetStore:
        """Return a store that has met no collective yet; this one stays as it is."""
        count = len(self.topology.devices) * (len(self.topology.devices) + 1)
        store = copy.copy(self)
        store._sets, store._arrays = {}, None
        store._resource = self._resource.first(int(self._resource_ptr.items[count]))
        store._end = self._end.first(int(self._end_ptr.items[count]))
        store._resource_ptr, store._end_ptr = (
            self._resource_ptr.first(count + 1),
            self._end_ptr.first(count + 1),
        )
        store._latency_s, store._s_per_byte = self._latency_s.first(count), self._s_per_byte.first(count)
        store._segments, store._origin = self._segments.first(count), self._origin.first(count)
        store._curves = CurveStore()
        store._operation, store._flows = self._operation.first(count), self._flows.first(count)
        store._issue_ns = self._issue_ns.first(count)
        return store

    def _add_devices_and_routes(self, origin: int) -> None:
        """Append what is there without any collective, all at once: of 1,024 devices there are a million routes."""
        table, count = route_table(self.topology), len(self.topology.devices)
        pairs = count * count
        total = count + pairs
        self._resource.extend(np.concatenate([np.arange(count), count + table.link]))
        self._resource_ptr.extend(np.concatenate([np.arange(1, count + 1), count + table.pointers_P1[1:]]))
        self._end.extend(np.stack(np.divmod(np.arange(pairs), count), axis=1).reshape(-1))
        self._end_ptr.extend(np.concatenate([np.zeros(count, np.int64), 2 * np.arange(1, pairs + 1)]))
        self._latency_s.extend(np.zeros((total, LIBRARY_FORMULAS)))
        self._s_per_byte.extend(np.zeros((total, LIBRARY_FORMULAS)))
        self._segments.extend(np.zeros((total, 2), np.int64))
        self._origin.extend(np.full(total, origin))
        self._operation.extend(np.full(total, -1))
        self._flows.extend(np.ones(total, np.int64))
        self._issue_ns.extend(np.repeat([0, self._message_ns], [count, pairs]))

    def numbers(self, sets: Sequence[tuple[int, int, Array]]) -> list[int]:
        """Return the numbers of the resource sets of collectives; those that are new are priced together.

        sets: of each the code of its kind (its place in `COLLECTIVE_KINDS`), its root or -1, its devices (ascending).
        """
        keys = [(code, root, members.tobytes()) for code, root, members in sets]
        new = {
            key: resource_set for key, resource_set in zip(keys, sets, strict=True) if key not in self._sets
        }
        if new:
            self._sets.update(zip(new, range(len(self._origin), len(self._origin) + len(new)), strict=True))
            self._add(list(new.values()))
        return [self._sets[key] for key in keys]

    def _add(self, sets: Sequence[tuple[int, int, Array]]) -> None:
        self._arrays = None
        codes, roots, members = zip(*sets, strict=True)
        prices = self._prices.table(codes, roots, members)
        self._resource_ptr.extend(prices.link_ptr[1:] + len(self._resource))
        self._resource.extend(prices.link + len(self.topology.devices))
        self._end_ptr.extend(np.cumsum([len(devices) for devices in members]) + len(self._end))
        self._end.extend(np.concatenate(members))
        self._latency_s.extend(prices.line_KA2[:, :, 0])
        self._s_per_byte.extend(prices.line_KA2[:, :, 1])
        self._segments.extend([self._curves.span(curve) for curve in prices.curves])
        self._origin.extend(prices.origin_K)
        self._operation.extend(codes)
        self._flows.extend([FLOWS[code] for code in codes])
        self._issue_ns.extend([self._collective_ns] * len(codes))

    def device_set(
        self,
        members: tuple[int, ...],
        kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
        root: int | None = None,
    ) -> PricedResourceSet:
        """Return the resource set of a collective over `members` (ascending), and its price."""
        code = COLLECTIVE_KINDS.index(kind)
        (number,) = self.numbers([(code, -1 if root is None else root, np.array(members, np.int64))])
        first, last = self._resource_ptr.items[number : number + 2].tolist()
        lines = np.stack([self._latency_s.items[number], self._s_per_byte.items[number]], axis=1)
        price = CollectivePrice(
            finite_lines(lines),
            tuple((self._resource.items[first:last] - len(self.topology.devices)).tolist()),
            ORIGINS[self._origin.items[number]],
            curve=self._curves.curve(*self._segments.items[number].tolist()),
        )
        return PricedResourceSet(number, price)

    def durations_ns(self, numbers: Sequence[int] | Array, size_bytes: Array) -> Array:
        """Return the nanoseconds of collectives by their numbers, as `CollectivePrice.duration_ns` does."""
        durations_ns = np.empty(len(numbers), np.int64)
        collectives_ns(
            self.arrays(), np.asarray(numbers, np.int64), np.ascontiguousarray(size_bytes), durations_ns
        )
        return durations_ns

    def member_counts(self, numbers: Array) -> Array:
        """Return how many devices are the ends of each of some resource sets, by their numbers."""
        ends = self._end_ptr.items
        counts: Array = ends[numbers + 1] - ends[numbers]
        return counts

    @property
    def count(self) -> int:
        """Number of resource sets so far."""
        return len(self._origin)

    def arrays(self) -> ResourceSets:
        """Return all resource sets so far as arrays; valid until the next one is added."""
        if self._arrays is None:
            self._arrays = ResourceSets(
                self._resource_ptr.items,
                self._resource.items,
                self._end_ptr.items,
                self._end.items,
                self._latency_s.items,
                self._s_per_byte.items,
                self._segments.items,
                self._origin.items,
                self._operation.items,
                self._flows.items,
                self._curves.segments.items,
                self._issue_ns.items,
            )
        return self._arrays


def contention_ppm(topology: Topology) -> Array:
    """Return, for each device, its contention factor in parts per million."""
    factors: list[Any] = [
        round(topology.contention_of(device.kind_name) * 1e6) for device in topology.devices
    ]
    return np.array(factors, np.int64)
