"""OptCNN: the strategy of the least additive cost, exactly, among listed configurations.

The cost of a strategy is a sum, as if nothing overlapped: of every operator the slowest forward and the slowest
backward of its tasks; of every edge what its exchange takes by itself, forward and back; of every group the
all-reduces of the gradients of its weights and the update, each on the device where it takes longest. A weight that
several groups read counts in each as if it were that group's own. The simulator knows better on all of it, so this is
a start for the walk and a certificate for this cost, and nothing else.

Source: OptCNN (arXiv:1802.04924): node and edge elimination, here of any operator with at most two neighbours; what
they leave over is enumerated (`search.bounds.elimination`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Self

import numpy as np

from graph.errors import UsageError
from graph.strategy import Strategy
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import simulated
from search.bounds.elimination import LARGEST_TABLE, CostFunction, TooWide, minimize
from search.cost.cost_table import Met
from search.parallel.copies import Copies
from search.problem import Problem
from search.space.enumerated_space import Space, count_contiguous, leading_space, smallest_space
from search.space.groups import find_groups
from search.tables import Array, Tables

# Configurations of a group up to which the whole space is taken.
MOST_WHOLE = 64
# Fewer are seldom those that go well together: of 8 none was worth having on 48 devices.
LEAST_KEPT = 16
# Choices, and pairs of them times devices, up to which costs are found before other processes have started.
MOST_LISTED_ALONE, MOST_PAIRS_ALONE = 2_000, 500_000
# The bounds of a choice's cost, the less exact one first (`_ascending`).
_LEAST, _WITH_WEIGHTS, _WITH_HEAD, _WITH_OTHERS, _WHOLE = range(5)


@dataclass(frozen=True, slots=True)
class Additive:
    """The strategy of the least additive cost in a space."""

    strategy: Strategy
    cost_ns: int
    space: Space


def optcnn(
    problem: Problem, space: Space | None = None, *, limit: int = LARGEST_TABLE, workers: int = 1
) -> Additive:
    """Return the strategy of the least additive cost in a space, by default one that fits the machine's size.

    workers: processes that look for costs, at most; one does where costs may be measured.

    Raises:
        UsageError: the core that the eliminations leave is too large to be enumerated.
        CostError: a local call has no cost.
        RuntimeFailure: a process was ended from outside.
    """
    tables = default_tables(problem, workers) if space is None else Tables(problem, space)
    return least_additive(tables, limit, workers)


def least_additive(tables: Tables, limit: int = LARGEST_TABLE, workers: int = 1) -> Additive:
    """Return the strategy of the least additive cost in the space of some tables.

    For `workers` and errors see `optcnn`.
    """
    space = tables.space
    sizes = [len(choices) for choices in space.choices]
    try:
        minimum = minimize(sizes, factors(tables, workers), limit)
    except TooWide as error:
        raise UsageError(
            f"optcnn: eliminations leave {error.left} of {len(sizes)} groups, whose tables need {error.entries} "
            f"entries, must be at most {limit}; take fewer devices or algorithm mcmc"
        ) from None
    return Additive(space.strategy(minimum.chosen), minimum.value, space)


def default_space(problem: Problem) -> Space:
    """Return the whole space where every group has few configurations, else a compact one.

    That is aligned lists of neighbours where these are few, else the first devices alone, without replicas; of those,
    each group keeps the `MOST_WHOLE` that cost least by themselves, the first of equals.
    """
    space = _listed_space(problem)
    if all(len(choices) <= MOST_WHOLE for choices in space.choices):
        return space
    with Cheapest(Tables(problem, space)) as cheapest:
        return cheapest.space(MOST_WHOLE)


def default_tables(problem: Problem, workers: int = 1) -> Tables:
    """Return the tables of the default space; for `workers` and errors see `optcnn`."""
    with Cheapest(Tables(problem, _listed_space(problem)), workers) as cheapest:
        return cheapest.tables(MOST_WHOLE)


def _listed_space(problem: Problem) -> Space:
    """Return the space of whose choices the default one has the cheapest."""
    graph, count = problem.graph, problem.device_count
    heads = [graph.operators[group.head] for group in find_groups(graph)]
    if all(count_contiguous(head, count) <= MOST_WHOLE for head in heads):
        return smallest_space(graph, count, MOST_WHOLE)
    return leading_space(graph, count)


def small_tables(problem: Problem, most_pairs: int, workers: int = 1) -> Tables | None:
    """Return the tables of a space of at most `most_pairs` pairs of configurations; None where the least has more.

    A group keeps `LEAST_KEPT` configurations, or twice as many while there are few enough pairs, up to `MOST_WHOLE`:
    those that cost least by themselves, of the space from which the default one takes its. For `workers` and errors
    see `optcnn`.
    """
    small = None
    most = LEAST_KEPT
    with Cheapest(Tables(problem, _listed_space(problem)), workers) as cheapest:
        while most <= MOST_WHOLE:
            tables = cheapest.tables(most)
            if tables.pair_count > most_pairs:
                break
            small = tables
            most *= 2
    return small


# The first of a group's choices with their costs, by the number of a group.
FirstChoices = dict[int, list[tuple[int, int]]]


class Cheapest:
    """The choices of each group in a space that cost least by themselves, of equals the first.

    A context, in which processes look for them. Nothing more may be asked where it raised.

    Args:
        tables: of the space.
        workers: see `optcnn`.
    """

    def __init__(self, tables: Tables, workers: int = 1) -> None:
        self._tables = tables
        self._ascending = {group: _ascending(tables, group) for group in sorted(set(tables.like_groups))}
        self._first: FirstChoices = {group: [] for group in self._ascending}
        listed = sum(len(tables.space.choices[group]) for group in self._ascending)
        count = _processes(tables, workers, len(self._ascending)) if listed > MOST_LISTED_ALONE else 1
        self._copies: Copies[int, tuple[FirstChoices, Met | None]] = Copies(self._share, count)

    def __enter__(self) -> Self:
        """Start the processes."""
        self._copies.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes."""
        self._copies.close()

    def tables(self, most: int) -> Tables:
        """Return the tables of a space of at most `most` choices a group."""
        space = self.space(most)
        return (
            self._tables if space is self._tables.space else Tables(self._tables.problem, space, self._tables)
        )

    def space(self, most: int) -> Space:
        """Return a space of at most `most` choices a group."""
        space = self._tables.space
        if all(len(choices) <= most for choices in space.choices):
            return space
        for first, met in self._copies.ask(most):
            self._first |= first
            if met is not None:
                self._tables.problem.costs.take(met)
                for group, costs_ns in first.items():
                    self._tables.learn_own_ns(group, dict(costs_ns))
        kept = [
            tuple(choices[number] for number, _ in sorted(self._first[group][:most]))
            for choices, group in zip(space.choices, self._tables.like_groups, strict=True)
        ]
        return replace(space, choices=tuple(kept), name=f"{space.name}, {most} a group", whole=False)

    def _share(self, share: int, shares: int, most: int) -> tuple[FirstChoices, Met | None]:
        """Return the first choices of the groups of a share, as many as asked for where there are as many."""
        mine = list(self._ascending)[share::shares]
        for group in mine:
            first = self._first[group]
            first.extend(islice(self._ascending[group], max(0, most - len(first))))
        return {group: self._first[group] for group in mine}, _met(self._tables, share)


def _processes(tables: Tables, workers: int, shares: int) -> int:
    """Return in how many processes costs are found, of at most so many shares: one where they may be measured."""
    return min(workers, shares) if workers > 1 and tables.problem.costs.copies() else 1


def _met(tables: Tables, share: int) -> Met | None:
    """Return the costs that a copy of this process has met; None for this process itself."""
    return tables.problem.costs.met() if share else None


def factors(tables: Tables, workers: int = 1) -> list[CostFunction]:
    """Return the additive cost as functions of one and of two groups; for `workers` and errors see `optcnn`."""
    space = tables.space
    own_of = {group: _own_ns(tables, group) for group in set(tables.like_groups)}
    own = [own_of[group] for group in tables.like_groups]
    if tables.pair_count * tables.problem.device_count > MOST_PAIRS_ALONE:
        _make_edges(tables, workers)
    between: dict[tuple[int, int], Array] = {}
    for number, edge in enumerate(tables.edges):
        table = tables.edge(number, by_part=False)
        producer, reader = space.group_of[edge.producer], space.group_of[edge.reader]
        if producer == reader:
            own[producer] = own[producer] + table.alone_ns[table.producer_C, table.reader_C]
            continue
        pairs = table.alone_ns[np.ix_(table.producer_C, table.reader_C)]
        key = (min(producer, reader), max(producer, reader))
        pairs = pairs if key[0] == producer else pairs.T
        between[key] = between[key] + pairs if key in between else pairs
    return [
        *(CostFunction((group,), table) for group, table in enumerate(own)),
        *(CostFunction(scope, table) for scope, table in between.items()),
    ]


def _make_edges(tables: Tables, workers: int) -> None:
    """Make the tables of all edges, by several processes where that is possible."""
    numbers = tables.distinct_edges()

    def alone_ns(share: int, shares: int, _: None) -> tuple[dict[int, Array], Met | None]:
        # Every so many of those that are ordered by size: shares are about equal.
        mine = numbers[share::shares]
        made = {number: tables.edge(number, by_part=False).alone_ns for number in mine}
        return made, _met(tables, share)

    with Copies(alone_ns, _processes(tables, workers, len(numbers))) as copies:
        for made, met in copies.ask(None):
            if met is not None:
                tables.problem.costs.take(met)
                for number, table in made.items():
                    tables.learn_edge(number, table)


def _own_ns(tables: Tables, group: int) -> Array:
    """Return the cost of each choice of a group, without exchanges, in nanoseconds."""
    numbers = range(len(tables.space.choices[group]))
    return np.array([tables.own_ns(group, number) for number in numbers], np.int64)


def _ascending(tables: Tables, group_index: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of a group's choices with their own costs, by ascending cost, of equals the first first.

    A cost is bounded by an equal share of the least time of all tasks of the head or, where that is not known, by its
    first task; by that and the weights' sums and updates; by the head's first task, and the weights; by the first tasks
    of all operators, and the weights. The choice of the lowest bound gets its next bound, or its cost, first: of the
    others these are made only where their bounds do not exclude them.
    """
    head, *others = tables.space.groups[group_index].operators
    least = tables.least_ns(head)
    if not least.any():  # all at once: they may have to be measured
        least = tables.first_ns(head, range(len(least)))
    least_ns = least.tolist()
    # Of equal bounds the less exact one first: it may belong to a choice that costs as much and comes before.
    bounds = [(bound_ns, _LEAST, number) for number, bound_ns in enumerate(least_ns)]
    heapify(bounds)
    while bounds:
        bound_ns, of, number = bounds[0]
        if of == _WHOLE:
            heappop(bounds)
            yield number, bound_ns
            continue
        if of == _LEAST:
            bound_ns += tables.weights_ns(group_index, number)
        elif of == _WITH_WEIGHTS:
            bound_ns += max(0, int(tables.first_ns(head, [number])[0]) - least_ns[number])
        elif of == _WITH_HEAD:
            bound_ns += sum(int(tables.first_ns(operator, [number])[0]) for operator in others)
        else:
            bound_ns = tables.own_ns(group_index, number)
        heapreplace(bounds, (bound_ns, of + 1, number))


def _algorithm(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    began = time.monotonic()
    additive = optcnn(problem, workers=context.workers)
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


ALGORITHMS: Mapping[str, Algorithm] = {"optcnn": _algorithm}
