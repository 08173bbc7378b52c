"""Chains walked by several processes at once, each on a core of its own.

Each process takes every n-th chain and walks its chains in turns. One that has none left gets a chain of the process
that has most to do, so that all end at about the same time. This process walks none: it hands on what the chains
record, and where costs may be measured it finds out those that the chains meet for the first time, each once.

A chain makes the same proposals wherever it is walked, so the number of processes, and which chain goes where and
when, changes nothing but the order in which the proposals of different chains are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from graph.errors import RuntimeFailure
from search.algorithms.chain import Chain
from search.algorithms.chain_worker import (
    AskedCosts,
    AskedUpdate,
    End,
    Ended,
    Handed,
    HandOver,
    Idle,
    Moved,
    Told,
    Walk,
    Worker,
    Written,
    part_of,
)
from search.algorithms.proposal_log import (
    ChainCheckpoint,
    ProposalBatch,
    Recorder,
    ResumedChain,
    SharedObserver,
    undisturbed,
)
from search.outcome import Outcome
from search.parallel.fork import Failed, Forked, fork

# A chain goes to another process only where what it leaves behind takes longer than this.
MOVING_PAYS_S = 0.2
# How long a process that is told to end may take for the proposal that it is at.
PATIENCE_S = 30.0


@dataclass
class Member:
    """A process, as it is known here. asked: for a chain, and has not answered; waits: for an answer."""

    number: int
    forked: Forked
    told: Told
    idle: bool = False
    asked: bool = False
    waits: bool = False
    ended: bool = False


class Team:
    """The processes that walk the chains of one search."""

    def __init__(self, walk: Walk, chains: Sequence[Chain], recorder: Recorder, count: int) -> None:
        self._walk = walk
        self._chains = {chain.number: chain for chain in chains}
        self._count = count
        self._recorder = recorder
        self._made = recorder.proposals, recorder.accepted
        self._checkpoints = {chain.number: chain.checkpoint() for chain in chains}
        self._asks = True
        self._best = min(chain.best.outcome for chain in chains)
        self._members: list[Member] = []
        # Chains that were handed over, and that nobody has yet.
        self._homeless: list[Moved] = []

    def run(self) -> None:
        """Walk all chains to their ends or the deadline; they are then as if they had been walked here.

        Raises:
            RuntimeFailure: a process was ended by somebody else.
            UsageError: one cannot be started.
            SoapstoneError: a local call has no cost.
        """
        try:
            self._start()
            while not all(member.idle for member in self._members) or self._homeless:
                for member in self._heard_of():
                    self._take_from(member)
                self._balance()
        except BaseException:
            # Whatever it is, what the chains did until now is recorded.
            with undisturbed(), suppress(Exception):
                self._end()
            raise
        else:
            with undisturbed():
                self._end()
        finally:
            for member in self._members:
                if not member.ended:
                    member.forked.kill()
                    member.forked.ended()
                member.forked.connection.close()

    def _start(self) -> None:
        # Sources of costs that are measured are asked here, and only while nobody walks.
        self._asks = not self._walk.builder.costs.copies()
        chains = list(self._chains.values())
        unfinished = [chain for chain in chains if not chain.done]
        for number in range(self._count):
            mine = unfinished[number :: self._count]
            forked = fork(partial(self._serve, number, mine))
            self._members.append(Member(number, forked, Told(0, 0, None, float("inf"), len(mine))))

    def _serve(self, number: int, chains: Sequence[Chain], connection: Connection) -> None:
        """Be a process of the team; called in its copy."""
        part = part_of(self._walk.observer, number, self._count)
        Worker(self._walk, chains, connection, part, asks=self._asks).run()

    def _heard_of(self) -> list[Member]:
        by_connection = {member.forked.connection: member for member in self._members if not member.ended}
        return [by_connection[ready] for ready in wait(list(by_connection)) if isinstance(ready, Connection)]

    def _take_from(self, member: Member) -> None:
        """Take what a process says; an interrupt waits until it is read and handed on."""
        with undisturbed():
            said = self._read(member)
            if isinstance(said, Written):
                self._record(said)
            elif isinstance(said, Told):
                member.told = said
                self._tell()
            elif isinstance(said, Idle):
                member.idle = True
            elif isinstance(said, Handed):
                member.asked = False
                self._take_handed(said)
            elif isinstance(said, Ended):
                self._take_chains(member, said)
            elif isinstance(said, Failed):
                raise said.error from RuntimeError(said.where)
            else:
                member.waits = True
        if member.waits:
            # May take as long as a measurement, and may be interrupted.
            answer = self._answer(member, said)
            with undisturbed():
                member.waits = False
                self._say(member, answer)

    def _read(self, member: Member) -> Any:
        try:
            return member.forked.connection.recv()
        except (EOFError, OSError):
            raise self._lost(member) from None

    def _say(self, member: Member, what: object) -> None:
        try:
            member.forked.connection.send(what)
        except OSError:
            raise self._lost(member) from None

    def _lost(self, member: Member) -> RuntimeFailure:
        member.ended = True
        member.forked.kill()  # it closed its pipe: it ends
        how = member.forked.ended()
        return RuntimeFailure(
            f"search: worker {member.number} of {self._count} (process {member.forked.process}) {how}, must walk until "
            "the end; what was recorded is kept, go on by --resume, or with fewer --workers"
        )

    def _answer(self, member: Member, asked: Any) -> object:
        table = self._walk.builder.costs
        with self._standing_still(member):
            if isinstance(asked, AskedCosts):
                return table.costs(asked.calls, asked.kind_name)
            if isinstance(asked, AskedUpdate):
                return table.update_s(asked.optimizer, asked.dtype, asked.kind_name)
        raise TypeError(f"{type(asked).__name__} is no question")

    @contextmanager
    def _standing_still(self, asking: Member) -> Iterator[None]:
        """Let nobody walk while something is measured: it would take longer."""
        with ExitStack() as stack:
            for member in self._members:
                if member is not asking and not member.ended:
                    stack.enter_context(member.forked.stopped())
            yield

    def _record(self, said: Written) -> None:
        """Hand on proposals; the checkpoint is of all chains, each after the last of its proposals that is recorded."""
        checkpoint: tuple[ChainCheckpoint, ...] | None = None
        if said.checkpoint is not None:
            self._checkpoints |= {one.number: one for one in said.checkpoint}
            checkpoint = tuple(self._checkpoints[number] for number in sorted(self._checkpoints))
        observer = self._walk.observer
        if isinstance(observer, SharedObserver):
            observer.on_written(said.written, checkpoint)
        elif observer is not None:
            batch: ProposalBatch = said.written
            observer.on_proposals(replace(batch, checkpoint=checkpoint))

    def _tell(self) -> None:
        told = [member.told for member in self._members]
        best: list[Outcome] = [one.best for one in told if one.best is not None]
        self._best = min([self._best, *best])
        self._recorder.proposals = self._made[0] + sum(one.proposals for one in told)
        self._recorder.accepted = self._made[1] + sum(one.accepted for one in told)
        self._recorder.progress(self._best.seconds)

    def _balance(self) -> None:
        """Give whom nothing is left a chain of those who have most to do."""
        idle = [member for member in self._members if member.idle]
        with undisturbed():
            while idle and self._homeless:
                member = idle.pop()
                member.idle = False
                self._say(member, self._homeless.pop())
            wanted = len(idle) - sum(member.asked for member in self._members)
            busy = [
                member
                for member in self._members
                if not (member.idle or member.asked)
                and member.told.unfinished > 1
                and MOVING_PAYS_S < member.told.left_s < float("inf")
            ]
            for member in sorted(busy, key=lambda one: one.told.left_s, reverse=True)[: max(0, wanted)]:
                member.asked = True
                self._say(member, HandOver())

    def _end(self) -> None:
        """Tell all to end, and take what they say until they have; those who do not in time are ended.

        Raises:
            RuntimeFailure: one of them was ended by somebody else, or does not end.
        """
        lost: list[RuntimeFailure] = []
        until = time.monotonic() + PATIENCE_S
        for member in self._members:
            with _gathering(lost):
                if not member.ended:
                    self._say(member, End())
        while running := [member for member in self._members if not member.ended]:
            connections = {member.forked.connection: member for member in running}
            ready = wait(list(connections), max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeFailure(
                    f"search: worker {running[0].number} of {self._count} is told to end and has not for "
                    f"{PATIENCE_S:g} s, must have; go on by --resume"
                )
            for one in ready:
                if isinstance(one, Connection):
                    with _gathering(lost):
                        self._take_last(connections[one])
        if lost:
            raise lost[0]

    def _take_last(self, member: Member) -> None:
        said = self._read(member)
        if isinstance(said, Written):
            self._record(said)
        elif isinstance(said, Told):
            member.told = said
            self._tell()
        elif isinstance(said, Handed):
            self._take_handed(said)
        elif isinstance(said, Ended):
            self._take_chains(member, said)
        elif isinstance(said, Failed):
            raise said.error from RuntimeError(said.where)

    def _take_handed(self, said: Handed) -> None:
        if said.moved is not None:
            self._homeless.append(said.moved)
            # Whoever gets it may be told to end before it has begun.
            self._follow(said.moved.chain)

    def _take_chains(self, member: Member, said: Ended) -> None:
        member.ended = True
        member.forked.ended()
        self._walk.builder.costs.take(said.met)
        for one in said.chains:
            self._follow(one)

    def _follow(self, walked: ResumedChain) -> None:
        self._chains[walked.checkpoint.number].follow(walked)


@contextmanager
def _gathering(lost: list[RuntimeFailure]) -> Iterator[None]:
    """Keep the loss of one process until all others have ended."""
    try:
        yield
    except RuntimeFailure as failure:
        lost.append(failure)


def walk_apart(walk: Walk, chains: Sequence[Chain], recorder: Recorder, workers: int) -> None:
    """Let so many processes walk the chains to their ends, see `Team`."""
    recorder.flush_whole()
    Team(walk, chains, recorder, workers).run()
