"""A process that walks some of a search's chains, and what it and the search say to each other.

It begins as a copy of the search (`search.parallel.fork`), so that it has its chains already. It tells of every
proposal in batches, asks for the costs that it meets for the first time where these may be measured, hands a chain
over where another process has none left, and says at the end how its chains ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from graph.calls import LocalCall
from graph.strategy import Strategy
from search.algorithms.chain import TURN, Chain, SearchOptions, resumed_chain
from search.algorithms.moves import Moves
from search.algorithms.proposal_log import (
    ChainCheckpoint,
    Observer,
    ProposalBatch,
    Recorder,
    ResumedChain,
    SharedObserver,
    WorkerObserver,
)
from search.cost.cost_table import CallCost, Met
from search.outcome import Outcome
from search.simulate.task_graph import TaskGraphBuilder
from search.space.placements import Origin

# How often a process looks whether it is told something, and how often it says how far it is.
LISTEN_S, TELL_S = 0.02, 0.1


@dataclass(frozen=True, slots=True)
class Walk:
    """What all processes of a search share when they begin. deadline: of `time.monotonic`, infinite without one."""

    builder: TaskGraphBuilder
    moves: Moves
    options: SearchOptions
    observer: Observer | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Told:
    """How far the chains are that a process has made proposals of, since it began.

    left_s: about how long what is left of them takes; unfinished: how many there are left.
    """

    proposals: int
    accepted: int
    best: Outcome | None
    left_s: float
    unfinished: int


@dataclass(frozen=True, slots=True)
class Written:
    """Proposals, as an observer's part in the process left them, and the process's chains after them."""

    written: Any
    checkpoint: tuple[ChainCheckpoint, ...] | None


@dataclass(frozen=True, slots=True)
class AskedCosts:
    """The process waits for the costs of some calls."""

    calls: Sequence[LocalCall]
    kind_name: str


@dataclass(frozen=True, slots=True)
class AskedUpdate:
    """The process waits for what an update costs."""

    optimizer: str
    dtype: str
    kind_name: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A chain on its way from one process to another; `left`: of `WorkerObserver.leave`."""

    chain: ResumedChain
    left: Any


@dataclass(frozen=True, slots=True)
class Handed:
    """What a process hands over that was asked for a chain: none where it has no two left."""

    moved: Moved | None


@dataclass(frozen=True, slots=True)
class Idle:
    """The process has nothing left to walk."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last that a process says: its chains, and the costs that it has met without asking for them."""

    chains: tuple[ResumedChain, ...]
    met: Met


@dataclass(frozen=True, slots=True)
class HandOver:
    """Told to a process: another one has nothing left."""


@dataclass(frozen=True, slots=True)
class End:
    """Told to a process: it is over."""


class EndedEarly(Exception):
    """The process is told to end."""


class Part:
    """Of observers that have no part of their own in a process: batches go as they are."""

    def written(self, batch: ProposalBatch) -> ProposalBatch:
        """Return the batch."""
        return batch

    def leave(self, chain: int) -> None:
        """Nothing is kept of a chain."""

    def enter(self, chain: int, left: None) -> None:
        """Nothing is kept of a chain."""


class Sending:
    """The observer in the process: what it takes goes through the pipe."""

    def __init__(self, connection: Connection, part: WorkerObserver) -> None:
        self._connection = connection
        self._part = part

    def on_start(self, chain: int, name: str, strategy: Strategy, heads: Mapping[int, Origin] | None) -> None:
        """Nothing starts in the process."""

    def on_proposals(self, batch: ProposalBatch) -> None:
        """Send proposals."""
        self._connection.send(Written(self._part.written(batch), batch.checkpoint))

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Sent at other times, see `Told`."""


class Worker:
    """Walks chains until there are none left, and then waits for more until it is told to end."""

    def __init__(
        self,
        walk: Walk,
        chains: Sequence[Chain],
        connection: Connection,
        part: WorkerObserver,
        *,
        asks: bool,
    ) -> None:
        """Take chains; `asks`: costs that are not known yet are asked for."""
        self._walk = walk
        self._chains = list(chains)
        self._connection = connection
        self._part = part
        self._recorder = Recorder(
            None if walk.observer is None else Sending(connection, part),
            lambda: tuple(chain.checkpoint() for chain in self._chains),
        )
        # By chain: seconds of a proposal, of its last turn.
        self._pace_s: dict[int, float] = {}
        self._best: Outcome | None = None
        self._asked = False
        self._listen_at = self._tell_at = time.monotonic()
        self._costs = walk.builder.costs
        if asks:
            self._costs.ask(self)

    def run(self) -> None:
        """Work until told to end."""
        try:
            while True:
                self._take_turns()
                self._recorder.flush_whole()
                self._tell(time.monotonic())
                self._decline()
                # Once: whoever is told of it twice would end a search in which this process has a chain again.
                self._connection.send(Idle())
                while isinstance(said := self._connection.recv(), HandOver):
                    self._connection.send(Handed(None))
                self._hear(said)
        except EndedEarly as end:
            if end.args:
                self._recorder.flush()  # a proposal is half done
            else:
                self._recorder.flush_whole()
        except Exception:
            self._recorder.flush()
            raise
        self._tell(time.monotonic())
        parked = tuple(chain.parked(self._walk.moves.graph) for chain in self._chains)
        self._connection.send(Ended(parked, self._costs.met()))

    def _take_turns(self) -> None:
        while walking := self._unfinished():
            for chain in walking:
                # It may have been handed over in the turn of another one.
                if chain in self._chains:
                    self._take_turn(chain)

    def _take_turn(self, chain: Chain) -> None:
        began, before = time.monotonic(), chain.proposals
        now = began
        for _ in range(TURN):
            if chain.done or now >= self._walk.deadline:
                break
            chain.step(self._walk.moves, self._recorder)
            now = time.monotonic()
            if now >= self._listen_at:
                self._attend(now)
                if chain not in self._chains:
                    return
        if chain.proposals > before:
            self._pace_s[chain.number] = (now - began) / (chain.proposals - before)

    def _unfinished(self) -> list[Chain]:
        if time.monotonic() >= self._walk.deadline:
            return []
        return [chain for chain in self._chains if not chain.done]

    def _attend(self, now: float) -> None:
        """Between two proposals: hear what there is to hear, and tell."""
        self._listen_at = now + LISTEN_S
        while self._connection.poll():
            self._hear(self._connection.recv())
        if self._asked:
            self._asked = False
            self._hand_over()
        if now >= self._tell_at:
            self._tell(now)

    def _hear(self, said: object) -> None:
        if isinstance(said, End):
            raise EndedEarly
        if isinstance(said, HandOver):
            self._asked = True
        if isinstance(said, Moved):
            walk = self._walk
            self._chains.append(resumed_chain(walk.builder, said.chain, walk.options))
            self._part.enter(said.chain.checkpoint.number, said.left)

    def _decline(self) -> None:
        """Answer, where there is nothing to hand over any more."""
        if self._asked:
            self._asked = False
            self._connection.send(Handed(None))

    def _hand_over(self) -> None:
        unfinished = self._unfinished()
        if len(unfinished) < 2:
            self._connection.send(Handed(None))
            return
        chain = max(unfinished, key=self._left_s)
        self._recorder.flush_whole()
        self._chains.remove(chain)
        left = Moved(chain.parked(self._walk.moves.graph), self._part.leave(chain.number))
        self._tell(time.monotonic())
        self._connection.send(Handed(left))

    def _left_s(self, chain: Chain) -> float:
        return chain.left * self._pace_s.get(chain.number, 0.0)

    def _tell(self, now: float) -> None:
        self._tell_at = now + TELL_S
        outcomes = [chain.best.outcome for chain in self._chains]
        self._best = min([*outcomes, *([] if self._best is None else [self._best])], default=None)
        unfinished = self._unfinished()
        self._connection.send(
            Told(
                self._recorder.proposals,
                self._recorder.accepted,
                self._best,
                min(sum(map(self._left_s, unfinished)), max(0.0, self._walk.deadline - now)),
                len(unfinished),
            )
        )

    def costs(self, calls: Sequence[LocalCall], kind_name: str) -> list[CallCost]:
        """Return what the search's own table says of some calls.

        Raises:
            SoapstoneError: what the table raises.
        """
        found: list[CallCost] = self._answer(AskedCosts(calls, kind_name))
        return found

    def update_s(self, optimizer: str, dtype: str, kind_name: str) -> tuple[float, int]:
        """Return what the search's own table says of an update.

        Raises:
            SoapstoneError: what the table raises.
        """
        found: tuple[float, int] = self._answer(AskedUpdate(optimizer, dtype, kind_name))
        return found

    def _answer(self, question: AskedCosts | AskedUpdate) -> Any:
        self._connection.send(question)
        while True:
            said = self._connection.recv()
            if isinstance(said, HandOver):
                self._asked = True
            elif isinstance(said, End):
                raise EndedEarly("within a proposal")
            else:
                return said


def part_of(observer: Observer | None, number: int, count: int) -> WorkerObserver:
    """Return an observer's part in process `number` of `count`."""
    return observer.apart(number, count) if isinstance(observer, SharedObserver) else Part()
