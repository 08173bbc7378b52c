"""What stages of a pipeline take and keep, from the fragments that the simulator's task graphs consist of.

A stage's time is that of its operators, each as its slowest task, forward and backward, and of the exchanges of the
values that they make, each as the busiest link, as if nothing overlapped. Sums of gradients are priced as parts of full
buckets; weights that several segments of a stage read count once. Buffers do not count. Of what crosses a
cut every device of the next stage gets its samples, from a sender in its own node where there is one; what several
later stages read crosses each cut on its way. The simulator knows better on all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd

import numpy as np

from graph.operators import OperatorGraph, ValueKind
from graph.schedule import GradientSums
from graph.strategy import Configuration
from graph.synchronization import BUCKET_BYTES
from search.bounds.stage_division import Array, StageCosts, StageOption, StageTable
from search.kernels.fragments import ASSEMBLY, ASSEMBLY_WORDS, VALUE, VALUE_WORDS
from search.problem import Problem
from search.simulate.arrays import static_values
from search.simulate.fragment_cache import UnitStore
from search.simulate.fragment_classes import Port, ValueClass
from search.simulate.task_graph import TaskGraphBuilder
from search.space.pipelines import Split, Splits, crossing_bytes, moved, stage_sizes


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """A pipeline whose holders of weights share gradients and optimizer (ZeRO-2), or that makes segments again.

    sums_each: what is shared is summed in every micro-batch, so that of gradients shares are kept as well.
    """

    shares_optimizer: bool = False
    recomputes: bool = False
    sums_each: bool = False


NO_SAVING = MemorySaving()
MEMORY_SAVINGS = tuple(
    MemorySaving(shares, recomputes, each)
    for recomputes in (False, True)
    for shares, each in ((False, False), (True, False), (True, True))
)
"""In the order of what they cost in time."""


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentCosts:
    """What every segment takes and keeps of a micro-batch (G segments), and a run of segments of a step.

    In nanoseconds, bytes and elements. sum_ns_BB: sums of gradients. held_BB: weights. updated_BB: what a device
    updates of them where those that hold the same elements share the update. input_bytes_BB: of one micro-batch.
    """

    forward_ns_G: Array
    backward_ns_G: Array
    sum_ns_BB: Array
    held_BB: Array
    updated_BB: Array
    input_bytes_BB: Array
    update_s: float
    kept_bytes_G: Array


@dataclass(slots=True)
class _Weight:
    """A weight in a segment: nanoseconds of its sum, elements that a device holds, and that it updates if shared."""

    sum_ns: float
    held: int
    updated: int


class PipelineCosts:
    """Tables of the stages of a problem, for `search.bounds.stage_division`."""

    def __init__(
        self, problem: Problem, splits: Splits, cuts: Sequence[int], builder: TaskGraphBuilder
    ) -> None:
        """Take the places where the order of the loss may be cut, and the builder whose fragments are used."""
        self.problem = problem
        self.graph: OperatorGraph = problem.graph
        self.splits = splits
        self.cuts = tuple(cuts)
        self.builder = builder
        self._store: UnitStore = builder.store
        of_loss = self.graph.order.of_loss
        self._segment_of = dict.fromkeys(range(len(self.graph.operators)), -1)
        for segment, (first, last) in enumerate(pairwise((0, *self.cuts, len(of_loss)))):
            for position in range(first, last):
                self._segment_of[of_loss[position]] = segment
        self._segments: dict[tuple[object, ...], _SegmentCosts] = {}
        self._costs: dict[tuple[object, ...], StageCosts] = {}
        self._exchanges: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self._weights: dict[tuple[object, ...], _Weight] = {}
        self._rates: dict[tuple[int, Split, Split], tuple[float, float]] = {}
        # Of rows of devices, by their number and the first: a number that those have in common that are alike.
        self._alike_of: dict[tuple[int, int], int] = {}
        self._alike_keys: dict[tuple[tuple[int, int, str], ...], int] = {}
        self._begin_of: dict[int, int] = {}
        for device in problem.topology.devices:
            self._begin_of.setdefault(device.node, device.index)

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.cuts) + 1

    def segment_of(self, operator: int) -> int:
        """Return the segment of an operator; -1 of one outside of the loss."""
        return self._segment_of[operator]

    @property
    def classes(self) -> Sequence[int]:
        """A number for every operator; equal ones, equal operators."""
        return self._store.classes.operators

    @cached_property
    def _crossing_B(self) -> Array:  # noqa: N802 - the shape suffix
        """The bytes over each boundary, and of those that have a gradient."""
        places = [0, *self.cuts, len(self.graph.order.of_loss)]
        return np.array(
            [[of_all[place] for place in places] for of_all in crossing_bytes(self.graph)], np.int64
        )

    def table(
        self,
        micro_batches: int,
        *,
        keeps_all: bool,
        saving: MemorySaving = NO_SAVING,
        split: Split | None = None,
    ) -> StageTable:
        """Return the table of all options, or of one split alone.

        Raises:
            CostError: a local call has no cost.
        """
        count = self.problem.device_count
        capacity_D = self.builder.capacity_bytes_D
        sizes = stage_sizes(count) if split is None else (split.devices,)
        # Whatever the stages before have, a stage begins with a multiple of this.
        unit = gcd(*sizes)
        options = [
            [
                StageOption(
                    each,
                    size,
                    self.stage_costs(each, first, saving),
                    int(capacity_D[first : first + size].min()),
                )
                for size in sizes
                if first % unit == 0 and first + size <= count
                for each in (self.splits.of(size) if split is None else (split,))
            ]
            for first in range(count)
        ]
        transfers = {
            (first + option.devices, number, after): self._transfer_ns_B(
                first + option.devices, option, next_option
            )
            for first in range(count)
            for number, option in enumerate(options[first])
            if first + option.devices < count
            for after, next_option in enumerate(options[first + option.devices])
        }
        return StageTable(options, transfers, micro_batches, keeps_all)

    # ---- what stages take

    def stage_costs(self, split: Split, first: int, saving: MemorySaving) -> StageCosts:
        """Return the costs of stages that are split so, on devices from `first` on."""
        alike = self._alike(split.devices, first)
        key = (split, alike, saving)
        if key not in self._costs:
            if (split, alike) not in self._segments:
                devices = tuple(range(first, first + split.devices))
                self._segments[split, alike] = self._segment_costs(split, devices)
            of = self._segments[split, alike]
            micro = of.forward_ns_G + of.backward_ns_G
            kept = of.kept_bytes_G
            entering = self._crossing_B[1] // split.data
            if saving.recomputes:
                micro = micro + of.forward_ns_G
                # What enters a segment is kept, whether it comes from another stage or not.
                kept = np.minimum(kept, entering[:-1])
                entering = np.zeros_like(entering)
            updated = of.updated_BB if saving.shares_optimizer else of.held_BB
            sums_ns_BB = of.sum_ns_BB
            sums_each = saving.sums_each or self.problem.gradients is GradientSums.EACH
            if sums_each and self.problem.micro_batches > 1:
                # Those of the last micro-batch are among them.
                micro = micro + np.rint(np.diagonal(sums_ns_BB, 1)).astype(np.int64)
                sums_ns_BB = np.zeros_like(sums_ns_BB)
            once = np.rint(sums_ns_BB + updated * of.update_s * 1e9).astype(np.int64)
            # Of several micro-batches gradients add up whole, where they are summed at the end.
            gradients = updated if self.problem.micro_batches == 1 or sums_each else of.held_BB
            elements = of.held_BB + gradients + updated * self.builder.state_tensors
            # The inputs of all micro-batches are there from the beginning.
            static = elements * self._item_bytes + of.input_bytes_BB * self.problem.micro_batches
            self._costs[key] = StageCosts(_sums(micro), once, static, _sums(kept), entering)
        return self._costs[key]

    def _alike(self, count: int, first: int) -> int:
        """Return a number of devices in a row: equal ones are the same devices of nodes, of the same kinds."""
        if (count, first) not in self._alike_of:
            devices = self.problem.topology.devices[first : first + count]
            key = tuple(
                (device.node - devices[0].node, device.index - self._begin_of[device.node], device.kind_name)
                for device in devices
            )
            self._alike_of[count, first] = self._alike_keys.setdefault(key, len(self._alike_keys))
        return self._alike_of[count, first]

    def _segment_costs(self, split: Split, devices: tuple[int, ...]) -> _SegmentCosts:
        strategy = self.splits.strategy(split)
        configurations = [moved(configuration, devices) for configuration in strategy.configurations]
        forward, backward, kept = (np.zeros(self.segments, np.int64) for _ in range(3))
        for index in self.graph.order.of_loss:
            rows = self._rows(index, configurations[index])
            segment = self._segment_of[index]
            forward[segment] += rows[0]
            backward[segment] += rows[1]
            kept[segment] += rows[2]
        for value in range(self._store.wiring.value_count):
            segment = self._segment_of[self._store.classes.values[value].producer.operator]
            if segment >= 0:
                there_ns, back_ns, copied_bytes = self._exchange(value, configurations)
                forward[segment] += there_ns
                backward[segment] += back_ns
                kept[segment] += copied_bytes
        sums, held, updated, inputs = (np.zeros((self.segments, self.segments), np.float64) for _ in range(4))

        def add(of_GG: Array, own: float, segment: int, before: int) -> None:
            of_GG[segment, segment] += own
            # Of a run with both of the segments, one counts.
            if before >= 0:
                of_GG[before, segment] -= own

        for static, readers in self._readers:
            is_weight, before = static < len(self.graph.weights), -1
            for segment, ports in readers:
                weight = self._weight(static, ports, configurations, is_weight=is_weight)
                if is_weight:
                    add(sums, weight.sum_ns, segment, before)
                    add(held, weight.held, segment, before)
                    add(updated, weight.updated, segment, before)
                else:
                    add(inputs, weight.held * self._store.classes.statics[static].item_bytes, segment, before)
                before = segment
        problem, dtype = self.problem, self.graph.weight_dtype
        kinds = {problem.topology.devices[device].kind_name for device in devices}
        update_s = max(
            problem.costs.update_cost(problem.training.optimizer, dtype, kind).seconds for kind in kinds
        )
        return _SegmentCosts(
            forward_ns_G=forward,
            backward_ns_G=backward,
            sum_ns_BB=_of_runs(sums),
            held_BB=np.rint(_of_runs(held)).astype(np.int64),
            updated_BB=np.rint(_of_runs(updated)).astype(np.int64),
            input_bytes_BB=np.rint(_of_runs(inputs)).astype(np.int64),
            update_s=float(update_s),
            kept_bytes_G=kept,
        )

    @cached_property
    def _item_bytes(self) -> int:
        return max((weight.spec.item_bytes for weight in self.graph.weights), default=0)

    def _rows(self, index: int, configuration: Configuration) -> tuple[int, int, int]:
        """Return the slowest forward and backward of an operator's tasks, and the most that one keeps."""
        devices = self.problem.topology.devices
        kinds = {devices[device].kind_name for device in configuration.devices}
        most = np.max(
            [
                self._store.task_costs.rows(index, configuration.degrees, kind, None)[:, :3].max(axis=0)
                for kind in sorted(kinds)
            ],
            axis=0,
        )
        return int(most[0]), int(most[1]), int(most[2])

    def _exchange(self, value: int, configurations: Sequence[Configuration]) -> tuple[int, int, int]:
        """Return the nanoseconds of a value's exchange in a stage, there and back, and the most bytes of its copies."""
        store = self._store
        of: ValueClass = store.classes.values[value]
        first = store.wiring.reading_ptr[value]
        is_back = bool(store.wiring.reading_gradient[first : first + len(of.readers)].any())
        made_by = configurations[of.producer.operator]
        read_by = tuple(configurations[port.operator] for port in of.readers)
        key = (of.number, is_back, made_by, read_by)
        if key not in self._exchanges:
            store.make_room()
            at = store.derive_value(of, made_by, read_by)
            there_ns, back_ns = store.exchanges_ns(np.array([at]))[0].tolist()
            self._exchanges[key] = (
                (there_ns, back_ns, self._copied_bytes(at)) if is_back else (there_ns, 0, 0)
            )
        return self._exchanges[key]

    def _copied_bytes(self, at: int) -> int:
        """Return the most bytes of copies that a device has of a value whose fragment starts there."""
        arena, first = self._store.arena, at + VALUE_WORDS
        count = int(arena[at:first].view(VALUE)["assemblies"][0])
        assemblies = arena[first : first + ASSEMBLY_WORDS * count].view(ASSEMBLY)
        copied_D = np.zeros(self.problem.device_count, np.int64)
        np.add.at(copied_D, assemblies["device"], assemblies["copied_bytes"])
        return int(copied_D.max())

    @cached_property
    def _readers(self) -> list[tuple[int, list[tuple[int, list[Port]]]]]:
        """Weights that something with a backward reads, and inputs; by segment their readers."""
        graph, statics = self.graph, static_values(self.graph)
        result = []
        for number, value in enumerate(statics):
            if value.kind is ValueKind.BUFFER:
                continue
            readers: dict[int, list[Port]] = {}
            for port in self._store.classes.statics[number].readers:
                trains = value.kind is ValueKind.INPUT or graph.has_backward(graph.operators[port.operator])
                if self._segment_of[port.operator] >= 0 and trains:
                    readers.setdefault(self._segment_of[port.operator], []).append(port)
            result.append((number, sorted(readers.items(), key=lambda pair: pair[0])))
        return result

    def _weight(
        self, static: int, ports: Sequence[Port], configurations: Sequence[Configuration], *, is_weight: bool
    ) -> _Weight:
        """Return what some readers' devices hold of a weight, or of an input, of which nothing is summed."""
        read_by = tuple(configurations[port.operator] for port in ports)
        item_bytes = self._store.classes.statics[static].item_bytes
        key = (is_weight, item_bytes, tuple(port.number for port in ports), read_by)
        if key not in self._weights:
            holders, cells = self._store.holdings(ports, read_by, synchronized=is_weight)
            updated, sum_ns = dict(holders), dict.fromkeys(dict(holders), 0.0)
            for members, elements in cells:
                ns = elements * item_bytes / BUCKET_BYTES * self._bucket_ns(members)
                for device in members:
                    sum_ns[device] += ns
                    updated[device] -= elements - -(-elements // len(members))
            held = max((elements for _, elements in holders), default=0)
            self._weights[key] = _Weight(
                max(sum_ns.values(), default=0.0), held, max(updated.values(), default=0)
            )
        return self._weights[key]

    def _bucket_ns(self, members: tuple[int, ...]) -> int:
        """Return the nanoseconds of the all-reduce of a full bucket."""
        return self._store.resource_sets.device_set(members).price.duration_ns(BUCKET_BYTES)

    # ---- transfers

    def _transfer_ns_B(self, device: int, before: StageOption, after: StageOption) -> Array:  # noqa: N802 - the shape suffix
        """Return what a micro-batch takes over each boundary to a stage that begins with a device, there and back."""
        assert isinstance(before.label, Split)
        assert isinstance(after.label, Split)
        alike = self._alike(before.devices + after.devices, device - before.devices)
        key = (alike, before.label, after.label)
        if key not in self._rates:
            self._rates[key] = self._rate(device, before.label, after.label)
        latency_ns, ns_per_byte = self._rates[key]
        transfers = np.where(self._crossing_B > 0, latency_ns + ns_per_byte * self._crossing_B, 0.0)
        result: Array = np.rint(transfers.sum(axis=0)).astype(np.int64)
        return result

    def _rate(self, device: int, before: Split, after: Split) -> tuple[float, float]:
        """Return the latency of a transfer between stages, and the nanoseconds that a byte holds the busiest link."""
        topology = self.problem.topology
        load: dict[int, float] = {}
        latency_s = 0.0
        for number in range(after.devices):
            receiver = device + number
            part, replica = divmod(number, after.tensor)
            # Senders that have some of the receiver's samples.
            for source in range(part * before.data // after.data, -(-(part + 1) * before.data // after.data)):
                low = max(part / after.data, source / before.data)
                share = min((part + 1) / after.data, (source + 1) / before.data) - low
                first = device - before.devices + source * before.tensor
                senders = range(first, first + before.tensor)
                node = topology.devices[receiver].node
                near = [sender for sender in senders if topology.devices[sender].node == node]
                candidates = near or senders
                route = topology.routes[candidates[replica % len(candidates)], receiver]
                latency_s = max(latency_s, sum(topology.links[link].latency_s for link in route))
                for link in route:
                    load[link] = load.get(link, 0.0) + share / topology.links[link].bandwidth_bytes_per_s
        return 1e9 * latency_s, 1e9 * max(load.values(), default=0.0)


def _sums(of_segments: Array) -> Array:
    """Return the sums of what segments have up to every boundary."""
    return np.concatenate([[0], np.cumsum(of_segments)])


def _of_runs(of_GG: Array) -> Array:
    """Return, for the run from one boundary to another, the sum of what pairs of segments of it have."""
    runs = np.zeros((len(of_GG) + 1, len(of_GG) + 1), of_GG.dtype)
    runs[:-1, 1:] = of_GG[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    return runs
