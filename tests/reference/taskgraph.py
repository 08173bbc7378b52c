"""Slow, obvious derivation of the task graph of a strategy from `graph.plan`, by names instead of arrays."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from graph.axes import Degrees
from graph.buckets import Gather
from graph.calls import LocalCall
from graph.collectives import BACKWARD, Collective, CollectiveKind, sent
from graph.exchange import Assembly
from graph.intervals import volume
from graph.operators import Operator, OperatorGraph, ValueKind
from graph.plan import Plan, build_plan, weight_placement
from graph.strategy import Sharding, Strategy
from graph.topology import Topology
from graph.training import OPTIMIZER_STATE, Training
from search.cost.cost_table import CostSource, OperatorCost
from search.cost.link_costs import LinkCosts
from search.simulate.saved_tensors import extra_bytes, keeps_output, kept_inputs, kept_outputs
from search.space.groups import is_view
from tests.reference.links import collective_price, message_s

Calls = Callable[[OperatorGraph, Operator, Degrees], tuple[LocalCall, ...]]
# ("forward", operator, task), ("transfer", value, assembly, piece), ("synchronize", bucket), ...
Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Volume:
    """The elements that a collective moves.

    whole: of an all-reduce, broadcast or reduce the region; of an all-gather or reduce-scatter all its chunks
        together; of an all-to-all what crosses devices.
    largest: of an all-to-all the largest message between two devices times the number of devices; else `whole`.
        Its steps are as long as their largest message.
    """

    whole: int
    largest: int


def moved(collective: Collective, assemblies: Sequence[Assembly]) -> Volume:
    """Return the elements that a collective moves."""
    members = [assemblies[number] for number in collective.assemblies]
    if collective.kind is CollectiveKind.ALL_TO_ALL:
        crossing = [volume(piece.region) for member in members for piece in member.remote_pieces]
        return Volume(sum(crossing), max(crossing) * len(collective.devices))
    if collective.kind is CollectiveKind.REDUCE_SCATTER:
        whole = sum(volume(member.region) for member in members)
    elif collective.kind is CollectiveKind.ALL_GATHER:
        whole = sum(volume(piece.region) for piece in members[0].pieces)
    else:
        whole = volume(members[0].pieces[0].region)
    return Volume(whole, whole)


@dataclass(frozen=True)
class Task:
    """A task by name; predecessors by name."""

    key: Key
    run_ns: int
    resources: tuple[int, ...]
    ends: tuple[int, ...]
    size_bytes: int
    predecessors: frozenset[Key]


def nanoseconds(seconds: float) -> int:
    """Halves up."""
    return int(seconds * 1e9 + 0.5)


class Deriver:
    """Walks a plan in program order."""

    def __init__(
        self,
        graph: OperatorGraph,
        strategy: Strategy,
        topology: Topology,
        source: CostSource,
        training: Training,
        calls: Calls,
        bucket_bytes: int,
        links: LinkCosts,
    ) -> None:
        self.graph, self.strategy, self.topology = graph, strategy, topology
        self.source, self.training, self.links = source, training, links
        node_of = [device.node for device in topology.devices]
        self.plan: Plan = build_plan(graph, strategy, node_of, bucket_bytes)
        self.calls = [
            calls(graph, operator, configuration.degrees)
            for operator, configuration in zip(graph.operators, strategy.configurations, strict=True)
        ]
        self.tasks: list[Task] = []

    def cost(self, index: int, task: int) -> OperatorCost:
        device = self.strategy.configurations[index].devices[task]
        kind = self.topology.devices[device].kind_name
        (cost,) = self.source.resolve([self.calls[index][task]], kind)
        assert cost is not None
        return cost

    def sums_ns(self, index: int, task: int) -> tuple[int, int]:
        """What a task takes to add its gradients to those that later readers of the same tensors have given.

        And its host to issue that.
        """
        operator, total, launch_ns = self.graph.operators[index], 0, 0
        device = self.strategy.configurations[index].devices[task]
        for slot, name in enumerate(operator.inputs):
            if not self.calls[index][task].gradients[slot]:
                continue  # no gradient, or none of this part: of a bias that another part adds
            readers = self.graph.readers[name]
            later = [other for other, _ in readers[readers.index((index, slot)) + 1 :]]
            if any(self.graph.has_backward(self.graph.operators[other]) for other in later):
                spec = self.calls[index][task].inputs[slot]
                cost = self.source.update_cost("sgd", spec.dtype, self.topology.devices[device].kind_name)
                total += nanoseconds(spec.elements * cost.seconds)
                launch_ns += nanoseconds(cost.launch_s)
        return total, launch_ns

    def link_resources(self, source: int, destination: int) -> tuple[int, ...]:
        return tuple(len(self.topology.devices) + link for link in self.topology.routes[source, destination])

    def derive(self) -> list[Task]:
        """Return all tasks in program order."""
        for index in self.graph.order.of_loss:
            self.gathers("forward", self.plan.forward_gathers, index)
            self.forward(index)
        for index in range(len(self.graph.operators) - 1, -1, -1):
            self.gathers("backward", self.plan.backward_gathers, index)
            for group in self.strategy.recomputation:
                if group.last == index:
                    for other in range(group.first, group.last + 1):
                        self.recompute(other)
            self.backward(index)
            self.gradient_collectives(index)
            self.gradient_transfers(index)
            for bucket in self.plan.buckets_after.get(index, ()):
                self.synchronize(bucket)
        for index in self.graph.order.of_buffers:
            self.forward(index)
        self.renewals()
        self.updates()
        self.update_gathers()
        return self.tasks

    def launched_ns(self) -> list[int]:
        """When the hosts of each task's devices have issued it: all before it in program order come first."""
        host_ns = [0] * len(self.topology.devices)
        launched = []
        for task in self.tasks:
            hosts = task.ends or task.resources
            for device in hosts:
                host_ns[device] += self.launch_ns(task)
            launched.append(max(host_ns[device] for device in hosts))
        return launched

    def launch_ns(self, task: Task) -> int:
        """In which each of a task's hosts issues it."""
        kind = task.key[0]
        if kind in ("forward", "recompute", "backward"):
            index, part = int(task.key[1]), int(task.key[2])
            cost = self.cost(index, part)
            if kind != "backward":
                return nanoseconds(cost.forward_launch_s)
            return nanoseconds(cost.backward_launch_s) + self.sums_ns(index, part)[1]
        if kind == "update":
            name = self.topology.devices[task.resources[0]].kind_name
            cost_of = self.source.update_cost(self.training.optimizer, self.graph.weight_dtype, name)
            return nanoseconds(cost_of.launch_s)
        is_message = kind in ("transfer", "gradient", "renew")
        return nanoseconds(self.links.issue_s / 2 if is_message else self.links.issue_s)

    def gathers(self, side: str, of_operators: dict[int, tuple[Gather, ...]], index: int) -> None:
        """Begin what the next operator needs that reads weights kept in shares; before the first, its own too.

        With micro-batches both are of its stage.
        """
        if index not in of_operators:
            return
        apart = self.strategy.micro_batches.count > 1
        places = [
            other for other in of_operators if not apart or self.stage_of(other) == self.stage_of(index)
        ]
        here = places.index(index)
        for other in places[(0 if here == 0 else here + 1) : here + 2]:
            for number, gather in enumerate(of_operators[other]):
                waits: set[Key] = set()
                for device in gather.devices:
                    waits |= self.latest(device)
                self.whole_cells((f"{side} gather", other, number), gather.devices, gather.size_bytes, waits)

    def stage_of(self, operator: int) -> int:
        """The stage that an operator is in."""
        return max([0, *(number for number, stage in enumerate(self.plan.stages) if stage.first <= operator)])

    def latest(self, device: int) -> set[Key]:
        """The last task so far that a device computes."""
        kinds = ("forward", "backward", "recompute")
        computed = [task.key for task in self.tasks if task.key[0] in kinds and task.resources == (device,)]
        return set(computed[-1:])

    def recompute(self, index: int) -> None:
        """The tasks of an operator that have a backward, once more."""
        for task, device in enumerate(self.strategy.configurations[index].devices):
            if self.plan.active[index][task]:
                waits = self.latest(device) | set(self.shared_sums(device)[-2:-1])
                waits |= self.gathered("backward", self.plan.backward_gathers, index, device)
                run_ns = nanoseconds(self.cost(index, task).forward_s)
                self.tasks.append(
                    Task(("recompute", index, task), run_ns, (device,), (), 0, frozenset(waits))
                )

    def group_of(self, index: int) -> int | None:
        """Which group an operator is in."""
        for number, group in enumerate(self.strategy.recomputation):
            if index in range(group.first, group.last + 1):
                return number
        return None

    def whole_cells(self, key: Key, devices: tuple[int, ...], size_bytes: int, waits: Iterable[Key]) -> None:
        price = collective_price(self.topology, devices, self.links, CollectiveKind.ALL_GATHER, None)
        resources = tuple(len(self.topology.devices) + link for link in price.links)
        run_ns = price.duration_ns(size_bytes)
        self.tasks.append(Task(key, run_ns, resources, devices, size_bytes, frozenset(waits)))

    def gathered(
        self, side: str, of_operators: dict[int, tuple[Gather, ...]], index: int, device: int
    ) -> set[Key]:
        """The gathers on a device at the operator before which a weight is gathered that `index` reads."""
        waits: set[Key] = set()
        for name in self.weights_seen(self.graph.operators[index].inputs):
            if self.plan.sharding[name] is not Sharding.PARAMETERS:
                continue
            for other, found in of_operators.items():
                if any(entry.weight == name for gather in found for entry in gather.entries):
                    for number, gather in enumerate(found):
                        if device in gather.devices:
                            waits.add((f"{side} gather", other, number))
        return waits

    def weights_seen(self, names: Iterable[str]) -> set[str]:
        """The weights among some values, and those that views of views among them are of."""
        found: set[str] = set()
        for name in names:
            if name in self.plan.sharding:
                found.add(name)
            elif name in self.graph.producer:
                maker = self.graph.operators[self.graph.producer[name][0]]
                found |= self.weights_seen(maker.inputs) if is_view(maker) else set()
        return found

    def shared_sums(self, device: int) -> list[Key]:
        """The sums of gradients, among the tasks so far, whose results this device shares with others."""
        return [
            task.key
            for task in self.tasks
            if task.key[0] == "synchronize"
            and device in task.ends
            and self.plan.buckets[int(task.key[1])].sharding is not Sharding.NONE
        ]

    def update_gathers(self) -> None:
        updated = {task.key for task in self.tasks if task.key[0] == "update"}
        for number, bucket in enumerate(self.plan.buckets):
            if bucket.sharding is Sharding.OPTIMIZER:
                waits: set[Key] = {("update", device) for device in bucket.devices}
                self.whole_cells(
                    ("update gather", number), bucket.devices, bucket.size_bytes, waits & updated
                )

    def forward(self, index: int) -> None:
        operator = self.graph.operators[index]
        devices = self.strategy.configurations[index].devices
        for task, device in enumerate(devices):
            waits: set[Key] = set()
            for name in operator.inputs:
                for position, assembly in enumerate(self.plan.exchanges.get(name, ())):
                    if any(reader.operator == index and reader.task == task for reader in assembly.readers):
                        waits |= self.pieces(name, position, assembly)
            waits |= self.gathered("forward", self.plan.forward_gathers, index, device)
            run_ns = nanoseconds(self.cost(index, task).forward_s)
            self.tasks.append(Task(("forward", index, task), run_ns, (device,), (), 0, frozenset(waits)))
        for name in operator.outputs:
            self.collectives("collective", name, name)
        for name in operator.outputs:
            self.transfers("transfer", name, name)

    def renewals(self) -> None:
        for buffer, value in self.graph.buffer_updates:
            self.collectives("buffer collective", buffer, value)
        for buffer, value in self.graph.buffer_updates:
            self.transfers("renew", buffer, value)

    def exchange(self, name: str, value: str) -> tuple[tuple[Assembly, ...], tuple[Collective, ...]]:
        if name == value:
            return self.plan.exchanges[name], self.plan.collectives[name]
        return self.plan.buffer_exchanges[name], self.plan.buffer_collectives[name]

    def collectives(self, kind: str, name: str, value: str) -> None:
        index, _ = self.graph.producer[value]
        assemblies, collectives = self.exchange(name, value)
        for number, collective in enumerate(collectives):
            waits = {
                ("forward", index, piece.source_task)
                for device in collective.devices
                for piece in sent(collective, assemblies, device)
            }
            self.collective((kind, name, number), value, collective, collective.kind, assemblies, waits)

    def collective(
        self,
        key: Key,
        value: str,
        collective: Collective,
        kind: CollectiveKind,
        assemblies: Sequence[Assembly],
        waits: Iterable[Key],
    ) -> None:
        item_bytes = self.graph.value_by_name[value].spec.item_bytes
        price = collective_price(self.topology, collective.devices, self.links, kind, collective.root)
        resources = tuple(len(self.topology.devices) + link for link in price.links)
        amount = moved(collective, assemblies)
        run_ns = price.duration_ns(amount.largest * item_bytes)
        size_bytes = amount.whole * item_bytes
        self.tasks.append(Task(key, run_ns, resources, collective.devices, size_bytes, frozenset(waits)))

    def pieces(self, name: str, position: int, assembly: Assembly) -> set[Key]:
        for collective_number, collective in enumerate(self.plan.collectives[name]):
            if position in collective.assemblies:
                return {("collective", name, collective_number)}
        producer, _ = self.graph.producer[name]
        return {
            ("forward", producer, piece.source_task)
            if piece.source_device == assembly.device
            else ("transfer", name, position, number)
            for number, piece in enumerate(assembly.pieces)
        }

    def transfers(self, kind: str, name: str, value: str) -> None:
        index, _ = self.graph.producer[value]
        item_bytes = self.graph.value_by_name[value].spec.item_bytes
        assemblies, collectives = self.exchange(name, value)
        for position, assembly in enumerate(assemblies):
            if any(position in collective.assemblies for collective in collectives):
                continue
            for number, piece in enumerate(assembly.pieces):
                if piece.source_device != assembly.device:
                    self.transfer(
                        (kind, name, position, number),
                        piece.source_device,
                        assembly.device,
                        volume(piece.region) * item_bytes,
                        frozenset({("forward", index, piece.source_task)}),
                    )

    def transfer(
        self, key: Key, source: int, destination: int, size_bytes: int, waits: frozenset[Key]
    ) -> None:
        run_ns = nanoseconds(message_s(self.topology, self.links, source, destination, size_bytes))
        resources = self.link_resources(source, destination)
        self.tasks.append(Task(key, run_ns, resources, (source, destination), size_bytes, waits))

    def reading_backwards(self, assembly: Assembly) -> frozenset[Key]:
        return frozenset(
            ("backward", reader.operator, reader.task)
            for reader in assembly.readers
            if self.plan.active[reader.operator][reader.task]
            and self.graph.gradient_inputs(self.graph.operators[reader.operator])[reader.slot]
        )

    def backward(self, index: int) -> None:
        operator = self.graph.operators[index]
        for task, device in enumerate(self.strategy.configurations[index].devices):
            if not self.plan.active[index][task]:
                continue
            made_again = self.group_of(index) is not None
            waits: set[Key] = {("recompute" if made_again else "forward", index, task)}
            for name in operator.outputs:
                for position, assembly in enumerate(self.plan.exchanges[name]):
                    if not self.plan.active_assemblies[name][position]:
                        continue
                    together = self.gradient_collective(name, position)
                    if together is not None:
                        if any(piece.source_task == task for piece in assembly.pieces):
                            waits.add(together)
                        continue
                    for number, piece in enumerate(assembly.pieces):
                        if piece.source_task != task:
                            continue
                        if piece.source_device == assembly.device:
                            waits |= self.reading_backwards(assembly)
                        else:
                            waits.add(("gradient", name, position, number))
            waits |= self.gathered("backward", self.plan.backward_gathers, index, device)
            waits |= set(self.shared_sums(device)[-2:-1])
            run_ns = nanoseconds(self.cost(index, task).backward_s) + self.sums_ns(index, task)[0]
            self.tasks.append(Task(("backward", index, task), run_ns, (device,), (), 0, frozenset(waits)))

    def gradient_collective(self, name: str, position: int) -> Key | None:
        """Return the collective in which an assembly's gradient goes back, if it goes in one."""
        for found in self.plan.gradient_collectives.values():
            for back in found:
                if back.value == name and position in self.plan.collectives[name][back.number].assemblies:
                    return ("gradient collective", name, back.number)
        return None

    def gradient_collectives(self, index: int) -> None:
        for back in self.plan.gradient_collectives.get(index, ()):
            collective = self.plan.collectives[back.value][back.number]
            assemblies = self.plan.exchanges[back.value]
            waits: set[Key] = set()
            for number in collective.assemblies:
                waits |= self.reading_backwards(assemblies[number])
            key = ("gradient collective", back.value, back.number)
            self.collective(key, back.value, collective, BACKWARD[collective.kind], assemblies, waits)

    def gradient_transfers(self, index: int) -> None:
        for back in self.plan.gradient_transfers.get(index, ()):
            assembly = self.plan.exchanges[back.value][back.assembly]
            item_bytes = self.graph.value_by_name[back.value].spec.item_bytes
            for number, piece in enumerate(assembly.pieces):
                if piece.source_device != assembly.device:
                    self.transfer(
                        ("gradient", back.value, back.assembly, number),
                        assembly.device,
                        piece.source_device,
                        volume(piece.region) * item_bytes,
                        self.reading_backwards(assembly),
                    )

    def synchronize(self, number: int) -> None:
        bucket = self.plan.buckets[number]
        waits: set[Key] = {
            ("backward", index, task)
            for entry in bucket.entries
            for index, _ in self.graph.consumers[entry.weight]
            for task, device in enumerate(self.strategy.configurations[index].devices)
            if device in bucket.devices and self.plan.active[index][task]
        }
        kind = CollectiveKind.ALL_REDUCE
        if bucket.sharding is not Sharding.NONE:
            kind = CollectiveKind.REDUCE_SCATTER
            for device in bucket.devices:
                waits |= set(self.shared_sums(device)[-1:])
        price = collective_price(self.topology, bucket.devices, self.links, kind, None)
        resources = tuple(len(self.topology.devices) + link for link in price.links)
        run_ns = price.duration_ns(bucket.size_bytes)
        key: Key = ("synchronize", number)
        self.tasks.append(Task(key, run_ns, resources, bucket.devices, bucket.size_bytes, frozenset(waits)))

    def trained(self) -> list[str]:
        return [
            weight.name
            for weight in self.graph.weights
            if any(any(self.plan.active[index]) for index, _ in self.graph.consumers[weight.name])
        ]

    def updates(self) -> None:
        devices_of = {task.key: task.resources[0] for task in self.tasks if task.key[0] == "backward"}
        for device in range(len(self.topology.devices)):
            elements = sum(self.updated(name, device) for name in self.trained())
            if not elements:
                continue
            waits: set[Key] = {key for key, mine in devices_of.items() if mine == device}
            for number, bucket in enumerate(self.plan.buckets):
                if device in bucket.devices:
                    waits.add(("synchronize", number))
            kind = self.topology.devices[device].kind_name
            seconds, *_ = self.source.update_cost(self.training.optimizer, self.graph.weight_dtype, kind)
            run_ns = nanoseconds(elements * seconds)
            self.tasks.append(Task(("update", device), run_ns, (device,), (), 0, frozenset(waits)))

    def updated(self, weight: str, device: int) -> int:
        """The elements of a weight that a device updates."""
        if self.plan.sharding[weight] is Sharding.NONE:
            region = self.plan.held[weight].get(device)
            return 0 if region is None else volume(region)
        return sum(volume(region) for owner, region in self.plan.updated(weight) if owner == device)

    def peak_memory(self) -> list[int]:
        """Return the bytes of each device: static tensors, what tasks keep for their backward, assemblies.

        And what is there while that group is made again at which most is; what lies behind it is gone then.
        """
        total = [0] * len(self.topology.devices)
        again = [[0] * len(total) for _ in self.strategy.recomputation]
        behind = [[0] * len(total) for _ in self.strategy.recomputation]
        kept = kept_outputs(self.graph) if not again else None
        state = OPTIMIZER_STATE[self.training.optimizer]
        for value in self.graph.values:
            if value.kind is not ValueKind.OPERATOR:
                for device, region in weight_placement(self.graph, self.strategy, value.name).items():
                    elements = volume(region)
                    if self.plan.sharding.get(value.name) is Sharding.PARAMETERS:
                        elements = self.updated(value.name, device)
                    if value.name in self.trained():
                        elements += self.updated(value.name, device) * (1 + state)
                    total[device] += elements * value.spec.item_bytes
        for index, configuration in enumerate(self.strategy.configurations):
            for task, device in enumerate(configuration.devices):
                if self.plan.active[index][task]:
                    group = self.group_of(index)
                    extra = extra_bytes(self.calls[index][task])
                    (total if group is None else again[group])[device] += extra
                    for number, earlier in enumerate(self.strategy.recomputation):
                        if group is None and index > earlier.last:
                            behind[number][device] += extra
                    for place, spec in enumerate(self.calls[index][task].outputs):
                        size_bytes = prod(spec.shape) * spec.item_bytes
                        name = self.graph.operators[index].outputs[place]
                        lasts = self.is_kept(name) if kept is None else kept[index][place]
                        total[device] += lasts * size_bytes
                        for number, earlier in enumerate(self.strategy.recomputation):
                            behind[number][device] += lasts * size_bytes * (index > earlier.last)
                        if group is not None and (lasts or self.is_kept_within(name, group)):
                            again[group][device] += size_bytes
        for name, assemblies in self.plan.exchanges.items():
            for position, assembly in enumerate(assemblies):
                if self.plan.active_assemblies[name][position] and not assembly.direct:
                    item_bytes = self.graph.value_by_name[name].spec.item_bytes
                    total[assembly.device] += volume(assembly.region) * item_bytes
                    for number, earlier in enumerate(self.strategy.recomputation):
                        if self.graph.producer[name][0] > earlier.last:
                            behind[number][assembly.device] += volume(assembly.region) * item_bytes
        groups = range(len(again))
        return [
            max([size, *(size - behind[group][device] + again[group][device] for group in groups)])
            for device, size in enumerate(total)
        ]

    def aliases(self, name: str) -> set[str]:
        """A value and all that share its memory, if it is memory of its own; else nothing."""
        index, _ = self.graph.producer[name]
        if is_view(self.graph.operators[index]):
            return set()
        found = {name}
        for operator in self.graph.operators:
            if is_view(operator) and operator.inputs[0] in found:
                found.update(operator.outputs)
        return found

    def keepers(self, name: str) -> Iterator[tuple[int, str]]:
        """The operators whose backward needs the memory of a value, and by which name."""
        names = self.aliases(name)
        for index, operator in enumerate(self.graph.operators):
            if self.graph.has_backward(operator):
                slots = kept_inputs(operator, self.graph.gradient_inputs(operator))
                needed = [operator.inputs[slot] for slot in slots]
                needed += operator.outputs if keeps_output(operator) else ()
                for one in needed:
                    if one in names:
                        yield index, one

    def enters(self, name: str, reader: int) -> bool:
        """Whether what an operator of a group reads is not made again with the group."""
        index, _ = self.graph.producer[name]
        within = self.group_of(index) == self.group_of(reader)
        return not within or not self.graph.has_backward(self.graph.operators[index])

    def is_kept(self, name: str) -> bool:
        """Whether a value's memory lasts from the forward to the backward."""
        if any(self.group_of(index) is None or self.enters(one, index) for index, one in self.keepers(name)):
            return True
        return any(
            one in operator.inputs and self.group_of(index) is not None and self.enters(one, index)
            for index, operator in enumerate(self.graph.operators)
            for one in self.aliases(name)
            if self.graph.has_backward(operator)
        )

    def is_kept_within(self, name: str, group: int) -> bool:
        """Whether a value's memory is needed by a backward of its own group."""
        return any(self.group_of(index) == group for index, _ in self.keepers(name))
