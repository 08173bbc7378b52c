"""The interface of a search algorithm: from a problem and some starts to a strategy, perhaps with a proof.

A module of this package offers its algorithms in `ALGORITHMS`, by the names that users type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from graph.strategy import Strategy
from search.algorithms.chain import ChainResult, SearchOptions
from search.algorithms.proposal_log import Observer, ResumedChain
from search.problem import Problem


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """The inputs of an algorithm beside the problem.

    starts: strategies to begin from. resumed: chains of the walk that was interrupted. observers: by algorithm; all
    tell how far they are, the walk tells its starts and proposals too. workers: processes, at most, for the walk's
    chains and for the costs that OptCNN's program adds up.
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
