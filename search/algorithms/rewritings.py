"""The graphs that sets of moves make of one, each with all that a walk over it takes.

A move applies substitutions; a set of them is a rewriting, by the ascending numbers of its moves. The graph as imported
is that of none. What a graph takes is made when it is asked for, and kept while it is among the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

from graph.strategy import Strategy
from search.algorithms.best_tracker import builder_of
from search.algorithms.moves import Moves, MoveShares
from search.evaluate.evaluator import Evaluation, evaluation, outcome
from search.orders import Order
from search.outcome import Outcome
from search.problem import Problem
from search.simulate.task_graph import TaskGraphBuilder

Rewriting = tuple[int, ...]
"""Numbers of moves, ascending."""

# Graphs that are kept, each with its fragments.
MOST_KEPT = 32


class RewrittenGraph:
    """The graph of a rewriting: its problem, its builder of task graphs, its moves of configurations.

    latest: the evaluation of the strategy at which the walk was last seen here.
    """

    def __init__(
        self, rewriting: Rewriting, problem: Problem, builder: TaskGraphBuilder, shares: MoveShares
    ) -> None:
        self.rewriting = rewriting
        self.problem = problem
        self.graph = problem.graph
        self.builder = builder
        self.latest: Evaluation | None = None
        self._shares = shares

    @cached_property
    def moves(self) -> Moves:
        """The moves of configurations."""
        return Moves(self.graph, self.problem.device_count, self._shares)

    def outcome(self, strategy: Strategy, order: Order) -> Outcome:
        """Return the outcome of a strategy, simulated in full."""
        return outcome(self.builder.layout(strategy), order)

    def evaluation(self, strategy: Strategy, order: Order) -> Evaluation:
        """Return an evaluation: of the strategy, or of the one at which the walk was last seen here."""
        if self.latest is None:
            self.latest = evaluation(self.builder.layout(strategy), order)
        return self.latest

    def touched(self, before: RewrittenGraph) -> Sequence[int]:
        """Return the places of the groups with operators that another graph does not have; all where there are none."""
        new = {
            index
            for index, operator in enumerate(self.graph.operators)
            if operator.name not in before.graph.index_by_name
        }
        groups = self.moves.groups
        places = [place for place, group in enumerate(groups) if not new.isdisjoint(group.operators)]
        return places or range(len(groups))


class Rewritings:
    """All rewritings of a graph by `count` moves.

    Args:
        imported: the problem of the graph as imported.
        count: of moves.
        problem_of: returns the problem of a rewriting, without a builder; None where its moves exclude each other.
        shares: of the walk's moves of configurations.
        most_kept: of the graphs. What a walk finds does not depend on it.
    """

    def __init__(
        self,
        imported: Problem,
        count: int,
        problem_of: Callable[[Rewriting], Problem | None],
        shares: MoveShares,
        most_kept: int = MOST_KEPT,
    ) -> None:
        self.imported = RewrittenGraph((), imported, builder_of(imported), shares)
        self.count = count
        self._problem_of = problem_of
        self._shares = shares
        self._most_kept = most_kept
        self._kept: OrderedDict[Rewriting, RewrittenGraph] = OrderedDict()
        self._impossible: set[Rewriting] = set()

    def graph(self, rewriting: Rewriting) -> RewrittenGraph | None:
        """Return the graph of a rewriting; None where its moves exclude each other.

        Raises:
            CostError: a local call has no cost.
        """
        if not rewriting:
            return self.imported
        kept = self._kept.get(rewriting)
        if kept is not None:
            self._kept.move_to_end(rewriting)
            return kept
        problem = None if rewriting in self._impossible else self._problem_of(rewriting)
        if problem is None:
            self._impossible.add(rewriting)
            return None
        builder = builder_of(problem, self.imported.builder)
        kept = self._kept[rewriting] = RewrittenGraph(rewriting, problem, builder, self._shares)
        if len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        return kept
