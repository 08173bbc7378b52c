"""Sharding of weights: the best change of one layer's weights after the other.

The operators of the best start stay as they are. Sharing costs time (reduce-scatter and all-gather against one
all-reduce, gathers that are waited for) and saves memory and a part of the update, so that it is taken where the plain
strategy exceeds a device's memory, or where the update takes long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from graph.errors import StrategyError
from graph.operators import OperatorGraph
from graph.strategy import Sharding, Strategy, stays_whole
from search.algorithms.algorithm import Algorithm
from search.algorithms.trials import Trial, TrialSearch
from search.space.baselines import data_parallel, expert, fsdp, shared, zero


def _share_weights(trial: Trial, starts: Sequence[Strategy], _seed: int) -> None:
    """Take some strategies with other shardings of their weights.

    The strategies are `starts`, data parallel and expert, and data parallel with all weights shared (ZeRO, FSDP). Of
    the best one all weights are then shared alike, and then layer after layer, those of the most bytes first, until a
    round brings nothing.
    """
    graph, count = trial.problem.graph, trial.problem.device_count
    plain = (data_parallel(graph, count), expert(graph, count), zero(graph, count), fsdp(graph, count))
    for strategy in (*starts, *plain):
        with suppress(StrategyError):  # of stages that do not take turns
            trial.take(strategy)
    for level in Sharding:
        trial.take(shared(graph, trial.best[1], level))
    layers, whole = weights_by_layer(graph), stays_whole(graph)
    gained = True
    while gained:
        gained = False
        for layer in layers:
            for level in Sharding:
                # What a step in micro-batches cannot keep in shares stays as it is.
                changed = trial.problem.in_micro_batches(_with(graph, trial.best[1], layer, level, whole))
                if changed != trial.best[1]:
                    gained |= trial.take(changed)


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


share_weights = TrialSearch("sharding", _share_weights)
ALGORITHMS: Mapping[str, Algorithm] = {"sharding": share_weights.solve}
