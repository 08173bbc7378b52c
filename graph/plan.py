"""The static plan of one training step: what every device does, in one order that all share.

The runtime walks this order, each rank doing its own share, and the simulator's `program` order is this order.
So nothing can deadlock: a wait on one rank is always for something that stands earlier in the common order.

    forward of every operator in topological order, each followed by the transfers of its outputs;
    backward in reverse order, each followed by the transfers of the gradients that are then complete and by the
    synchronization of the gradient buckets that are then full; the remaining buckets; the optimizer's update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from graph.axes import operand_regions, tasks
from graph.exchange import Assembly, Reading, exchange, source_groups
from graph.holdings import Cell, cell_elements, cells, held_regions
from graph.intervals import Region
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Strategy

# As in DistributedDataParallel (PyTorch's default of 25 MiB): large enough to amortize a collective's latency,
# small enough to start before backward ends.
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A cell of one weight inside a bucket."""

    weight: str
    cell: Cell


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of cells with the same holders, summed over them by one all-reduce after backward of `after`."""

    devices: tuple[int, ...]
    entries: tuple[BucketEntry, ...]
    size_bytes: int
    after: int


@dataclass(frozen=True, slots=True)
class GradientTransfer:
    """The gradient of one assembly goes back to its pieces' tasks."""

    value: str
    assembly: int


@dataclass(frozen=True)
class Plan:
    """All that follows from a graph, a strategy and the devices' nodes.

    exchanges: for each operator's value that is read, its assemblies (`graph.exchange`).
    buffer_exchanges: for each updated buffer, the assemblies that renew it where it is read.
    active: for each operator, for each task, whether it has a backward (a replica that nobody reads has none).
    seeds: tasks of the loss's producer whose gradient is one (all parts of a partial sum, one of each replica group).
    active_assemblies: for each value, for each assembly, whether its gradient flows back.
    held: for each weight, the region held by each device.
    gradient_transfers: for each operator, the transfers to issue right after its backward.
    buckets: in the order of their all-reduces; `after` is the operator whose backward completes them.
    """

    graph: OperatorGraph
    strategy: Strategy
    exchanges: dict[str, tuple[Assembly, ...]]
    buffer_exchanges: dict[str, tuple[Assembly, ...]]
    active: tuple[tuple[bool, ...], ...]
    active_assemblies: dict[str, tuple[bool, ...]]
    seeds: tuple[int, ...]
    held: dict[str, dict[int, Region]]
    gradient_transfers: dict[int, tuple[GradientTransfer, ...]]
    buckets: tuple[Bucket, ...]

    @cached_property
    def buckets_after(self) -> dict[int, tuple[int, ...]]:
        """For each operator, the buckets to synchronize after its backward and its gradient transfers."""
        result: dict[int, list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            result.setdefault(bucket.after, []).append(index)
        return {operator: tuple(indexes) for operator, indexes in result.items()}


def build_plan(
    graph: OperatorGraph, strategy: Strategy, node_of: Sequence[int], bucket_bytes: int = BUCKET_BYTES
) -> Plan:
    """Return the plan of a validated strategy.

    Args:
        graph: the operator graph.
        strategy: a strategy that `Strategy.validate` accepted.
        node_of: for each device, its node.
        bucket_bytes: an all-reduce is issued as soon as its gradients reach this size.
    """
    exchanges = {
        value.name: value_exchange(graph, strategy, value.name, node_of)
        for value in graph.values
        if value.kind is ValueKind.OPERATOR
    }
    active, active_assemblies, seeds = _backward_activity(graph, strategy, exchanges)
    held = {weight.name: weight_holdings(graph, strategy, weight.name) for weight in graph.weights}
    return Plan(
        graph=graph,
        strategy=strategy,
        exchanges=exchanges,
        buffer_exchanges=_buffer_exchanges(graph, strategy, node_of),
        active=active,
        active_assemblies=active_assemblies,
        seeds=seeds,
        held=held,
        gradient_transfers=_gradient_transfers(exchanges, active, active_assemblies, graph),
        buckets=_buckets(graph, held, active, bucket_bytes),
    )


def readings_of(graph: OperatorGraph, strategy: Strategy, value: str) -> list[Reading]:
    """Return the operators that read a value, with their configurations, in topological order."""
    return [
        Reading(index, slot, graph.operators[index].space, strategy.configurations[index])
        for index, slot in graph.consumers[value]
    ]


def value_exchange(
    graph: OperatorGraph, strategy: Strategy, value: str, node_of: Sequence[int]
) -> tuple[Assembly, ...]:
    """Return the assemblies of one operator's value."""
    index, output = graph.producer[value]
    return exchange(
        graph.operators[index].space,
        output,
        strategy.configurations[index],
        readings_of(graph, strategy, value),
        node_of,
    )


def weight_holdings(graph: OperatorGraph, strategy: Strategy, weight: str) -> dict[int, Region]:
    """Return, by device, the region of a weight or buffer that the device's tasks read."""
    needed: list[tuple[int, Region]] = []
    for reading in readings_of(graph, strategy, weight):
        regions = operand_regions(
            reading.space.axes, reading.space.inputs[reading.slot], reading.configuration.degrees
        )
        needed.extend(zip(reading.configuration.devices, regions, strict=True))
    return held_regions(needed)


def _buffer_exchanges(
    graph: OperatorGraph, strategy: Strategy, node_of: Sequence[int]
) -> dict[str, tuple[Assembly, ...]]:
    result = {}
    for buffer, value in graph.buffer_updates:
        index, output = graph.producer[value]
        result[buffer] = exchange(
            graph.operators[index].space,
            output,
            strategy.configurations[index],
            readings_of(graph, strategy, buffer),
            node_of,
        )
    return result


def loss_seeds(graph: OperatorGraph, strategy: Strategy) -> tuple[int, ...]:
    """Return the tasks of the loss's producer that start the backward with gradient one."""
    index, _ = graph.producer[graph.loss]
    return tuple(
        group[0] for group in source_groups(graph.operators[index].space, strategy.configurations[index])
    )


def _backward_activity(
    graph: OperatorGraph, strategy: Strategy, exchanges: dict[str, tuple[Assembly, ...]]
) -> tuple[tuple[tuple[bool, ...], ...], dict[str, tuple[bool, ...]], tuple[int, ...]]:
    active = [[False] * tasks(c.degrees) for c in strategy.configurations]
    active_assemblies: dict[str, tuple[bool, ...]] = {}
    seeds = loss_seeds(graph, strategy)
    gradient_inputs = [graph.gradient_inputs(operator) for operator in graph.operators]
    for index in range(len(graph.operators) - 1, -1, -1):
        operator = graph.operators[index]
        for name in operator.outputs:
            needs = graph.value_by_name[name].requires_gradient
            flags = []
            for assembly in exchanges[name]:
                flows = needs and any(
                    active[reader.operator][reader.task] and gradient_inputs[reader.operator][reader.slot]
                    for reader in assembly.readers
                )
                flags.append(flows)
                if flows:
                    for piece in assembly.pieces:
                        active[index][piece.source_task] = True
            active_assemblies[name] = tuple(flags)
            if name == graph.loss and needs:
                for task in seeds:
                    active[index][task] = True
    return tuple(tuple(flags) for flags in active), active_assemblies, seeds


def _gradient_transfers(
    exchanges: dict[str, tuple[Assembly, ...]],
    active: tuple[tuple[bool, ...], ...],
    active_assemblies: dict[str, tuple[bool, ...]],
    graph: OperatorGraph,
) -> dict[int, tuple[GradientTransfer, ...]]:
    gradient_inputs = [graph.gradient_inputs(operator) for operator in graph.operators]
    result: dict[int, list[GradientTransfer]] = {}
    for value, assemblies in exchanges.items():
        for position, assembly in enumerate(assemblies):
            if not active_assemblies[value][position]:
                continue
            # Backward runs in reverse, so the earliest active reader is the last to contribute.
            last = min(
                reader.operator
                for reader in assembly.readers
                if active[reader.operator][reader.task] and gradient_inputs[reader.operator][reader.slot]
            )
            result.setdefault(last, []).append(GradientTransfer(value, position))
    return {operator: tuple(transfers) for operator, transfers in result.items()}


def _buckets(
    graph: OperatorGraph,
    held: dict[str, dict[int, Region]],
    active: tuple[tuple[bool, ...], ...],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Fill buckets, one series a set of holders, in the order in which backward completes the gradients."""
    complete: dict[int, list[str]] = {}
    for weight in graph.weights:
        users = [index for index, _ in graph.consumers[weight.name] if any(active[index])]
        if users:
            complete.setdefault(min(users), []).append(weight.name)
    buckets: list[Bucket] = []
    filling: dict[tuple[int, ...], tuple[list[BucketEntry], int]] = {}
    for index in range(len(graph.operators) - 1, -1, -1):
        for name in complete.get(index, ()):
            item_bytes = graph.value_by_name[name].spec.item_bytes
            for cell in cells(held[name]):
                if len(cell.devices) < 2:
                    continue
                entries, size = filling.get(cell.devices, ([], 0))
                entries.append(BucketEntry(name, cell))
                size += cell_elements(cell) * item_bytes
                if size >= bucket_bytes:
                    buckets.append(Bucket(cell.devices, tuple(entries), size, index))
                    filling.pop(cell.devices, None)
                else:
                    filling[cell.devices] = (entries, size)
    buckets.extend(Bucket(devices, tuple(entries), size, 0) for devices, (entries, size) in filling.items())
    return tuple(buckets)
