"""The static program of one rank: its instructions, in the plan's common order.

All ranks issue the plan's events in the same order, so nothing can deadlock: a wait is always for an event that is
earlier in the common order.

Activation checkpointing: the forward of a group of operators runs unrecorded, and the tensors that no operator outside
of the group reads are released at once; in the backward the same calls are recomputed, recorded, from the inputs of
the group.

With micro-batches the instructions of one are lowered once, and the program has them as often as there are
micro-batches (`runtime.lowering.stage_runs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from graph.calls import LocalCall
from graph.intervals import Region, shape
from graph.operator_ranges import group_numbers
from graph.operators import FLOATING, Operator, ValueKind
from graph.plan import Plan
from graph.rules import local_calls
from graph.schedule import Phase
from graph.stretches import check_compiled, members
from profiler.operators import ExecutionContext, compile_call
from runtime.instructions.base import Instruction, Slots
from runtime.instructions.compute import (
    Assemble,
    Call,
    Detach,
    Loss,
    Recompute,
    Renew,
    Seed,
    Unrecorded,
)
from runtime.instructions.messages import ReceiveGradients
from runtime.instructions.region_assembly import Recipe
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import WeightPart, parts_of
from runtime.lowering.compiled_stretches import StretchCall, stretch_calls
from runtime.lowering.differentiation import differentiation
from runtime.lowering.loss_count import counted_loss, over_all
from runtime.lowering.segments import Node, Segments, cuts
from runtime.lowering.stage_runs import ActorRuns, StageRuns
from runtime.lowering.synchronization import SynchronizationLowering
from runtime.lowering.tensor_slots import LocalAssembly, RegionRead, TensorSlots
from runtime.lowering.transfers import TransferLowering, ValueTransfer
from runtime.lowering.weight_prefetch import WeightPrefetch

# From the slots that a node reads to its instruction.
Make = Callable[[Slots], Instruction]


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of a rank in one step, and the tensors that must be in place before it.

    shapes: of all slots.
    reads: regions of inputs, buffers and weights that tasks read.
    held: for each weight of the rank, its slot and region; the gradient of that slot updates it.
    empty: slots of tensors without elements, with shape and dtype.
    updated: the weights that get a gradient.
    parts: for each weight of the rank, the parts that the rank updates.
    sharded: the weights that the rank holds in these parts, and whole only while they are read.
    after_update: the all-gathers of weights whose shares other ranks have updated.
    late: of the instructions those that do what the step before has left: updates of weights, sums and gathers, and
        the waits for them.
    kept: for each value that stays after the step, the regions of it that the rank makes, and their slots.
    gradient_homes: of several micro-batches, by slot, the place in its bucket of the gradient of each weight that is
        one cell: a gradient beside the bucket would take its memory twice for as long as the step lasts.
    actors: of that schedule, where in the instructions the rank's work on each micro-batch is.
    """

    shapes: tuple[tuple[int, ...], ...]
    reads: tuple[RegionRead, ...]
    held: dict[str, tuple[int, Region]]
    empty: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    updated: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    parts: dict[str, tuple[WeightPart, ...]]
    sharded: frozenset[str]
    after_update: tuple[Instruction, ...]
    late: tuple[Instruction, ...]
    kept: dict[str, tuple[tuple[Region, int], ...]]
    gradient_homes: dict[int, torch.Tensor]
    actors: ActorRuns | None


def compile_program(
    plan: Plan,
    rank: int,
    device: torch.device,
    kept: frozenset[str] = frozenset(),
    *,
    in_succession: bool = False,
) -> Program:
    """Return `rank`'s program of a plan, for tensors on `device`.

    kept: values that stay after the step. in_succession: what the plan leaves to the next step's forward (late updates,
        late gathers) is left to it; otherwise a step, with its `after_update`, is whole in itself.
    """
    return _Lowering(plan, rank, device, kept, in_succession=in_succession).compile()


class _Lowering:
    def __init__(
        self, plan: Plan, rank: int, device: torch.device, kept: frozenset[str], *, in_succession: bool
    ) -> None:
        self.plan = plan
        self.kept = kept
        self.graph = plan.graph
        self.rank = rank
        self.device = device
        self.slots = TensorSlots(plan, rank)
        self.segments = Segments(cuts(plan, self.slots))
        self.transfers = TransferLowering(plan, self.slots, self.segments, device)
        self._runs = StageRuns(plan, rank, acts=device.type == "cpu")
        self.counted = counted_loss(plan.graph) if plan.strategy.micro_batches.count > 1 else None
        self.prefetch = WeightPrefetch(plan, self.slots, parts_of(plan, rank), device)
        self.synchronization = SynchronizationLowering(
            plan, self.slots, self.prefetch, device, in_succession=in_succession
        )
        self._group_of = group_numbers(plan.graph, plan.strategy.recomputation)
        # For each leaf, the groups of the operators that read it; -1 stands for those of no group.
        self._leaf_readers: dict[int, set[int]] = {}

    def compile(self) -> Program:
        nodes = self._with_stretches(self._nodes())
        inputs = self.segments.connect(
            (node for group in nodes for node, _ in group), self._leaf_targets(), self.slots
        )
        for node, slots in inputs.items():
            for made, read in zip(node.inputs, slots, strict=True):
                if made != read:
                    self._leaf_readers.setdefault(read, set()).add(self._group_of[node.operator])
        self._expect_messages()
        late = self.synchronization.late()
        # Operators that only renew buffers come last: no rank waits for their messages (statistics of all devices).
        self._forward(self.graph.order.of_loss, nodes, inputs, late)
        self._loss()
        finished = self._backward(nodes, inputs)
        self._runs.enter_renewals()
        self._forward_of(self.graph.order.of_buffers, nodes, inputs)
        self._renew_buffers()
        self._runs.add_releases(self._never_released())
        held = self.slots.held
        after_update = self.synchronization.after_update()
        instructions, actors = self._runs.of_step(finished)
        return Program(
            shapes=tuple(self.slots.shapes),
            reads=tuple(self.slots.reads.values()),
            held={name: (slot, self.synchronization.held[name]) for name, slot in held.items()},
            empty=tuple(
                (local.slot, shape(local.assembly.region), self.transfers.dtype(local.value))
                for local in self.slots.empty
            ),
            updated=tuple(name for name in held if self._has_gradient(name)),
            instructions=instructions,
            parts=self.synchronization.parts,
            sharded=frozenset(self.prefetch.weights),
            after_update=after_update,
            late=tuple(item for index in self.graph.order.of_loss for item in late.get(index, ())),
            kept={name: tuple(self.slots.made(name)) for name in sorted(self.kept)},
            gradient_homes=self.synchronization.gradient_homes(),
            actors=actors,
        )

    def _nodes(self) -> list[list[tuple[Node, Make]]]:
        """Return the nodes of each operator, each with the function that makes its instruction from its input slots."""
        result = []
        for index, operator in enumerate(self.graph.operators):
            group: list[tuple[Node, Make]] = []
            for local in self.slots.assemblies.get(index, ()):
                if not local.assembly.remote_pieces:
                    group.append(self._local_assembly(index, local))
            if self.slots.tasks[index]:
                degrees = self.plan.strategy.configurations[index].degrees
                calls = local_calls(self.graph, operator, degrees)
                for task in self.slots.tasks[index]:
                    group.append(self._call(index, operator, task, calls[task]))
            result.append(group)
        return result

    def _with_stretches(self, nodes: list[list[tuple[Node, Make]]]) -> list[list[tuple[Node, Make]]]:
        """Return the nodes with one node for each stretch that is compiled, at its last operator on the rank."""
        check_compiled(self.plan)
        for of in stretch_calls(self.plan, self.slots, self.plan.strategy.compiled, self.kept).values():
            for index in dict.fromkeys(index for index, _ in of.parts):
                # What the first ones read may be assembled here, before them.
                nodes[index] = nodes[index][: -len(self.slots.tasks[index])]
            nodes[of.parts[-1][0]].append(self._stretch(of))
        return nodes

    def _stretch(self, of: StretchCall) -> tuple[Node, Make]:
        execute = compile_call(of.call)
        node = Node(of.parts[-1][0], of.inputs, of.call.gradients, of.outputs)
        return node, lambda slots: Call(execute, slots, of.outputs)

    def _call(self, index: int, operator: Operator, task: int, call: LocalCall) -> tuple[Node, Make]:
        slots = self.slots
        inputs = tuple(slots.sources[index, task, slot] for slot in range(len(operator.inputs)))
        outputs = tuple(slots.outputs[index, task, position] for position in range(len(operator.outputs)))
        active = self.plan.active[index][task]
        wanted = tuple(active and flag for flag in self.graph.gradient_inputs(operator))
        values = [self.graph.value_by_name[name] for name in operator.outputs]
        constants = tuple(
            slot
            for slot, value in zip(outputs, values, strict=True)
            if active and not value.requires_gradient and value.spec.dtype in FLOATING
        )
        execute = compile_call(call)
        if index == self.counted:
            by_itself = execute

            def execute(
                values: Sequence[torch.Tensor], context: ExecutionContext
            ) -> tuple[torch.Tensor, ...]:
                return by_itself([over_all(values[0], context)], context)

        return Node(index, inputs, wanted, outputs), lambda slots: Call(execute, slots, outputs, constants)

    def _local_assembly(self, index: int, local: LocalAssembly) -> tuple[Node, Make]:
        pieces = local.assembly.pieces
        recipe = Recipe(local.assembly.region, [piece.region for piece in pieces], self.device)
        selections = tuple(self.transfers.cut(local.value, piece) for piece in pieces)
        sources = tuple(self.slots.piece_slot(local.value, piece) for piece in pieces)
        active = self.plan.active_assemblies[local.value][local.number]
        node = Node(index, sources, (active,) * len(sources), (local.slot,))
        return node, lambda slots: Assemble(recipe, selections, slots, local.slot)

    def _has_gradient(self, weight: str) -> bool:
        return self.graph.value_by_name[weight].requires_gradient and any(
            any(self.plan.active[operator]) for operator, _ in self.graph.consumers[weight]
        )

    # ---- gradients that cross segments and ranks

    def _leaf_targets(self) -> dict[int, int]:
        targets = {
            read.slot: self.slots.held[read.value]
            for read in self.slots.reads.values()
            if self.graph.value_by_name[read.value].kind is ValueKind.WEIGHT
            and self.graph.value_by_name[read.value].requires_gradient
        }
        for group in self.slots.assemblies.values():
            for local in group:
                if local.assembly.remote_pieces:
                    targets[local.slot] = local.slot
        return targets

    def _expect_messages(self) -> None:
        """Note the tensors whose gradients come from another rank, from a received assembly, or from the seed."""
        for value, assemblies in self.plan.exchanges.items():
            for assembly, active in zip(assemblies, self.plan.active_assemblies[value], strict=True):
                if not active or not assembly.remote_pieces:
                    continue
                for piece in assembly.pieces:
                    if piece.source_device == self.rank:
                        self.segments.expect_gradient(self.slots.piece_slot(value, piece))
        for slot in self._loss_parts():
            self.segments.expect_gradient(slot)

    def _loss_parts(self) -> tuple[int, ...]:
        operator, position = self.graph.producer[self.graph.loss]
        return tuple(
            self.slots.outputs[operator, task, position]
            for task in self.plan.seeds
            if task in self.slots.tasks[operator]
        )

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of the run that is being lowered."""
        return self._runs.last

    # ---- forward

    def _forward(
        self,
        operators: Sequence[int],
        nodes: list[list[tuple[Node, Make]]],
        inputs: dict[Node, tuple[int, ...]],
        late: Mapping[int, Sequence[Instruction]],
    ) -> None:
        for index in operators:
            self._runs.enter(Phase.FORWARD, index)
            self._forward_of((index,), nodes, inputs, late)

    def _forward_of(
        self,
        operators: Sequence[int],
        nodes: list[list[tuple[Node, Make]]],
        inputs: dict[Node, tuple[int, ...]],
        late: Mapping[int, Sequence[Instruction]] = MappingProxyType({}),
    ) -> None:
        for index in operators:
            self.instructions.extend(late.get(index, ()))
            self.instructions.extend(self.prefetch.before_forward(index))
            for local in self.slots.assemblies.get(index, ()):
                if local.assembly.remote_pieces:
                    active = self.plan.active_assemblies[local.value][local.number]
                    self.instructions.append(
                        self.transfers.receive(local, local.value, differentiable=active)
                    )
            for node, make in nodes[index]:
                recomputed = self._is_recomputed(node)
                instruction = make(node.inputs if recomputed else inputs[node])
                recorded = node.active and not recomputed
                self.instructions.append(instruction if recorded else Unrecorded(instruction))
                pairs = self._leaves_of(node, recomputed=False)
                if pairs:
                    self.instructions.append(Detach(pairs))
            self.instructions.extend(self.prefetch.after_forward(index))
            for maker in self._sent_behind.get(index, (index,)):
                self.instructions.extend(
                    self.transfers.issue(
                        [
                            ValueTransfer(
                                value, value, self.plan.exchanges[value], self.plan.collectives[value]
                            )
                            for value in self.graph.operators[maker].outputs
                        ]
                    )
                )

    @cached_property
    def _sent_behind(self) -> dict[int, tuple[int, ...]]:
        """For each operator of a compiled stretch, the operators whose values are sent behind it.

        The stretch's last operator has all of its operators, the others have none. It is the last one of all ranks, so
        that every rank issues messages in the same order.
        """
        behind: dict[int, tuple[int, ...]] = {}
        for stretch in self.plan.strategy.compiled:
            inside = members(self.plan, stretch)
            behind |= {**dict.fromkeys(inside, ()), inside[-1]: inside}
        return behind

    def _is_recomputed(self, node: Node) -> bool:
        return node.active and self._group_of[node.operator] >= 0

    def _leaves_of(self, node: Node, *, recomputed: bool) -> tuple[tuple[int, int], ...]:
        """Return the leaves of a node's outputs in the forward, or the recomputed ones, which its group alone reads."""
        pairs = []
        for slot in node.outputs:
            leaf = self.segments.leaves.get(slot)
            if leaf is not None:
                within = self._is_recomputed(node) and self._leaf_readers[leaf] <= {
                    self._group_of[node.operator]
                }
                if within == recomputed:
                    pairs.append((slot, leaf))
        return tuple(pairs)

    def _loss(self) -> None:
        parts = self._loss_parts()
        if parts:
            self.instructions.append(Loss(parts))

    # ---- backward

    def _backward(
        self, nodes: list[list[tuple[Node, Make]]], inputs: dict[Node, tuple[int, ...]]
    ) -> list[Instruction]:
        """Append the backward; return the waits for the gradient synchronization that it starts.

        An all-reduce starts as soon as its bucket is full, and those that go before it: its overlap with the backward
        lasts until the waits. Weights that are updated late have theirs there.
        """
        finishing: list[Instruction] = []
        parts = self._loss_parts()
        self._runs.enter(Phase.BACKWARD, len(self.graph.operators) - 1)
        if parts and self.graph.value_by_name[self.graph.loss].requires_gradient:
            self.instructions.append(Seed(parts))
        first = {segment.first: number for number, segment in self.segments.by_number.items()}
        for index in range(len(self.graph.operators) - 1, -1, -1):
            self._runs.enter(Phase.BACKWARD, index)
            self.instructions.extend(self.prefetch.before_backward(index))
            for operator in self.plan.recomputed_before.get(index, ()):
                self._recompute(nodes[operator], inputs)
            if index in first:
                self._differentiate(first[index])
            self.instructions.extend(self.transfers.issue_gradients(index))
            self.instructions.extend(self.prefetch.after_backward(index, self.segments))
            if self.plan.buckets_after.get(index):
                started, waits = self.synchronization.after_backward(index)
                self._runs.of_weights(index).extend(started)
                finishing.extend(waits)
        return finishing

    def _recompute(self, nodes: list[tuple[Node, Make]], inputs: dict[Node, tuple[int, ...]]) -> None:
        """Append the nodes of an operator once more, recorded by autograd."""
        for node, make in nodes:
            if not node.active:
                continue
            self.instructions.append(Recompute(make(inputs[node]), node.outputs))
            pairs = self._leaves_of(node, recomputed=True)
            if pairs:
                self.instructions.append(Recompute(Detach(pairs), tuple(leaf for _, leaf in pairs)))

    def _differentiate(self, number: int) -> None:
        segment = self.segments.by_number[number]
        arrived = self.transfers.gradients_for(number)
        if arrived:
            self.instructions.append(ReceiveGradients(tuple(arrived)))
        apart = self._weight_reads if segment.first in self.plan.weight_parts else frozenset[int]()
        made = differentiation(number, segment, self._read_parts, apart)
        if made is not None:
            self.instructions.append(made.backward)
            if made.weights is not None:
                self._runs.of_weights(segment.first).append(made.weights)

    @cached_property
    def _weight_reads(self) -> frozenset[int]:
        """The slots of reads of weights."""
        kinds = self.graph.value_by_name
        return frozenset(
            read.slot for read in self.slots.reads.values() if kinds[read.value].kind is ValueKind.WEIGHT
        )

    @cached_property
    def _read_parts(self) -> dict[int, Selection]:
        """The part of the held weight that each read of a part is, by slot."""
        parts = {}
        for read in self.slots.reads.values():
            held = self.plan.held.get(read.value, {}).get(self.rank)
            if held is not None and held != read.region:
                parts[read.slot] = Selection(read.region, held, self.device)
        return parts

    def _never_released(self) -> set[int]:
        """Return the slots of tensors that stay: what is read from outside, what is empty, and what is kept."""
        kept = {read.slot for read in self.slots.reads.values()}
        kept.update(local.slot for local in self.slots.empty)
        kept.update(slot for name in self.kept for _, slot in self.slots.made(name))
        return kept

    # ---- after the backward

    def _renew_buffers(self) -> None:
        """Append the messages that renew buffers where they are read, and their assembly."""
        updates = [
            ValueTransfer(
                buffer, value, self.plan.buffer_exchanges[buffer], self.plan.buffer_collectives[buffer]
            )
            for buffer, value in self.graph.buffer_updates
        ]
        self.instructions.extend(self.transfers.issue(updates))
        for event in updates:
            for number, assembly in enumerate(event.assemblies):
                if assembly.device != self.rank or not assembly.pieces:
                    continue
                read = self.slots.reads[event.name, assembly.region]
                if assembly.direct:
                    slot = self.slots.piece_slot(event.value, assembly.pieces[0])
                else:
                    slot = self.slots.new_slot(shape(assembly.region))
                    local = LocalAssembly(event.value, number, assembly, slot)
                    self.instructions.append(self.transfers.receive(local, event.name, differentiable=False))
                self.instructions.append(Renew(slot, read.slot))
