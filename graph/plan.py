"""The static plan of one training step: the instructions of every device, in one common order.

The runtime walks this order, each rank doing its own share, and the simulator's `program` order is this order.
So nothing can deadlock: a wait on one rank is always for something that stands earlier in the common order.

    forward of the operators that the loss depends on, in topological order, each followed by the exchange of its
    outputs: first the collectives (`graph.collectives`), then the messages from one device to another;
    backward in reverse order, each followed by the exchange of the gradients that are then complete, likewise, and by
    the synchronization of the gradient buckets that are then full; the remaining buckets;
    forward of the operators that only renew buffers, in the same way; the exchange that renews buffers where they
    are read; the optimizer's update; the collection of the weights whose update was shared.

The policies of `graph.synchronization` leave a part of that to the next step's forward. Of p3 with shared updates,
slices are updated where their gathers (pulls) start (`Plan.starts`), in the backward or before an operator of the next
forward, which also waits for the pulls of what it is the first to read.

Of a group of operators whose activations are not kept (`graph.recomputation`), each device makes its own again just
before the backward of the group's last operator; nothing is sent again.

Weights that are kept in shares are gathered before the first operator that reads them, and before the backward of the
last one (or before that one's group is made again), several operators' together; the next gather begins before the
operators of this one, so that one is always under way. Who reads a view of a weight reads the weight
(`OperatorGraph.weight_readers`).

With micro-batches (`graph.schedule`) the forwards and backwards of stages stand in `Plan.units`, each as above for its
operators; buckets are synchronized in the backwards of the last micro-batch, or of each (`Plan.summed_each`), and
operators that only renew buffers come after all backwards, micro-batch by micro-batch. Weights that are kept in shares
are gathered for every forward and every backward of a stage, whose first gathers begin with it. Where the schedule has
the gradients of weights apart (`graph.backward_parts`), they are in units of their own, with the synchronization of
buckets behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graph.axes import operand_regions, tasks
from graph.backward_parts import backward_parts
from graph.buckets import Bucket, Gathers, gradient_buckets, last_backward_reads, weight_gathers
from graph.collectives import SUMMABLE, Collective, recognize
from graph.exchange import Assembly, Consumer, ExchangeCache, exchange, source_groups
from graph.intervals import Region, volume
from graph.operators import OperatorGraph, ValueKind
from graph.pulls import Bounds, Pull, SliceStart, bounds_of_pulls, check_pulls, slice_starts
from graph.schedule import ONE_BATCH, Phase, Schedule, Stage, Unit, common_order, stages_of
from graph.strategy import Sharding, Strategy, stays_whole
from graph.synchronization import Policy, Synchronization
from graph.weight_placement import (
    cells,
    held_regions,
    shares,
    with_every_element,
)

# Of late gathers: each has a tensor of its own beside the weights, and a second one keeps the link busy.
GATHERS_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class GradientTransfer:
    """The gradient of one assembly goes back to its pieces' tasks."""

    value: str
    assembly: int


@dataclass(frozen=True, slots=True)
class GradientCollective:
    """The gradients of all assemblies that a collective serves go back together; `number` is among its value's."""

    value: str
    number: int


@dataclass(frozen=True)
class Plan:
    """The exchanges, collectives, buckets and gathers that follow from a graph, a strategy and the devices' nodes.

    The order of execution is the graph's (`OperatorGraph.order`).

    exchanges: for each operator's value that is read, its assemblies (`graph.exchange`).
    collectives: for each of them, the collectives that serve some of its assemblies; the others get messages.
    buffer_exchanges: for each updated buffer, the assemblies that renew it where it is read.
    buffer_collectives: for each of them, its collectives.
    active: for each operator, for each task, whether it has a backward (a replica that nobody reads has none).
    seeds: tasks of the loss's producer whose gradient is one (all parts of a partial sum, one of each replica group).
    active_assemblies: for each value, for each assembly, whether its gradient flows back.
    held: for each weight, the region held by each device.
    gradient_collectives: for each operator, the collectives to issue backward right after its backward.
    gradient_transfers: for each operator, the other assemblies' transfers, to issue after those.
    buckets: in the order of their all-reduces; `after` is the operator whose backward completes them.
    slice_order: for each slice of a bucket, in the order in which their sums start, the bucket.
    gather_order: the buckets whose update is shared, in the order in which their updated weights are gathered.
    pulls: of p3, the gathers of updated slices of these buckets, in the order in which they start; the k-th of a bucket
        is that of its slice k.
    forward_gathers, backward_gathers: by the operator before which they must be there, in the order in which these
        operators come.
    """

    graph: OperatorGraph
    strategy: Strategy
    exchanges: dict[str, tuple[Assembly, ...]]
    collectives: dict[str, tuple[Collective, ...]]
    buffer_exchanges: dict[str, tuple[Assembly, ...]]
    buffer_collectives: dict[str, tuple[Collective, ...]]
    active: tuple[tuple[bool, ...], ...]
    active_assemblies: dict[str, tuple[bool, ...]]
    seeds: tuple[int, ...]
    held: dict[str, dict[int, Region]]
    gradient_collectives: dict[int, tuple[GradientCollective, ...]]
    gradient_transfers: dict[int, tuple[GradientTransfer, ...]]
    buckets: tuple[Bucket, ...]
    slice_order: tuple[int, ...]
    gather_order: tuple[int, ...]
    pulls: tuple[Pull, ...]
    forward_gathers: Gathers
    backward_gathers: Gathers

    @cached_property
    def sharding(self) -> dict[str, Sharding]:
        """For each weight, its level of sharding."""
        return {
            weight.name: self.strategy.sharding_of(number) for number, weight in enumerate(self.graph.weights)
        }

    @cached_property
    def recomputed_before(self) -> dict[int, tuple[int, ...]]:
        """For each operator before whose backward a group is recomputed, the group's operators with a backward."""
        return {
            group.last: tuple(
                index for index in range(group.first, group.last + 1) if any(self.active[index])
            )
            for group in self.strategy.recomputation
        }

    def updated(self, weight: str) -> list[tuple[int, Region]]:
        """Return disjoint regions that make up all held elements of a weight, each with the device that updates it.

        Of a cell that is shared these are the shares, else it is the first of the devices that hold the cell.
        """
        regions: list[tuple[int, Region]] = []
        for cell in cells(self.held[weight]) if self.held[weight] else ():
            if not volume(cell.region):
                continue
            if self.sharding[weight] is Sharding.NONE or len(cell.devices) == 1:
                regions.append((cell.devices[0], cell.region))
                continue
            for device, region in zip(cell.devices, shares(cell), strict=True):
                if region is not None:
                    regions.append((device, region))
        return regions

    @cached_property
    def buckets_after(self) -> dict[int, tuple[int, ...]]:
        """For each operator, the buckets to synchronize after its backward and its gradient transfers."""
        result: dict[int, list[int]] = {}
        for index, bucket in enumerate(self.buckets):
            result.setdefault(bucket.after, []).append(index)
        return {operator: tuple(indexes) for operator, indexes in result.items()}

    @cached_property
    def slice_counts(self) -> tuple[int, ...]:
        """In how many slices each bucket is summed."""
        counts = Counter(self.slice_order)
        return tuple(counts[number] for number in range(len(self.buckets)))

    @cached_property
    def starts(self) -> list[list[SliceStart]]:
        """For each place (`graph.pulls`), the sums and pulls of slices that start there, in their order."""
        places = [self._place(pull) for pull in self.pulls]
        count = len(self.buckets) + len(self.graph.order.of_loss)
        return slice_starts(self.slice_order, self.pulls, places, count)

    def starts_before(self, operator: int) -> list[SliceStart]:
        """Return the pulls that start before an operator's next forward, and the sums that go behind them."""
        return self.starts[len(self.buckets) + self._forward_place[operator]] if self.pulls else []

    @cached_property
    def _forward_place(self) -> dict[int, int]:
        return {index: place for place, index in enumerate(self.graph.order.of_loss)}

    def _place(self, pull: Pull) -> int:
        if pull.phase is Phase.FORWARD:
            return len(self.buckets) + self._forward_place[pull.operator]
        return max(k for k, bucket in enumerate(self.buckets) if bucket.after >= pull.operator)

    def stands_at(self, place: int) -> tuple[Phase, int]:
        """Return after or before which operator a place of pulls is."""
        if place < len(self.buckets):
            return Phase.BACKWARD, self.buckets[place].after
        return Phase.FORWARD, self.graph.order.of_loss[place - len(self.buckets)]

    @cached_property
    def pull_bounds(self) -> Bounds:
        """Where pulls may be: before the first operator that reads a bucket's weights, and after the last one."""
        last_reads = last_backward_reads(self.graph, self.strategy, self.active)
        return bounds_of_pulls(self.buckets, last_reads, stays_whole(self.graph), self.first_read)

    @cached_property
    def pulls_awaited(self) -> dict[int, tuple[int, ...]]:
        """For each operator, the buckets whose pulls are awaited before its forward: it is the first to read them."""
        result: dict[int, list[int]] = {}
        for number in dict.fromkeys(pull.bucket for pull in self.pulls):
            result.setdefault(self.graph.order.of_loss[self.first_read[number]], []).append(number)
        return {index: tuple(numbers) for index, numbers in result.items()}

    @cached_property
    def updated_before(self) -> dict[int, tuple[str, ...]]:
        """For each operator, the weights that a step updates whose forward is the first to read them."""
        place = {index: place for place, index in enumerate(self.graph.order.of_loss)}
        result: dict[int, list[str]] = {}
        for weight in self.graph.weights:
            users = [index for index, _ in self.graph.consumers[weight.name] if index in place]
            if weight.requires_gradient and any(any(self.active[index]) for index in users):
                result.setdefault(min(users, key=place.__getitem__), []).append(weight.name)
        return {index: tuple(names) for index, names in result.items()}

    @property
    def updates_late(self) -> bool:
        """Whether weights are updated in the forward of the next step."""
        return self.strategy.synchronization.policy is Policy.P3

    @property
    def gathers_late(self) -> bool:
        """Whether updated weights are gathered in the forward of the next step."""
        return self.strategy.synchronization.orders_gathers and bool(self.gather_order)

    @cached_property
    def gathers_awaited(self) -> dict[int, tuple[int, ...]]:
        """For each operator, the buckets whose late gathers are awaited before its forward, in their order.

        It is the first that reads any of a bucket's weights, or of those of a bucket that follows in the order: a
        gather is awaited no later than those behind it, so that on all devices all starts and waits stand in one order.
        """
        result: dict[int, list[int]] = {}
        soonest = len(self.graph.order.of_loss)
        for number in reversed(self.gather_order):
            soonest = min(soonest, self.first_read[number])
            result.setdefault(self.graph.order.of_loss[soonest], []).append(number)
        return {index: tuple(reversed(numbers)) for index, numbers in reversed(result.items())}

    @cached_property
    def first_read(self) -> tuple[int, ...]:
        """For each bucket, the place in the forward of the first operator that reads any of its weights."""
        place = self._forward_place
        first = {name: place[index] for index, names in self.updated_before.items() for name in names}
        return tuple(min(first[entry.weight] for entry in bucket.entries) for bucket in self.buckets)

    @property
    def first_gathers(self) -> tuple[int, ...]:
        """The buckets whose late gathers start right after the updates."""
        return self.gather_order[:GATHERS_UNDER_WAY]

    def gather_after(self, awaited: int) -> int | None:
        """Return the bucket whose late gather starts once that of the bucket `awaited` is there."""
        place = self.gather_order.index(awaited) + GATHERS_UNDER_WAY
        return self.gather_order[place] if place < len(self.gather_order) else None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages, in the order of the forward."""
        return stages_of(self.graph, self.strategy.configurations, self.strategy.micro_batches.schedule)

    @cached_property
    def stage_firsts(self) -> tuple[int, ...]:
        """The first operators of the stages that micro-batches go through; none of a step in one batch."""
        if self.strategy.micro_batches == ONE_BATCH:
            return ()
        return tuple(stage.first for stage in self.stages)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The forwards and backwards of all stages on all micro-batches, in the common order."""
        groups = 1 + max(stage.group for stage in self.stages)
        micro_batches = self.strategy.micro_batches
        return common_order(micro_batches, groups, len(self.stages) // groups)

    @cached_property
    def summed_each(self) -> tuple[bool, ...]:
        """For each bucket, whether it is summed in every micro-batch, if the strategy says so.

        Not where its devices are of several stages: these would wait for each other.
        """
        each = self.strategy.micro_batches.sums_each
        return tuple(
            each and any(stage.devices.issuperset(bucket.devices) for stage in self.stages)
            for bucket in self.buckets
        )

    @cached_property
    def weight_parts(self) -> frozenset[int]:
        """The operators whose backward has a weight part apart (`graph.backward_parts`), as the schedule wants."""
        if not self.strategy.micro_batches.splits_backward:
            return frozenset()
        return frozenset(
            index
            for index, operator in enumerate(self.graph.operators)
            if backward_parts(self.graph, operator).has_weights
        )

    def with_synchronization(self, synchronization: Synchronization) -> Plan:
        """Return the plan of the same strategy with its weights synchronized otherwise, in default orders."""
        strategy = replace(self.strategy, synchronization=synchronization)
        return replace(self, strategy=strategy)._synchronized(synchronization)

    def _synchronized(
        self,
        synchronization: Synchronization,
        slice_order: Sequence[int] = (),
        gather_order: Sequence[int] = (),
        pulls: Sequence[Pull] = (),
    ) -> Plan:
        parts = (self.graph, self.strategy, self.held, self.active, synchronization.size_bytes)
        # Of each micro-batch a stage sums its gradients before its backward ends.
        ends = self.stage_firsts if self.strategy.micro_batches.sums_each else ()
        buckets = gradient_buckets(*parts, ends)
        forward_gathers, backward_gathers = weight_gathers(*parts, self.stage_firsts)
        counts = [synchronization.slice_count(bucket.size_bytes) for bucket in buckets]
        in_order = [number for number, count in enumerate(counts) for _ in range(count)]
        if slice_order and sorted(slice_order) != in_order:
            raise ValueError(
                f"slice_order: is of {len(slice_order)} slices, must be of {len(in_order)}, {counts} by bucket"
            )
        gathered = [number for number, bucket in enumerate(buckets) if bucket.sharding is Sharding.OPTIMIZER]
        if gather_order and sorted(gather_order) != gathered:
            raise ValueError(f"gather_order: is {list(gather_order)}, must be of the buckets {gathered}")
        plan = replace(
            self,
            buckets=buckets,
            slice_order=tuple(slice_order) or tuple(in_order),
            gather_order=tuple(gather_order) or tuple(gathered),
            pulls=(),
            forward_gathers=forward_gathers,
            backward_gathers=backward_gathers,
        )
        if plan.updates_late and gathered:
            return plan._with_pulls(pulls)
        if gather_order or not plan.gathers_late:
            return plan
        return replace(plan, gather_order=plan._by_first_read)

    @property
    def _by_first_read(self) -> tuple[int, ...]:
        """The buckets whose update is shared, in the order in which their weights are read first."""
        return tuple(sorted(self.gather_order, key=self.first_read.__getitem__))

    def _with_pulls(self, pulls: Sequence[Pull]) -> Plan:
        """Return the plan with pulls; where there are none, with the latest ones that come in time."""
        if pulls:
            plan = replace(self, pulls=tuple(pulls))
            check_pulls(pulls, plan.slice_order, plan.starts, plan.pull_bounds)
            return plan
        order, count = self.graph.order.of_loss, len(self.slice_order)
        latest = tuple(
            Pull(number, Phase.FORWARD, order[self.first_read[number]], count)
            for number in self._by_first_read
            for _ in range(self.slice_counts[number])
        )
        return replace(self, pulls=latest)

    @cached_property
    def device_groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that communicate together, in the same order on all ranks: all devices first."""
        collectives = [*self.collectives.values(), *self.buffer_collectives.values()]
        groups = [tuple(range(self.strategy.device_count))]
        groups += [bucket.devices for bucket in self.buckets]
        groups += [gather.devices for gathers in self.forward_gathers.values() for gather in gathers]
        groups += [collective.devices for of_value in collectives for collective in of_value]
        if self.strategy.micro_batches.schedule is Schedule.ACTORS:
            # The first device of a stage tells the others what comes next.
            groups += [tuple(sorted(stage.devices)) for stage in self.stages if len(stage.devices) > 1]
        return tuple(dict.fromkeys(groups))

    @cached_property
    def returning_groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices of several stages whose collectives go back in another order than forward.

        Of schedule actors each stage has its own order between the two.
        """
        if self.strategy.micro_batches.schedule is not Schedule.ACTORS:
            return ()
        groups = [collective.devices for of_value in self.collectives.values() for collective in of_value]
        return tuple(
            group
            for group in dict.fromkeys(groups)
            if not any(stage.devices.issuperset(group) for stage in self.stages)
        )


def build_plan(
    graph: OperatorGraph,
    strategy: Strategy,
    node_of: Sequence[int],
    bucket_bytes: int | None = None,
    *,
    every_element: bool = False,
    slice_order: Sequence[int] = (),
    gather_order: Sequence[int] = (),
    pulls: Sequence[Pull] = (),
) -> Plan:
    """Return the plan of a validated strategy.

    Args:
        graph: the operator graph.
        strategy: a strategy that `Strategy.validate` accepted.
        node_of: for each device, its node.
        bucket_bytes: a bucket is full, and a slice complete, with so many bytes; so much of weights that are kept in
            shares is gathered at once. Without it, as the strategy says.
        every_element: a weight of which some elements are never read is held whole by its first holder, so that an
            optimizer which changes weights without gradients (weight decay) reaches these elements too.
        slice_order: see `Plan`; without one, buckets follow each other as they become full.
        gather_order: see `Plan`; without one, gathers are in the order of the buckets, late ones of their first reads.
        pulls: see `Plan`; without them, each is before the first operator that needs it.

    Raises:
        ValueError: `slice_order` or `pulls` are of other slices, or `gather_order` of other buckets; pulls are too soon
            or too late.
    """
    cache: ExchangeCache = {}
    exchanges = {
        value.name: value_exchange(graph, strategy, value.name, node_of, cache)
        for value in graph.values
        if value.kind is ValueKind.OPERATOR
    }
    collectives = {name: _recognized(graph, name, assemblies) for name, assemblies in exchanges.items()}
    buffer_exchanges = {
        buffer: value_exchange(graph, strategy, value, node_of, read_as=buffer)
        for buffer, value in graph.buffer_updates
    }
    active, active_assemblies, seeds = _backward_activity(graph, strategy, exchanges)
    together, alone = _gradient_exchanges(exchanges, collectives, active, active_assemblies, graph)
    held = {weight.name: weight_placement(graph, strategy, weight.name) for weight in graph.weights}
    if every_element:
        held = {
            weight.name: with_every_element(held[weight.name], weight.spec.shape) for weight in graph.weights
        }
    plan = Plan(
        graph=graph,
        strategy=strategy,
        exchanges=exchanges,
        collectives=collectives,
        buffer_exchanges=buffer_exchanges,
        buffer_collectives={
            buffer: _recognized(graph, value, buffer_exchanges[buffer])
            for buffer, value in graph.buffer_updates
        },
        active=active,
        active_assemblies=active_assemblies,
        seeds=seeds,
        held=held,
        gradient_collectives=together,
        gradient_transfers=alone,
        buckets=(),
        slice_order=(),
        gather_order=(),
        pulls=(),
        forward_gathers={},
        backward_gathers={},
    )
    synchronization = strategy.synchronization
    if bucket_bytes is not None:
        synchronization = replace(synchronization, size_bytes=bucket_bytes)
    return plan._synchronized(synchronization, slice_order, gather_order, pulls)


def consumers_of(graph: OperatorGraph, strategy: Strategy, value: str) -> list[Consumer]:
    """Return the operators that read a value, with their configurations, in the order of execution."""
    return [
        Consumer(index, slot, graph.operators[index].space, strategy.configurations[index])
        for index, slot in graph.readers[value]
    ]


def _recognized(graph: OperatorGraph, value: str, assemblies: tuple[Assembly, ...]) -> tuple[Collective, ...]:
    return recognize(assemblies, summable=graph.value_by_name[value].spec.dtype in SUMMABLE)


def value_exchange(
    graph: OperatorGraph,
    strategy: Strategy,
    value: str,
    node_of: Sequence[int],
    cache: ExchangeCache | None = None,
    read_as: str | None = None,
) -> tuple[Assembly, ...]:
    """Return the assemblies of one operator's value.

    `cache`: of others on the same nodes, see `graph.exchange`. `read_as`: the buffer that the value renews, where its
    readers are that buffer's.
    """
    index, output = graph.producer[value]
    return exchange(
        graph.operators[index].space,
        output,
        strategy.configurations[index],
        consumers_of(graph, strategy, value if read_as is None else read_as),
        node_of,
        cache,
    )


def weight_placement(graph: OperatorGraph, strategy: Strategy, weight: str) -> dict[int, Region]:
    """Return, by device, the region of a weight or buffer that the device's tasks read."""
    needed: list[tuple[int, Region]] = []
    for consumer in consumers_of(graph, strategy, weight):
        regions = operand_regions(
            consumer.space.axes, consumer.space.inputs[consumer.slot], consumer.configuration.degrees
        )
        needed.extend(zip(consumer.configuration.devices, regions, strict=True))
    return held_regions(needed)


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


def _gradient_exchanges(
    exchanges: dict[str, tuple[Assembly, ...]],
    collectives: dict[str, tuple[Collective, ...]],
    active: tuple[tuple[bool, ...], ...],
    active_assemblies: dict[str, tuple[bool, ...]],
    graph: OperatorGraph,
) -> tuple[dict[int, tuple[GradientCollective, ...]], dict[int, tuple[GradientTransfer, ...]]]:
    """Return, by operator, the gradients that go back as collectives and the gradients sent one by one.

    A collective goes back as one where all its assemblies' gradients are complete after the same operator.
    """
    gradient_inputs = [graph.gradient_inputs(operator) for operator in graph.operators]
    together: dict[int, list[GradientCollective]] = {}
    alone: dict[int, list[GradientTransfer]] = {}
    for value, assemblies in exchanges.items():
        # Backward runs in reverse, so the earliest active reader is the last to contribute.
        after = [
            min(
                reader.operator
                for reader in assembly.readers
                if active[reader.operator][reader.task] and gradient_inputs[reader.operator][reader.slot]
            )
            if flows
            else None
            for assembly, flows in zip(assemblies, active_assemblies[value], strict=True)
        ]
        served: set[int] = set()
        for number, collective in enumerate(collectives[value]):
            ends = {after[position] for position in collective.assemblies}
            last = ends.pop()
            if not ends and last is not None:
                together.setdefault(last, []).append(GradientCollective(value, number))
                served.update(collective.assemblies)
        for position, last in enumerate(after):
            if last is not None and position not in served:
                alone.setdefault(last, []).append(GradientTransfer(value, position))
    return (
        {operator: tuple(exchanges) for operator, exchanges in together.items()},
        {operator: tuple(exchanges) for operator, exchanges in alone.items()},
    )
