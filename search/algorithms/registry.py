"""All search algorithms behind one interface: from a problem and some starts to a strategy, perhaps with a proof.

They may be chained: the strategy of one is a start of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from graph.errors import StrategyError, UsageError
from graph.strategy import Strategy
from search.algorithms.best_tracker import builder_of
from search.algorithms.mcmc import (
    ChainResult,
    Observer,
    Outcome,
    ResumedChain,
    SearchOptions,
    outcome,
    search,
)
from search.orders import Order
from search.problem import Problem

if TYPE_CHECKING:
    from search.algorithms.greedy import TrialResult


# Of one search.
MOST_CHAINED = 4


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """The inputs of an algorithm beside the problem.

    starts: strategies to begin from. resumed: chains of the walk that was interrupted. observers: by algorithm; all
    tell how far they are, the walk tells its starts and proposals too. workers: processes for the walk's chains.
    """

    options: SearchOptions
    starts: tuple[Strategy, ...] = ()
    resumed: tuple[ResumedChain, ...] = ()
    observers: Mapping[str, Observer] = field(default_factory=dict)
    workers: int = 1


@dataclass(frozen=True, slots=True)
class AlgorithmResult:
    """The result of one algorithm.

    step_time_s: simulated; infinite where the memory does not suffice.
    proposals, accepted: strategies that were simulated, and that were taken.
    proven: the space of which the strategy is the optimum, in words; empty where nothing is proven.
    bound_s: seconds that no strategy is below, for an algorithm that looked at the whole space.
    """

    algorithm: str
    strategy: Strategy
    step_time_s: float
    proposals: int = 0
    accepted: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    chains: tuple[ChainResult, ...] = field(default=())
    proven: str = ""
    bound_s: float | None = None


Algorithm = Callable[[Problem, AlgorithmContext], AlgorithmResult]


def run(
    names: Sequence[str],
    problem: Problem,
    context: AlgorithmContext,
    announce: Callable[[str, int], None] | None = None,
) -> tuple[AlgorithmResult, ...]:
    """Run algorithms one after the other, each from the starts and from the strategies of those before it.

    An interrupt ends the run with the results so far.

    Args:
        names: of the algorithms.
        problem: the problem to solve.
        context: their other inputs.
        announce: told the name of each that begins, and how many starts it has.

    Raises:
        UsageError: there is no such algorithm, or one cannot solve this problem.
        StrategyError: nothing that was found fits the devices' memories.
        CostError: a local call has no cost.
    """
    results: list[AlgorithmResult] = []
    for name, algorithm in [(name, named(name)) for name in names]:
        starts = (*context.starts, *(result.strategy for result in results))
        if announce is not None:
            announce(name, len(starts))
        try:
            results.append(algorithm(problem, replace(context, starts=starts)))
        except KeyboardInterrupt:
            if not results:
                raise
            results[-1] = replace(results[-1], interrupted=True)
        if results[-1].interrupted:
            break
    if best_of(results).step_time_s == float("inf"):
        raise StrategyError(
            f"search: what {', '.join(names)} found exceeds the devices' memories, must fit; take more devices, a "
            "smaller batch or algorithm mcmc"
        )
    return tuple(results)


def best_of(results: Sequence[AlgorithmResult]) -> AlgorithmResult:
    """Return the fastest, the first of equals."""
    return min(results, key=lambda result: result.step_time_s)


def parsed(text: str) -> tuple[str, ...]:
    """Return the algorithms that a text like "optcnn,mcmc" names.

    Raises:
        UsageError: one is unknown or there twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        named(name)
    if len(set(names)) < len(names) or len(names) > MOST_CHAINED:
        raise UsageError(
            f"algorithms: are {', '.join(names)}, must be at most {MOST_CHAINED} different ones; leave some out"
        )
    return names


def named(name: str) -> Algorithm:
    """Return an algorithm by its name.

    Raises:
        UsageError: there is none.
    """
    if name not in ALGORITHMS:
        raise UsageError(
            f"algorithm {name}: is unknown, must be one of {', '.join(ALGORITHMS)}, or several joined by commas; "
            "choose one"
        )
    return ALGORITHMS[name]


def simulated(problem: Problem, strategy: Strategy, order: Order) -> Outcome:
    """Return the outcome of a strategy, simulated in full."""
    return outcome(builder_of(problem).layout(strategy), order)


def _mcmc(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    """The walk; every start is one more chain, so that the others walk as they do without."""
    result = search(
        problem.graph,
        problem.topology,
        problem.costs,
        problem.training,
        context.options,
        known=context.starts,
        resumed=context.resumed,
        links=problem.links,
        observer=context.observers.get("mcmc"),
        local_calls=problem.local_calls,
        workers=context.workers,
        builder=problem.builder,
    )
    return AlgorithmResult(
        "mcmc",
        result.strategy,
        result.step_time_s,
        result.proposals,
        result.accepted,
        result.interrupted,
        result.seconds,
        result.chains,
    )


def _optcnn(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    from search.algorithms.optcnn import optcnn

    began = time.monotonic()
    additive = optcnn(problem)
    cost = simulated(problem, additive.strategy, context.options.order)
    return AlgorithmResult(
        "optcnn",
        additive.strategy,
        cost.seconds,
        proposals=1,
        accepted=1,
        seconds=time.monotonic() - began,
        proven=f"the least additive cost ({additive.cost_ns / 1e6:.3f} ms) of {additive.space.name}",
    )


def _exhaustive(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    from search.algorithms.exhaustive import default_space, exhaustive

    began = time.monotonic()
    space = default_space(problem)
    optimum = exhaustive(problem, space, context.starts, order=context.options.order)
    return AlgorithmResult(
        "exhaustive",
        optimum.strategy,
        optimum.outcome.seconds,
        proposals=optimum.simulated,
        accepted=1,
        interrupted=optimum.interrupted,
        seconds=time.monotonic() - began,
        proven="" if optimum.interrupted else f"the optimum of {space.size} strategies: {space.name}",
        bound_s=optimum.bound_ns / 1e9 if space.whole else None,
    )


def _greedy(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    from search.algorithms.greedy import greedy

    return _tried("greedy", greedy, problem, context)


def _sharding(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    from search.algorithms.weight_sharding import share_weights

    return _tried("sharding", share_weights, problem, context)


def _recomputation(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    from search.algorithms.activation_checkpointing import recompute

    return _tried("recomputation", recompute, problem, context)


def _random(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    from search.algorithms.greedy import random_search

    return _tried("random", partial(random_search, seed=context.options.seed), problem, context)


def _tried(
    name: str, algorithm: Callable[..., TrialResult], problem: Problem, context: AlgorithmContext
) -> AlgorithmResult:
    """Run an algorithm that tries strategies one after the other."""
    began, options = time.monotonic(), context.options
    tried = algorithm(
        problem,
        context.starts,
        most=options.proposals,
        order=options.order,
        observer=context.observers.get(name),
    )
    return AlgorithmResult(
        name,
        tried.strategy,
        tried.outcome.seconds,
        tried.simulated,
        tried.accepted,
        tried.interrupted,
        time.monotonic() - began,
    )


ALGORITHMS: Mapping[str, Algorithm] = {
    "mcmc": _mcmc,
    "optcnn": _optcnn,
    "exhaustive": _exhaustive,
    "greedy": _greedy,
    "sharding": _sharding,
    "recomputation": _recomputation,
    "random": _random,
}
