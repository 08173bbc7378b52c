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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from graph.errors import StrategyError, UsageError
from graph.operators import OperatorGraph
from graph.strategy import Configuration, Strategy
from graph.topology import Topology
from graph.training import Training
from search.baselines import data_parallel, expert, single_device
from search.collector import leaving_alone_what_is_there
from search.configurations import configured, random_draw
from search.costs import CostTable
from search.evaluation import NEVER_NS, Evaluation, Full, Outcome, evaluation, outcome
from search.groups import follow
from search.links import LinkCosts
from search.moves import Move, Moves, MoveShares
from search.needed import LocalCalls
from search.placements import Origin
from search.proposals import (
    ChainCheckpoint,
    Observer,
    ProposalBatch,
    Recorder,
    ResumedChain,
    decode_configuration,
    encode_configuration,
)
from search.simulator import Order
from search.taskgraph import TaskGraphBuilder

__all__ = [
    "ChainCheckpoint",
    "ChainResult",
    "Observer",
    "Outcome",
    "ProposalBatch",
    "ResumedChain",
    "SearchOptions",
    "SearchResult",
    "decode_configuration",
    "encode_configuration",
    "outcome",
    "search",
    "start_chain",
]

# Chains take turns of this many proposals, so that a time limit treats them alike.
TURN = 32
POLISHING = "polishing"
# Instead of a time in a proposal's record.
EXCEEDED, STOPPED = -1, -2


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search.

    proposals: budget of all chains together. chains: how many. seed: of everything random.
    beta: how greedy; 300 accepts a step that is 1 % of the initial makespan longer with probability 0.05.
    order: of the simulation. time_limit_s: ends the search early; its result then depends on the machine.
    stop_without_gain: the paper's rule, a chain ends when half of its budget has brought no improvement.
    polish_proposals: greedy proposals from the best strategy after the chains, recorded as one more chain.
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
    stop_without_gain: bool = False
    polish_proposals: int = 0
    shares: MoveShares = field(default_factory=MoveShares)

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


@dataclass(frozen=True, slots=True)
class Best:
    """The best strategy of a chain, its outcome, and after how many proposals it was found."""

    outcome: Outcome
    configurations: tuple[Configuration, ...]
    found_at: int = 0


@dataclass
class Chain:
    """One walk."""

    number: int
    start: str
    evaluation: Evaluation
    rng: np.random.Generator
    budget: int
    beta: float
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
            return NEVER_NS
        return self.current.step_time_ns + int(-log(number) / self.beta * self.initial.step_time_ns)

    def step(self, moves: Moves, recorder: Recorder) -> None:
        """Make one proposal, and accept or reject it."""
        evaluation = self.evaluation
        move = moves.propose(evaluation.configurations, self.rng)
        bound_ns = self.bound_ns() if self.beta != float("inf") else self.current.step_time_ns
        current = evaluation.configurations
        changes = {index: one for index, one in move.changed.items() if current[index] != one}
        proposed: Outcome | None = self.current
        if changes:
            # Where memory is exceeded, a proposal may be accepted whatever time it takes.
            least_ns = bound_ns if self.current.excess_bytes == 0 else NEVER_NS
            proposed = evaluation.propose(changes, least_ns)
        accepted = proposed is not None and accepts(self.current, proposed, bound_ns)
        self.proposals += 1
        if accepted and proposed is not None:
            self.current = proposed
            self.accepted += 1
            if changes:
                evaluation.accept()
            if proposed < self.best.outcome:
                # One assignment: an interrupt finds a strategy and its outcome together.
                self.best = Best(proposed, tuple(evaluation.configurations), self.proposals)
                self.gained_at = self.proposals
        elif changes:
            evaluation.reject()
        self._record(move, recorder, proposed, bound_ns, accepted=accepted)

    def _record(
        self, move: Move, recorder: Recorder, proposed: Outcome | None, bound_ns: int, *, accepted: bool
    ) -> None:
        if proposed is None:
            simulated_ns = STOPPED
        else:
            simulated_ns = proposed.step_time_ns if proposed.excess_bytes == 0 else EXCEEDED
        recorder.add(
            self.number,
            self.proposals,
            move.head,
            move.configuration,
            move.origin,
            simulated_ns,
            bound_ns,
            accepted=accepted,
            others=move.others,
        )

    def checkpoint(self) -> ChainCheckpoint:
        """Return what the chain needs to go on from here; to be called between two proposals."""
        return ChainCheckpoint(
            number=self.number,
            start=self.start,
            proposals=self.proposals,
            accepted=self.accepted,
            gained_at=self.gained_at,
            best_at=self.best.found_at,
            initial=_pair(self.initial),
            current=_pair(self.current),
            best=_pair(self.best.outcome),
            generator=self.rng.bit_generator.state,
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


def _pair(one: Outcome) -> tuple[int, int]:
    return one.excess_bytes, one.step_time_ns


def accepts(current: Outcome, proposed: Outcome, bound_ns: int) -> bool:
    """Return whether a proposal is accepted, given the makespan up to which the acceptance number allows it."""
    if proposed.excess_bytes != current.excess_bytes:
        return proposed.excess_bytes < current.excess_bytes
    return proposed.step_time_ns <= bound_ns


def search(
    graph: OperatorGraph,
    topology: Topology,
    costs: CostTable,
    training: Training,
    options: SearchOptions | None = None,
    *,
    starts: Sequence[Strategy] = (),
    known: Sequence[Strategy] = (),
    resumed: Sequence[ResumedChain] = (),
    links: LinkCosts | None = None,
    observer: Observer | None = None,
    local_calls: LocalCalls | None = None,
) -> SearchResult:
    """Search a fast strategy. The same arguments give the same result, unless there is a time limit.

    Chains start from the given starts first, then from data parallel, expert, one device, and random strategies.
    Each known strategy is the start of one more chain, with the budget of one of those: they walk as they do
    without it, so that what is known never makes a search worse.
    Chains that are resumed go on from where they were, and make the proposals that they would have made; starts
    and known strategies must be those of the search that was interrupted.
    Ctrl-C ends the search with what was found so far.

    Raises:
        StrategyError: a given start does not fit, or nothing that was simulated fits the devices' memories.
        CostError: a local call has no cost.
        UsageError: a resumed chain does not take the time any more that it took.
    """
    options = options if options is not None else SearchOptions()
    began = time.monotonic()
    for strategy in (*starts, *known, *(one for chain in resumed for one in (chain.current, chain.best))):
        strategy.validate(graph, len(topology.devices))
    builder = TaskGraphBuilder(graph, topology, costs, training, links=links, local_calls=local_calls)
    moves = Moves(graph, len(topology.devices), options.shares)
    chains: list[Chain] = []
    recorder = Recorder(observer, lambda: tuple(chain.checkpoint() for chain in chains))
    interrupted = False
    try:
        if resumed:
            chains += [_resumed_chain(builder, one, options) for one in resumed]
            recorder.proposals = sum(chain.proposals for chain in chains)
            recorder.accepted = sum(chain.accepted for chain in chains)
        else:
            for number, start in enumerate(_starts(moves, options, starts, known)):
                chains.append(start_chain(builder, number, start.name, start.strategy, start.rng, options))
                if observer is not None:
                    observer.on_start(number, start.name, start.strategy, start.heads)
        _walk(chains, moves, recorder, options, began)
        if options.polish_proposals and chains[-1].start != POLISHING:
            chains.append(_polishing(builder, chains, options))
            if observer is not None:
                observer.on_start(
                    chains[-1].number, POLISHING, Strategy(graph.digest, chains[-1].best.configurations), None
                )
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


@dataclass(frozen=True, slots=True)
class Start:
    """Where a chain begins: `heads` says what a random strategy was drawn from."""

    name: str
    strategy: Strategy
    rng: np.random.Generator
    heads: Mapping[int, Origin] | None = None


def _starts(
    moves: Moves, options: SearchOptions, given: Sequence[Strategy], known: Sequence[Strategy]
) -> list[Start]:
    """Return the start of every chain. A chain's generator depends on the seed and its number alone."""
    graph, device_count = moves.graph, moves.device_count
    generators = [_generator(options, number) for number in range(options.chains)]
    named = [(f"given {place}", start) for place, start in enumerate(given)][: options.chains]
    for name, make in (("data_parallel", data_parallel), ("expert", expert)):
        if len(named) < options.chains:
            named.append((name, make(graph, device_count)))
    if len(named) < options.chains:
        named.append(("single_device", single_device(graph)))
    starts = [Start(name, strategy, rng) for (name, strategy), rng in zip(named, generators, strict=False)]
    starts += [_random_start(moves, rng) for rng in generators[len(starts) :]]
    # One number further: that between is of the polishing chain.
    first = options.chains + 1
    for place, strategy in enumerate(known):
        starts.append(Start(f"known {place}", strategy, _generator(options, first + place)))
    return starts


def _generator(options: SearchOptions, number: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=(number,)))


def _random_start(moves: Moves, rng: np.random.Generator) -> Start:
    """Return a random configuration of every head, which the other operators follow."""
    heads: dict[int, Origin] = {}
    chosen: dict[int, Configuration] = {}
    for group in moves.groups:
        drawn = random_draw(moves.graph.operators[group.head], moves.device_count, rng)
        heads[group.head] = drawn
        chosen.update(follow(group, configured(drawn, moves.device_count)))
    configurations = tuple(chosen[index] for index in range(len(moves.graph.operators)))
    return Start("random", Strategy(moves.graph.digest, configurations), rng, heads)


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
    evaluated = Full(layout, options.order) if in_full else evaluation(layout, options.order)
    initial = evaluated.current()
    chain = Chain(
        number,
        name,
        evaluated,
        rng,
        options.proposals // options.chains + (number < options.proposals % options.chains),
        options.beta,
        initial,
        initial,
        Best(initial, strategy.configurations),
        stop_without_gain=options.stop_without_gain,
    )
    if name == POLISHING:
        chain.budget = options.polish_proposals
        chain.beta = float("inf")
    return chain


def _polishing(builder: TaskGraphBuilder, chains: Sequence[Chain], options: SearchOptions) -> Chain:
    strategy = Strategy(builder.graph.digest, _best(chains).configurations)
    return start_chain(
        builder, len(chains), POLISHING, strategy, _generator(options, options.chains), options
    )


def _resumed_chain(builder: TaskGraphBuilder, resumed: ResumedChain, options: SearchOptions) -> Chain:
    """Return the chain as it was at its checkpoint.

    Raises:
        UsageError: its strategy does not take the time that it took: the costs are others now.
    """
    was = resumed.checkpoint
    rng = np.random.default_rng()
    rng.bit_generator.state = dict(was.generator)
    chain = start_chain(builder, was.number, was.start, resumed.current, rng, options)
    if _pair(chain.current) != tuple(was.current):
        before, now = was.current[1] / 1e6, chain.current.step_time_ns / 1e6
        raise UsageError(
            f"search: chain {was.number} was at {before:g} ms, is at {now:g} ms with the costs of today, must be "
            "the same to go on; start a new search"
        )
    chain.initial = Outcome(*was.initial)
    chain.best = Best(Outcome(*was.best), resumed.best.configurations, was.best_at)
    chain.proposals, chain.accepted, chain.gained_at = was.proposals, was.accepted, was.gained_at
    return chain


@leaving_alone_what_is_there()
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
