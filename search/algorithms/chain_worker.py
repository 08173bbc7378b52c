"""A worker process of a chain pool: it walks chains for a turn each, and what it and the search send each other.

It begins as a copy of the search (`search.parallel.fork`), so that it has all chains already. A request is answered by
a reply; where costs may be measured, the worker asks for those that it needs in the middle of a turn.
"""

from __future__ import annotations

import copyreg
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from graph.calls import LocalCall
from graph.strategy import Configuration, Strategy
from search.algorithms.chain import Chain, SearchOptions, resumed_chain
from search.algorithms.moves import Moves, Part
from search.algorithms.proposal_log import ChainSnapshot, Proposal, ResumedChain, forget
from search.cost.cost_table import CallCost, UpdateCost
from search.simulate.task_graph import TaskGraphBuilder
from search.space.placements import Copied, Drawn, Permuted, Strided

# Proposals are pickled by their fields: in the way of frozen dataclasses it takes five times as long.
copyreg.pickle(Configuration, lambda it: (Configuration, (it.degrees, it.devices)))
copyreg.pickle(Drawn, lambda it: (Drawn, (it.degrees, it.placement)))
copyreg.pickle(Strided, lambda it: (Strided, (it.start, it.stride)))
copyreg.pickle(Permuted, lambda it: (Permuted, (it.seed,)))
copyreg.pickle(Copied, lambda it: (Copied, (it.head, it.axes)))
copyreg.pickle(Part, lambda it: (Part, (it.heads, it.configuration, it.origin)))

# How long a turn takes. A search that is interrupted waits for the turns that are under way.
TURN_S = 0.2


@dataclass(frozen=True, slots=True)
class WalkContext:
    """The inputs that all processes of a search share when they begin.

    is_recorded: whether proposals are sent to the search. deadline: of `time.monotonic`, infinite without one.
    """

    builder: TaskGraphBuilder
    moves: Moves
    options: SearchOptions
    is_recorded: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Walk a chain for a turn.

    parked: where the chain is, if another process walked it last. parks: whether another one may go on with it.
    """

    chain: int
    parked: ResumedChain | None
    parks: bool


@dataclass(frozen=True, slots=True)
class TurnReply:
    """The proposals of a turn, and the chain after it. best: if it is a new one. parked: if the chain may move."""

    proposals: list[Proposal]
    snapshot: ChainSnapshot
    best: Strategy | None
    parked: ResumedChain | None


@dataclass(frozen=True, slots=True)
class CostQuestion:
    """The worker waits for what a method of the search's own cost table returns."""

    method: Literal["costs", "update_cost"]
    arguments: tuple[Any, ...]


class SearchEnded(Exception):
    """The search ends while the worker waits for a cost."""


class ChainWorker:
    """Walks the chains that it is told to, until it is told to end by None; then sends the costs that it met."""

    def __init__(
        self, context: WalkContext, chains: Mapping[int, Chain], connection: Connection, *, asks: bool
    ) -> None:
        """Take all chains, as they are; `asks`: costs that the table lacks are asked for."""
        self._context = context
        self._chains = dict(chains)
        self._connection = connection
        if asks:
            context.builder.costs.ask(self)

    def run(self) -> None:
        """Answer requests until there are no more."""
        while (request := self._connection.recv()) is not None:
            self._walk(request)
        self._connection.send(self._context.builder.costs.met())

    def _walk(self, request: TurnRequest) -> None:
        context = self._context
        if request.parked is not None:
            self._chains[request.chain] = resumed_chain(context.builder, request.parked, context.options)
        chain = self._chains[request.chain]
        proposals: list[Proposal] = []
        record = proposals.append if context.is_recorded else forget
        until = min(context.deadline, time.monotonic() + TURN_S)
        generator, gained_at = chain.rng.bit_generator, chain.best.found_at
        state = generator.state
        try:
            while not chain.done:
                state = generator.state
                chain.step(context.moves, record)
                if time.monotonic() >= until:
                    break
        except SearchEnded:
            generator.state = state
        except Exception:
            # A search that is resumed makes this proposal again.
            generator.state = state
            self._reply(chain, proposals, gained_at, parks=False)
            raise
        self._reply(chain, proposals, gained_at, parks=request.parks)

    def _reply(self, chain: Chain, proposals: list[Proposal], gained_at: int, *, parks: bool) -> None:
        graph = self._context.moves.graph
        best = chain.best_strategy(graph) if chain.best.found_at > gained_at else None
        parked = chain.parked(graph) if parks else None
        self._connection.send(TurnReply(proposals, chain.snapshot(), best, parked))

    def costs(self, calls: Sequence[LocalCall], kind_name: str) -> list[CallCost]:
        """Return the costs of some calls in the search's own table.

        Raises:
            SearchEnded: nobody answers any more.
        """
        costs: list[CallCost] = self._answer("costs", calls, kind_name)
        return costs

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the cost of an update in the search's own table.

        Raises:
            SearchEnded: nobody answers any more.
        """
        cost: UpdateCost = self._answer("update_cost", optimizer, dtype, kind_name)
        return cost

    def _answer(self, method: Literal["costs", "update_cost"], *arguments: Any) -> Any:
        self._connection.send(CostQuestion(method, arguments))
        answer = self._connection.recv()
        if answer is None:
            raise SearchEnded
        return answer
