"""The slots of one rank's tensors: those that it makes, reads, holds and receives under a plan.

They follow from the plan alone: `graph.plan` has the messages between ranks, this the slots of their tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graph.axes import operand_regions
from graph.collectives import Collective
from graph.exchange import Assembly, Piece, source_groups
from graph.intervals import Region, shape
from graph.operators import ValueKind
from graph.plan import Plan


@dataclass(frozen=True, slots=True)
class RegionRead:
    """A region of an input, a buffer or a weight that tasks of the rank read, and its slot."""

    value: str
    region: Region
    slot: int


@dataclass(frozen=True, slots=True)
class LocalAssembly:
    """An assembly on the rank: its value, its number in the plan, and its slot."""

    value: str
    number: int
    assembly: Assembly
    slot: int


class TensorSlots:
    """Slots of one rank. `shapes` are those of all slots, in order.

    tasks: for each operator, the rank's tasks.
    outputs: slot by (operator, task, output position).
    reads: in order of first use; `held` maps each weight that the rank holds to its slot.
    assemblies: for each operator, the assemblies that its tasks are the first to read; `empty` ones have no pieces.
    sources: the slot that a task reads, by (operator, task, input slot).
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        """Number the tensors of `rank`."""
        self.plan = plan
        self.rank = rank
        self.shapes: list[tuple[int, ...]] = []
        self.tasks = tuple(
            tuple(task for task, device in enumerate(configuration.devices) if device == rank)
            for configuration in plan.strategy.configurations
        )
        self.outputs: dict[tuple[int, int, int], int] = {}
        self.reads: dict[tuple[str, Region], RegionRead] = {}
        self.held: dict[str, int] = {}
        self.assemblies: dict[int, list[LocalAssembly]] = {}
        self.empty: list[LocalAssembly] = []
        self.sources: dict[tuple[int, int, int], int] = {}
        self._make_outputs()
        self._make_assemblies()
        self._make_reads()

    def new_slot(self, sizes: tuple[int, ...]) -> int:
        """Return a new slot for a tensor of shape `sizes`."""
        self.shapes.append(sizes)
        return len(self.shapes) - 1

    def output_regions(self, operator: int, position: int) -> tuple[Region, ...]:
        """Return the region of an operator's output for each of its tasks."""
        space = self.plan.graph.operators[operator].space
        degrees = self.plan.strategy.configurations[operator].degrees
        return operand_regions(space.axes, space.outputs[position], degrees)

    def made(self, value: str) -> list[tuple[Region, int]]:
        """Return the regions of a value that the rank's tasks make, and their slots; of replicas the first alone.

        Those of all ranks make up the value; where they are the same region, they are partial sums.
        """
        operator, position = self.plan.graph.producer[value]
        regions = self.output_regions(operator, position)
        groups = source_groups(
            self.plan.graph.operators[operator].space, self.plan.strategy.configurations[operator]
        )
        return [
            (regions[group[0]], self.outputs[operator, group[0], position])
            for group in groups
            if group[0] in self.tasks[operator]
        ]

    def piece_slot(self, value: str, piece: Piece) -> int:
        """Return the slot of the task's output from which a piece on this rank is cut."""
        operator, position = self.plan.graph.producer[value]
        return self.outputs[operator, piece.source_task, position]

    def source_region(self, value: str, piece: Piece) -> Region:
        """Return the region that a piece's task holds."""
        operator, position = self.plan.graph.producer[value]
        return self.output_regions(operator, position)[piece.source_task]

    def messages(
        self, assemblies: tuple[Assembly, ...], collectives: tuple[Collective, ...] = ()
    ) -> Iterator[tuple[int, Assembly, Piece]]:
        """Yield this rank's messages about a value in the plan's order: (assembly number, assembly, piece).

        Assemblies that `collectives` serve get none.
        """
        served = {number for collective in collectives for number in collective.assemblies}
        for number, assembly in enumerate(assemblies):
            if number in served:
                continue
            for piece in assembly.pieces:
                if piece.source_device != assembly.device and self.rank in (
                    piece.source_device,
                    assembly.device,
                ):
                    yield number, assembly, piece

    def _make_outputs(self) -> None:
        for index, operator in enumerate(self.plan.graph.operators):
            for position in range(len(operator.outputs)):
                regions = self.output_regions(index, position)
                for task in self.tasks[index]:
                    self.outputs[index, task, position] = self.new_slot(shape(regions[task]))

    def _make_assemblies(self) -> None:
        for value, assemblies in self.plan.exchanges.items():
            for number, assembly in enumerate(assemblies):
                if assembly.device != self.rank:
                    continue
                if assembly.direct:
                    slot = self.piece_slot(value, assembly.pieces[0])
                else:
                    slot = self.new_slot(shape(assembly.region))
                    local = LocalAssembly(value, number, assembly, slot)
                    if assembly.pieces:
                        # Readers are in the order of execution.
                        self.assemblies.setdefault(assembly.readers[0].operator, []).append(local)
                    else:
                        self.empty.append(local)
                for reader in assembly.readers:
                    self.sources[reader.operator, reader.task, reader.slot] = slot

    def _make_reads(self) -> None:
        graph = self.plan.graph
        for index, operator in enumerate(graph.operators):
            degrees = self.plan.strategy.configurations[index].degrees
            for slot, name in enumerate(operator.inputs):
                if graph.value_by_name[name].kind is ValueKind.OPERATOR:
                    continue
                regions = operand_regions(operator.space.axes, operator.space.inputs[slot], degrees)
                for task in self.tasks[index]:
                    read = self._read(name, regions[task])
                    self.sources[index, task, slot] = read.slot
        for weight in graph.weights:
            region = self.plan.held[weight.name].get(self.rank)
            if region is not None:
                self.held[weight.name] = self.new_slot(shape(region))

    def _read(self, value: str, region: Region) -> RegionRead:
        if (value, region) not in self.reads:
            self.reads[value, region] = RegionRead(value, region, self.new_slot(shape(region)))
        return self.reads[value, region]
