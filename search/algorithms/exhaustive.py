"""Exhaustive search: the least simulated step time in a listed space, by branch and bound.

Groups get their choice one after the other, in topological order. A choice is followed up only if a bound on all its
completions is below the best strategy known: the devices' load, and the longest path through what has been chosen,
with the least that the rest adds to it (`search.bounds.critical_path`), the all-reduce of the bucket that a backward
fills, and the update of what its device holds so far. Where devices are alike, so that renaming all of them in a
circle changes nothing, the first task of the first group runs on device 0. What is complete is simulated, so the
result is the optimum of the simulated time in that space, and not of the bound.

Source: FlexFlow (arXiv:1807.05358) section 8.4, which used A* for the same purpose; the bound is ours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graph.errors import UsageError
from graph.strategy import Strategy
from graph.topology import Topology
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import BestTracker
from search.algorithms.optcnn import factors
from search.bounds.critical_path import CriticalPaths
from search.bounds.elimination import TooWide, minimize
from search.bounds.partial_bound import PartialStrategy
from search.orders import Order
from search.outcome import Outcome
from search.problem import Problem
from search.space.enumerated_space import Space, smallest_space
from search.tables import Tables

# Choices of a group, whose pairs are tabulated for every edge.
MOST_CHOICES = 160
# Partial strategies after which it gives up.
MOST_VISITED = 1_000_000


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy of a space.

    outcome: its cost. simulated: how many strategies were simulated. interrupted: the search was stopped, and the
    strategy is the best so far. bound_ns: no strategy of the space is below it; the best one's time, unless the search
    was stopped.
    """

    strategy: Strategy
    outcome: Outcome
    simulated: int
    interrupted: bool
    bound_ns: int


def exhaustive(
    problem: Problem,
    space: Space,
    starts: Sequence[Strategy] = (),
    *,
    order: Order = "program",
    most_visited: int = MOST_VISITED,
) -> Optimum:
    """Return the best strategy of a space and of `starts`, which shorten the search where they are good.

    Strategies that exceed the devices' memories are worse than all others. Ctrl-C ends the search with the best so far.

    Raises:
        UsageError: the space is too large, or too many partial strategies were followed up.
        CostError: a local call has no cost.
    """
    most = max(len(choices) for choices in space.choices)
    if most > MOST_CHOICES:
        raise UsageError(
            f"exhaustive: a group has {most} configurations on {problem.device_count} devices, must have at most "
            f"{MOST_CHOICES}; take fewer devices or algorithm mcmc"
        )
    interrupted = False
    walk = _BranchAndBound(problem, space, order, most_visited)
    try:
        for strategy in (*starts, *walk.additive()):
            walk.best.take(strategy)
        walk.descend(0)
    except KeyboardInterrupt:
        interrupted = True
    if walk.best.found is None:
        raise KeyboardInterrupt
    cost, strategy = walk.best.found
    time_ns = cost.step_time_ns
    return Optimum(
        strategy,
        cost,
        walk.best.simulated,
        interrupted,
        min(walk.open_ns, time_ns) if interrupted else time_ns,
    )


def default_space(problem: Problem) -> Space:
    """Return the whole space where every group has few enough configurations, else aligned lists of neighbours."""
    return smallest_space(problem.graph, problem.device_count, MOST_CHOICES)


class _BranchAndBound:
    """A depth-first search over partial strategies, which prunes by their bounds."""

    def __init__(self, problem: Problem, space: Space, order: Order, most_visited: int) -> None:
        self.space, self.most_visited = space, most_visited
        paths = CriticalPaths(Tables(problem, space))
        self.tables = paths.tables
        self.best = BestTracker(problem, order)
        self.partial = PartialStrategy(paths, self.best.builder.bucket_bytes)
        self.visited = 0
        # A compact space does not have all that renaming gives.
        messages = {problem.links.messages.get(pair) for pair in problem.topology.routes}
        self.alike = space.whole and all_alike(problem.topology) and len(messages) <= 1
        # The least bound of the strategies that were not searched yet.
        self.open_ns = paths.bound_ns()

    def additive(self) -> list[Strategy]:
        """Return the strategy of the least additive cost, to begin with; the first one where that is too much work."""
        try:
            minimum = minimize([len(choices) for choices in self.space.choices], factors(self.tables))
        except TooWide:
            return [self.space.strategy([0] * len(self.space.groups))]
        return [self.space.strategy(minimum.chosen)]

    @property
    def below_ns(self) -> int:
        """The time of the best strategy so far; slower partial strategies are pruned."""
        if self.best.found is None or self.best.found[0].excess_bytes:
            return int(np.iinfo(np.int64).max)
        return self.best.found[0].step_time_ns

    def descend(self, depth: int) -> None:
        """Search all completions of the choices of the first `depth` groups."""
        if depth == len(self.space.groups):
            self.best.take(self.space.strategy(self.partial.chosen))
            return
        bounded = []
        for number, choice in enumerate(self.space.choices[depth]):
            if depth == 0 and self.alike and choice.devices[0] != 0:
                continue
            if self.partial.least_ns[depth][number] < self.below_ns:
                self.partial.choose(depth, number)
                bounded.append((self.partial.bound_ns(depth), number))
        for bound_ns, number in sorted(bounded):
            if depth == 0:
                self.open_ns = max(self.open_ns, bound_ns)
            if bound_ns >= self.below_ns:
                break
            self.visited += 1
            if self.visited > self.most_visited:
                raise UsageError(
                    f"exhaustive: {self.visited} partial strategies were followed up, must be at most "
                    f"{self.most_visited}; take fewer devices or algorithm mcmc"
                )
            self.partial.choose(depth, number)
            self.descend(depth + 1)
        self.partial.forget(depth)


def all_alike(topology: Topology) -> bool:
    """Return whether renaming the devices in a circle (k to k + 1, the last to 0) changes the time of no strategy.

    One kind, one node, a link of its own for every ordered pair, all of one bandwidth and latency: then it leaves the
    topology as it is, and the rings of collectives, which go through ascending devices. Not so for other renamings:
    they may turn a ring round, so that it holds other links. Devices that are alike otherwise count as different.
    """
    routes = list(topology.routes.values())
    links = [topology.links[route[0]] for route in routes]
    return (
        len({device.kind_name for device in topology.devices}) == 1
        and topology.node_count == 1
        and all(len(route) == 1 for route in routes)
        and len(set(routes)) == len(routes)
        and len({(link.bandwidth_bytes_per_s, link.latency_s) for link in links}) <= 1
    )


def _algorithm(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
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


ALGORITHMS: Mapping[str, Algorithm] = {"exhaustive": _algorithm}
