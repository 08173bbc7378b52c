"""Small problems drawn from seeds, and the plainest search of their whole space."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from math import perm, prod

import numpy as np

from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Configuration, Strategy
from graph.topology import Topology, local_topology
from graph.training import Training
from search.algorithms.best_tracker import builder_of
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts
from search.evaluate.evaluator import outcome
from search.orders import Order
from search.outcome import Outcome
from search.problem import Problem
from search.space.groups import find_groups, follow
from tests.search.builders import GraphBuilder, MadeUpCosts, device_kind, local_calls

MOST_OPERATORS = 5
# Strategies of a space, so that there is something to find.
FEWEST = 30


def small_graph(rng: np.random.Generator) -> OperatorGraph:
    """Up to five operators: products, poolings, pointwise operators with one or two sources, a normalization."""
    builder = GraphBuilder()
    samples, features = int(rng.integers(2, 5)), int(rng.integers(2, 4))
    latest = builder.value("input.0", (samples, features), ValueKind.INPUT)
    known = [latest]
    # The loss is two operators. One product at least: without a weight nothing is trained.
    if rng.random() < 0.15:
        builder.normalization("norm", builder.value("other", (samples, features), ValueKind.INPUT))
        builder.loss("norm")
        return builder.finish()
    for place in range(int(rng.integers(1, MOST_OPERATORS - 1))):
        kind = "linear" if place == 0 else str(rng.choice(["linear", "pointwise", "window", "add", "shared"]))
        name = f"o{place}"
        if kind == "linear":
            latest = builder.linear(name, latest, int(rng.integers(2, 4)))
        elif kind == "window":
            latest = builder.window(name, latest)
        elif kind == "shared" and builder.spec("o0.weight").shape == (builder.spec(latest).shape[1],) * 2:
            latest = builder.linear(name, latest, builder.spec(latest).shape[1], weight="o0.weight")
        else:
            same = [one for one in known if builder.spec(one) == builder.spec(latest)]
            other = (str(rng.choice(same)),) if kind == "add" and same else ()
            latest = builder.pointwise(name, latest, *other)
        known.append(latest)
    builder.loss(latest)
    return builder.finish()


def small_topology(rng: np.random.Generator, count: int, memory_bytes: int) -> Topology:
    """Two or three devices with links that are all alike or all different."""
    kind = device_kind(memory_bytes=memory_bytes)
    measured = None
    if rng.random() < 0.4:
        pairs = itertools.permutations(range(count), 2)
        measured = {pair: (float(rng.uniform(1e8, 4e8)), float(rng.uniform(1e-6, 6e-6))) for pair in pairs}
    return local_topology(count, kind, 2e8, 3e-6, float(rng.choice([0.0, 0.3])), measured=measured)


def space_size(graph: OperatorGraph, count: int) -> int:
    """Return how many strategies `strategies` gives."""
    sizes = []
    for group in find_groups(graph):
        axes = graph.operators[group.head].space.axes
        ranges = [range(1, min(axis.size, count) + 1) for axis in axes]
        sizes.append(sum(perm(count, prod(d)) for d in itertools.product(*ranges) if prod(d) <= count))
    return prod(sizes)


@lru_cache(maxsize=512)
def small_problem(seed: int, most: int) -> Problem:
    """Return the problem of a seed; its space has at least `FEWEST` and at most `most` strategies."""
    rng = np.random.default_rng(seed)
    while True:
        graph, count = small_graph(rng), int(rng.integers(2, 4))
        if len(graph.operators) <= MOST_OPERATORS and FEWEST <= space_size(graph, count) <= most:
            break
    tight = rng.random() < 0.2
    topology = small_topology(rng, count, 260 if tight else 1 << 40)
    costs = CostTable(MadeUpCosts(float(10 ** rng.uniform(-8, -5))))
    training = Training(4, optimizer=str(rng.choice(["sgd", "adam"])))
    return Problem(graph, topology, costs, training, LinkCosts(), local_calls)


def strategies(graph: OperatorGraph, count: int) -> Iterator[Strategy]:
    """Give every strategy whose heads run on distinct devices and whose other operators follow them."""
    choices = []
    for group in find_groups(graph):
        axes = graph.operators[group.head].space.axes
        ranges = [range(1, min(axis.size, count) + 1) for axis in axes]
        choices.append(
            [
                follow(group, Configuration(degrees, placed))
                for degrees in itertools.product(*ranges)
                if prod(degrees) <= count
                for placed in itertools.permutations(range(count), prod(degrees))
            ]
        )
    for chosen in itertools.product(*choices):
        by_operator = {index: one for part in chosen for index, one in part.items()}
        yield Strategy(graph.digest, tuple(by_operator[index] for index in range(len(graph.operators))))


@lru_cache(maxsize=512)
def brute_force(problem: Problem, order: Order) -> Outcome:
    """Return the best outcome of all strategies, each simulated."""
    builder = builder_of(problem)
    layout = None
    best = None
    for strategy in strategies(problem.graph, problem.device_count):
        if layout is None:
            layout = builder.layout(strategy)
        layout.change(dict(enumerate(strategy.configurations)))
        found = outcome(layout, order)
        best = found if best is None else min(best, found)
    assert best is not None
    return best
