"""Slow, obvious step in micro-batches: `graph.plan`'s units one after the other, by names instead of positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from graph.axes import operand_regions
from graph.intervals import volume
from graph.operators import ValueKind
from graph.plan import weight_placement
from graph.schedule import GradientSums, MicroBatches, Phase, Schedule, Unit
from graph.strategy import Sharding
from graph.training import OPTIMIZER_STATE
from search.simulate.saved_tensors import extra_bytes, keeps_output, kept_inputs, lasting_outputs
from tests.reference import simulate as reference
from tests.reference.taskgraph import Deriver, Key, Task, nanoseconds

COMPUTE = ("forward", "backward", "weight", "recompute", "update")
RENEWALS = ("renew", "buffer collective")
# A task of the step: its micro-batch, the last one of what is done once, and its name in one micro-batch.
StepKey = tuple[int, Key]


@dataclass(frozen=True)
class StepTask:
    """A task of one micro-batch in the step, and what it waits for there."""

    key: StepKey
    task: Task
    predecessors: frozenset[StepKey]


class StepDeriver:
    """Walks the units of a plan, each with the tasks of its micro-batch."""

    def __init__(self, deriver: Deriver) -> None:
        self.deriver, self.plan = deriver, deriver.plan
        self.units = self.plan.units
        self.count = self.plan.strategy.micro_batches.count
        self.splits = self.plan.strategy.micro_batches.schedule is Schedule.ZERO_BUBBLE
        self.once = [part for task in deriver.derive() for part in self.in_parts(self.adding(task), task)]
        self.steps: list[StepTask] = []
        self.latest: dict[int, StepKey] = {}
        # By device, the renewals of the micro-batch before that no forward has waited for.
        self.renewed: dict[int, set[StepKey]] = {}
        # By device, and by bucket where its gradients are not shared: the latest sum, and by device what the next
        # computation waits for.
        self.summed: dict[tuple[int, int | None], StepKey] = {}
        self.blocking: dict[int, set[StepKey]] = {}

    def is_summed_each(self, key: Key) -> bool:
        """Whether a bucket is summed in every micro-batch: so the strategy says, and some stage has all its devices."""
        devices = set(self.plan.buckets[int(key[1])].devices)
        within = any(devices <= stage.devices for stage in self.plan.stages)
        return self.plan.strategy.micro_batches.gradients is GradientSums.EACH and within

    def sums_before(self, key: Key, number: int) -> set[StepKey]:
        """The sums that a sum waits for, as do its devices from then on; note it as the latest."""
        bucket, waits = self.plan.buckets[int(key[1])], set()
        for device in bucket.devices:
            series = device, (int(key[1]) if bucket.sharding is Sharding.NONE else None)
            if series in self.summed:
                waits.add(self.summed[series])
                self.blocking.setdefault(device, set()).add(self.summed[series])
            self.summed[series] = number, key
        return waits

    def adding(self, task: Task) -> Task:
        """Return a task with the time to add its gradients of weights to those of other micro-batches."""
        if task.key[0] != "backward" or self.count == 1:
            return task
        return replace(task, run_ns=task.run_ns + self.added_ns(int(task.key[1]), int(task.key[2]))[0])

    def added_ns(self, index: int, part: int) -> tuple[int, int]:
        """Nanoseconds in which a task adds its gradients of weights to those of others, and of the sums' launches."""
        graph, call = self.deriver.graph, self.deriver.calls[index][part]
        device = self.deriver.strategy.configurations[index].devices[part]
        kind = self.deriver.topology.devices[device].kind_name
        added_ns = launch_ns = 0
        for slot, name in enumerate(graph.operators[index].inputs):
            readers = graph.readers[name]
            later = [other for other, _ in readers[readers.index((index, slot)) + 1 :]]
            is_last = not any(graph.has_backward(graph.operators[other]) for other in later)
            if graph.value_by_name[name].kind is ValueKind.WEIGHT and call.gradients[slot] and is_last:
                cost = self.deriver.source.update_cost("sgd", call.inputs[slot].dtype, kind)
                added_ns += nanoseconds(call.inputs[slot].elements * cost.seconds)
                launch_ns += nanoseconds(cost.launch_s)
        return added_ns, launch_ns

    def act(self, flows: Sequence[int], contention_ppm: list[int]) -> None:
        """Order the units of schedule actors by what stages take in a step of one micro-batch; `flows` of its tasks."""
        place = {task.key: index for index, task in enumerate(self.once)}
        tasks = []
        for task, flow in zip(self.once, flows, strict=True):
            once = task.key[0] == "synchronize" or self.part(task.key)[0] in ("renewals", "updates")
            before = tuple(place[key] for key in task.predecessors)
            simulated = self.simulated_task(replace(task, run_ns=0) if once else task, before, flow)
            tasks.append(simulated)
        times = reference.program_order(tasks, contention_ppm)
        begins: dict[tuple[str, int], int] = {}
        ends: dict[tuple[str, int], int] = {}
        for task, (start, end) in zip(self.once, times, strict=True):
            if task.key[0] in COMPUTE:
                part = self.part(task.key)
                begins[part] = min(begins.get(part, start), start)
                ends[part] = max(ends.get(part, end), end)
        self.units = acted_units(self.plan.strategy.micro_batches, len(self.plan.stages), begins, ends)

    def is_divided(self, index: int) -> bool:
        """Whether the gradients of an operator's weights are made apart: it reads some, and no view of them."""
        return self.splits and any(self.weight_slots(index))

    def weight_slots(self, index: int) -> tuple[bool, ...]:
        """Which inputs of an operator are weights that are trained."""
        values = [
            self.deriver.graph.value_by_name[name] for name in self.deriver.graph.operators[index].inputs
        ]
        return tuple(value.kind is ValueKind.WEIGHT and value.requires_gradient for value in values)

    def part_cost(self, index: int, part: int, *, of_weights: bool) -> tuple[int, int]:
        """Nanoseconds of a part of a backward, with its sums within a micro-batch, and of its launch."""
        deriver, call = self.deriver, self.deriver.calls[index][part]
        flags = [
            flag and is_weight is of_weights
            for flag, is_weight in zip(call.gradients, self.weight_slots(index), strict=True)
        ]
        if not any(flags):
            return 0, 0
        device = deriver.strategy.configurations[index].devices[part]
        kind = deriver.topology.devices[device].kind_name
        (cost,) = deriver.source.resolve([replace(call, gradients=tuple(flags))], kind)
        assert cost is not None
        taken_ns, launch_ns = nanoseconds(cost.backward_s), nanoseconds(cost.backward_launch_s)
        for slot, flag in enumerate(flags):
            readers = deriver.graph.readers[deriver.graph.operators[index].inputs[slot]]
            later = [other for other, _ in readers[readers.index((index, slot)) + 1 :]]
            if flag and any(deriver.graph.has_backward(deriver.graph.operators[other]) for other in later):
                sums = deriver.source.update_cost("sgd", call.inputs[slot].dtype, kind)
                taken_ns += nanoseconds(call.inputs[slot].elements * sums.seconds)
                launch_ns += nanoseconds(sums.launch_s)
        return taken_ns, launch_ns

    def in_parts(self, task: Task, before: Task) -> list[Task]:
        """Return a task as it is where backwards are divided; `before`: without the sums over micro-batches."""
        kind = task.key[0]
        if kind in ("synchronize", "update"):
            waits = {
                ("weight", *key[1:]) if key[0] == "backward" and self.is_divided(int(key[1])) else key
                for key in task.predecessors
            }
            return [replace(task, predecessors=frozenset(waits))]
        if kind != "backward" or not self.is_divided(int(task.key[1])):
            return [task]
        index, part = int(task.key[1]), int(task.key[2])
        inputs_ns, _ = self.part_cost(index, part, of_weights=False)
        weights_ns, _ = self.part_cost(index, part, of_weights=True)
        sums = {key for key in task.predecessors if key[0] == "synchronize"}
        return [
            replace(task, run_ns=inputs_ns),
            replace(
                task,
                key=("weight", index, part),
                run_ns=weights_ns + task.run_ns - before.run_ns,
                predecessors=frozenset({task.key, *sums}),
            ),
        ]

    def derive(self) -> list[StepTask]:
        """Return all tasks in program order."""
        for (phase, stage, number), leads in self.units_with_leads():
            for task in self.once:
                if self.part(task.key) == (phase.value, stage) and self.leads(task) is leads:
                    self.add(task, number)
        for number in range(self.count):
            renewed: dict[int, set[StepKey]] = {}
            for task in self.once:
                if self.part(task.key) == ("renewals", 0):
                    self.add(task, number)
                    for device in task.ends if task.key[0] in RENEWALS else ():
                        renewed.setdefault(device, set()).add((number, task.key))
            self.renewed = renewed
        for task in self.once:
            if self.part(task.key) == ("updates", 0):
                self.add(task, self.count - 1)
        return self.steps

    def units_with_leads(self) -> list[tuple[Unit, bool]]:
        """Every unit twice: where the gathers that it begins with stand, behind the unit before it there, and it."""
        before: dict[int, int] = {}
        placed = []
        for place, unit in enumerate(self.units):
            group = self.plan.stages[unit.stage].group
            placed += [((before.get(group, -1), 1, place), unit, True), ((place, 0, place), unit, False)]
            before[group] = place
        return [(unit, leads) for _, unit, leads in sorted(placed, key=lambda item: item[0])]

    def leads(self, task: Task) -> bool:
        """Whether a task is a gather before all that its part of the program computes."""
        if task.key[0] not in ("forward gather", "backward gather"):
            return False
        own = [other for other in self.once if self.part(other.key) == self.part(task.key)]
        computed = [place for place, other in enumerate(own) if other.key[0] in COMPUTE]
        return own.index(task) < min(computed, default=len(own))

    def part(self, key: Key) -> tuple[str, int]:
        """Where in the program a task stands: a phase of a stage, or what follows all of them."""
        plan, kind, name = self.plan, str(key[0]), key[1]
        if kind in ("forward", "transfer", "collective"):
            maker = int(name) if kind == "forward" else plan.graph.producer[str(name)][0]
            late = maker in plan.graph.order.of_buffers
            return ("renewals", 0) if late else (Phase.FORWARD.value, self.stage_of(maker))
        if kind in RENEWALS:
            return ("renewals", 0)
        if kind in ("forward gather", "backward gather"):
            return kind.split()[0], self.stage_of(int(name))
        if kind in ("update", "update gather"):
            return ("updates", 0)
        of_weights = kind == "weight" or (self.splits and kind == "synchronize")
        return ((Phase.WEIGHT if of_weights else Phase.BACKWARD).value, self.stage_of(self.after(key)))

    def after(self, key: Key) -> int:
        """The operator with whose backward a task of the backward stands."""
        kind = key[0]
        if kind in ("backward", "weight"):
            return int(key[1])
        if kind == "recompute":
            (last,) = [
                group.last
                for group in self.plan.strategy.recomputation
                if group.first <= int(key[1]) <= group.last
            ]
            return last
        if kind == "synchronize":
            return self.plan.buckets[int(key[1])].after
        if kind == "gradient":
            (operator,) = [
                index
                for index, found in self.plan.gradient_transfers.items()
                if any((back.value, back.assembly) == key[1:3] for back in found)
            ]
            return operator
        assert kind == "gradient collective"
        (operator,) = [
            index
            for index, found in self.plan.gradient_collectives.items()
            if any((back.value, back.number) == key[1:3] for back in found)
        ]
        return operator

    def stage_of(self, operator: int) -> int:
        """The stage that an operator is in."""
        return self.deriver.stage_of(operator)

    def add(self, task: Task, number: int) -> None:
        """Add a task for a micro-batch, if it is done for that."""
        kind, last = task.key[0], self.count - 1
        if kind == "synchronize" and number != last and not self.is_summed_each(task.key):
            return
        there = {step.key for step in self.steps}
        waits: set[StepKey] = set()
        for key in task.predecessors:
            if key[0] != "synchronize":
                waits.add((number, key))
            else:
                waits |= {(number if self.is_summed_each(key) else last, key)} & there
            is_own = kind == "synchronize" and self.is_summed_each(task.key)
            if kind in ("synchronize", "update") and key[0] in ("backward", "weight") and not is_own:
                # The backwards of all micro-batches add to what is summed, or updated.
                waits |= {(other, key) for other in range(self.count)}
        if kind == "synchronize" and self.plan.strategy.micro_batches.gradients is GradientSums.EACH:
            waits |= self.sums_before(task.key, number)
        if kind in ("forward gather", "backward gather"):
            waits |= {self.latest[device] for device in task.ends if device in self.latest}
        if kind in COMPUTE:
            (device,) = task.resources
            waits |= self.blocking.pop(device, set())
            if device in self.latest:
                waits.add(self.latest[device])
            if self.part(task.key) == ("renewals", 0):
                waits |= self.renewed.pop(device, set())
            self.latest[device] = (number, task.key)
        assert waits <= there
        self.steps.append(StepTask((number, task.key), task, frozenset(waits)))

    def simulated(self, flows: Sequence[int]) -> list[reference.Task]:
        """Return the tasks as the slow simulation takes them; `flows` of each."""
        place = {step.key: index for index, step in enumerate(self.steps)}
        tasks = []
        for step, flow in zip(self.steps, flows, strict=True):
            before = tuple(place[key] for key in step.predecessors)
            tasks.append(self.simulated_task(step.task, before, flow))
        return tasks

    def simulated_task(self, task: Task, before: tuple[int, ...], flow: int) -> reference.Task:
        """Return a task as the slow simulation takes it."""
        kind = task.key[0]
        launch_ns = 0 if kind == "weight" else self.deriver.launch_ns(task)
        if kind in ("backward", "weight"):
            index, part = int(task.key[1]), int(task.key[2])
            if self.is_divided(index):
                _, launch_ns = self.part_cost(index, part, of_weights=kind == "weight")
            if self.count > 1 and self.is_divided(index) is (kind == "weight"):
                launch_ns += self.added_ns(index, part)[1]
        return reference.Task(
            run_ns=task.run_ns,
            predecessors=before,
            resources=task.resources,
            device=task.resources[0] if kind in COMPUTE else None,
            ends=task.ends,
            flows=flow,
            launch_ns=launch_ns,
        )

    # ---- memory

    def peak_memory(self) -> list[int]:
        """Return the bytes of each device at the unit at which most is there."""
        static, inputs = self.static_bytes()
        kept = self.kept_bytes(behind=None)
        devices = range(len(static))
        groups = self.plan.strategy.recomputation
        result = []
        for device in devices:
            now = most = 0
            for unit in self.plan.units:
                size = kept.get((unit.stage, device), 0)
                held = self.held_bytes(unit.stage, device)
                if unit.phase is Phase.WEIGHT:
                    now -= held
                    continue
                if unit.phase is Phase.FORWARD:
                    now += size
                    most = max(most, now)
                    continue
                for number, group in enumerate(groups):
                    if self.stage_of(group.last) == unit.stage:
                        gone = self.kept_bytes(behind=group.last).get((unit.stage, device), 0)
                        most = max(most, now - gone + self.again_bytes(number, device))
                now += held - size
                most = max(most, now)
            result.append(static[device] + self.count * inputs[device] + most)
        return result

    def held_bytes(self, stage: int, device: int) -> int:
        """Return what a stage keeps on a device of a micro-batch between the parts of its backward."""
        deriver, plan = self.deriver, self.plan
        tensors: dict[object, int] = {}
        for index, operator in enumerate(plan.graph.operators):
            configuration = plan.strategy.configurations[index]
            if not self.is_divided(index) or self.stage_of(index) != stage:
                continue
            for part, other in enumerate(configuration.devices):
                if other != device or not plan.active[index][part]:
                    continue
                call = deriver.calls[index][part]
                tensors[index, part] = extra_bytes(call)
                for position, spec in enumerate(call.outputs):
                    # Its gradient, and itself where the backward reads it.
                    size = prod(spec.shape) * spec.item_bytes
                    tensors[index, part, "gradient", position] = size
                    if keeps_output(operator):
                        tensors[index, part, "output", position] = size
                for slot in kept_inputs(operator, plan.graph.gradient_inputs(operator)):
                    name, space = operator.inputs[slot], operator.space
                    if plan.graph.value_by_name[name].kind is ValueKind.OPERATOR:
                        region = operand_regions(space.axes, space.inputs[slot], configuration.degrees)[part]
                        tensors[name, region] = prod(call.inputs[slot].shape) * call.inputs[slot].item_bytes
        return sum(tensors.values())

    def static_bytes(self) -> tuple[list[int], list[int]]:
        """Return, by device, the bytes of weights and buffers, and of the inputs of one micro-batch."""
        deriver, plan = self.deriver, self.plan
        static, inputs = ([0] * len(deriver.topology.devices) for _ in range(2))
        state = OPTIMIZER_STATE[deriver.training.optimizer]
        for value in plan.graph.values:
            if value.kind is ValueKind.OPERATOR:
                continue
            placement = weight_placement(plan.graph, plan.strategy, value.name)
            within = any(set(placement) <= stage.devices for stage in plan.stages)
            in_shares = within and plan.strategy.micro_batches.gradients is GradientSums.EACH
            for device, region in placement.items():
                elements = volume(region)
                if value.name in deriver.trained():
                    updated = deriver.updated(value.name, device)
                    # A gradient is whole until it is summed.
                    elements += (updated if in_shares else volume(region)) + updated * state
                    if plan.sharding[value.name] is Sharding.PARAMETERS:
                        elements -= volume(region) - updated
                target = inputs if value.kind is ValueKind.INPUT else static
                target[device] += elements * value.spec.item_bytes
        return static, inputs

    def kept_bytes(self, behind: int | None) -> dict[tuple[int, int], int]:
        """Return what each stage keeps of a micro-batch on each device; `behind`: of what follows an operator alone."""
        deriver, plan = self.deriver, self.plan
        sizes: dict[tuple[int, int], int] = {}

        def keep(stage: int, device: int, size_bytes: int) -> None:
            sizes[stage, device] = sizes.get((stage, device), 0) + size_bytes

        lasting = lasting_outputs(plan.graph, plan.strategy.recomputation)
        for index, configuration in enumerate(plan.strategy.configurations):
            for task, device in enumerate(configuration.devices):
                if plan.active[index][task] and (behind is None or index > behind):
                    call = deriver.calls[index][task]
                    size = sum(
                        prod(spec.shape) * spec.item_bytes * lasts
                        for spec, lasts in zip(call.outputs, lasting[index].kept, strict=True)
                    )
                    if deriver.group_of(index) is None:
                        size += extra_bytes(call)
                    keep(self.stage_of(index), device, size)
        for name, assemblies in plan.exchanges.items():
            maker = plan.graph.producer[name][0]
            for position, assembly in enumerate(assemblies):
                if plan.active_assemblies[name][position] and not assembly.direct:
                    early = [
                        reader.operator
                        for reader in assembly.readers
                        if reader.operator in plan.graph.order.of_loss
                    ]
                    stage = self.stage_of(min(early))
                    if behind is None or maker > behind:
                        item_bytes = plan.graph.value_by_name[name].spec.item_bytes
                        keep(stage, assembly.device, volume(assembly.region) * item_bytes)
        return sizes

    def again_bytes(self, number: int, device: int) -> int:
        """Return the bytes on a device that the backward of a group needs, once the group is made again."""
        deriver, plan, total = self.deriver, self.plan, 0
        for index, outputs in enumerate(lasting_outputs(plan.graph, plan.strategy.recomputation)):
            if deriver.group_of(index) != number or outputs.again is None:
                continue
            for task, other in enumerate(plan.strategy.configurations[index].devices):
                if plan.active[index][task] and other == device:
                    call = deriver.calls[index][task]
                    total += extra_bytes(call)
                    total += sum(
                        prod(spec.shape) * spec.item_bytes * lasts
                        for spec, lasts in zip(call.outputs, outputs.again, strict=True)
                    )
        return total


def acted_units(
    micro_batches: MicroBatches,
    stages: int,
    begins: Mapping[tuple[str, int], int],
    ends: Mapping[tuple[str, int], int],
) -> tuple[Unit, ...]:
    """Return the units of actors: always the one that can start first, of several on a stage its backward.

    begins, ends: of each phase of each stage in one micro-batch alone; all phases take time.
    """
    credits_S, count = micro_batches.credits_of(stages), micro_batches.count
    ended: dict[Unit, int] = {}
    done = {(phase, stage): 0 for phase in (Phase.FORWARD, Phase.BACKWARD) for stage in range(stages)}
    free = [0] * stages

    def ready(phase: Phase, stage: int) -> int | None:
        """When the next unit of a stage can start; None where that is not known, or there is none."""
        number = done[phase, stage]
        other = stage - 1 if phase is Phase.FORWARD else stage + 1
        needed = [(Unit(phase, other, number), 0)] if 0 <= other < stages else []
        if needed:
            needed = [(needed[0][0], max(0, begins[phase.value, stage] - ends[phase.value, other]))]
        if phase is Phase.BACKWARD:
            needed.append((Unit(Phase.FORWARD, stage, number), 0))
            if stage and number >= 2:
                needed.append((Unit(Phase.BACKWARD, stage - 1, number - 2), 0))
        elif number >= credits_S[stage]:
            needed.append((Unit(Phase.BACKWARD, stage, number - credits_S[stage]), 0))
        if number == count or any(unit not in ended for unit, _ in needed):
            return None
        return max([free[stage], *(ended[unit] + later for unit, later in needed)])

    while len(ended) < 2 * stages * count:
        starts = [
            (start, phase is Phase.FORWARD, stage, phase)
            for (phase, stage) in done
            if (start := ready(phase, stage)) is not None
        ]
        start, _, stage, phase = min(starts)
        taken = ends[phase.value, stage] - begins[phase.value, stage]
        assert taken > 0
        free[stage] = ended[Unit(phase, stage, done[phase, stage])] = start + taken
        done[phase, stage] += 1
    return tuple(sorted(ended, key=lambda unit: (ended[unit], unit.phase is Phase.FORWARD, unit.stage)))
