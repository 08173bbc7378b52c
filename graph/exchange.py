"""The pieces of a value that devices send each other, under given configurations of its producer and its readers.

A reader task needs a region of the value on its own device: an assembly. An assembly is put together from pieces of
the producer's tasks. Partial sums are added up while assembling. Of replicas (tasks that compute the same region)
an assembly reads one: that on its own device, else one in its node, else the one of lowest index. Readers on one
device that need the same region share one assembly, so that it is sent once. The gradient of an assembly goes back
along the same pieces; a partial sum's gradient is the same for every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph.axes import AxisKind, IterationSpace, coordinates, operand_regions
from graph.intervals import IndexSet, Region, intersect, intersect_regions
from graph.strategy import Configuration


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an assembly that one task of the producer holds; partial sums over one region add up."""

    source_task: int
    source_device: int
    region: Region


@dataclass(frozen=True, slots=True)
class Reader:
    """One input slot of one task that reads an assembly."""

    operator: int
    task: int
    slot: int


@dataclass(frozen=True, slots=True)
class Assembly:
    """A region of a value on one device, with its pieces and its readers there.

    `direct` holds where the assembly is exactly one local task's output, so that nothing is copied.
    """

    device: int
    region: Region
    pieces: tuple[Piece, ...]
    readers: tuple[Reader, ...]
    direct: bool

    @property
    def remote_pieces(self) -> tuple[Piece, ...]:
        """The pieces that come from other devices."""
        return tuple(piece for piece in self.pieces if piece.source_device != self.device)


@dataclass(frozen=True, slots=True)
class Consumer:
    """An operator that reads a value: its index, input slot, iteration space and configuration."""

    operator: int
    slot: int
    space: IterationSpace
    configuration: Configuration


def source_groups(space: IterationSpace, configuration: Configuration) -> list[list[int]]:
    """Return the producer's tasks grouped by replicas: tasks of one group compute the same."""
    replica = [index for index, axis in enumerate(space.axes) if axis.kind is AxisKind.REPLICA]
    groups: dict[tuple[int, ...], list[int]] = {}
    for task, coordinate in enumerate(coordinates(configuration.degrees)):
        key = tuple(position for axis, position in enumerate(coordinate) if axis not in replica)
        groups.setdefault(key, []).append(task)
    return list(groups.values())


def choose_replica(tasks: Sequence[int], devices: Sequence[int], device: int, node_of: Sequence[int]) -> int:
    """Return the replica that `device` reads: its own, else one in its node, else that of lowest index."""
    for task in tasks:
        if devices[task] == device:
            return task
    for task in tasks:
        if node_of[devices[task]] == node_of[device]:
            return task
    return tasks[0]


ExchangeCache = dict[object, dict[tuple[int, Region], tuple[tuple[Piece, ...], bool]]]
"""Pieces and `direct` of assemblies, by the producer's axes, output and configuration, and by device and region."""


def exchange(
    producer: IterationSpace,
    output: int,
    configuration: Configuration,
    consumers: Sequence[Consumer],
    node_of: Sequence[int],
    cache: ExchangeCache | None = None,
) -> tuple[Assembly, ...]:
    """Return the assemblies of one value, ordered by first reader.

    Args:
        producer: iteration space of the operator that makes the value.
        output: the value's position among the operator's outputs.
        configuration: the producer's configuration.
        consumers: the operators that read the value, in the order of execution.
        node_of: for each device, its node.
        cache: of other values on the same nodes, which is added to: equal layers have equal exchanges.
    """
    readers: dict[tuple[int, Region], list[Reader]] = {}
    for consumer in consumers:
        needed = operand_regions(
            consumer.space.axes, consumer.space.inputs[consumer.slot], consumer.configuration.degrees
        )
        for task, (region, device) in enumerate(zip(needed, consumer.configuration.devices, strict=True)):
            readers.setdefault((device, region), []).append(Reader(consumer.operator, task, consumer.slot))
    form = (producer.axes, producer.outputs[output], configuration)
    cached = {} if cache is None else cache.setdefault(form, {})
    sources: ProducedRegions | None = None
    assemblies = []
    for key, reading_tasks in readers.items():
        if key not in cached:
            sources = ProducedRegions(producer, output, configuration) if sources is None else sources
            cached[key] = sources.pieces(*key, node_of)
        pieces, direct = cached[key]
        assemblies.append(Assembly(*key, pieces, tuple(reading_tasks), direct))
    return tuple(assemblies)


class ProducedRegions:
    """The parts of one value that its producer's tasks make."""

    def __init__(self, producer: IterationSpace, output: int, configuration: Configuration) -> None:
        self._regions = operand_regions(producer.axes, producer.outputs[output], configuration.degrees)
        self._groups = source_groups(producer, configuration)
        self._devices = configuration.devices
        # Of each dim: the replica groups by their index set of that dim.
        self._by_dim: list[dict[IndexSet, list[int]]] = []
        for dim in range(len(self._regions[0])):
            by_set: dict[IndexSet, list[int]] = {}
            for number, group in enumerate(self._groups):
                by_set.setdefault(self._regions[group[0]][dim], []).append(number)
            self._by_dim.append(by_set)
        self._overlaps: dict[tuple[int, IndexSet], list[int]] = {}

    def pieces(self, device: int, region: Region, node_of: Sequence[int]) -> tuple[tuple[Piece, ...], bool]:
        """Return the pieces of a region on a device, and whether it is just one local task's output."""
        pieces = []
        for number in self._overlapping(region):
            group = self._groups[number]
            common = intersect_regions(self._regions[group[0]], region)
            if common is not None:
                task = choose_replica(group, self._devices, device, node_of)
                pieces.append(Piece(task, self._devices[task], common))
        direct = (
            len(pieces) == 1
            and pieces[0].source_device == device
            and self._regions[pieces[0].source_task] == region
        )
        return tuple(pieces), direct

    def _overlapping(self, region: Region) -> Sequence[int]:
        """Return the replica groups, ascending, that overlap a region in the dim that is cut most."""
        if not self._by_dim:
            return range(len(self._groups))
        dim = max(range(len(self._by_dim)), key=lambda dim: len(self._by_dim[dim]))
        key = (dim, region[dim])
        if key not in self._overlaps:
            self._overlaps[key] = sorted(
                number
                for indexes, numbers in self._by_dim[dim].items()
                if intersect(indexes, region[dim])
                for number in numbers
            )
        return self._overlaps[key]
