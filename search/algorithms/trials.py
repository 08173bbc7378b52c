"""Algorithms that simulate one strategy after the other, as many as they may, and keep the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graph.errors import UsageError
from graph.strategy import Strategy
from search.algorithms.algorithm import AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import BestTracker
from search.algorithms.proposal_log import Observer
from search.orders import Order
from search.outcome import Outcome
from search.problem import Problem


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The best strategy of a trial, its outcome, how many were simulated, and whether it was interrupted.

    accepted: how often one was better than all before it.
    """

    strategy: Strategy
    outcome: Outcome
    simulated: int
    accepted: int
    interrupted: bool


class BudgetSpent(Exception):
    """As many strategies are simulated as may be."""


class Trial(BestTracker):
    """A best tracker with a budget of simulations, which counts improvements and reports to an observer."""

    def __init__(self, problem: Problem, order: Order, observer: Observer | None, most: int) -> None:
        super().__init__(problem, order)
        self.problem = problem
        self.observer = observer
        self.most = most
        self.accepted = 0

    @property
    def left(self) -> int:
        """How many simulations may still be made."""
        return self.most - self.simulated

    def take(
        self, strategy: Strategy, limit: Outcome | None = None, *, instead_of_equals: bool = False
    ) -> bool:
        """Simulate a strategy, with the problem's micro-batches; return whether it is the best so far.

        limit, instead_of_equals: as of `BestTracker.take`.

        Raises:
            BudgetSpent: no further simulation may be made.
            CostError: a local call has no cost.
        """
        if not self.left:
            raise BudgetSpent
        strategy = self.problem.in_micro_batches(strategy)
        better = super().take(strategy, limit, instead_of_equals=instead_of_equals)
        self.accepted += better
        if self.observer is not None and self.found is not None:
            self.observer.progress(self.simulated, self.accepted, self.found[0].seconds)
        return better

    @property
    def best(self) -> tuple[Outcome, Strategy]:
        """The best so far, and its outcome.

        Raises:
            KeyboardInterrupt: nothing was simulated yet.
        """
        if self.found is None:
            raise KeyboardInterrupt
        return self.found


Walk = Callable[[Trial, Sequence[Strategy], int], None]
"""What an algorithm tries, from some starts and a seed, until it returns or its budget is spent."""


@dataclass(frozen=True, slots=True)
class TrialSearch:
    """An algorithm by its name and its walk."""

    name: str
    walk: Walk

    def __call__(
        self,
        problem: Problem,
        starts: Sequence[Strategy] = (),
        *,
        most: int,
        seed: int = 0,
        order: Order = "program",
        observer: Observer | None = None,
    ) -> TrialResult:
        """Return the best that the walk meets within `most` simulations, or until it is interrupted.

        Raises:
            UsageError: `most` is less than 1.
            CostError: a local call has no cost.
            KeyboardInterrupt: it was interrupted before anything was simulated.
        """
        if most < 1:
            raise UsageError(
                f"{self.name}: may simulate {most} strategies, must be at least 1; raise --proposals"
            )
        trial, interrupted = Trial(problem, order, observer, most), False
        try:
            self.walk(trial, starts, seed)
        except BudgetSpent:
            pass
        except KeyboardInterrupt:
            interrupted = True
        outcome, strategy = trial.best
        return TrialResult(strategy, outcome, trial.simulated, trial.accepted, interrupted)

    def solve(self, problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
        """Solve a problem as an algorithm of `search.algorithms.registry`."""
        began, options = time.monotonic(), context.options
        result = self(
            problem,
            context.starts,
            most=options.proposals,
            seed=options.seed,
            order=options.order,
            observer=context.observers.get(self.name),
        )
        return AlgorithmResult(
            self.name,
            result.strategy,
            result.outcome.seconds,
            result.simulated,
            result.accepted,
            result.interrupted,
            time.monotonic() - began,
        )
