"""Strategies of a problem simulated in full one after the other, of which the best is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graph.strategy import Strategy
from search.evaluate.evaluator import outcome
from search.orders import Order
from search.outcome import Outcome
from search.problem import Problem
from search.simulate.task_graph import TaskGraphBuilder

if TYPE_CHECKING:  # numba comes with them
    from search.kernels.records import Array
    from search.simulate.strategy_state import Layout


def builder_of(problem: Problem, beside: TaskGraphBuilder | None = None) -> TaskGraphBuilder:
    """Return the task graph builder of a problem; `beside`: of another graph, see `TaskGraphBuilder`."""
    if problem.builder is not None:
        return problem.builder
    return TaskGraphBuilder(
        problem.graph,
        problem.topology,
        problem.costs,
        problem.training,
        links=problem.links,
        local_calls=problem.local_calls,
        beside=beside,
    )


def simulated(problem: Problem, strategy: Strategy, order: Order) -> Outcome:
    """Return the outcome of a strategy, simulated in full."""
    return outcome(builder_of(problem).layout(strategy), order)


class BestTracker:
    """Simulates strategies and keeps the best, the first of equals. `latest`: the outcome of the latest one."""

    def __init__(self, problem: Problem, order: Order) -> None:
        self.builder = builder_of(problem)
        self.found: tuple[Outcome, Strategy] | None = None
        self.simulated = 0
        self._order = order
        self.latest = Outcome(0, 0)
        self._layout: Layout | None = None

    @property
    def latest_peak_bytes_D(self) -> Array:  # noqa: N802 - the shape suffix
        """The peak bytes of each device under the latest strategy."""
        devices = len(self.builder.capacity_bytes_D)
        return np.zeros(devices, np.int64) if self._layout is None else self._layout.peak_memory_D.copy()

    def take(
        self, strategy: Strategy, limit: Outcome | None = None, *, instead_of_equals: bool = False
    ) -> bool:
        """Simulate a strategy; return whether it is the best so far.

        limit: not below the best so far; of a strategy that cannot be below it `latest` says so much alone, see
            `search.evaluate.evaluator.outcome`.
        instead_of_equals: keep it also where it is no better than the best so far, and no worse.

        Raises:
            CostError: a local call has no cost.
        """
        if self._layout is None:
            self._layout = self.builder.layout(strategy)
        else:
            before = self._layout.configurations
            self._layout.recompute(strategy.recomputation)
            self._layout.divide(strategy.micro_batches)
            self._layout.share(dict(enumerate(self.builder.sharding(strategy))))
            self._layout.change(
                {
                    index: configuration
                    for index, configuration in enumerate(strategy.configurations)
                    if before[index] != configuration
                }
            )
        self.simulated += 1
        cost = self.latest = outcome(self._layout, self._order, limit)
        if self.found is not None and not (
            cost < self.found[0] or (instead_of_equals and cost == self.found[0])
        ):
            return False
        self.found = cost, strategy
        return True
