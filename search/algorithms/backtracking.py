"""Backtracking over sets of substitutions, cheapest first: the outer level of Unity's joint search.

What one set costs is the caller's to say: the graph that it makes, and a strategy for that graph.

Source: Unity (OSDI 2022) section 6 and its artifact; TASO (SOSP 2019) section 5: a queue of graphs by cost, from which
those are dropped that cost more than alpha times the best.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALPHA = 1.2
"""Of Unity's artifact; 1.05 in TASO."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A set of moves, by their numbers, and its cost in seconds; infinite where nothing fits."""

    moves: tuple[int, ...]
    cost_s: float

    @property
    def rank(self) -> tuple[float, int, tuple[int, ...]]:
        """The key by which sets are compared: by cost, then fewer moves, then their numbers."""
        return self.cost_s, len(self.moves), self.moves


def backtrack(
    count: int,
    cost: Callable[[tuple[int, ...]], float],
    *,
    budget: int,
    alpha: float = ALPHA,
    starts: Sequence[tuple[int, ...]] = ((),),
    deadline: float = float("inf"),
) -> list[Evaluated]:
    """Return all sets of moves that were evaluated, the best first.

    A set is followed by those with one move more or one less. A larger budget evaluates the same sets first.

    Args:
        count: of moves.
        cost: seconds of a set of moves, which are ascending.
        budget: the most sets to evaluate, unless there are more starts, which count.
        alpha: sets that cost more than so many times the best are not followed.
        starts: evaluated first, and in any case.
        deadline: of `time.monotonic`, after which no other set is evaluated.
    """
    evaluated: dict[tuple[int, ...], Evaluated] = {}
    queue: list[tuple[tuple[float, int, tuple[int, ...]], Evaluated]] = []
    best_s = float("inf")

    def visit(moves: tuple[int, ...]) -> None:
        nonlocal best_s
        if moves in evaluated:
            return
        one = evaluated[moves] = Evaluated(moves, cost(moves))
        best_s = min(best_s, one.cost_s)
        heapq.heappush(queue, (one.rank, one))

    for start in starts:
        visit(tuple(sorted(start)))
    while queue:
        _, one = heapq.heappop(queue)
        if one.cost_s > alpha * best_s:
            break
        for move in range(count):
            if len(evaluated) >= budget or time.monotonic() >= deadline:
                return _sorted(evaluated)
            visit(tuple(sorted(set(one.moves) ^ {move})))
    return _sorted(evaluated)


def _sorted(evaluated: dict[tuple[int, ...], Evaluated]) -> list[Evaluated]:
    return sorted(evaluated.values(), key=lambda one: one.rank)
