"""Two algorithms to compare others with: the best change of one group after the other, and random strategies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from graph.errors import UsageError
from graph.strategy import Strategy
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import BestTracker
from search.algorithms.optcnn import default_space
from search.algorithms.proposal_log import Observer
from search.orders import Order
from search.outcome import Outcome
from search.problem import Problem
from search.space.baselines import data_parallel, expert, random_strategy, single_device
from search.space.groups import follow


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


class Trial(BestTracker):
    """A best tracker that counts improvements, and reports to an observer."""

    def __init__(self, problem: Problem, order: Order, observer: Observer | None) -> None:
        super().__init__(problem, order)
        self.observer = observer
        self.accepted = 0

    def take(self, strategy: Strategy) -> bool:
        """Simulate a strategy; return whether it is the best so far."""
        better = super().take(strategy)
        self.accepted += better
        if self.observer is not None and self.found is not None:
            self.observer.progress(self.simulated, self.accepted, self.found[0].seconds)
        return better

    @property
    def strategy(self) -> Strategy:
        """The best so far.

        Raises:
            KeyboardInterrupt: nothing was simulated yet.
        """
        if self.found is None:
            raise KeyboardInterrupt
        return self.found[1]

    def tried(self, *, interrupted: bool) -> TrialResult:
        """Return the best so far."""
        if self.found is None:
            raise KeyboardInterrupt
        return TrialResult(self.found[1], self.found[0], self.simulated, self.accepted, interrupted)


def greedy(
    problem: Problem,
    starts: Sequence[Strategy] = (),
    *,
    most: int,
    order: Order = "program",
    observer: Observer | None = None,
) -> TrialResult:
    """Return the result of the best change of one group after the other, within `most` simulations.

    From the best of `starts` (else of data parallel, expert and one device), groups take, in topological order, the
    best of the configurations that OptCNN chooses from, until a round brings nothing.

    Raises:
        UsageError: `most` is less than 1.
        CostError: a local call has no cost.
    """
    graph, count = problem.graph, problem.device_count
    require_one("greedy", most)
    best = Trial(problem, order, observer)
    try:
        if not starts:
            starts = (data_parallel(graph, count), expert(graph, count), single_device(graph))
        for strategy in starts[:most]:
            best.take(strategy)
        space = default_space(problem)
        gained = True
        while gained and best.simulated < most:
            gained = False
            for group, choices in zip(space.groups, space.choices, strict=True):
                for choice in choices[: most - best.simulated]:
                    if best.found is None or best.found[1].configurations[group.head] == choice:
                        continue
                    changed = list(best.found[1].configurations)
                    for index, configuration in follow(group, choice).items():
                        changed[index] = configuration
                    gained = best.take(best.found[1].with_configurations(tuple(changed))) or gained
    except KeyboardInterrupt:
        return best.tried(interrupted=True)
    return best.tried(interrupted=False)


def random_search(
    problem: Problem,
    starts: Sequence[Strategy] = (),
    *,
    most: int,
    seed: int,
    order: Order = "program",
    observer: Observer | None = None,
) -> TrialResult:
    """Return the best of `starts` and of random strategies, `most` of them together.

    Raises:
        UsageError: `most` is less than 1.
        CostError: a local call has no cost.
    """
    require_one("random", most)
    best = Trial(problem, order, observer)
    rng = np.random.default_rng(seed)
    try:
        for strategy in starts[:most]:
            best.take(strategy)
        while best.simulated < most:
            best.take(random_strategy(problem.graph, problem.device_count, rng))
    except KeyboardInterrupt:
        return best.tried(interrupted=True)
    return best.tried(interrupted=False)


def require_one(name: str, most: int) -> None:
    """Refuse a budget in which nothing can be simulated.

    Raises:
        UsageError: `most` is less than 1.
    """
    if most < 1:
        raise UsageError(f"{name}: may simulate {most} strategies, must be at least 1; raise --proposals")


def trials(name: str, search: Callable[..., TrialResult]) -> Algorithm:
    """Return the algorithm of a function that tries strategies one after the other."""

    def algorithm(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
        began, options = time.monotonic(), context.options
        result = search(
            problem,
            context.starts,
            most=options.proposals,
            order=options.order,
            observer=context.observers.get(name),
        )
        return AlgorithmResult(
            name,
            result.strategy,
            result.outcome.seconds,
            result.simulated,
            result.accepted,
            result.interrupted,
            time.monotonic() - began,
        )

    return algorithm


def _random(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    return trials("random", partial(random_search, seed=context.options.seed))(problem, context)


ALGORITHMS: Mapping[str, Algorithm] = {"greedy": trials("greedy", greedy), "random": _random}
