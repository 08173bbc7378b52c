"""How good predictions are: the query equals a slow count over all pairs, over every backend."""

from __future__ import annotations

import statistics
from itertools import combinations

import numpy as np
import pytest

from app.analytics.compare import compare
from app.db.store import Store
from tests.app.db import samples
from tests.app.db.samples import Scene


def half_interquartile_range(steps: list[float]) -> float:
    low, high = np.quantile(steps, [0.25, 0.75])
    return float(high - low) / 2


def stored(store: Store, scene: Scene, number: int, predicted_s: float, runs: list[list[float]]) -> None:
    """Store a strategy with a prediction and finished runs."""
    strategy = store.put_strategy(samples.strategy(scene.graph_id, number))
    store.put_simulation(scene.simulation(strategy, predicted_s))
    for at, steps in enumerate(runs):
        store.finish_execution(store.start_execution(scene.execution(strategy, at=at)), steps)


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_equals_a_slow_count_over_all_pairs(store: Store, seed: int) -> None:
    random = np.random.default_rng(seed)
    scene, drawn = Scene.stored(store), []
    for number in range(14):
        # Coarse, so that predictions tie and intervals touch.
        predicted = float(random.integers(2, 8)) / 4
        centre = float(random.integers(2, 8)) / 4
        runs = [
            [centre + float(step) / 16 for step in random.integers(0, 8, 5)]
            for _ in range(random.integers(1, 4))
        ]
        stored(store, scene, number, predicted, runs)
        medians = [statistics.median(run) for run in runs]
        noise = max(half_interquartile_range(runs[-1]), (max(medians) - min(medians)) / 2)
        drawn.append((predicted, medians[-1], noise))
    agreeing = opposite = pairs = 0
    for (p, m, noise), (q, n, other_noise) in combinations(drawn, 2):
        if abs(m - n) > noise + other_noise:
            pairs += 1
            agreeing += (p - q) * (m - n) > 0
            opposite += (p - q) * (m - n) < 0
    assert 0 < agreeing + opposite < pairs < 14 * 13 / 2
    errors = [(p - m) / m for p, m, _ in drawn]
    lowest = min(p for p, _, _ in drawn)
    chosen = next(m for p, m, _ in drawn if p == lowest)

    (found,) = compare(store.database).accuracy
    assert (found.micro_batches, found.strategies, found.pairs) == (1, 14, pairs)
    assert (found.agreeing_pairs, found.opposite_pairs) == (agreeing, opposite)
    assert found.kendall_tau == pytest.approx((agreeing - opposite) / pairs)
    absolute = np.abs(errors)
    assert found.mean_error == pytest.approx(absolute.mean())
    assert found.median_error == pytest.approx(np.median(absolute))
    assert found.p95_error == pytest.approx(np.quantile(absolute, 0.95))
    assert found.worst_error == pytest.approx(absolute.max())
    assert found.bias == pytest.approx(np.mean(errors))
    assert found.noise == pytest.approx(np.median([noise / m for _, m, noise in drawn]))
    assert found.loss_of_choice == pytest.approx(chosen / min(m for _, m, _ in drawn) - 1)


def test_networks_are_judged_apart_and_only_by_what_was_run(store: Store) -> None:
    first, second = Scene.stored(store), Scene.stored(store, 1, model="alexnet", batch_size=16)
    stored(store, first, 1, 1.0, [[1.0, 1.0]])
    stored(store, first, 2, 2.0, [[4.0, 4.0]])
    stored(store, first, 3, 9.0, [])
    stored(store, second, 4, 3.0, [[2.0, 2.0]])
    stored(store, second, 5, 2.0, [[3.0, 3.0]])
    found = {one.model: one for one in compare(store.database).accuracy}
    assert {name: (one.strategies, one.kendall_tau) for name, one in found.items()} == {
        "inception": (2, 1.0),
        "alexnet": (2, -1.0),
    }
    assert found["inception"].loss_of_choice == 0.0
    assert found["alexnet"].loss_of_choice == pytest.approx(0.5)
    assert [one.model for one in compare(store.database, model="alexnet").accuracy] == ["alexnet"]


def test_strategies_within_their_noise_say_nothing_about_the_order(store: Store) -> None:
    scene = Scene.stored(store)
    stored(store, scene, 1, 2.0, [[1.0, 1.2]])
    stored(store, scene, 2, 1.0, [[1.05, 1.25]])
    (found,) = compare(store.database).accuracy
    assert (found.pairs, found.kendall_tau) == (0, None)
