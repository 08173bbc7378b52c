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
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graph.axes import tasks
from graph.errors import UsageError
from graph.strategy import Configuration, Strategy
from search.algorithms.algorithm import Algorithm, AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import simulated
from search.bounds.elimination import LARGEST_TABLE, CostFunction, TooWide, minimize
from search.problem import Array, Problem, Tables
from search.space.enumerated_space import Space, all_degrees, smallest_space
from search.space.groups import follow

# Configurations of a group up to which the whole space is taken.
MOST_WHOLE = 64


@dataclass(frozen=True, slots=True)
class Additive:
    """The strategy of the least additive cost in a space. `widest`: operators that the core's tables joined."""

    strategy: Strategy
    cost_ns: int
    space: Space
    widest: int


def optcnn(problem: Problem, space: Space | None = None, *, limit: int = LARGEST_TABLE) -> Additive:
    """Return the strategy of the least additive cost in a space, by default one that fits the machine's size.

    Raises:
        UsageError: the core that the eliminations leave is too large to be enumerated.
        CostError: a local call has no cost.
    """
    space = space if space is not None else default_space(problem)
    tables = Tables(problem, space)
    sizes = [len(choices) for choices in space.choices]
    try:
        minimum = minimize(sizes, factors(tables), limit)
    except TooWide as error:
        raise UsageError(
            f"optcnn: eliminations leave {error.left} of {len(sizes)} groups, whose tables need {error.entries} "
            f"entries, must be at most {limit}; take fewer devices or algorithm mcmc"
        ) from None
    return Additive(space.strategy(minimum.chosen), minimum.value, space, minimum.widest)


def default_space(problem: Problem) -> Space:
    """Return the whole space where every group has few configurations, else a compact one.

    That is aligned lists of neighbours where these are few, else the first devices alone, without replicas; of those,
    each group keeps the `MOST_WHOLE` that cost least by themselves, the first of equals.
    """
    graph, count = problem.graph, problem.device_count
    space = smallest_space(graph, count, MOST_WHOLE)
    if space.whole or max(len(configurations) for configurations in space.choices) <= MOST_WHOLE:
        return space
    groups = space.groups
    choices = [
        tuple(
            Configuration(degrees, tuple(range(tasks(degrees))))
            for degrees in all_degrees(graph.operators[group.head], count)
            if count % tasks(degrees) == 0 and degrees[-1] == 1
        )
        for group in groups
    ]
    space = Space(
        graph,
        count,
        groups,
        tuple(choices),
        "degrees on a divisor of the devices, the first of them, without replicas",
        whole=False,
    )
    if max(len(configurations) for configurations in choices) <= MOST_WHOLE:
        return space
    tables = Tables(problem, space)
    kept = []
    for group_number, configurations_of_group in enumerate(choices):
        order = np.argsort(_own_ns(tables, group_number), kind="stable")[:MOST_WHOLE]
        kept.append(tuple(configurations_of_group[number] for number in sorted(order.tolist())))
    return Space(graph, count, groups, tuple(kept), f"{space.name}, {MOST_WHOLE} a group", whole=False)


def factors(tables: Tables) -> list[CostFunction]:
    """Return the additive cost as functions of one and of two groups."""
    space = tables.space
    own = [_own_ns(tables, group) for group in range(len(space.groups))]
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


def _own_ns(tables: Tables, group_index: int) -> Array:
    """Return the cost of each choice of a group, without exchanges, in nanoseconds."""
    space = tables.space
    group = space.groups[group_index]
    total: Array = np.zeros(len(space.choices[group_index]), np.int64)
    for operator in group.operators:
        total = total + tables.operator(operator).longest_ns_C
    weights = [weight for weight, readers in tables.trained() if group_index in readers]
    for number, choice in enumerate(space.choices[group_index]):
        syncs, elements = tables.syncs(weights, follow(group, choice))
        by_device: dict[int, int] = {}
        for sync in syncs:
            for device in sync.devices:
                by_device[device] = by_device.get(device, 0) + tables.sync_ns(sync)
        total[number] += max(by_device.values(), default=0)
        total[number] += max((tables.update_ns(held, device) for device, held in elements.items()), default=0)
    return total


def _algorithm(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
    began = time.monotonic()
    additive = optcnn(problem)
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
