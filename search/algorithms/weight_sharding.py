"""Sharding of weights: the best change of one layer's weights after the other.

The operators of the best start stay as they are. Sharing costs time (reduce-scatter and all-gather against one
all-reduce, gathers that are waited for) and saves memory and a part of the update, so that it is taken where the plain
strategy exceeds a device's memory, or where the update takes long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graph.operators import OperatorGraph
from graph.strategy import Sharding, Strategy, stays_whole
from search.algorithms.algorithm import Algorithm
from search.algorithms.greedy import Trial, TrialResult, require_one, trials
from search.algorithms.proposal_log import Observer
from search.orders import Order
from search.problem import Problem
from search.space.baselines import data_parallel, expert, fsdp, shared, zero


def share_weights(
    problem: Problem,
    starts: Sequence[Strategy] = (),
    *,
    most: int,
    order: Order = "program",
    observer: Observer | None = None,
) -> TrialResult:
    """Return the best of some strategies with other shardings of their weights, within `most` simulations.

    The strategies are `starts`, data parallel and expert, and data parallel with all weights shared (ZeRO, FSDP). Of
    the best one all weights are then shared alike, and then layer after layer, those of the most bytes first, until a
    round brings nothing.

    Raises:
        UsageError: `most` is less than 1.
        CostError: a local call has no cost.
    """
    graph, count = problem.graph, problem.device_count
    require_one("sharding", most)
    best = Trial(problem, order, observer)
    try:
        plain = (data_parallel(graph, count), expert(graph, count), zero(graph, count), fsdp(graph, count))
        for strategy in (*starts, *plain)[:most]:
            best.take(strategy)
        for level in Sharding:
            if best.simulated < most:
                best.take(shared(graph, best.strategy, level))
        layers = weights_by_layer(graph)
        whole = stays_whole(graph)
        gained = True
        while gained and best.simulated < most:
            gained = False
            for layer in layers:
                for level in Sharding:
                    changed = _with(graph, best.strategy, layer, level, whole)
                    if changed != best.strategy and best.simulated < most:
                        gained = best.take(changed) or gained
    except KeyboardInterrupt:
        return best.tried(interrupted=True)
    return best.tried(interrupted=False)


def weights_by_layer(graph: OperatorGraph) -> list[tuple[int, ...]]:
    """Return the numbers of the weights that one operator is the first to read, those of the most bytes first."""
    layers: dict[int, list[int]] = {}
    for number, weight in enumerate(graph.weights):
        readers = [index for index, _ in graph.consumers[weight.name]]
        if readers:
            layers.setdefault(min(readers), []).append(number)
    weights = graph.weights
    size = {reader: sum(weights[number].spec.size_bytes for number in of) for reader, of in layers.items()}
    return [tuple(layers[reader]) for reader in sorted(layers, key=lambda reader: (-size[reader], reader))]


def _with(
    graph: OperatorGraph, strategy: Strategy, layer: Sequence[int], level: Sharding, whole: frozenset[str]
) -> Strategy:
    levels = [strategy.sharding_of(number) for number in range(len(graph.weights))]
    for number in layer:
        kept_whole = level is Sharding.PARAMETERS and graph.weights[number].name in whole
        levels[number] = Sharding.OPTIMIZER if kept_whole else level
    return replace(strategy, sharding=tuple(levels))


ALGORITHMS: Mapping[str, Algorithm] = {"sharding": trials("sharding", share_weights)}
