"""Substitutions and configurations searched together: backtracking over rewritings, then a Metropolis walk over both.

Backtracking goes through sets of moves (`search.algorithms.rewritings`), cheapest first; a set costs the simulated step
of the best of some strategies for its graph. The walk begins at the best set. Its state is a rewriting and a strategy
for the graph that this makes. Most proposals change configurations, as those of `mcmc` do; a share of them applies or
reverts a move, the configurations being carried over (`search.space.carried`); of half of these the operators that are
new change theirs at once. All are accepted by one rule, with one beta and one initial makespan.

Source: Unity (OSDI 2022) section 6 for the levels; FlexFlow (arXiv:1807.05358) section 6 for the walk; the walk over
both is ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from graph.errors import StrategyError, UsageError
from graph.strategy import Strategy
from search.algorithms.backtracking import Evaluated, backtrack
from search.algorithms.chain import TURN, Chain, ChainResult, SearchOptions, start_chain
from search.algorithms.optcnn import least_additive, small_tables
from search.algorithms.proposal_log import Observer, forget
from search.algorithms.rewritings import Rewriting, Rewritings, RewrittenGraph
from search.orders import Order
from search.outcome import Outcome
from search.parallel.gc_pause import frozen_heap
from search.space.baselines import FEW_DEVICES, single_device, usual_baselines
from search.space.carried import carried

# The most rewritings that backtracking evaluates before the walk.
BUDGET = 20
# Pairs of configurations beyond which OptCNN's program takes longer than the walk is worth.
MOST_TABULATED = 300_000
# Proposals that apply or revert a move, and those of them that change configurations too.
SHARE, TOGETHER = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class JointStart:
    """A rewriting, and a strategy for the graph that it makes; of the strategy the configurations count."""

    name: str
    rewriting: Rewriting
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class JointResult:
    """The best strategy, and the rewriting that makes its graph.

    step_time_s: simulated; infinite where the memory does not suffice. evaluated: by backtracking, the best first.
    seconds: of the search. chain: of the walk; None where it had not begun.
    """

    rewriting: Rewriting
    strategy: Strategy
    step_time_s: float
    chain: ChainResult | None = None
    proposals: int = 0
    accepted: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    evaluated: tuple[Evaluated, ...] = ()


class RewritingCosts:
    """What rewritings cost: the simulated step of the best of some strategies for the graph that each makes.

    Those are known strategies, each for the graph of its rewriting, and that of OptCNN's dynamic program for the graph
    as imported, of at most `MOST_TABULATED` pairs, all carried over; data parallelism; on few devices the expert's; one
    device. The program's cost is additive; the simulator knows what overlaps, and has the last word. `best`: of those
    asked for so far, the best strategy and its outcome. `best_alone`: the rewriting that is best on one device. After
    the deadline, of `time.monotonic`, no more moves are tried for it, and no dynamic program is begun.

    Raises:
        StrategyError: the moves of a known strategy's rewriting exclude each other.
        CostError: a local call has no cost.
        RuntimeFailure: a process of several `workers` was ended from outside.
    """

    def __init__(
        self,
        rewritings: Rewritings,
        order: Order,
        known: Sequence[JointStart] = (),
        deadline: float = float("inf"),
        workers: int = 1,
    ) -> None:
        self._rewritings = rewritings
        self._order: Order = order
        self.best: dict[Rewriting, tuple[Outcome, Strategy]] = {}
        self._known = [(start.strategy, _graph_of(rewritings, start).graph) for start in known]
        self.best_alone = self._best_alone(deadline)
        imported = rewritings.imported.problem
        if time.monotonic() >= deadline:
            return
        tables = small_tables(imported, MOST_TABULATED, workers)
        if tables is not None and time.monotonic() < deadline:
            with suppress(UsageError):  # too wide for it: the others count
                self._known.append((least_additive(tables, workers=workers).strategy, imported.graph))

    @property
    def cheapest(self) -> Rewriting:
        """The rewriting that costs least of those asked for, of equals one of fewer moves."""
        return min(self.best, key=lambda rewriting: (self.best[rewriting][0], len(rewriting), rewriting))

    def seconds(self, rewriting: Rewriting) -> float:
        """Return the step of a rewriting; infinite where its moves exclude each other, or nothing fits the memory.

        Raises:
            CostError: a local call has no cost.
        """
        rewritten = self._rewritings.graph(rewriting)
        if rewritten is None:
            return float("inf")
        graph = rewritten.graph
        count = rewritten.problem.device_count
        # On many devices an expert's layers, each over all of them, take hundreds of times as long to be simulated.
        left_out = "expert" if count > FEW_DEVICES else ""
        strategies = [
            *(carried(strategy, of, graph) for strategy, of in self._known),
            *(one.strategy for one in usual_baselines(graph, count) if one.name != left_out),
        ]
        outcomes = [rewritten.outcome(strategy, self._order) for strategy in strategies]
        outcome = min(outcomes)
        self.best[rewriting] = outcome, strategies[outcomes.index(outcome)]
        return outcome.seconds

    def _best_alone(self, deadline: float) -> Rewriting:
        """Return a rewriting for one device: the move that saves most first, then each other that still saves."""

        def in_time(_: object) -> bool:
            return time.monotonic() < deadline

        best: Rewriting = ()
        best_s = imported_s = self._alone_s(best)
        alone = [(self._alone_s((move,)), move) for move in takewhile(in_time, range(self._rewritings.count))]
        for _, move in takewhile(in_time, sorted(pair for pair in alone if pair[0] < imported_s)):
            more = tuple(sorted((*best, move)))
            more_s = self._alone_s(more)
            if more_s < best_s:
                best, best_s = more, more_s
        return best

    def _alone_s(self, rewriting: Rewriting) -> float:
        """Return the step of a rewriting on one device, whether it fits there or not; infinite as of `seconds`."""
        rewritten = self._rewritings.graph(rewriting)
        if rewritten is None:
            return float("inf")
        return rewritten.outcome(single_device(rewritten.graph), self._order).step_time_ns / 1e9


def _graph_of(rewritings: Rewritings, start: JointStart) -> RewrittenGraph:
    graph = rewritings.graph(start.rewriting)
    if graph is None:
        raise StrategyError(
            f"joint search: moves {start.rewriting} of a start exclude each other, must not; leave it out"
        )
    return graph


class JointChain:
    """A Metropolis chain over rewritings and strategies. `at`: the graph that it is at."""

    def __init__(
        self, rewritings: Rewritings, start: JointStart, options: SearchOptions, share: float
    ) -> None:
        """Begin a chain.

        Raises:
            StrategyError: the moves of the start exclude each other.
            CostError: a local call has no cost.
        """
        at = self.at = _graph_of(rewritings, start)
        self._rewritings = rewritings
        self._order = options.order
        self._share = share
        # Other numbers than those of chains that walk on one graph.
        rng = np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=(0, 1)))
        strategy = Strategy(start.strategy.graph_digest, start.strategy.configurations)
        self.chain: Chain = start_chain(at.builder, 0, start.name, strategy, rng, options)
        self.chain.rewriting = start.rewriting
        self.chain.best = replace(self.chain.best, rewriting=start.rewriting)
        at.latest = self.chain.evaluation

    def step(self) -> None:
        """Make one proposal, and accept or reject it."""
        if self._rewritings.count and self.chain.rng.random() < self._share:
            self._rewrite()
        else:
            self.chain.step(self.at.moves, forget)

    def result(self) -> ChainResult:
        """Return the chain's result so far."""
        graph = self._rewritings.graph(self.chain.best.rewriting)
        assert graph is not None, "the chain was there"
        return self.chain.result(graph.graph)

    def _rewrite(self) -> None:
        chain, rng = self.chain, self.chain.rng
        move = int(rng.integers(self._rewritings.count))
        together = rng.random() < TOGETHER
        rewriting = tuple(sorted(set(chain.rewriting) ^ {move}))
        target = self._rewritings.graph(rewriting)
        if target is None:
            chain.proposals += 1
            return
        current = Strategy(self.at.graph.digest, tuple(chain.evaluation.configurations))
        strategy = carried(current, self.at.graph, target.graph)
        changed = dict(enumerate(strategy.configurations))
        if together:
            changed |= target.moves.propose(strategy.configurations, rng, target.touched(self.at)).changed
        if chain.rewrite(target.evaluation(strategy, self._order), changed, rewriting):
            self.at = target


@frozen_heap()
def walk_jointly(
    rewritings: Rewritings,
    start: JointStart,
    options: SearchOptions,
    *,
    share: float = SHARE,
    deadline: float = float("inf"),
    observer: Observer | None = None,
) -> JointResult:
    """Walk over rewritings and strategies, one chain; the result is no worse than the start.

    Of the start the configurations count: sharding and recomputation are of weights and operators that a rewriting may
    not have. The same arguments give the same result, unless there is a deadline; more proposals make the same ones
    first. Ctrl-C ends the walk with the best so far.

    Args:
        rewritings: of the graph as imported.
        start: of the chain.
        options: as of `search.algorithms.mcmc.search`; the number of chains and the time limit count for nothing.
        share: of the proposals that apply or revert a move.
        deadline: of `time.monotonic`, after which no proposal is made.
        observer: told how far the walk is.

    Raises:
        StrategyError: the moves of the start exclude each other.
        CostError: a local call has no cost.
        UsageError: the share is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise UsageError(
            f"joint search: share of moves that rewrite is {share:g}, must be from 0 to 1; choose another"
        )
    began = time.monotonic()
    joint = JointChain(rewritings, start, replace(options, chains=1), share)
    interrupted = False
    try:
        _walk(joint, deadline, observer)
    except KeyboardInterrupt:
        interrupted = True
    result = joint.result()
    return JointResult(
        joint.chain.best.rewriting,
        result.strategy,
        result.best_s,
        result,
        joint.chain.proposals,
        joint.chain.accepted,
        interrupted,
        time.monotonic() - began,
    )


def _walk(joint: JointChain, deadline: float, observer: Observer | None) -> None:
    """Let the chain make its proposals, unless the time is up before."""
    chain = joint.chain
    while not chain.done and time.monotonic() < deadline:
        joint.step()
        if observer is not None and (chain.done or chain.proposals % TURN == 0):
            observer.progress(chain.proposals, chain.accepted, chain.best.outcome.seconds)


@frozen_heap()
def search_jointly(
    rewritings: Rewritings,
    known: Sequence[JointStart],
    options: SearchOptions,
    *,
    share: float = SHARE,
    observer: Observer | None = None,
    workers: int = 1,
) -> JointResult:
    """Search by backtracking, then by a walk from the best rewriting.

    Backtracking begins at the graph as imported, at the one that is best on one device, which is what one would take
    who substitutes first and parallelizes then, and at those of known strategies. The result is no worse than any of
    these, by their configurations alone. The same arguments give the same result, unless there is a time limit. Ctrl-C
    ends the search with the best so far.

    Args:
        rewritings: of the graph as imported.
        known: strategies, each with the rewriting that makes its graph.
        options: as of `walk_jointly`, but that the time limit counts.
        share: as of `walk_jointly`.
        observer: told how far the walk is.
        workers: processes that look for the costs of OptCNN's program, at most; see `optcnn`.

    Raises:
        StrategyError: the moves of a known strategy's rewriting exclude each other.
        CostError: a local call has no cost.
        UsageError: the share is not between 0 and 1.
        RuntimeFailure: a process was ended from outside.
        KeyboardInterrupt: it was interrupted before anything was simulated.
    """
    began = time.monotonic()
    deadline = began + options.time_limit_s if options.time_limit_s is not None else float("inf")
    evaluated: tuple[Evaluated, ...] = ()
    costs = RewritingCosts(rewritings, options.order, known, deadline, workers)
    try:
        evaluated = tuple(
            backtrack(
                rewritings.count,
                costs.seconds,
                budget=BUDGET,
                starts=((), costs.best_alone, *(start.rewriting for start in known)),
                deadline=deadline,
            )
        )
        start = JointStart("backtracking", costs.cheapest, costs.best[costs.cheapest][1])
        result = walk_jointly(rewritings, start, options, share=share, deadline=deadline, observer=observer)
    except KeyboardInterrupt:
        if not costs.best:
            raise
        outcome, strategy = costs.best[costs.cheapest]
        result = JointResult(costs.cheapest, strategy, outcome.seconds, interrupted=True)
    return replace(result, evaluated=evaluated, seconds=time.monotonic() - began)
