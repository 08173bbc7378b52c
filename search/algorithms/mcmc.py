"""Metropolis-Hastings over strategies: several chains, each from its own start.

A proposal is accepted with probability min(1, exp(beta * (current - proposed) / initial)), times being simulated
makespans and `initial` that of the chain's start, so that beta has no unit. The acceptance number is drawn first:
it gives the bound up to which the proposal is accepted. Proposals are drawn from `search.algorithms.moves`, whose
density is not uniform, so the walk favours what it draws often; as an optimizer it needs no symmetry.

A strategy that exceeds a device's memory is never accepted from one that fits; from another it is where it exceeds
less (or as little, within the bound).

Source: FlexFlow (arXiv:1807.05358) section 6.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graph.errors import StrategyError
from graph.strategy import Configuration, Strategy
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import builder_of
from search.algorithms.chain import TURN, Chain, ChainResult, SearchOptions, resumed_chain, start_chain
from search.algorithms.chain_worker import WalkContext
from search.algorithms.moves import Moves
from search.algorithms.proposal_log import Observer, Recorder, ResumedChain
from search.evaluate.evaluator import outcome
from search.parallel.gc_pause import frozen_heap
from search.problem import Problem
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import FEW_DEVICES, starting_baselines
from search.space.configurations import configured, random_draw
from search.space.groups import follow
from search.space.placements import ProposalOrigin

# Other processes are started only where what is left takes longer than this: they are of use after some 0.1 s.
WORKERS_PAY_S = 0.5


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best strategy of all chains and how it was found. `seconds`: of the search.

    Of equals it is one that a chain began at, if there is any, and else the first.
    """

    strategy: Strategy
    step_time_s: float
    chains: tuple[ChainResult, ...]
    proposals: int
    accepted: int
    interrupted: bool
    seconds: float


def search(
    problem: Problem,
    options: SearchOptions | None = None,
    *,
    known: Sequence[Strategy] = (),
    resumed: Sequence[ResumedChain] = (),
    observer: Observer | None = None,
    workers: int = 1,
) -> SearchResult:
    """Search a fast strategy. The same arguments give the same result, unless there is a time limit.

    Chains start from data parallel, expert, one device, and random strategies; on many devices from data parallel and
    hybrids (`search.space.baselines.starting_baselines`).
    Each known strategy is the start of one more chain, with the budget of one of those: they walk as they do
    without it, so that a known strategy never makes a search worse.
    Chains that are resumed go on from where they were, and make the proposals that they would have made; known
    strategies must be those of the search that was interrupted.
    Ctrl-C ends the search with the best strategy so far.
    With several workers, as many processes walk the chains where that is quicker (`search.algorithms.chain_pool`):
    the result is the same, and so is the record of each chain.
    A problem's builder keeps its fragment cache.

    Raises:
        StrategyError: a known strategy does not fit, or nothing that was simulated fits the devices' memories.
        CostError: a local call has no cost.
        UsageError: a resumed chain does not take the time any more that it took.
        RuntimeFailure: a worker was ended by somebody else.
    """
    options = options if options is not None else SearchOptions()
    graph, device_count = problem.graph, problem.device_count
    began = time.monotonic()
    of_chains = [strategy for chain in resumed for strategy in (chain.current, chain.best)]
    for strategy in (*known, *of_chains):
        strategy.validate(graph, device_count)
    builder = builder_of(problem)
    moves = Moves(graph, device_count, options.shares)
    chains: list[Chain] = []
    recorder = Recorder(observer, lambda: tuple(chain.snapshot() for chain in chains))
    interrupted = False
    deadline = began + options.time_limit_s if options.time_limit_s is not None else float("inf")
    context = WalkContext(builder, moves, options, observer is not None, deadline)
    try:
        if resumed:
            chains += [resumed_chain(builder, chain, options) for chain in resumed]
            recorder.proposals = sum(chain.proposals for chain in chains)
            recorder.accepted = sum(chain.accepted for chain in chains)
        else:
            for number, start in enumerate(_starts(builder, moves, options, known)):
                chains.append(start_chain(builder, number, start.name, start.strategy, start.rng, options))
                if observer is not None:
                    observer.on_start(number, start.name, start.strategy, start.heads)
        _walk(context, chains, recorder, workers)
    except KeyboardInterrupt:
        interrupted = True
    if not chains:
        raise KeyboardInterrupt
    if interrupted:
        recorder.flush()  # a proposal is half done
    else:
        recorder.flush_whole()
    best = _best(chains)
    excess_bytes = best.best.outcome.excess_bytes
    if excess_bytes:
        raise StrategyError(
            f"search: every strategy met exceeds the devices' memories, the best one by {excess_bytes} bytes, "
            "must fit; take more devices, a smaller batch or a longer search"
        )
    return SearchResult(
        strategy=best.best_strategy(graph),
        step_time_s=best.best.outcome.seconds,
        chains=tuple(chain.result(graph) for chain in chains),
        proposals=sum(chain.proposals for chain in chains),
        accepted=sum(chain.accepted for chain in chains),
        interrupted=interrupted,
        seconds=time.monotonic() - began,
    )


def _best(chains: Sequence[Chain]) -> Chain:
    """Return the chain with the best strategy; of equals the first whose best is its start, a baseline mostly."""
    return min(chains, key=lambda chain: (chain.best.outcome, chain.best.found_at > 0))


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a chain. `heads`: the origins of the heads' configurations in a random strategy."""

    name: str
    strategy: Strategy
    rng: np.random.Generator
    heads: Mapping[int, ProposalOrigin] | None = None


def _starts(
    builder: TaskGraphBuilder, moves: Moves, options: SearchOptions, known: Sequence[Strategy]
) -> list[Start]:
    """Return the start of every chain. A chain's generator depends on the seed and its number alone."""
    generators = [_generator(options, number) for number in range(options.chains)]
    named = _named_starts(builder, options)[: options.chains]
    starts = [Start(name, strategy, rng) for (name, strategy), rng in zip(named, generators, strict=False)]
    starts += [_random_start(moves, rng) for rng in generators[len(starts) :]]
    # One number further, so that they walk as under older Soapstones, which had one more chain between.
    first = options.chains + 1
    for number, strategy in enumerate(known):
        starts.append(Start(f"known {number}", strategy, _generator(options, first + number)))
    return starts


def _named_starts(builder: TaskGraphBuilder, options: SearchOptions) -> list[tuple[str, Strategy]]:
    """Return the baselines that chains start from.

    On many devices data parallelism comes first, then the best of the others and those that are no worse than it, and
    all of them again: random strategies are hopeless there, and take long to be derived.
    """
    graph, device_count = builder.graph, len(builder.topology.devices)
    baselines = [
        (baseline.name.replace("-", "_"), baseline.strategy)
        for baseline in starting_baselines(graph, device_count)
    ]
    if device_count <= FEW_DEVICES:
        return baselines
    costs = [outcome(builder.layout(strategy), options.order) for _, strategy in baselines]
    ranked = sorted(range(1, len(baselines)), key=costs.__getitem__)
    good = [index for index in ranked if index == ranked[0] or costs[index] <= costs[0]]
    again = [
        (f"{baselines[index][0]} {turn}", baselines[index][1])
        for turn in range(2, options.chains + 1)
        for index in (*good, 0)
    ]
    return [baselines[0], *(baselines[index] for index in good), *again]


def _generator(options: SearchOptions, number: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=(number,)))


def _random_start(moves: Moves, rng: np.random.Generator) -> Start:
    """Return a random configuration of every head, which the other operators follow."""
    heads: dict[int, ProposalOrigin] = {}
    chosen: dict[int, Configuration] = {}
    for group in moves.groups:
        drawn = random_draw(moves.graph.operators[group.head], moves.device_count, rng)
        heads[group.head] = drawn
        chosen.update(follow(group, configured(drawn, moves.device_count)))
    configurations = tuple(chosen[index] for index in range(len(moves.graph.operators)))
    return Start("random", Strategy(moves.graph.digest, configurations), rng, heads)


@frozen_heap()
def _walk(context: WalkContext, chains: Sequence[Chain], recorder: Recorder, workers: int) -> None:
    """Let the chains take turns until all are done or the time is up.

    They begin here. Where what is left takes longer than starting `workers` processes, these go on with it.
    """
    while walking := [chain for chain in chains if not chain.done]:
        for chain in walking:
            began, before = time.monotonic(), chain.proposals
            for _ in range(TURN):
                if chain.done or time.monotonic() >= context.deadline:
                    break
                chain.step(context.moves, recorder.add)
            recorder.progress(_best(chains).best.outcome.seconds)
            now = time.monotonic()
            if now >= context.deadline:
                return
            count = min(workers, sum(not other.done for other in chains))
            pace_s = (now - began) / (chain.proposals - before)
            left_s = min(pace_s * sum(other.left for other in chains), context.deadline - now)
            if count > 1 and left_s > WORKERS_PAY_S:
                from search.algorithms.chain_pool import ChainPool

                ChainPool(context, chains, recorder, count).run()
                return


def _algorithm(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    """The walk; every start is one more chain, so that the others walk as they do without."""
    result = search(
        problem,
        context.options,
        known=context.starts,
        resumed=context.resumed,
        observer=context.observers.get("mcmc"),
        workers=context.workers,
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


ALGORITHMS: Mapping[str, Algorithm] = {"mcmc": _algorithm}
