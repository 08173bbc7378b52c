"""Chains walked by several processes at once, each on a core of its own.

Each chain has a process that walks it, turn by turn. A process that has none left takes over a chain of another one, so
that all end at about the same time. This process walks none: it records the proposals, and where costs may be
measured it resolves those that chains meet for the first time, each once.

A chain makes the same proposals wherever it is walked, so the number of processes, and which chain goes where and
when, changes nothing but the order in which the proposals of different chains are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from graph.errors import RuntimeFailure
from search.algorithms.chain import Chain
from search.algorithms.chain_worker import (
    ChainWorker,
    CostQuestion,
    TurnReply,
    TurnRequest,
    WalkContext,
)
from search.algorithms.proposal_log import Recorder, ResumedChain, undisturbed
from search.cost.cost_table import Met
from search.parallel.fork import ForkedProcess, WorkFailure, fork

# A chain goes to another process only where the rest of it takes longer than this.
MOVING_PAYS_S = 0.2
# How long a process that is told to end may take for the turn that it is at.
PATIENCE_S = 30.0


@dataclass
class PoolWorker:
    """A process of the pool, as the search sees it.

    chain: that it walks now. began: when. question: that it waits to be answered. ended: whether it is gone.
    """

    number: int
    process: ForkedProcess
    chain: Chain | None = None
    began: float = 0.0
    question: CostQuestion | None = None
    ended: bool = False


class ChainPool:
    """The processes that walk the chains of one search."""

    def __init__(
        self, context: WalkContext, chains: Sequence[Chain], recorder: Recorder, worker_count: int
    ) -> None:
        self._context = context
        self._chains = {chain.number: chain for chain in chains}
        self._recorder = recorder
        self._worker_count = worker_count
        self._workers: list[PoolWorker] = []
        # Chains that nobody walks now, the one that waits longest first; each one's worker; those that may move.
        self._waiting = [chain for chain in chains if not chain.done]
        self._worker_of = {chain.number: turn % worker_count for turn, chain in enumerate(self._waiting)}
        self._parked: dict[int, ResumedChain] = {}
        # By chain: seconds of a proposal, of its last turn.
        self._pace_s: dict[int, float] = {}

    def run(self) -> None:
        """Walk all chains to their ends or the deadline; they are then as if they had been walked here.

        Raises:
            RuntimeFailure: a process was ended by somebody else.
            UsageError: one cannot be started.
            SoapstoneError: a local call has no cost.
        """
        try:
            self._start()
            while self._hand_out_turns():
                for worker in self._with_messages():
                    self._receive(worker)
        except BaseException:
            # Whatever it is, the proposals that the chains made until now are recorded.
            with undisturbed(), suppress(Exception):
                self._end()
            raise
        else:
            with undisturbed():
                self._end()
        finally:
            for worker in self._workers:
                if not worker.ended:
                    worker.process.kill()
                    worker.process.wait()
                worker.process.connection.close()

    def _start(self) -> None:
        # Costs that are measured are asked here, and only while nobody walks.
        asks = not self._context.builder.costs.copies()
        for number in range(self._worker_count):
            self._workers.append(PoolWorker(number, fork(partial(self._serve, asks=asks))))

    def _serve(self, connection: Connection, *, asks: bool) -> None:
        """Be a process of the pool; called in its copy."""
        ChainWorker(self._context, self._chains, connection, asks=asks).run()

    def _hand_out_turns(self) -> bool:
        """Let idle workers walk; return whether any worker walks."""
        idle = [worker for worker in self._workers if worker.chain is None]
        if time.monotonic() < self._context.deadline:
            with undisturbed():
                for worker in idle:
                    own = (chain for chain in self._waiting if self._worker_of[chain.number] == worker.number)
                    self._begin_turn(worker, next(own, None))
                for worker in idle:
                    if worker.chain is None:
                        self._begin_turn(worker, self._movable_chain())
        return any(worker.chain is not None for worker in self._workers)

    def _movable_chain(self) -> Chain | None:
        """Return the chain with most to do, of those whose workers are busy; None where moving does not pay."""
        movable = [chain for chain in self._waiting if chain.number in self._parked]
        chain = max(movable, key=self._left_s, default=None)
        return chain if chain is not None and self._left_s(chain) > MOVING_PAYS_S else None

    def _left_s(self, chain: Chain) -> float:
        left_s = chain.left * self._pace_s[chain.number]
        return min(left_s, self._context.deadline - time.monotonic())

    def _begin_turn(self, worker: PoolWorker, chain: Chain | None) -> None:
        if chain is None:
            return
        moves = self._worker_of[chain.number] != worker.number
        parked = self._parked.pop(chain.number, None)
        self._waiting.remove(chain)
        self._worker_of[chain.number] = worker.number
        worker.chain, worker.began = chain, time.monotonic()
        # It may move where somebody has nothing to do, and its worker has other chains.
        is_one_of_many = any(self._worker_of[other.number] == worker.number for other in self._waiting)
        parks = is_one_of_many and any(other.chain is None for other in self._workers)
        self._send(worker, TurnRequest(chain.number, parked if moves else None, parks))

    def _with_messages(self) -> list[PoolWorker]:
        by_connection = {worker.process.connection: worker for worker in self._workers}
        return [by_connection[ready] for ready in wait(list(by_connection)) if isinstance(ready, Connection)]

    def _receive(self, worker: PoolWorker) -> None:
        """Take a message; an interrupt waits until it is read and recorded."""
        with undisturbed():
            self._take(worker, self._message(worker))
        if worker.question is not None:
            # May take as long as a measurement, and may be interrupted.
            answer = self._answer(worker, worker.question)
            with undisturbed():
                worker.question = None
                self._send(worker, answer)

    def _take(self, worker: PoolWorker, message: object) -> None:
        if isinstance(message, TurnReply):
            self._end_turn(worker, message)
        elif isinstance(message, CostQuestion):
            worker.question = message
        elif isinstance(message, WorkFailure):
            raise message.error from RuntimeError(message.traceback)
        elif isinstance(message, Met):
            self._context.builder.costs.take(message)
            worker.ended = True
            worker.process.wait()

    def _end_turn(self, worker: PoolWorker, reply: TurnReply) -> None:
        chain, recorder = worker.chain, self._recorder
        if chain is None:
            raise TypeError("a turn ends that nobody began")
        worker.chain = None
        proposals, accepted = chain.proposals, chain.accepted
        chain.follow(reply.snapshot, reply.best)
        if reply.parked is not None:
            self._parked[chain.number] = reply.parked
        if chain.proposals > proposals:
            self._pace_s[chain.number] = (time.monotonic() - worker.began) / (chain.proposals - proposals)
        if not chain.done:
            self._waiting.append(chain)
        recorder.proposals += chain.proposals - proposals
        recorder.accepted += chain.accepted - accepted
        recorder.extend(reply.proposals)
        recorder.progress(min(each.best.outcome for each in self._chains.values()).seconds)

    def _message(self, worker: PoolWorker) -> Any:
        try:
            return worker.process.connection.recv()
        except (EOFError, OSError):
            raise self._lost(worker) from None

    def _send(self, worker: PoolWorker, message: object) -> None:
        try:
            worker.process.connection.send(message)
        except OSError:
            raise self._lost(worker) from None

    def _lost(self, worker: PoolWorker) -> RuntimeFailure:
        worker.ended = True
        worker.process.kill()  # it closed its pipe: it ends
        how = worker.process.wait()
        return RuntimeFailure(
            f"search: worker {worker.number} of {self._worker_count} (process {worker.process.number}) {how}, must "
            "walk until the end; what was recorded is kept, go on by --resume, or with fewer --workers"
        )

    def _answer(self, asking: PoolWorker, question: CostQuestion) -> object:
        """Return a cost; nobody walks while it is measured, which would take longer beside others."""
        table = self._context.builder.costs
        with ExitStack() as stack:
            for worker in self._workers:
                if worker is not asking:
                    stack.enter_context(worker.process.stopped())
            answer: object = getattr(table, question.method)(*question.arguments)
            return answer

    def _end(self) -> None:
        """Tell all workers to end after the turns that they are at, and take these; who does not in time is ended.

        Raises:
            RuntimeFailure: one of them was ended by somebody else, or does not end.
        """
        failures: list[RuntimeFailure] = []
        until = time.monotonic() + PATIENCE_S
        running = [worker for worker in self._workers if not worker.ended]
        for worker in running:
            with suppress(OSError):  # seen below
                worker.process.connection.send(None)
        for worker in running:
            try:
                self._take_last(worker, until)
            except RuntimeFailure as failure:
                failures.append(failure)
        self._recorder.flush_whole()
        if failures:
            raise failures[0]

    def _take_last(self, worker: PoolWorker, until: float) -> None:
        while not worker.ended:
            if worker.question is not None:
                # None was the answer to this.
                worker.question = None
                self._send(worker, None)
            if not worker.process.connection.poll(max(0.0, until - time.monotonic())):
                raise RuntimeFailure(
                    f"search: worker {worker.number} of {self._worker_count} is told to end and has not for "
                    f"{PATIENCE_S:g} s, must have; go on by --resume"
                )
            self._take(worker, self._message(worker))
