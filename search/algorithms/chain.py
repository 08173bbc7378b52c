"""A Markov chain over strategies by the Metropolis rule: its start, its steps, its snapshot.

A chain's walk depends on its start, the seed, its number and the costs: not on other chains, nor on the process that
walks it. `search.algorithms.mcmc` says which chains there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log

import numpy as np

from graph.errors import UsageError
from graph.operator_ranges import OperatorRanges
from graph.operators import OperatorGraph
from graph.strategy import Configuration, Sharding, Strategy
from graph.texts import one_of
from search.algorithms.moves import Move, Moves, MoveShares
from search.algorithms.proposal_log import ChainSnapshot, Proposal, ResumedChain
from search.evaluate.evaluator import Evaluation, FullEvaluation, evaluation
from search.orders import ORDERS, Order
from search.outcome import NEVER_NS, Outcome
from search.simulate.task_graph import TaskGraphBuilder

# Chains take turns of this many proposals, so that a time limit treats them alike.
TURN = 32
# Instead of a time in a proposal's record.
EXCEEDED, STOPPED = -1, -2


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search.

    proposals: budget of all chains together. chains: how many. seed: of everything random.
    beta: how greedy; 300 accepts a step that is 1 % of the initial makespan longer with probability 0.05.
    order: of the simulation. time_limit_s: ends the search early; its result then depends on the machine.
    shares: how often a move is of which kind.

    Raises:
        UsageError: a number is out of its range.
    """

    proposals: int = 20_000
    chains: int = 4
    seed: int = 0
    beta: float = 300.0
    order: Order = "program"
    time_limit_s: float | None = None
    shares: MoveShares = field(default_factory=MoveShares)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("proposals", self.proposals, 0),
            ("chains", self.chains, 1),
            ("seed", self.seed, 0),
            ("beta", self.beta, 0),
            ("time limit", self.time_limit_s if self.time_limit_s is not None else 0, 0),
        ):
            if not value >= least:
                raise UsageError(f"search: {name} is {value}, must be at least {least}; choose another")
        one_of(ORDERS, self.order, "search: order")


@dataclass(frozen=True, slots=True)
class ChainResult:
    """The start of a chain, and its best strategy. Times are of strategies that fit, else infinite."""

    start: str
    initial_s: float
    best_s: float
    proposals: int
    accepted: int
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class ChainBest:
    """The best strategy of a chain, its outcome, after how many proposals it was found, and its graph's rewriting."""

    outcome: Outcome
    configurations: tuple[Configuration, ...]
    found_at: int = 0
    rewriting: tuple[int, ...] = ()


@dataclass(eq=False)
class Chain:
    """A Metropolis chain, with the evaluation of its current strategy."""

    number: int
    start: str
    evaluation: Evaluation
    rng: np.random.Generator
    budget: int
    beta: float
    current: Outcome
    initial: Outcome
    best: ChainBest
    proposals: int = 0
    accepted: int = 0
    # Of the start, and of all that follow it.
    sharding: tuple[Sharding, ...] = field(default=(), kw_only=True)
    recomputation: OperatorRanges = field(default=(), kw_only=True)
    # Of a walk that rewrites the graph (`search.algorithms.joint`): the moves that made the current one, by number.
    rewriting: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def done(self) -> bool:
        """Whether the budget is used."""
        return self.proposals >= self.budget

    @property
    def left(self) -> int:
        """How many proposals it makes at most from here on."""
        return max(0, self.budget - self.proposals)

    def bound_ns(self) -> int:
        """Draw the makespan up to which the next proposal is accepted."""
        number = 1.0 - self.rng.random()  # in (0, 1]
        if self.beta == 0:
            return NEVER_NS
        return self.current.step_time_ns + int(-log(number) / self.beta * self.initial.step_time_ns)

    def step(self, moves: Moves, record: Callable[[Proposal], None]) -> None:
        """Make one proposal, accept or reject it, and record it."""
        move = moves.propose(self.evaluation.configurations, self.rng)
        proposed, bound_ns, accepted = self._decide(self.evaluation, move.changed, self.rewriting)
        record(self._proposal(move, proposed, bound_ns, accepted=accepted))

    def rewrite(
        self, evaluation: Evaluation, changed: Mapping[int, Configuration], rewriting: tuple[int, ...]
    ) -> bool:
        """Make one proposal of another graph, accept or reject it; return whether it was accepted.

        Args:
            evaluation: of a strategy for that graph.
            changed: operators whose configurations are others in the proposal.
            rewriting: the moves that make that graph.
        """
        return self._decide(evaluation, changed, rewriting)[2]

    def _decide(
        self, evaluation: Evaluation, changed: Mapping[int, Configuration], rewriting: tuple[int, ...]
    ) -> tuple[Outcome | None, int, bool]:
        """Accept or reject a proposal; return its outcome, the makespan up to which it is accepted, and whether it is.

        The outcome is None where it exceeds that.
        """
        bound_ns = self.bound_ns() if self.beta != float("inf") else self.current.step_time_ns
        current = evaluation.configurations
        # Most that are equal are one object.
        changes = {
            index: configuration
            for index, configuration in changed.items()
            if current[index] is not configuration and current[index] != configuration
        }
        if changes:
            # Where memory is exceeded, a proposal may be accepted whatever time it takes.
            least_ns = bound_ns if self.current.excess_bytes == 0 else NEVER_NS
            proposed = evaluation.propose(changes, least_ns)
        else:
            proposed = self.current if evaluation is self.evaluation else evaluation.current()
        accepted = proposed is not None and accepts(self.current, proposed, bound_ns)
        self.proposals += 1
        if accepted and proposed is not None:
            self.current = proposed
            self.accepted += 1
            if changes:
                evaluation.commit()
            self.evaluation, self.rewriting = evaluation, rewriting
            if proposed < self.best.outcome:
                # One assignment: an interrupt finds a strategy and its outcome together.
                self.best = ChainBest(
                    proposed, tuple(evaluation.configurations), self.proposals, self.rewriting
                )
        elif changes:
            evaluation.roll_back()
        return proposed, bound_ns, accepted

    def _proposal(self, move: Move, proposed: Outcome | None, bound_ns: int, *, accepted: bool) -> Proposal:
        if proposed is None:
            simulated_ns = STOPPED
        else:
            simulated_ns = proposed.step_time_ns if proposed.excess_bytes == 0 else EXCEEDED
        return Proposal(
            self.number,
            self.proposals,
            move.head,
            move.configuration,
            move.origin,
            simulated_ns,
            bound_ns,
            accepted,
            move.others,
        )

    def snapshot(self) -> ChainSnapshot:
        """Return the snapshot from which the chain goes on; to be called between two proposals."""
        return ChainSnapshot(
            number=self.number,
            start=self.start,
            proposals=self.proposals,
            accepted=self.accepted,
            best_at=self.best.found_at,
            initial=_pair(self.initial),
            current=_pair(self.current),
            best=_pair(self.best.outcome),
            generator=self.rng.bit_generator.state,
        )

    def parked(self, graph: OperatorGraph) -> ResumedChain:
        """Return the chain as another process goes on with it; to be called between two proposals."""
        return ResumedChain(
            self.snapshot(),
            self._strategy(graph, tuple(self.evaluation.configurations)),
            self.best_strategy(graph),
        )

    def best_strategy(self, graph: OperatorGraph) -> Strategy:
        """Return the chain's best strategy so far."""
        return self._strategy(graph, self.best.configurations)

    def _strategy(self, graph: OperatorGraph, configurations: tuple[Configuration, ...]) -> Strategy:
        return Strategy(graph.digest, configurations, self.sharding, self.recomputation)

    def follow(self, was: ChainSnapshot, best: Strategy | None) -> None:
        """Take the counts, times and best of this chain as another process walked it; None: no better one.

        The current strategy stays behind: the chain is not walked here any more.
        """
        self.rng.bit_generator.state = dict(was.generator)
        self.initial, self.current = Outcome(*was.initial), Outcome(*was.current)
        if best is not None:
            self.best = ChainBest(Outcome(*was.best), best.configurations, was.best_at)
        self.proposals, self.accepted = was.proposals, was.accepted

    def result(self, graph: OperatorGraph) -> ChainResult:
        """Return the chain's result so far."""
        return ChainResult(
            self.start,
            self.initial.seconds,
            self.best.outcome.seconds,
            self.proposals,
            self.accepted,
            self.best_strategy(graph),
        )


def _pair(outcome: Outcome) -> tuple[int, int]:
    return outcome.excess_bytes, outcome.step_time_ns


def accepts(current: Outcome, proposed: Outcome, bound_ns: int) -> bool:
    """Return whether a proposal is accepted, given the makespan up to which the acceptance number allows it."""
    if proposed.excess_bytes != current.excess_bytes:
        return proposed.excess_bytes < current.excess_bytes
    return proposed.step_time_ns <= bound_ns


def start_chain(
    builder: TaskGraphBuilder,
    number: int,
    name: str,
    strategy: Strategy,
    rng: np.random.Generator,
    options: SearchOptions,
    *,
    in_full: bool = False,
) -> Chain:
    """Return a chain that begins at a strategy; `in_full`: every proposal is simulated from its task graph.

    Raises:
        CostError: a local call has no cost.
    """
    layout = builder.layout(strategy)
    evaluated = FullEvaluation(layout, options.order) if in_full else evaluation(layout, options.order)
    initial = evaluated.current()
    return Chain(
        number,
        name,
        evaluated,
        rng,
        options.proposals // options.chains + (number < options.proposals % options.chains),
        options.beta,
        initial,
        initial,
        ChainBest(initial, strategy.configurations),
        sharding=strategy.sharding,
        recomputation=strategy.recomputation,
    )


def resumed_chain(builder: TaskGraphBuilder, resumed: ResumedChain, options: SearchOptions) -> Chain:
    """Return the chain as it was at its snapshot.

    Raises:
        UsageError: its strategy does not take the time that it took: the costs are others now.
    """
    was = resumed.snapshot
    rng = np.random.default_rng()
    rng.bit_generator.state = dict(was.generator)
    chain = start_chain(builder, was.number, was.start, resumed.current, rng, options)
    if _pair(chain.current) != tuple(was.current):
        before, now = was.current[1] / 1e6, chain.current.step_time_ns / 1e6
        raise UsageError(
            f"search: chain {was.number} was at {before:g} ms, is at {now:g} ms with the costs of today, must be "
            "the same to go on; start a new search"
        )
    chain.follow(was, resumed.best)
    return chain
