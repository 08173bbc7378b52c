"""The contract of the store, over every backend: documents, searches, simulations and executions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.db.records import RunSpeed, SearchOutcome
from app.db.store import Store
from graph.errors import DatabaseError, UsageError
from tests.app.db import samples
from tests.app.db.samples import Scene


def test_documents_are_one_row_each(store: Store) -> None:
    scene = Scene.stored(store)
    assert Scene.stored(store) == scene
    graph = store.graph_by_digest(samples.graph().digest)
    assert graph == store.graph(scene.graph_id) == replace(samples.graph(), id=scene.graph_id)
    topology = store.topology(scene.topology_id)
    assert topology == replace(samples.topology(), id=scene.topology_id)
    training = store.training(scene.training_id)
    assert training == replace(samples.training(), id=scene.training_id)
    assert store.graphs() == [graph]
    assert store.topologies() == [topology]
    for missing in (store.graph(99), store.topology(99), store.training(99)):
        assert missing is None


def test_strategy_is_found_by_id_digest_and_prefix(store: Store) -> None:
    scene = Scene.stored(store)
    strategies = [samples.strategy(scene.graph_id, number) for number in range(40)]
    ids = [store.put_strategy(strategy) for strategy in strategies]
    for number, strategy in zip(ids, strategies, strict=True):
        stored = replace(strategy, id=number)
        assert store.strategy(number) == store.strategy(str(number)) == stored
        assert store.strategy(strategy.digest) == store.strategy(strategy.digest[:12].upper()) == stored
    assert store.strategies(graph_id=scene.graph_id, limit=1) == [replace(strategies[-1], id=ids[-1])]
    assert store.strategies(graph_id=99) == []


def test_unknown_strategy_is_named(store: Store) -> None:
    scene = Scene.stored(store)
    digest = store.strategy(store.put_strategy(samples.strategy(scene.graph_id, 0))).digest
    for reference in (
        "ffffffff",
        "%%%%%%%",
        "______",
        "12345",
        12345,
        "9" * 30,
        "",
        "-1",
        digest[:5],
        digest + "0",
    ):
        with pytest.raises(UsageError, match=f"strategy '{str(reference)[:40]}.*': is not in database"):
            store.strategy(reference)


def test_ambiguous_strategy_is_named(store: Store) -> None:
    scene = Scene.stored(store)
    for last in "01":
        store.put_strategy(replace(samples.strategy(scene.graph_id, 0), digest="abcdef" * 10 + "000" + last))
    with pytest.raises(UsageError, match="'abcdefab': means abcdefabcdef, abcdefabcdef, must mean one"):
        store.strategy("abcdefab")


def test_strategy_found_again_keeps_its_source(store: Store) -> None:
    scene = Scene.stored(store)
    baseline = samples.strategy(scene.graph_id, 0, "data-parallel")
    number = store.put_strategy(baseline)
    assert store.put_strategy(replace(baseline, source="search")) == number
    assert store.strategy(number).source == "data-parallel"


def test_best_strategy_is_by_newest_simulation_and_feasible(store: Store) -> None:
    scene = Scene.stored(store)
    slow, fast, stale, too_large = (
        store.put_strategy(samples.strategy(scene.graph_id, number)) for number in range(4)
    )
    for simulation in (
        scene.simulation(slow, 3.0),
        scene.simulation(fast, 2.0),
        scene.simulation(stale, 1.0, at=0, costs="old"),
        scene.simulation(stale, 4.0, at=1, costs="new"),
        replace(scene.simulation(too_large, 0.5), feasible=False),
        replace(scene.simulation(slow, 0.1), task_order="fifo"),
    ):
        store.put_simulation(simulation)
    ranked = store.best_strategies(scene.graph_id, scene.topology_id, scene.training_id)
    assert [(one.strategy.id, one.simulation.step_time_s) for one in ranked] == [
        (fast, 2.0),
        (slow, 3.0),
        (stale, 4.0),
    ]
    best = store.best_strategy(scene.graph_id, scene.topology_id, scene.training_id)
    assert best == ranked[0]
    assert store.best_strategy(scene.graph_id, scene.topology_id, scene.training_id + 1) is None
    by_fifo = store.best_strategy(scene.graph_id, scene.topology_id, scene.training_id, task_order="fifo")
    assert by_fifo is not None
    assert by_fifo.strategy.id == slow


def test_simulation_is_one_row_and_stays_with_its_first_search(store: Store) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 0))
    first, second = store.start_search(scene.search()), store.start_search(scene.search())
    number = store.put_simulation(scene.simulation(strategy, 1.0))
    assert store.put_simulation(scene.simulation(strategy, 1.0, at=1, search_id=first)) == number
    assert store.put_simulation(scene.simulation(strategy, 1.0, at=2, search_id=second)) == number
    expected = replace(scene.simulation(strategy, 1.0, at=2, search_id=first), id=number)
    assert store.simulations(strategy_id=strategy) == store.simulations(search_id=first) == [expected]
    assert store.simulations(search_id=second) == []


def test_search_goes_from_start_to_finish(store: Store) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 0))
    number = store.start_search(scene.search())
    assert store.search(number) == replace(scene.search(), id=number)
    store.record_traces(number, [], SearchOutcome(10, 5, 2.0, 1.5))
    assert store.search(number).status == "running"
    store.finish_search(number, "interrupted", SearchOutcome(20, 9, 2.0, 1.0, strategy))
    found = store.search(number)
    assert (found.status, found.proposals, found.accepted) == ("interrupted", 20, 9)
    assert (found.initial_time_s, found.best_time_s, found.best_strategy_id) == (2.0, 1.0, strategy)
    assert found.finished_at is not None
    assert store.resume_search(number) == found
    assert (store.search(number).status, store.search(number).finished_at) == ("running", None)
    assert store.searches(graph_id=scene.graph_id) == [store.search(number)]
    for act in (
        lambda: store.search(99),
        lambda: store.resume_search(99),
        lambda: store.finish_search(99, "failed", SearchOutcome(0, 0, None, None)),
    ):
        with pytest.raises(UsageError, match="search 99: is not in database"):
            act()


def test_execution_goes_from_start_to_finish(store: Store) -> None:
    scene = Scene.stored(store, batch_size=8)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 0))
    number = store.start_execution(scene.execution(strategy))
    assert store.execution(number) == replace(scene.execution(strategy), id=number)
    finished = store.finish_execution(
        number, [2.0, 4.0, 9.0], largest_deviation=1e-6, speed=RunSpeed(0.5, 1.8)
    )
    assert (finished.minimum_s, finished.median_s, finished.mean_s) == (2.0, 4.0, 5.0)
    assert finished.throughput_samples_per_s == 8 / 4.0
    assert (finished.status, finished.step_times_s) == ("finished", (2.0, 4.0, 9.0))
    assert finished.largest_deviation == 1e-6
    assert (finished.speed, finished.slowdown) == (0.5, 1.8)
    assert store.executions(strategy_id=strategy) == [finished]
    with pytest.raises(DatabaseError, match="has no step times"):
        store.finish_execution(number, [])


def test_failed_execution_keeps_its_reason(store: Store) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 0))
    number = store.start_execution(scene.execution(strategy))
    store.fail_execution(number, "rank 1: killed")
    found = store.execution(number)
    assert (found.status, found.failure, found.median_s) == ("failed", "rank 1: killed", None)
    with pytest.raises(DatabaseError, match="execution 99: is not in database"):
        store.fail_execution(99, "nobody")
