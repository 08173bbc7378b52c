"""Activation checkpointing: the blocks of a network to make again in the backward, which save most for their time.

A network is cut into blocks that keep about as many bytes each, where few bytes cross; into few and into many, since
what is there while a block is made again grows with its size. Each block is simulated alone, and blocks are taken by
the time that they add for a byte that they save where memory is short, until the strategy fits. Every step is an exact
simulation.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174), for blocks of equal size; DTR
(arXiv:2006.09616) for cost per byte as the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import isqrt

import numpy as np

from graph.operator_ranges import OperatorRange, OperatorRanges
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from search.algorithms.algorithm import Algorithm
from search.algorithms.trials import Trial, TrialSearch
from search.kernels.records import Array
from search.outcome import Outcome
from search.simulate.saved_tensors import kept_outputs
from search.space.baselines import data_parallel, expert

FEWEST_BLOCKS, MOST_BLOCKS = 4, 128
MOST_BASES = 4
"""Strategies that do not fit, of which blocks are made again: the fastest ones."""


@dataclass(frozen=True, slots=True)
class _Simulated:
    outcome: Outcome
    peak_bytes_D: Array


def blocks(graph: OperatorGraph, count: int) -> OperatorRanges:
    """Return about `count` groups that make up the network, each keeping about as many bytes, cut where few cross.

    Groups begin and end with operators that have a backward.
    """
    operators = range(len(graph.operators))
    size = [
        sum(
            graph.value_by_name[name].spec.size_bytes
            for name, kept in zip(graph.operators[index].outputs, flags, strict=True)
            if kept
        )
        for index, flags in zip(operators, kept_outputs(graph), strict=True)
    ]
    before = [0, *accumulate(size)]
    crossing = _crossing_bytes(graph)
    ends = [0]
    for number in range(1, count):
        ideal = number * before[-1] / count
        within = [
            index
            for index in operators[ends[-1] + 1 :]
            if abs(before[index] - ideal) * 2 * count <= before[-1]
        ]
        if within:
            ends.append(min(within, key=lambda index: (crossing[index], abs(before[index] - ideal), index)))
    recomputed = []
    for first, last in pairwise([*ends, len(graph.operators)]):
        reached = [index for index in operators[first:last] if graph.has_backward(graph.operators[index])]
        if reached:
            recomputed.append(OperatorRange(reached[0], reached[-1]))
    return tuple(recomputed)


def _crossing_bytes(graph: OperatorGraph) -> list[int]:
    """Return, for each operator, the bytes made before it that it or a later one reads."""
    change = [0] * (len(graph.operators) + 2)
    for index, operator in enumerate(graph.operators):
        for name in operator.outputs:
            readers = [reader for reader, _ in graph.consumers[name]]
            if readers:
                change[index + 1] += graph.value_by_name[name].spec.size_bytes
                change[max(readers) + 1] -= graph.value_by_name[name].spec.size_bytes
    return list(accumulate(change))[: len(graph.operators)]


def everything(graph: OperatorGraph) -> OperatorRanges:
    """Return groups that make up the network, as many as the square root of the operators that have a backward."""
    return blocks(graph, max(1, isqrt(sum(graph.has_backward(operator) for operator in graph.operators))))


def _recompute(trial: Trial, starts: Sequence[Strategy], _seed: int) -> None:
    """Take some strategies with as much made again as must be to fit.

    The strategies are `starts`, data parallel and expert, all as they are and with nothing made again. Of those that do
    not fit, and would be faster than what does, the fastest are made to.
    """
    graph, count = trial.problem.graph, trial.problem.device_count
    outcomes: dict[Strategy, Outcome] = {}
    for strategy in (*starts, data_parallel(graph, count), expert(graph, count)):
        for variant in (strategy, replace(strategy, recomputation=())):
            if variant not in outcomes:
                outcomes[variant] = _simulate(trial, variant).outcome
    exceeding = [
        variant for variant, cost in outcomes.items() if cost.excess_bytes and not variant.recomputation
    ]
    exceeding.sort(key=lambda variant: outcomes[variant].step_time_ns)
    for base in exceeding[:MOST_BASES]:
        for candidates in _cuts(graph):
            _fit(trial, base, candidates)


def _cuts(graph: OperatorGraph) -> list[OperatorRanges]:
    """Return the ways to cut a network into blocks, those of about as many blocks as operators in one first."""
    middle = isqrt(len(graph.operators))
    counts = []
    count = FEWEST_BLOCKS
    while count <= min(MOST_BLOCKS, max(FEWEST_BLOCKS, len(graph.operators) // 2)):
        counts.append(count)
        count *= 2
    counts.sort(key=lambda number: abs(np.log2(number / max(1, middle))))
    return list(dict.fromkeys(blocks(graph, number) for number in counts))


def _simulate(trial: Trial, strategy: Strategy) -> _Simulated:
    trial.take(strategy)
    return _Simulated(trial.latest, trial.latest_peak_bytes_D)


def _fit(trial: Trial, base: Strategy, candidates: OperatorRanges) -> None:
    """Recompute so many blocks that a strategy fits, the cheapest ones first; then leave out needless ones."""
    if trial.left < 2 + len(candidates) or not _is_promising(trial, base):
        return
    plain = _simulate(trial, base)
    over_D = np.maximum(0, plain.peak_bytes_D - trial.builder.capacity_bytes_D)
    priced: list[tuple[float, OperatorRange]] = []
    for block in candidates:
        alone = _simulate(trial, replace(base, recomputation=(block,)))
        saved_D = np.minimum(over_D, plain.peak_bytes_D - alone.peak_bytes_D)
        saved_bytes = int(np.maximum(0, saved_D).sum())
        if saved_bytes:
            added_ns = alone.outcome.step_time_ns - plain.outcome.step_time_ns
            priced.append((added_ns / saved_bytes, block))
    chosen: list[OperatorRange] = []
    for _, block in sorted(priced):
        chosen.append(block)
        if _simulate(trial, _with(base, chosen)).outcome.excess_bytes == 0:
            _leave_out(trial, base, chosen)
            return


def _is_promising(trial: Trial, base: Strategy) -> bool:
    """Return whether a strategy, as it is, would be faster than the best that fits."""
    best, _ = trial.best
    return bool(best.excess_bytes) or _simulate(trial, base).outcome.step_time_ns < best.step_time_ns


def _leave_out(trial: Trial, base: Strategy, chosen: list[OperatorRange]) -> None:
    """Keep the activations of blocks, the dearest for their bytes first, as long as the strategy fits."""
    for block in reversed(chosen[:-1]):
        fewer = [other for other in chosen if other != block]
        if _simulate(trial, _with(base, fewer)).outcome.excess_bytes == 0:
            chosen.remove(block)


def _with(base: Strategy, chosen: Sequence[OperatorRange]) -> Strategy:
    return replace(base, recomputation=tuple(sorted(chosen)))


recompute = TrialSearch("recomputation", _recompute)
ALGORITHMS: Mapping[str, Algorithm] = {"recomputation": recompute.solve}
