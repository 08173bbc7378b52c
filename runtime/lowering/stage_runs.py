"""The instructions of a rank in runs, one for each phase of each stage, and those of a step.

They are lowered once, as of one micro-batch. A step has each run as often as there are micro-batches, in the order of
the plan's units; what synchronizes gradients stands in the last micro-batch's backwards, or in its weight parts where
there are any, but for what is summed in every micro-batch. What renews buffers comes after all backwards.

Of schedule actors a rank starts what arrives from other stages as soon as its credits allow, and the order in the
program is the one that uses all of them; `runtime.execution.acting` finds another as the step goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from graph.plan import Plan
from graph.schedule import GRADIENT_REGISTERS, Phase, Schedule, group_orders
from runtime.instructions.base import Instruction
from runtime.instructions.compute import EnterMicroBatch, GiveRenewals, Recompute, Release
from runtime.instructions.gradient_synchronization import FillBucket, StartAllReduce
from runtime.instructions.sharded_weights import StartReduceScatter


@dataclass(frozen=True, slots=True)
class _Run:
    """A phase of a stage in one micro-batch, or what comes after all backwards (phase None)."""

    phase: Phase | None
    stage: int
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ActorRuns:
    """Where in the program of a rank its stage's work on each micro-batch is.

    arriving, forward, returning, backward: by micro-batch, the start of what arrives for its forward, the forward, the
    start of what arrives for its backward, the backward. rest: what comes after all of them.
    ranks: of the stage, ascending. credits: micro-batches that the stage may have in flight.
    """

    ranks: tuple[int, ...]
    credits: int
    arriving: tuple[slice, ...]
    forward: tuple[slice, ...]
    returning: tuple[slice, ...]
    backward: tuple[slice, ...]
    rest: slice


class StageRuns:
    """The runs of one rank, in the order of a single micro-batch."""

    def __init__(self, plan: Plan, rank: int, *, acts: bool) -> None:
        """Prepare for the instructions of `rank`; `acts`: whether it can tell what has arrived, as CPUs can."""
        self._plan = plan
        self._acts = acts and plan.strategy.micro_batches.schedule is Schedule.ACTORS
        self._rank = rank
        self._firsts = [stage.first for stage in plan.stages]
        self._runs: list[_Run] = []
        # Weight parts, by stage: they are lowered beside the backwards, and come after them.
        self._weights: dict[int, _Run] = {}

    @property
    def last(self) -> list[Instruction]:
        """The instructions of the run that was begun last, to add to."""
        return self._runs[-1].instructions

    @cached_property
    def _by_unit(self) -> dict[tuple[Phase | None, int], list[Instruction]]:
        """The instructions of each run; all must have been added."""
        return {(run.phase, run.stage): run.instructions for run in self._runs}

    def enter(self, phase: Phase, operator: int) -> None:
        """Begin the run that an operator's forward or backward is in, where it has not begun."""
        stage = self._stage_of(operator)
        if not self._runs or (self._runs[-1].phase, self._runs[-1].stage) != (phase, stage):
            self._runs.append(_Run(phase, stage))

    def _stage_of(self, operator: int) -> int:
        return max(bisect_right(self._firsts, operator) - 1, 0)

    def of_weights(self, operator: int) -> list[Instruction]:
        """Return the instructions, to add to, that an operator's weights are differentiated and synchronized in.

        Where the schedule has no weight parts, these are of the run that was begun last.
        """
        if not self._plan.strategy.micro_batches.splits_backward:
            return self.last
        stage = self._stage_of(operator)
        return self._weights.setdefault(stage, _Run(Phase.WEIGHT, stage)).instructions

    def enter_renewals(self) -> None:
        """Begin the run after all backwards."""
        self._runs.extend(self._weights.values())
        self._runs.append(_Run(None, 0))

    def add_releases(self, kept: set[int]) -> None:
        """Add, after each instruction, the release of tensors unused until recomputation, but of the slots `kept`."""
        needed: set[int] = set()
        for run in reversed(self._runs):
            result: list[Instruction] = []
            for instruction in reversed(run.instructions):
                released = tuple(
                    slot
                    for slot in dict.fromkeys(instruction.touches)
                    if slot not in needed and slot not in kept
                )
                if released:
                    result.append(Release(released))
                result.append(instruction)
                needed.update(instruction.touches)
                if isinstance(instruction, Recompute):
                    needed.difference_update(instruction.outputs)
            run.instructions[:] = reversed(result)

    def of_step(self, finished: Sequence[Instruction]) -> tuple[tuple[Instruction, ...], ActorRuns | None]:
        """Return the instructions of a whole step and, of schedule actors, where in them the rank's work is.

        finished: the waits for the synchronization of gradients.
        """
        micro_batches = self._plan.strategy.micro_batches
        if micro_batches.count == 1:
            return (*chain.from_iterable(run.instructions for run in self._runs), *finished), None
        own = [stage for stage, item in enumerate(self._plan.stages) if self._rank in item.devices]
        after = [*self._renewals(), *finished]
        if self._acts and len(self._plan.stages) > 1 and own:
            return self._of_actors(own[0], after)
        return (*self._in_common_order(own), *after), None

    def _in_common_order(self, own: Sequence[int]) -> Iterator[Instruction]:
        """Yield the instructions of all units; `own`: the stages that the rank is in."""
        # Micro-batches whose backward was the last one here, and the one before: their gradients are on their way.
        on_their_way: list[int] = []
        for phase, stage, number in self._plan.units:
            sent: list[int] = []
            if phase is Phase.BACKWARD and stage in own:
                # What this one has sent forward was there before its gradient comes back.
                sent = [number, *on_their_way[:-1]]
                on_their_way = [*on_their_way[-1:], number]
            yield from self._of_unit(phase, stage, number, sent)

    def _of_unit(
        self, phase: Phase, stage: int, number: int, sent: Sequence[int] = ()
    ) -> Iterator[Instruction]:
        own = self._by_unit.get((phase, stage), [])
        if own:
            yield EnterMicroBatch(number, tuple(dict.fromkeys(sent)))
        for instruction in own:
            if number == self._plan.strategy.micro_batches.count - 1 or not _is_of_last(instruction):
                yield instruction

    def _renewals(self) -> Iterator[Instruction]:
        for number in range(self._plan.strategy.micro_batches.count):
            yield EnterMicroBatch(number)
            yield from self._by_unit[None, 0]
            yield GiveRenewals()

    def _of_actors(self, own: int, after: Sequence[Instruction]) -> tuple[tuple[Instruction, ...], ActorRuns]:
        """Return the instructions of a rank of the stage `own`, and where they are."""
        stages, micro_batches = self._plan.stages, self._plan.strategy.micro_batches
        count, registers = micro_batches.count, micro_batches.credits_of(len(stages))[own]
        program: list[Instruction] = []
        places: dict[str, list[slice]] = {
            name: [] for name in ("arriving", "forward", "returning", "backward")
        }
        # By stage, sums over several stages: for when the rank has done its own, in one order on all ranks.
        common: dict[int, list[Instruction]] = {}

        def add(name: str, phase: Phase, of: Iterable[int], sent: Sequence[int] = ()) -> None:
            """Add what the rank does for the next micro-batch in the stages `of`."""
            first = len(program)
            for stage in of:
                for item in self._of_unit(phase, stage, len(places[name]), sent):
                    is_common = not stages[own].devices.issuperset(_ranks_of_sum(item))
                    (common.setdefault(stage, []) if is_common else program).append(item)
            places[name].append(slice(first, len(program)))

        for phase, _, number in group_orders(micro_batches, len(stages))[own]:
            ended, begun = len(places["backward"]), len(places["forward"])
            while len(places["arriving"]) < min(count, ended + registers):
                add("arriving", Phase.FORWARD, range(own))
            while len(places["returning"]) < min(begun, ended + GRADIENT_REGISTERS):
                add("returning", Phase.BACKWARD, range(len(stages) - 1, own, -1))
            if phase is Phase.FORWARD:
                add("forward", phase, [own])
            else:
                sent = (number, number - GRADIENT_REGISTERS) if number >= GRADIENT_REGISTERS else (number,)
                add("backward", phase, [own], sent)
        for stage in range(own):
            common[stage] = list(self._of_unit(Phase.BACKWARD, stage, count - 1))
        later = [item for stage in sorted(common, reverse=True) for item in common[stage]]
        rest = slice(len(program), len(program) + len(later) + len(after))
        runs = {name: tuple(of_name) for name, of_name in places.items()}
        ranks = tuple(sorted(stages[own].devices))
        return (*program, *later, *after), ActorRuns(ranks, registers, rest=rest, **runs)


def _is_of_last(instruction: Instruction) -> bool:
    """Return whether an instruction stands in the last micro-batch alone: it sums the gradients of all of them."""
    if isinstance(instruction, FillBucket | StartAllReduce):
        return not instruction.bucket.each
    return isinstance(instruction, StartReduceScatter) and not instruction.group.sums_each


def _ranks_of_sum(instruction: Instruction) -> tuple[int, ...]:
    """Return the ranks of a sum of weights' gradients that an instruction prepares or starts; none of another one."""
    if isinstance(instruction, FillBucket | StartAllReduce):
        return instruction.bucket.ranks
    return instruction.group.ranks if isinstance(instruction, StartReduceScatter) else ()
