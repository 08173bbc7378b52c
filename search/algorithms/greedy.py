"""Two algorithms to compare others with: the best change of one group after the other, and random strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graph.strategy import Strategy
from search.algorithms.algorithm import Algorithm
from search.algorithms.optcnn import default_space
from search.algorithms.trials import Trial, TrialSearch
from search.space.baselines import data_parallel, expert, random_strategy, single_device
from search.space.groups import follow


def _greedy(trial: Trial, starts: Sequence[Strategy], _seed: int) -> None:
    """Take the best change of one group after the other.

    From the best of `starts` (else of data parallel, expert and one device), groups take, in topological order, the
    best of the configurations that OptCNN chooses from, until a round brings nothing.
    """
    graph, count = trial.problem.graph, trial.problem.device_count
    for strategy in starts or (data_parallel(graph, count), expert(graph, count), single_device(graph)):
        trial.take(strategy)
    space = default_space(trial.problem)
    gained = True
    while gained:
        gained = False
        for group, choices in zip(space.groups, space.choices, strict=True):
            for choice in choices:
                _, best = trial.best
                if best.configurations[group.head] != choice:
                    changed = list(best.configurations)
                    for index, configuration in follow(group, choice).items():
                        changed[index] = configuration
                    gained |= trial.take(best.with_configurations(tuple(changed)))


def _random(trial: Trial, starts: Sequence[Strategy], seed: int) -> None:
    """Take the starts, then random strategies."""
    rng = np.random.default_rng(seed)
    for strategy in starts:
        trial.take(strategy)
    while True:
        trial.take(random_strategy(trial.problem.graph, trial.problem.device_count, rng))


greedy, random_search = TrialSearch("greedy", _greedy), TrialSearch("random", _random)
ALGORITHMS: Mapping[str, Algorithm] = {"greedy": greedy.solve, "random": random_search.solve}
