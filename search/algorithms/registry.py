"""All search algorithms: whatever the modules beside this one offer in `ALGORITHMS`.

They may be chained: the strategy of one is a start of the next. Not among them is `unity`, which searches over graphs
(`search.algorithms.joint`, called by `app.services.search.substitution_searches`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import search.algorithms
from graph.errors import StrategyError, UsageError
from graph.texts import shown
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.trials import TrialSearch
from search.problem import Problem

# Of one search.
MOST_CHAINED = 4

UNITY = "unity"
"""The algorithm that searches substitutions and strategies together: none of one problem, and so in no chain."""


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
        UsageError: one is empty, unknown, there twice, or unity beside others.
    """
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise UsageError(
            f"algorithms: are {shown(repr(text))}, must be names, several joined by commas; name at least one, leave "
            "out what is empty"
        )
    if UNITY in names and len(names) > 1:
        raise UsageError(f"algorithm {UNITY}: is joined with others, must be alone; leave it or them out")
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
            f"algorithm {name}: is unknown, must be one of {', '.join(sorted((*ALGORITHMS, UNITY)))}, or several "
            "joined by commas; choose one"
        )
    return ALGORITHMS[name]


def _offered() -> dict[str, Algorithm]:
    """Return all that the modules of this package offer."""
    names = [f"search.algorithms.{module.name}" for module in iter_modules(search.algorithms.__path__)]
    modules = [import_module(name) for name in names if name != __name__]
    offers = [getattr(module, "ALGORITHMS", {}) for module in modules]
    return dict(sorted(pair for offer in offers for pair in offer.items()))


ALGORITHMS: Mapping[str, Algorithm] = _offered()
"""The algorithms by the names that users type."""

TRIALS = frozenset(
    name
    for name, algorithm in ALGORITHMS.items()
    if isinstance(getattr(algorithm, "__self__", None), TrialSearch)
)
"""Those that find nothing without a simulation, so that they must be allowed one."""
