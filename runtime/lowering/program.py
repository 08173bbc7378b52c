"""The static program of one rank: its share of the plan's common order, as instructions.

All ranks walk the plan's events in the same order, so nothing can deadlock: a wait is always for something that
stands earlier in the common order.

Of a group of operators whose activations are not kept, the forward runs unrecorded, and what nobody outside needs is
released at once; in the backward the same calls run again, recorded, from what entered the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from graph.calls import LocalCall
from graph.intervals import Region, shape
from graph.operators import FLOATING, Operator, ValueKind
from graph.plan import Bucket, Plan
from graph.recomputation import group_numbers
from graph.rules import local_calls
from graph.strategy import Sharding
from profiler.operators import compile_call
from runtime.instructions import base as steps
from runtime.instructions.gradient_synchronization import (
    FinishReduction,
    Reduction,
    StartReduction,
    reductions,
)
from runtime.instructions.region_assembly import Recipe
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import (
    FinishGather,
    FinishSharedSum,
    Group,
    Part,
    PutBack,
    StartGather,
    StartSharedSum,
    is_copied,
    parts_of,
)
from runtime.lowering.segments import Node, Segments, cuts
from runtime.lowering.tensor_slots import Layout, Local, Reading
from runtime.lowering.transfers import Event, Exchanges
from runtime.lowering.weight_prefetch import Gathering

Instruction = steps.Instruction
# Makes a recorded step's instruction from the slots that it reads.
Make = Callable[[steps.Slots], Instruction]


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank executes in one step, and the tensors that must be in place before it.

    shapes: of all slots.
    readings: regions of inputs, buffers and weights that tasks read.
    held: for each weight of the rank, its slot and region; the gradient of that slot updates it.
    empty: slots of tensors without elements, with shape and dtype.
    updated: the weights that get a gradient.
    parts: for each weight of the rank, what the rank updates of it.
    gathered: the weights that the rank keeps in these parts, and has whole only while they are read.
    after_update: what makes the weights whole again of which other ranks have updated shares.
    kept: for each value that stays after the step, the regions of it that the rank answers for, and their slots.
    """

    shapes: tuple[tuple[int, ...], ...]
    readings: tuple[Reading, ...]
    held: dict[str, tuple[int, Region]]
    empty: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    updated: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    parts: dict[str, tuple[Part, ...]]
    gathered: frozenset[str]
    after_update: tuple[Instruction, ...]
    kept: dict[str, tuple[tuple[Region, int], ...]]


def compile_program(
    plan: Plan, rank: int, device: torch.device, kept: frozenset[str] = frozenset()
) -> Program:
    """Return `rank`'s program of a plan, for tensors on `device`; `kept` values stay after the step."""
    return _Compiler(plan, rank, device, kept).compile()


class _Compiler:
    def __init__(self, plan: Plan, rank: int, device: torch.device, kept: frozenset[str]) -> None:
        self.plan = plan
        self.kept = kept
        self.graph = plan.graph
        self.rank = rank
        self.device = device
        self.layout = Layout(plan, rank)
        self.segments = Segments(cuts(plan, self.layout))
        self.exchanges = Exchanges(plan, self.layout, self.segments, device)
        self.instructions: list[Instruction] = []
        self.parts = parts_of(plan, rank)
        self.held = {name: plan.held[name][rank] for name in self.layout.held}
        self.gathering = Gathering(plan, self.layout, self.parts, device)
        self._group_of = group_numbers(plan.graph, plan.strategy.recomputation)
        # For each leaf, the groups of the operators that read it; -1 stands for those of no group.
        self._leaf_readers: dict[int, set[int]] = {}
        self._last_shared: Group | None = None
        self._updated_groups: list[Group] = []

    def compile(self) -> Program:
        nodes = self._nodes()
        inputs = self.segments.connect(
            (node for group in nodes for node, _ in group), self._leaf_targets(), self.layout
        )
        for node, slots in inputs.items():
            for made, read in zip(node.inputs, slots, strict=True):
                if made != read:
                    self._leaf_readers.setdefault(read, set()).add(self._group_of[node.operator])
        self._expect_messages()
        # What only renews buffers comes last: its messages (statistics of all devices) then hold nobody up.
        self._forward(self.graph.order.of_loss, nodes, inputs)
        self._loss()
        finished = self._backward(nodes, inputs)
        self._forward(self.graph.order.of_buffers, nodes, inputs)
        self._renew_buffers()
        self.instructions.extend(finished)
        held = self.layout.held
        after_update = self._after_update()
        return Program(
            shapes=tuple(self.layout.shapes),
            readings=tuple(self.layout.readings.values()),
            held={name: (slot, self.plan.held[name][self.rank]) for name, slot in held.items()},
            empty=tuple(
                (local.slot, shape(local.assembly.region), self.exchanges.dtype(local.value))
                for local in self.layout.empty
            ),
            updated=tuple(name for name in held if self._has_gradient(name)),
            instructions=tuple(self._with_releases()),
            parts=self.parts,
            gathered=frozenset(self.gathering.weights),
            after_update=after_update,
            kept={name: tuple(self.layout.made(name)) for name in sorted(self.kept)},
        )

    # ---- what there is to execute

    def _nodes(self) -> list[list[tuple[Node, Make]]]:
        """For each operator, its recorded steps, each with what makes its instruction from its input slots."""
        result = []
        for index, operator in enumerate(self.graph.operators):
            group: list[tuple[Node, Make]] = []
            for local in self.layout.assemblies.get(index, ()):
                if not local.assembly.remote_pieces:
                    group.append(self._local_assembly(index, local))
            if self.layout.tasks[index]:
                degrees = self.plan.strategy.configurations[index].degrees
                calls = local_calls(self.graph, operator, degrees)
                for task in self.layout.tasks[index]:
                    group.append(self._call(index, operator, task, calls[task]))
            result.append(group)
        return result

    def _call(self, index: int, operator: Operator, task: int, call: LocalCall) -> tuple[Node, Make]:
        layout = self.layout
        inputs = tuple(layout.sources[index, task, slot] for slot in range(len(operator.inputs)))
        outputs = tuple(layout.outputs[index, task, position] for position in range(len(operator.outputs)))
        active = self.plan.active[index][task]
        wanted = tuple(active and flag for flag in self.graph.gradient_inputs(operator))
        values = [self.graph.value_by_name[name] for name in operator.outputs]
        constants = tuple(
            slot
            for slot, value in zip(outputs, values, strict=True)
            if active and not value.requires_gradient and value.spec.dtype in FLOATING
        )
        execute = compile_call(call)
        return Node(index, inputs, wanted, outputs), lambda slots: steps.Call(
            execute, slots, outputs, constants
        )

    def _local_assembly(self, index: int, local: Local) -> tuple[Node, Make]:
        pieces = local.assembly.pieces
        recipe = Recipe(local.assembly.region, [piece.region for piece in pieces], self.device)
        selections = tuple(self.exchanges.cut(local.value, piece) for piece in pieces)
        sources = tuple(self.layout.piece_slot(local.value, piece) for piece in pieces)
        active = self.plan.active_assemblies[local.value][local.number]
        node = Node(index, sources, (active,) * len(sources), (local.slot,))
        return node, lambda slots: steps.Assemble(recipe, selections, slots, local.slot)

    def _has_gradient(self, weight: str) -> bool:
        return self.graph.value_by_name[weight].requires_gradient and any(
            any(self.plan.active[operator]) for operator, _ in self.graph.consumers[weight]
        )

    # ---- what crosses segments and ranks

    def _leaf_targets(self) -> dict[int, int]:
        targets = {
            reading.slot: self.layout.held[reading.value]
            for reading in self.layout.readings.values()
            if self.graph.value_by_name[reading.value].kind is ValueKind.WEIGHT
            and self.graph.value_by_name[reading.value].requires_gradient
        }
        for group in self.layout.assemblies.values():
            for local in group:
                if local.assembly.remote_pieces:
                    targets[local.slot] = local.slot
        return targets

    def _expect_messages(self) -> None:
        """Note every tensor whose gradient comes from another rank, from a received assembly, or from the seed."""
        for value, assemblies in self.plan.exchanges.items():
            for assembly, active in zip(assemblies, self.plan.active_assemblies[value], strict=True):
                if not active or not assembly.remote_pieces:
                    continue
                for piece in assembly.pieces:
                    if piece.source_device == self.rank:
                        self.segments.expect_gradient(self.layout.piece_slot(value, piece))
        for slot in self._loss_parts():
            self.segments.expect_gradient(slot)

    def _loss_parts(self) -> tuple[int, ...]:
        operator, position = self.graph.producer[self.graph.loss]
        return tuple(
            self.layout.outputs[operator, task, position]
            for task in self.plan.seeds
            if task in self.layout.tasks[operator]
        )

    # ---- forward

    def _forward(
        self,
        operators: Sequence[int],
        nodes: list[list[tuple[Node, Make]]],
        inputs: dict[Node, tuple[int, ...]],
    ) -> None:
        for index in operators:
            self.instructions.extend(self.gathering.before_forward(index))
            for local in self.layout.assemblies.get(index, ()):
                if local.assembly.remote_pieces:
                    active = self.plan.active_assemblies[local.value][local.number]
                    self.instructions.append(
                        self.exchanges.receive(local, local.value, differentiable=active)
                    )
            for node, make in nodes[index]:
                made_again = self._is_made_again(node)
                instruction = make(node.inputs if made_again else inputs[node])
                recorded = node.active and not made_again
                self.instructions.append(instruction if recorded else steps.Unrecorded(instruction))
                pairs = self._leaves_of(node, made_again=False)
                if pairs:
                    self.instructions.append(steps.Detach(pairs))
            self.instructions.extend(self.gathering.after_forward(index))
            outputs = self.graph.operators[index].outputs
            self.instructions.extend(
                self.exchanges.issue(
                    [
                        Event(value, value, self.plan.exchanges[value], self.plan.collectives[value])
                        for value in outputs
                    ]
                )
            )

    def _is_made_again(self, node: Node) -> bool:
        return node.active and self._group_of[node.operator] >= 0

    def _leaves_of(self, node: Node, *, made_again: bool) -> tuple[tuple[int, int], ...]:
        """The leaves of what a node makes: in the forward, or those made again, which its group alone reads."""
        found = []
        for slot in node.outputs:
            leaf = self.segments.leaves.get(slot)
            if leaf is not None:
                within = self._is_made_again(node) and self._leaf_readers[leaf] <= {
                    self._group_of[node.operator]
                }
                if within == made_again:
                    found.append((slot, leaf))
        return tuple(found)

    def _loss(self) -> None:
        parts = self._loss_parts()
        if parts:
            self.instructions.append(steps.Loss(parts))

    # ---- backward

    def _backward(
        self, nodes: list[list[tuple[Node, Make]]], inputs: dict[Node, tuple[int, ...]]
    ) -> list[Instruction]:
        """Append the backward; return what finishes the sums of gradients that it starts."""
        started: list[Reduction] = []
        finishing: list[Instruction] = []
        parts = self._loss_parts()
        if parts and self.graph.value_by_name[self.graph.loss].requires_gradient:
            self.instructions.append(steps.Seed(parts))
        first = {segment.first: number for number, segment in self.segments.by_number.items()}
        for index in range(len(self.graph.operators) - 1, -1, -1):
            self.instructions.extend(self.gathering.before_backward(index))
            for operator in self.plan.recomputed_before.get(index, ()):
                self._make_again(nodes[operator], inputs)
            if index in first:
                self._differentiate(first[index])
            self.instructions.extend(self.exchanges.issue_gradients(index))
            self.instructions.extend(self.gathering.after_backward(index, self.segments))
            for number in self.plan.buckets_after.get(index, ()):
                bucket = self.plan.buckets[number]
                if self.rank not in bucket.devices:
                    continue
                if bucket.sharding is not Sharding.NONE:
                    self._share(bucket, finishing)
                    continue
                made = reductions(self.graph, bucket, self.layout.held, self.held, self.device, len(started))
                started.extend(made)
                self.instructions.extend(StartReduction(reduction) for reduction in made)
                finishing.extend(FinishReduction(reduction) for reduction in made)
        return finishing

    def _make_again(self, nodes: list[tuple[Node, Make]], inputs: dict[Node, tuple[int, ...]]) -> None:
        """Append an operator's recorded steps once more, this time for autograd."""
        for node, make in nodes:
            if not node.active:
                continue
            self.instructions.append(steps.Recompute(make(inputs[node]), node.outputs))
            pairs = self._leaves_of(node, made_again=True)
            if pairs:
                self.instructions.append(
                    steps.Recompute(steps.Detach(pairs), tuple(leaf for _, leaf in pairs))
                )

    def _share(self, bucket: Bucket, finishing: list[Instruction]) -> None:
        """Append the sum of a bucket in shares; its last end is noted in `finishing`."""
        for group in self.gathering.groups(bucket.devices, bucket.entries):
            before = self._last_shared
            self.instructions.append(StartSharedSum(group, before))
            self._last_shared = group
            finishing.append(FinishSharedSum(group))
            if bucket.sharding is Sharding.OPTIMIZER:
                self._updated_groups.append(group)

    def _after_update(self) -> tuple[Instruction, ...]:
        """What makes weights whole again: parts that are copies, and others' shares, the next ones under way."""
        result: list[Instruction] = []
        for name, own in self.parts.items():
            if self.plan.sharding[name] is Sharding.OPTIMIZER:
                for part in own:
                    place = Selection(part.region, self.held[name], self.device)
                    if part.alone and is_copied(own, place):
                        result.append(PutBack(self.layout.held[name], place, part.number))
        starts = [StartGather(group) for group in self._updated_groups]
        ends = [FinishGather(group) for group in self._updated_groups]
        result.extend(starts[:1])
        for number, end in enumerate(ends):
            result.extend(starts[number + 1 : number + 2])
            result.append(end)
        return tuple(result)

    def _differentiate(self, number: int) -> None:
        segment = self.segments.by_number[number]
        arrived = self.exchanges.gradients_for(number)
        if arrived:
            self.instructions.append(steps.ReceiveGradients(tuple(arrived)))
        if segment.outputs and segment.inputs:
            targets = []
            for leaf, target in segment.inputs.items():
                targets.append((target, self._weight_places.get(leaf)))
            self.instructions.append(
                steps.Differentiate(tuple(segment.outputs), tuple(segment.inputs), tuple(targets))
            )

    @cached_property
    def _weight_places(self) -> dict[int, Selection]:
        """For each reading of a part of a held weight, which part it is."""
        places = {}
        for reading in self.layout.readings.values():
            held = self.plan.held.get(reading.value, {}).get(self.rank)
            if held is not None and held != reading.region:
                places[reading.slot] = Selection(reading.region, held, self.device)
        return places

    # ---- after the backward

    def _renew_buffers(self) -> None:
        """Append the messages that renew buffers where they are read, and their assembly."""
        updates = [
            Event(buffer, value, self.plan.buffer_exchanges[buffer], self.plan.buffer_collectives[buffer])
            for buffer, value in self.graph.buffer_updates
        ]
        self.instructions.extend(self.exchanges.issue(updates))
        for event in updates:
            for number, assembly in enumerate(event.assemblies):
                if assembly.device != self.rank or not assembly.pieces:
                    continue
                reading = self.layout.readings[event.name, assembly.region]
                if assembly.direct:
                    slot = self.layout.piece_slot(event.value, assembly.pieces[0])
                else:
                    slot = self.layout.new_slot(shape(assembly.region))
                    local = Local(event.value, number, assembly, slot)
                    self.instructions.append(self.exchanges.receive(local, event.name, differentiable=False))
                self.instructions.append(steps.Renew(slot, reading.slot))

    def _with_releases(self) -> list[Instruction]:
        """The instructions, each followed by the release of what nothing needs any more, or before it is made again."""
        kept = {reading.slot for reading in self.layout.readings.values()}
        kept.update(local.slot for local in self.layout.empty)
        kept.update(slot for name in self.kept for _, slot in self.layout.made(name))
        result: list[Instruction] = []
        needed: set[int] = set()
        for instruction in reversed(self.instructions):
            released = tuple(
                slot for slot in dict.fromkeys(instruction.touches) if slot not in needed and slot not in kept
            )
            if released:
                result.append(steps.Release(released))
            result.append(instruction)
            needed.update(instruction.touches)
            if isinstance(instruction, steps.Recompute):
                needed.difference_update(instruction.made)
        result.reverse()
        return result
