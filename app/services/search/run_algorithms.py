"""The algorithms of a search, one after the other, with their progress and the trace of the walk."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.db.store import Store
from app.db.trace import ProposalTrace
from app.services.predict.predict import Setting
from app.services.predict.problem import problem_of
from app.services.progress import Progress
from app.services.search.request import searched_on
from app.services.search.start_strategies import StartStrategy
from app.services.trace.recorder import TraceRecorder, WalkBar, groups_text
from app.services.trace.replay import TraceReader
from graph.errors import UsageError
from graph.strategy import Strategy
from profiler.pinning import usable_cores
from search.algorithms import registry
from search.algorithms.algorithm import AlgorithmContext, AlgorithmResult
from search.algorithms.chain import SearchOptions
from search.algorithms.proposal_log import ProposalBatch, ResumedChain
from search.parallel.fork import can_fork
from search.problem import Problem
from search.space.groups import find_groups
from search.space.placements import ProposalOrigin


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search about to begin: its algorithms, their starts and, of a walk that is resumed, its chains.

    workers: processes that walk chains, at most. result: of a search that has been made; then no algorithm runs.
    """

    search_id: int
    names: tuple[str, ...]
    options: SearchOptions
    starts: tuple[StartStrategy, ...]
    resumed: tuple[ResumedChain, ...] = ()
    compare_baselines: bool = False
    workers: int = 1
    result: AlgorithmResult | None = None


def worker_count(asked: int | None) -> int:
    """Return the number of processes that may walk chains: as many as asked for, or one for each usable core.

    Raises:
        UsageError: more than one was asked for on an operating system where only one can.
    """
    if can_fork():
        return len(usable_cores()) if asked is None else asked
    if asked is not None and asked > 1:
        raise UsageError(
            f"--workers: is {asked}, must be 1 on {sys.platform}: more are for Linux; leave it out"
        )
    return 1


class ProgressObserver:
    """An observer that moves the progress bar and keeps nothing."""

    def __init__(self, progress: Progress, text: str) -> None:
        self._bar = WalkBar(progress, text)

    def on_start(
        self, chain: int, name: str, strategy: Strategy, heads: Mapping[int, ProposalOrigin] | None
    ) -> None:
        """Ignore the start of a chain."""

    def on_proposals(self, batch: ProposalBatch) -> None:
        """Ignore proposals."""

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Move the bar."""
        self._bar.move(proposals, accepted, best_s)


def run_algorithms(
    store: Store, setting: Setting, plan: SearchPlan, progress: Progress
) -> tuple[AlgorithmResult, ...]:
    """Run the algorithms and return their results; every proposal of the walk goes into the trace.

    Raises:
        SoapstoneError: as `search.algorithms.registry.run`.
    """
    model = setting.model.graph.name
    groups = find_groups(setting.model.graph)
    with ProposalTrace(store, plan.search_id, groups_text(groups)) as trace:
        reader = TraceReader(store, plan.search_id)
        steps = {chain.snapshot.number: chain.snapshot.proposals for chain in plan.resumed}
        recorder = TraceRecorder(
            trace,
            groups,
            len(setting.topology.devices),
            progress,
            model,
            resumed={chain: reader.codes(chain, step) for chain, step in steps.items()},
            recorded=reader.recorded_after(steps),
            first_code=reader.next_code(),
        )
        context = AlgorithmContext(
            plan.options,
            tuple(start.strategy for start in plan.starts),
            plan.resumed,
            {
                name: recorder if name == "mcmc" else ProgressObserver(progress, _text(model, name))
                for name in plan.names
            },
            plan.workers,
        )

        return _announced(model, problem_of(setting), plan, context, progress)


def run_again(
    setting: Setting, plan: SearchPlan, problem: Problem, strategy: Strategy, progress: Progress
) -> AlgorithmResult:
    """Run a plan's algorithms on a problem of which a strategy asks too much; no proposal is recorded.

    The algorithms begin from the plan's starts and that strategy, with the share of the plan's proposals and time that
    a search has which goes on from another.

    Raises:
        StrategyError: nothing that was found fits the devices' memories.
        CostError: a local call has no cost.
    """
    model = f"{setting.model.graph.name} with less memory"
    observers = {name: ProgressObserver(progress, _text(model, name)) for name in plan.names}
    starts = (*(start.strategy for start in plan.starts), strategy)
    context = AlgorithmContext(searched_on(plan.options), starts, (), observers, plan.workers)
    results = _announced(model, problem, plan, context, progress)
    return replace(registry.best_of(results), interrupted=results[-1].interrupted)


def _announced(
    model: str, problem: Problem, plan: SearchPlan, context: AlgorithmContext, progress: Progress
) -> tuple[AlgorithmResult, ...]:
    """Run a plan's algorithms, each with a bar of its own."""
    begun = False

    def announce(name: str, start_count: int) -> None:
        nonlocal begun
        if begun:
            progress.end()
        progress.begin(_text(model, name), _total(name, context.options, start_count))
        begun = True

    try:
        return registry.run(plan.names, problem, context, announce)
    finally:
        if begun:
            progress.end()


def _text(model: str, name: str) -> str:
    return f"searching {model}" + ("" if name == "mcmc" else f" by {name}")


def _total(name: str, options: SearchOptions, start_count: int) -> int | None:
    """Return the most strategies that an algorithm simulates; None where that is unknown."""
    if name == "mcmc":
        return options.proposals + start_count * (options.proposals // options.chains)
    return options.proposals if name in ("greedy", "random") else None
