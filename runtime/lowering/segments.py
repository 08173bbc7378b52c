"""The segments of a rank's backward, and the leaves of autograd between them.

A segment is a run of the rank's operators, in topological order, that autograd differentiates as a unit. The rank
cuts before operator o wherever it takes part in a message or a synchronization that the plan issues after backward
of o: what it sends is then complete, and what it receives comes before the segments that need it. It cuts after an
operator for whose output a gradient comes from elsewhere: the backwards of the operators behind it do not wait for that
gradient. It also cuts before and after a group of operators that is recomputed in the backward, so that no segment is
partly kept, and between pipeline stages, whose backwards are apart. An operator whose backward has a weight part apart
is a segment by itself. The forward needs no cuts; its messages are issued
between the operators.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from graph.buckets import gathers_begun
from graph.plan import Plan
from runtime.lowering.tensor_slots import TensorSlots


@dataclass(frozen=True, slots=True)
class Node:
    """A task or a local assembly in the forward of the rank.

    `wanted`: for each of `inputs`, whether a gradient flows back through it; all False in an inactive node.
    """

    operator: int
    inputs: tuple[int, ...]
    wanted: tuple[bool, ...]
    outputs: tuple[int, ...]

    @property
    def active(self) -> bool:
        """Whether autograd records it."""
        return any(self.wanted)


@dataclass(slots=True)
class Segment:
    """One unit of the backward: its earliest operator, the tensors that it is differentiated from, and to.

    `inputs` are leaves; each maps to the slot to whose gradient it adds.
    """

    first: int
    outputs: list[int] = field(default_factory=list)
    inputs: dict[int, int] = field(default_factory=dict)


def cuts(plan: Plan, slots: TensorSlots) -> tuple[int, ...]:
    """Return the operators before which the rank cuts, ascending."""
    operators: set[int] = set()
    for operator, collectives in plan.gradient_collectives.items():
        for back in collectives:
            if slots.rank in plan.collectives[back.value][back.number].devices:
                operators.update((operator, plan.graph.producer[back.value][0] + 1))
    for operator, transfers in plan.gradient_transfers.items():
        for transfer in transfers:
            assembly = plan.exchanges[transfer.value][transfer.assembly]
            if any(slots.messages((assembly,))):
                operators.add(operator)
            if any(piece.source_device == slots.rank for piece in assembly.remote_pieces):
                operators.add(plan.graph.producer[transfer.value][0] + 1)
    operators.update(bucket.after for bucket in plan.buckets if slots.rank in bucket.devices)
    # Gathered weights are there from their last reader's backward on, not before.
    for operator in plan.backward_gathers:
        begun = [gather for _, gather in gathers_begun(plan.backward_gathers, operator, plan.stage_firsts)]
        if any(slots.rank in gather.devices for gather in (*begun, *plan.backward_gathers[operator])):
            operators.add(operator + 1)
    for group in plan.strategy.recomputation:
        operators.update((group.first, group.last + 1))
    for operator in plan.weight_parts:
        # Alone, its weight part goes through no other operator.
        if slots.tasks[operator]:
            operators.update((operator, operator + 1))
    if plan.strategy.micro_batches.count > 1:
        operators.update(stage.first for stage in plan.stages)
    return tuple(sorted(operators))


class Segments:
    """The segments of one rank and the leaves between them.

    leaves: for each tensor that a later segment differentiates through, the slot of the leaf that stands for it.
    """

    def __init__(self, cut_before: tuple[int, ...]) -> None:
        """Prepare segments for the given cuts."""
        self._cuts = cut_before
        self._made_in: dict[int, int] = {}
        self.by_number: dict[int, Segment] = {}
        self.leaves: dict[int, int] = {}

    def number_of(self, operator: int) -> int:
        """Return the number of the segment that an operator belongs to."""
        return bisect_right(self._cuts, operator)

    def made_in(self, slot: int) -> int | None:
        """Return the segment in which a tensor was recorded, if it was."""
        return self._made_in.get(slot)

    def connect(
        self, nodes: Iterable[Node], targets: Mapping[int, int], slots: TensorSlots
    ) -> dict[Node, tuple[int, ...]]:
        """Make the leaves of every segment; return the slots that each node reads.

        Args:
            nodes: in execution order.
            targets: for each slot that is a leaf by itself (reads of weights, received assemblies), the slot to
                whose gradient it adds.
            slots: gets a new slot for every leaf.
        """
        result = {}
        for node in nodes:
            number = self.number_of(node.operator)
            segment = self.by_number.setdefault(number, Segment(node.operator))
            result[node] = tuple(
                self._connect(slot, segment, number, targets, slots) if wanted else slot
                for slot, wanted in zip(node.inputs, node.wanted, strict=True)
            )
            if node.active:
                self._made_in.update(dict.fromkeys(node.outputs, number))
        return result

    def _connect(
        self, slot: int, segment: Segment, number: int, targets: Mapping[int, int], slots: TensorSlots
    ) -> int:
        if slot in targets:
            segment.inputs[slot] = targets[slot]
            return slot
        maker = self._made_in.get(slot)
        if maker is None or maker == number:
            return slot
        leaf = self.leaves.get(slot)
        if leaf is None:
            leaf = self.leaves[slot] = slots.new_slot(slots.shapes[slot])
        segment.inputs[leaf] = slot
        self.expect_gradient(slot)
        return leaf

    def expect_gradient(self, slot: int) -> None:
        """Note that a gradient of `slot` comes from outside its segment."""
        maker = self._made_in.get(slot)
        if maker is not None and slot not in self.by_number[maker].outputs:
            self.by_number[maker].outputs.append(slot)
