"""Metropolis-Hastings over strategies: several chains, each from its own start.

A proposal is accepted with probability min(1, exp(beta * (current - proposed) / initial)), times being simulated
makespans and `initial` that of the chain's start, so that beta has no unit. The acceptance number is drawn first:
it gives the bound up to which the proposal is accepted. Proposals are drawn from `search.moves`, whose density is
not uniform, so the walk favours what it draws often; as an optimizer it needs no symmetry.

A strategy that exceeds a device's memory is never accepted from one that fits; from another it is where it exceeds
less (or as little, within the bound).

Source: FlexFlow (arXiv:1807.05358) section 6.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING

import numpy as np

from graph.errors import StrategyError, UsageError
from graph.operators import OperatorGraph
from graph.strategy import Configuration, Strategy
from graph.topology import Topology
from graph.training import Training
from search.baselines import data_parallel, expert, random_strategy, single_device
from search.costs import CostTable
from search.links import LinkCosts
from search.moves import Move, Moves
from search.needed import LocalCalls
from search.proposals import Observer, ProposalBatch, Recorder, decode_configuration, encode_configuration
from search.simulator import Order
from search.taskgraph import TaskGraphBuilder

if TYPE_CHECKING:
    from search.layout import Layout, Undo

__all__ = [
    "ChainResult",
    "Observer",
    "ProposalBatch",
    "SearchOptions",
    "SearchResult",
    "decode_configuration",
    "encode_configuration",
    "search",
]

# Chains take turns of this many proposals, so that a time limit treats them alike.
TURN = 32


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search.

    proposals: budget of all chains together. chains: how many. seed: of everything random.
    beta: how greedy; 300 accepts a step that is 1 % of the initial makespan longer with probability 0.05.
    order: of the simulation. time_limit_s: ends the search early; its result then depends on the machine.
    stop_without_gain: the paper's rule, a chain ends when half of its budget has brought no improvement.
    polish_proposals: greedy proposals from the best strategy after the chains, recorded as one more chain.

    Raises:
        UsageError: a number is out of its range.
    """

    proposals: int = 20_000
    chains: int = 4
    seed: int = 0
    beta: float = 300.0
    order: Order = "program"
    time_limit_s: float | None = None
    stop_without_gain: bool = False
    polish_proposals: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("proposals", self.proposals, 0),
            ("chains", self.chains, 1),
            ("seed", self.seed, 0),
            ("beta", self.beta, 0),
            ("time limit", self.time_limit_s if self.time_limit_s is not None else 0, 0),
            ("polishing proposals", self.polish_proposals, 0),
        ):
            if not value >= least:
                raise UsageError(f"search: {name} is {value}, must be at least {least}; choose another")
        if self.order not in ("program", "fifo"):
            raise UsageError(f"search: order is {self.order}, must be program or fifo; choose one of them")


@dataclass(frozen=True, slots=True)
class ChainResult:
    """One chain: where it started, what it found. Times are of strategies that fit, else infinite."""

    start: str
    initial_s: float
    best_s: float
    proposals: int
    accepted: int
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best strategy of all chains (the first of equals) and how it was found. `seconds`: of the search."""

    strategy: Strategy
    step_time_s: float
    chains: tuple[ChainResult, ...]
    proposals: int
    accepted: int
    interrupted: bool
    seconds: float


@dataclass(frozen=True, slots=True, order=True)
class Outcome:
    """What a strategy costs: bytes beyond the devices' memories come first, then nanoseconds."""

    excess_bytes: int
    step_time_ns: int

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite where the memory does not suffice."""
        return self.step_time_ns / 1e9 if self.excess_bytes == 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Best:
    """The best strategy of a chain and its outcome."""

    outcome: Outcome
    configurations: tuple[Configuration, ...]


@dataclass
class Chain:
    """One walk."""

    number: int
    start: str
    layout: Layout
    rng: np.random.Generator
    budget: int
    beta: float
    order: Order
    current: Outcome
    initial: Outcome
    best: Best
    proposals: int = 0
    accepted: int = 0
    gained_at: int = 0
    stop_without_gain: bool = field(default=False, kw_only=True)

    @property
    def done(self) -> bool:
        """Whether the budget is used, or half of it without gain where that is asked for."""
        idle = self.proposals - self.gained_at
        return self.proposals >= self.budget or (self.stop_without_gain and 2 * idle >= self.budget)

    def bound_ns(self) -> int:
        """Draw the makespan up to which the next proposal is accepted."""
        number = 1.0 - self.rng.random()  # in (0, 1]
        if self.beta == 0:
            return np.iinfo(np.int64).max
        return self.current.step_time_ns + int(-log(number) / self.beta * self.initial.step_time_ns)

    def step(self, moves: Moves, recorder: Recorder) -> None:
        """Make one proposal, and accept or reject it."""
        move = moves.propose(self.layout.configurations, self.rng)
        bound_ns = self.bound_ns() if self.beta != float("inf") else self.current.step_time_ns
        undo: Undo | None = None
        proposed = self.current
        if any(self.layout.configurations[index] != one for index, one in move.changed.items()):
            undo = self.layout.change(move.changed)
            proposed = outcome(self.layout, self.order)
        accepted = accepts(self.current, proposed, bound_ns)
        self.proposals += 1
        if accepted:
            self.current = proposed
            self.accepted += 1
            if proposed < self.best.outcome:
                # One assignment: an interrupt finds a strategy and its outcome together.
                self.best = Best(proposed, tuple(self.layout.configurations))
                self.gained_at = self.proposals
        elif undo is not None:
            self.layout.undo(undo)
        self._record(move, recorder, proposed, bound_ns, accepted=accepted)

    def _record(
        self, move: Move, recorder: Recorder, proposed: Outcome, bound_ns: int, *, accepted: bool
    ) -> None:
        simulated_ns = proposed.step_time_ns if proposed.excess_bytes == 0 else -1
        recorder.add(
            self.number,
            self.proposals,
            move.head,
            move.configuration,
            simulated_ns,
            bound_ns,
            accepted=accepted,
        )

    def result(self, graph: OperatorGraph) -> ChainResult:
        """Return what the chain found so far."""
        strategy = Strategy(graph.digest, self.best.configurations)
        return ChainResult(
            self.start,
            self.initial.seconds,
            self.best.outcome.seconds,
            self.proposals,
            self.accepted,
            strategy,
        )


def accepts(current: Outcome, proposed: Outcome, bound_ns: int) -> bool:
    """Return whether a proposal is accepted, given the makespan up to which the acceptance number allows it."""
    if proposed.excess_bytes != current.excess_bytes:
        return proposed.excess_bytes < current.excess_bytes
    return proposed.step_time_ns <= bound_ns


def outcome(layout: Layout, order: Order) -> Outcome:
    """Simulate a layout."""
    step_time_ns, _ = layout.run(order)
    return Outcome(layout.excess_bytes, step_time_ns)


def search(
    graph: OperatorGraph,
    topology: Topology,
    costs: CostTable,
    training: Training,
    options: SearchOptions | None = None,
    *,
    starts: Sequence[Strategy] = (),
    links: LinkCosts | None = None,
    observer: Observer | None = None,
    local_calls: LocalCalls | None = None,
) -> SearchResult:
    """Search a fast strategy. The same arguments give the same result, unless there is a time limit.

    Chains start from the given starts first, then from data parallel, expert, one device, and random strategies.
    Ctrl-C ends the search with what was found so far.

    Raises:
        StrategyError: a given start does not fit, or nothing that was simulated fits the devices' memories.
        CostError: a local call has no cost.
    """
    options = options if options is not None else SearchOptions()
    began = time.monotonic()
    for start in starts:
        start.validate(graph, len(topology.devices))
    builder = TaskGraphBuilder(graph, topology, costs, training, links=links, local_calls=local_calls)
    moves = Moves(graph, len(topology.devices))
    recorder = Recorder(observer)
    chains: list[Chain] = []
    interrupted = False
    try:
        for number, start_chain in enumerate(_starts(graph, topology, options, starts)):
            chains.append(_chain(builder, number, *start_chain, options))
        _walk(chains, moves, recorder, options, began)
        if options.polish_proposals:
            chains.append(_polishing(builder, chains, options))
            _walk(chains[-1:], moves, recorder, options, began)
    except KeyboardInterrupt:
        interrupted = True
    if not chains:
        raise KeyboardInterrupt
    recorder.flush()
    best = _best(chains)
    excess_bytes = best.outcome.excess_bytes
    if excess_bytes:
        raise StrategyError(
            f"search: every strategy met exceeds the devices' memories, the best one by {excess_bytes} bytes, "
            "must fit; take more devices, a smaller batch or a longer search"
        )
    return SearchResult(
        strategy=Strategy(graph.digest, best.configurations),
        step_time_s=best.outcome.seconds,
        chains=tuple(chain.result(graph) for chain in chains),
        proposals=sum(chain.proposals for chain in chains),
        accepted=sum(chain.accepted for chain in chains),
        interrupted=interrupted,
        seconds=time.monotonic() - began,
    )


def _best(chains: Sequence[Chain]) -> Best:
    return min((chain.best for chain in chains), key=lambda best: best.outcome)


def _starts(
    graph: OperatorGraph, topology: Topology, options: SearchOptions, given: Sequence[Strategy]
) -> list[tuple[str, Strategy, np.random.Generator]]:
    """Return name, strategy and generator of every chain. A chain's generator depends on its number alone."""
    device_count = len(topology.devices)
    seeds = np.random.SeedSequence(options.seed).spawn(options.chains)
    generators = [np.random.default_rng(seed) for seed in seeds]
    named = [(f"given {place}", start) for place, start in enumerate(given)][: options.chains]
    for name, make in (("data_parallel", data_parallel), ("expert", expert)):
        if len(named) < options.chains:
            named.append((name, make(graph, device_count)))
    if len(named) < options.chains:
        named.append(("single_device", single_device(graph)))
    while len(named) < options.chains:
        named.append(("random", random_strategy(graph, device_count, generators[len(named)])))
    return [(name, strategy, rng) for (name, strategy), rng in zip(named, generators, strict=True)]


def _chain(
    builder: TaskGraphBuilder,
    number: int,
    name: str,
    strategy: Strategy,
    rng: np.random.Generator,
    options: SearchOptions,
) -> Chain:
    layout = builder.layout(strategy)
    initial = outcome(layout, options.order)
    share = options.proposals // options.chains + (number < options.proposals % options.chains)
    return Chain(
        number,
        name,
        layout,
        rng,
        share,
        options.beta,
        options.order,
        initial,
        initial,
        Best(initial, strategy.configurations),
        stop_without_gain=options.stop_without_gain,
    )


def _polishing(builder: TaskGraphBuilder, chains: Sequence[Chain], options: SearchOptions) -> Chain:
    strategy = Strategy(builder.graph.digest, _best(chains).configurations)
    rng = np.random.default_rng(np.random.SeedSequence(options.seed).spawn(options.chains + 1)[-1])
    chain = _chain(builder, len(chains), "polishing", strategy, rng, options)
    chain.budget = options.polish_proposals
    chain.beta = float("inf")
    return chain


def _walk(
    chains: Sequence[Chain], moves: Moves, recorder: Recorder, options: SearchOptions, began: float
) -> None:
    """Let the chains take turns until all are done or the time is up."""
    deadline = began + options.time_limit_s if options.time_limit_s is not None else float("inf")
    walking = [chain for chain in chains if not chain.done]
    while walking:
        for chain in walking:
            for _ in range(TURN):
                if chain.done or time.monotonic() >= deadline:
                    break
                chain.step(moves, recorder)
            recorder.progress(_best(chains).outcome.seconds)
        if time.monotonic() >= deadline:
            return
        walking = [chain for chain in walking if not chain.done]
