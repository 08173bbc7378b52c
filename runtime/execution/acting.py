"""Schedule actors on a rank: the stage does what is ready, as long as it has credits.

A stage has as many registers as credits. It takes one for a micro-batch when it makes room for what arrives for it,
and frees it at the end of the micro-batch's backward; so a stage before it that is faster is held back. Of what is
ready a backward goes first. Forwards are in the order of micro-batches, and so are backwards: what two ranks send each
other is always in that order, whatever the times.

Where a stage is on several ranks its first one chooses, by what has arrived there, and tells the others: they do all
in one order, as their collectives need it. None of this waits in a circle: of all that has been chosen so far, whatever
an act needs comes from acts that were chosen before it.

Source: OneFlow (arXiv:2110.15032), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

import torch

from graph.schedule import GRADIENT_REGISTERS
from runtime.communication import World, naming_lost_peers
from runtime.instructions.base import Instruction
from runtime.instructions.state import MicroBatchState, StepState
from runtime.lowering.stage_runs import ActorRuns


def acting(
    runs: ActorRuns, instructions: Sequence[Instruction], state: StepState, device: torch.device
) -> Iterator[Instruction]:
    """Yield a step's instructions, each to be run before the next is asked for, in the order in which they can go on.

    Raises:
        PeerFailure: another rank is gone or silent.
    """
    count, begun, ended, awaited, returned = len(runs.forward), 0, 0, 0, 0
    chooser = _Chooser(runs, state.world, device)
    while ended < count:
        while awaited < min(count, ended + runs.credits):
            yield from instructions[runs.arriving[awaited]]
            chooser.forwards.watch(state.micro_batches[awaited])
            awaited += 1
        while returned < min(begun, ended + GRADIENT_REGISTERS):
            yield from instructions[runs.returning[returned]]
            chooser.backwards.watch(state.micro_batches[returned])
            returned += 1
        if chooser.backward_is_next(begun, ended):
            yield from instructions[runs.backward[ended]]
            ended += 1
        else:
            yield from instructions[runs.forward[begun]]
            begun += 1
    chooser.end()
    yield from instructions[runs.rest]


class _Chooser:
    """What a rank is to do next: by what has arrived on its stage's first rank, where it is this one."""

    def __init__(self, runs: ActorRuns, world: World, device: torch.device) -> None:
        self._runs = runs
        self._world = world
        self._leads = world.rank == runs.ranks[0]
        self._alone = len(runs.ranks) == 1
        # Of one that leads: the work and the tensor of what the others are told, which must stay alive until then.
        self._told: tuple[Any, torch.Tensor] | None = None
        self._device = device
        changed = Condition()
        self.forwards, self.backwards = (
            _Arrivals(world.rank, changed, watches=self._leads) for _ in range(2)
        )

    def backward_is_next(self, begun: int, ended: int) -> bool:
        """Wait until one of the two is ready; return which, the same on all ranks of the stage."""
        if not self._leads:
            choice = torch.empty(1, dtype=torch.int64, device=self._device)
            self._world.wait(self._tell(choice))
            return bool(choice)
        result = self._ready(begun, ended)
        if not self._alone:
            self._wait_for_told()
            choice = torch.full((1,), int(result), device=self._device)
            self._told = self._tell(choice), choice
        return result

    def _ready(self, begun: int, ended: int) -> bool:
        forward_is_left = begun < min(len(self._runs.forward), ended + self._runs.credits)
        changed = self.forwards.changed
        with changed:
            while True:
                if ended < begun and self.backwards.have_come(ended):
                    return True
                if forward_is_left and self.forwards.have_come(begun):
                    return False
                changed.wait()

    def _tell(self, choice: torch.Tensor) -> Any:
        return self._world.broadcast(choice, self._runs.ranks[0], self._runs.ranks)

    def _wait_for_told(self) -> None:
        if self._told is not None:
            self._world.wait(self._told[0])

    def end(self) -> None:
        """Wait for what is still under way of the choosing itself."""
        self._wait_for_told()
        self.forwards.end()
        self.backwards.end()


@dataclass(slots=True)
class _WatchedWork:
    """A work that another thread waits for; it can be waited for once only."""

    arrivals: _Arrivals
    number: int

    def wait(self) -> None:
        """Wait until that thread has."""
        with self.arrivals.changed:
            while not self.arrivals.have_come(self.number):
                self.arrivals.changed.wait()


class _Arrivals:
    """What arrives for one micro-batch after the other: a thread waits for it, since gloo's works cannot be polled."""

    def __init__(self, rank: int, changed: Condition, *, watches: bool) -> None:
        self.changed = changed
        self._rank = rank
        self._watches = watches
        self._watched = 0
        self._come = 0
        self._failure: Exception | None = None
        self._queue: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def watch(self, state: MicroBatchState) -> None:
        """Wait from now on, in the thread, for what is under way to the next micro-batch."""
        if not self._watches:
            return
        number, works = self._watched, []
        self._watched += 1
        for slot, (work, tensor) in state.pending_receives.items():
            if not isinstance(work, _WatchedWork):
                works.append(work)
                state.pending_receives[slot] = _WatchedWork(self, number), tensor
        if self._thread is None and not works:
            # The first stage waits for no forward, nor the last one for a backward.
            self._come += 1
            return
        if self._thread is None:
            self._thread = Thread(target=self._wait, daemon=True)
            self._thread.start()
        self._queue.put(works)

    def have_come(self, number: int) -> bool:
        """Return whether all for a micro-batch is here.

        Raises:
            PeerFailure: something will not come.
        """
        if self._failure is not None:
            raise self._failure
        return self._come > number

    def _wait(self) -> None:
        while (works := self._queue.get()) is not None:
            failure = None
            try:
                with naming_lost_peers(self._rank):
                    while works:
                        # None is kept here: the last to let go of a tensor is the thread that reads it.
                        works.pop(0).wait()
            except Exception as error:  # it is raised in the thread that waits
                failure = error
            with self.changed:
                self._failure = self._failure or failure
                self._come += 1
                self.changed.notify_all()

    def end(self) -> None:
        """Let the thread end, when all has come."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
