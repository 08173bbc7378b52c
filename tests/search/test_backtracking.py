"""Backtracking over sets of substitutions against all sets, one by one."""

from __future__ import annotations

import itertools
import random

import pytest

from search.algorithms.backtracking import backtrack


def random_cost(count: int, seed: int) -> dict[tuple[int, ...], float]:
    """Return a cost for every set: of each move and of each pair, so that moves help or harm each other."""
    draw = random.Random(seed)
    single = [draw.uniform(-1, 1) for _ in range(count)]
    pairs = {pair: draw.uniform(-0.5, 0.5) for pair in itertools.combinations(range(count), 2)}
    return {
        moves: 10.0
        + sum(single[move] for move in moves)
        + sum(pairs[pair] for pair in itertools.combinations(moves, 2))
        for size in range(count + 1)
        for moves in itertools.combinations(range(count), size)
    }


@pytest.mark.parametrize("seed", range(20))
def test_with_any_alpha_and_budget_enough_the_best_of_all_sets_is_found(seed: int) -> None:
    cost = random_cost(5, seed)
    found = backtrack(5, cost.__getitem__, budget=len(cost), alpha=100.0)
    assert len(found) == len(cost)
    assert found[0].cost_s == min(cost.values())
    assert [one.cost_s for one in found] == sorted(cost.values())


@pytest.mark.parametrize("seed", range(20))
def test_a_larger_budget_evaluates_the_same_sets_first_and_is_never_worse(seed: int) -> None:
    cost = random_cost(6, seed)
    before: set[tuple[int, ...]] = set()
    best = float("inf")
    for budget in (1, 2, 5, 10, 20, 64):
        asked: list[tuple[int, ...]] = []

        def asking(moves: tuple[int, ...], asked: list[tuple[int, ...]] = asked) -> float:
            asked.append(moves)
            return cost[moves]

        found = backtrack(6, asking, budget=budget)
        assert len(asked) == len(set(asked)) == len(found) <= budget
        assert before <= set(asked)
        assert found[0].cost_s <= best
        before, best = set(asked), found[0].cost_s


def test_what_it_starts_from_is_never_beaten_by_less() -> None:
    """Moves 0 and 1 pay together alone, and each by itself is beyond alpha: a start has them nevertheless."""
    cost = {(): 1.0, (0,): 2.0, (1,): 2.0, (0, 1): 0.5}
    assert backtrack(2, cost.__getitem__, budget=3)[0].moves == ()
    assert backtrack(2, cost.__getitem__, budget=3, starts=((), (1, 0)))[0].moves == (0, 1)


def test_sets_beyond_alpha_are_not_followed() -> None:
    cost = {(): 1.0, (0,): 1.3, (1,): 1.25, (0, 1): 0.1}
    assert [one.moves for one in backtrack(2, cost.__getitem__, budget=9, alpha=1.2)] == [(), (1,), (0,)]
    assert backtrack(2, cost.__getitem__, budget=9, alpha=1.3)[0].moves == (0, 1)
