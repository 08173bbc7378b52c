"""Actors: who may act, and when, where every output has a fixed number of registers.

An actor repeats one act. It may act when it is readable, each input has what one act reads, and writable, its output
has a free register; it takes that register when it begins. A register is free again when every consumer has ended the
act that reads it. So the number of registers of an output, its credits, bounds memory, and a slow consumer holds its
producers back. Actors of one resource act one at a time, of several that may act the one that is first in the graph.

    runs = act(actors, acts=10)

What must hold before they start (`check_actors`): no directed cycle without a first token, for nobody in it could
begin, and no output with fewer registers than one act of a consumer holds at once.

Source: OneFlow (arXiv:2110.15032), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from graph.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Input:
    """What an actor reads of another one's output.

    producer: its number. holds: registers that one act reads, and frees at its end. tokens: registers that are full
    before anybody has acted. latency: time from the end of the producer's act until the register can be read.
    """

    producer: int
    holds: int = 1
    tokens: int = 0
    latency: int = 0


@dataclass(frozen=True, slots=True)
class Actor:
    """What acts: for how long, on which resource, with how many registers for its output."""

    duration: int
    registers: int
    resource: int
    inputs: tuple[Input, ...] = ()


class Act(NamedTuple):
    """One act: when it ends and begins, which actor's, and its number from 0."""

    end: int
    start: int
    actor: int
    number: int


def check_actors(actors: Sequence[Actor]) -> None:
    """Check that actors can go on for ever.

    Raises:
        StrategyError: an output has fewer registers than an act of a consumer holds; a cycle has no first token.
    """
    waited_for: list[set[int]] = [set() for _ in actors]
    for number, actor in enumerate(actors):
        if actor.registers < 1:
            raise StrategyError(
                f"actor {number}: has {actor.registers} registers, must have at least 1; give it more"
            )
        for item in actor.inputs:
            registers = actors[item.producer].registers
            if max(item.holds, item.tokens) > registers:
                raise StrategyError(
                    f"actor {number}: holds {max(item.holds, item.tokens)} registers of actor {item.producer} at once, "
                    f"which has {registers}, must have as many; give it more"
                )
            if item.tokens < item.holds:
                waited_for[number].add(item.producer)
    begun: set[int] = set()
    while able := [n for n in range(len(actors)) if n not in begun and waited_for[n] <= begun]:
        begun.update(able)
    if len(begun) < len(actors):
        stuck = ", ".join(str(number) for number in range(len(actors)) if number not in begun)
        raise StrategyError(
            f"actors {stuck}: wait for each other in a cycle without a first token, must have one; give an input tokens"
        )


def act(actors: Sequence[Actor], acts: int) -> list[Act]:
    """Return the acts of all actors in the order of their ends, of equal ends in that of the actors.

    Each actor acts `acts` times, one of which an act holds several registers accordingly less often.

    Raises:
        StrategyError: see `check_actors`; or registers fill a cycle, so that nobody can go on.
    """
    check_actors(actors)
    return _Course(actors, acts).run()


class _Course:
    """The state of actors at a time."""

    def __init__(self, actors: Sequence[Actor], acts: int) -> None:
        self._actors = actors
        self._most = [acts] * len(actors)
        # By actor: its readers with what they read; the ends of its acts begun; how many of them have ended.
        self._readers: list[list[tuple[int, Input]]] = [[] for _ in actors]
        self._ends: list[list[int]] = [[] for _ in actors]
        self._ended = [0] * len(actors)
        self._of_resource: dict[int, list[int]] = {}
        for number, actor in enumerate(actors):
            self._of_resource.setdefault(actor.resource, []).append(number)
            for item in actor.inputs:
                self._readers[item.producer].append((number, item))
        before: list[int] = []
        while before != self._most:
            before = list(self._most)
            for number, actor in enumerate(actors):
                for item in actor.inputs:
                    able = (self._most[item.producer] + item.tokens) // item.holds
                    self._most[number] = min(self._most[number], able)
        self._busy: set[int] = set()
        # Pairs of a time and an actor: that ends an act, or -1 - actor: that may have something to read.
        self._events: list[tuple[int, int]] = []

    def run(self) -> list[Act]:
        result: list[Act] = []
        now, changed = 0, set(self._of_resource)
        while True:
            for resource in sorted(changed - self._busy):
                self._begin(resource, now, result)
            if not self._events:
                break
            now, changed = self._events[0][0], set()
            while self._events and self._events[0][0] == now:
                self._take(heappop(self._events)[1], now, changed)
        if any(len(ends) < most for ends, most in zip(self._ends, self._most, strict=True)):
            raise StrategyError("actors: no one can act, at least one must; give them more registers")
        return sorted(result)

    def _begin(self, resource: int, now: int, result: list[Act]) -> None:
        for number in self._of_resource[resource]:
            if self._may_act(number, now):
                end = now + self._actors[number].duration
                result.append(Act(end, now, number, len(self._ends[number])))
                self._ends[number].append(end)
                self._busy.add(resource)
                heappush(self._events, (end, number))
                return

    def _may_act(self, number: int, now: int) -> bool:
        actor, done = self._actors[number], len(self._ends[number])
        if done == self._most[number]:
            return False
        for item in actor.inputs:
            needed, ends = (done + 1) * item.holds - item.tokens, self._ends[item.producer]
            if needed > len(ends) or (needed > 0 and ends[needed - 1] + item.latency > now):
                return False
        return all(
            done + item.tokens - self._ended[reader] * item.holds < actor.registers
            for reader, item in self._readers[number]
        )

    def _take(self, event: int, now: int, changed: set[int]) -> None:
        """Take note of the end of an act, or of something to read; add the resources that may have work by it."""
        if event < 0:
            changed.add(self._actors[-1 - event].resource)
            return
        actor = self._actors[event]
        self._ended[event] += 1
        self._busy.discard(actor.resource)
        changed.add(actor.resource)
        changed.update(self._actors[item.producer].resource for item in actor.inputs)
        for reader, item in self._readers[event]:
            if item.latency:
                heappush(self._events, (now + item.latency, -1 - reader))
            else:
                changed.add(self._actors[reader].resource)
