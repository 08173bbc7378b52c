"""The instructions of a rank in runs, one for each phase of each stage, and those of a step.

They are lowered once, as of one micro-batch. A step has each run as often as there are micro-batches, in the order of
the plan's units; what synchronizes gradients stands in the last micro-batch's backwards alone, or in its weight parts
where there are any, and what renews buffers comes after all backwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graph.plan import Plan
from graph.schedule import Phase
from runtime.instructions.base import Instruction
from runtime.instructions.compute import EnterMicroBatch, GiveRenewals, Recompute, Release
from runtime.instructions.gradient_synchronization import FillBucket, StartAllReduce
from runtime.instructions.sharded_weights import StartReduceScatter

_OF_LAST_MICRO_BATCH = (FillBucket, StartAllReduce, StartReduceScatter)


@dataclass(frozen=True, slots=True)
class _Run:
    """A phase of a stage in one micro-batch, or what comes after all backwards (phase None)."""

    phase: Phase | None
    stage: int
    instructions: list[Instruction] = field(default_factory=list)


class StageRuns:
    """The runs of one rank, in the order of a single micro-batch."""

    def __init__(self, plan: Plan, rank: int) -> None:
        """Prepare for the instructions of `rank`."""
        self._plan = plan
        self._rank = rank
        self._firsts = [stage.first for stage in plan.stages]
        self._runs: list[_Run] = []
        # Weight parts, by stage: they are lowered beside the backwards, and come after them.
        self._weights: dict[int, _Run] = {}

    @property
    def last(self) -> list[Instruction]:
        """The instructions of the run that was begun last, to add to."""
        return self._runs[-1].instructions

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

    def of_step(self, finished: Sequence[Instruction]) -> Iterator[Instruction]:
        """Yield the instructions of a whole step; `finished`: the waits for the synchronization of gradients."""
        count = self._plan.strategy.micro_batches.count
        if count == 1:
            for run in self._runs:
                yield from run.instructions
            yield from finished
            return
        runs = {(run.phase, run.stage): run.instructions for run in self._runs}
        # Micro-batches whose backward was the last one here, and the one before: their gradients are on their way.
        on_their_way: list[int] = []
        for phase, stage, number in self._plan.units:
            own = runs.get((phase, stage), [])
            sent: list[int] = []
            if phase is Phase.BACKWARD and self._rank in self._plan.stages[stage].devices:
                # What this one has sent forward was there before its gradient comes back.
                sent = [number, *on_their_way[:-1]]
                on_their_way = [*on_their_way[-1:], number]
            if own:
                yield EnterMicroBatch(number, tuple(dict.fromkeys(sent)))
            for instruction in own:
                if number == count - 1 or not isinstance(instruction, _OF_LAST_MICRO_BATCH):
                    yield instruction
        for number in range(count):
            yield EnterMicroBatch(number)
            yield from runs[None, 0]
            yield GiveRenewals()
        yield from finished
