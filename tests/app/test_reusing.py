"""What a new search starts from: the best that is known for its setting, else for the nearest one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from app.db.records import (
    GraphRecord,
    SimulationRecord,
    StrategyRecord,
    StrategySource,
    TopologyRecord,
    TrainingRecord,
)
from app.db.store import Store
from app.services.costs.operator_costs import CostsByKind
from app.services.models.models import ImportedModel, ModelRequest
from app.services.predict.predict import Setting, Target
from app.services.search.joint_starts import (
    given_joint_starts,
    joint_start,
    known_joint_starts,
)
from app.services.search.start_strategies import MOST, given_starts, known_starts
from app.services.search.substitution_moves import moves_of, substitutions_of
from graph.canonical import canonical_json, digest
from graph.errors import UsageError
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.strategy import Strategy, strategy_text
from graph.substitutions.rewriting import rewritten
from graph.training import Training
from search.cost.cost_table import CostTable
from search.space.baselines import random_strategy
from tests.search.builders import MadeUpCosts, branches, devices, two_layers
from tests.search.merging import Twice


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "x.sqlite") as opened:
        yield opened


def setting_of(store: Store, graph: OperatorGraph, device_count: int, batch_size: int) -> Setting:
    """Return a setting of made-up costs, as `app.services.predict.predict.prepare` does."""
    topology = devices(device_count)
    training = Training(batch_size)
    return Setting(
        model=ImportedModel(ModelRequest("made-up", "paper", None, ""), graph, batch_size),
        target=Target(topology, None, None),
        training=training,
        graph_id=store.put_graph(
            GraphRecord(graph.digest, graph.name, {}, 1, 1, 1, canonical_json(graph.to_json()))
        ),
        topology_id=store.put_topology(
            TopologyRecord(topology.digest, topology.name, device_count, topology.to_json())
        ),
        training_id=store.put_training(
            TrainingRecord(training.digest, batch_size, canonical_json(training.to_json()))
        ),
        source=CostsByKind({}),
        table=CostTable(MadeUpCosts()),
    )


def found(
    store: Store, setting: Setting, seed: int, time_s: float, source: StrategySource = "search"
) -> Strategy:
    """Store a strategy as the result of an earlier search."""
    graph, count = setting.model.graph, len(setting.topology.devices)
    strategy = random_strategy(graph, count, np.random.default_rng(seed))
    text = strategy_text(strategy, graph)
    number = store.put_strategy(StrategyRecord(strategy.digest, setting.graph_id, count, text, source))
    store.put_simulation(
        SimulationRecord(
            number,
            setting.topology_id,
            setting.training_id,
            "program",
            digest(seed),
            time_s,
            1.0,
            0.0,
            0.0,
            time_s,
            0,
            (0,) * count,
        )
    )
    return strategy


def test_the_best_of_the_same_setting_are_taken_and_no_baselines(store: Store) -> None:
    setting = setting_of(store, branches(), 4, 8)
    assert known_starts(store, setting, "program") == []
    found(store, setting, 1, 0.1, "data-parallel")
    slow, best, second = (found(store, setting, seed, time_s) for seed, time_s in ((2, 9), (3, 1), (4, 2)))
    elsewhere = setting_of(store, branches(), 8, 8)
    found(store, elsewhere, 5, 0.01)
    starts = known_starts(store, setting, "program")
    assert [one.strategy for one in starts] == [best, second]
    assert slow not in [one.strategy for one in starts]
    assert len(starts) == MOST
    assert {one.found_for for one in starts} == {"batch size 8 on 4 devices"}
    assert [one.digest for one in starts] == [best.digest, second.digest]


@pytest.mark.parametrize(
    ("others", "nearest"),
    [
        # (samples, devices, batch size): doublings of both count alike, a tie is of the same topology first.
        ([(64, 8, 64), (64, 64, 64)], 0),
        ([(64, 32, 64), (32, 4, 32)], 1),
        ([(64, 2, 64), (16, 4, 16)], 0),
    ],
)
def test_of_the_nearest_setting_one_is_made_to_fit(
    store: Store, others: list[tuple[int, int, int]], nearest: int
) -> None:
    found_there = []
    for seed, (samples, count, batch_size) in enumerate(others):
        other = setting_of(store, two_layers(samples=samples), count, batch_size)
        found_there.append(found(store, other, seed, 1.0))
    setting = setting_of(store, two_layers(samples=64), 4, 64)
    (start,) = known_starts(store, setting, "program")
    assert start.digest == found_there[nearest].digest
    start.strategy.validate(setting.model.graph, 4)
    _, count, batch_size = others[nearest]
    assert start.found_for == f"batch size {batch_size} on {count} devices of {devices(count).name}"


def test_another_network_of_the_same_name_is_passed_over(store: Store) -> None:
    other = two_layers(samples=64)
    same_name = setting_of(store, branches(), 4, 64)
    assert same_name.model.graph.name == other.name
    found(store, same_name, 1, 1.0)
    assert known_starts(store, setting_of(store, other, 8, 64), "program") == []


def test_named_starts_are_those_that_are_named(store: Store) -> None:
    setting = setting_of(store, branches(), 4, 8)
    first, second = (found(store, setting, seed, 1.0) for seed in (1, 2))
    starts = given_starts(store, setting, [second.digest[:12], "1"])
    assert [one.strategy for one in starts] == [second, first]
    with pytest.raises(UsageError, match="strategy 'ffffffff': is not in database"):
        given_starts(store, setting, ["ffffffff"])


def test_a_named_start_of_another_network_is_refused_by_the_option(store: Store) -> None:
    other = found(store, setting_of(store, two_layers(samples=64), 4, 64), 1, 1.0)
    setting = setting_of(store, replace(branches(), name="branches"), 4, 8)
    reference = other.digest[:12]
    with pytest.raises(
        UsageError,
        match=rf"^--start {reference}: is a strategy of \S+, must fit this branches \(its operators are not those of "
        r"branches, .*\); name one of branches, see app strategy list",
    ):
        given_starts(store, setting, [reference])


def test_a_joint_search_takes_the_best_strategies_of_graphs_that_its_moves_make(store: Store) -> None:
    graph = import_module(Twice(), (torch.randn(8, 4),), {}, name="heads")
    moves = moves_of(graph)
    assert [len(move) for move in moves] == [1, 1]
    setting = setting_of(store, graph, 2, 8)
    assert known_joint_starts(store, setting, moves, "program") == []
    found(store, setting, 1, 1.0)
    made = {
        rewriting: setting_of(store, rewritten(graph, substitutions_of(moves, rewriting)), 2, 8)
        for rewriting in ((0,), (1,), (0, 1))
    }
    best = found(store, made[0, 1], 2, 2.0)
    found(store, made[0,], 3, 4.0)
    found(store, made[1,], 4, 3.0)
    baseline = found(store, made[1,], 5, 0.5, "data-parallel")
    # Other devices, another batch size, a network of the same name of another size.
    found(store, setting_of(store, made[1,].model.graph, 4, 8), 6, 0.1)
    found(store, setting_of(store, made[1,].model.graph, 2, 16), 7, 0.1)
    larger = import_module(Twice(), (torch.randn(16, 4),), {}, name="heads")
    found(store, setting_of(store, rewritten(larger, substitutions_of(moves, (1,))), 2, 8), 8, 0.1)

    starts = known_joint_starts(store, setting, moves, "program")
    assert [(start.rewriting, start.record.digest) for start in starts] == [
        ((1,), baseline.digest),
        ((0, 1), best.digest),
    ]
    assert len(starts) == MOST
    used, start = joint_start(store, setting, moves, starts[1])
    assert (start.rewriting, start.strategy) == ((0, 1), best)
    assert used.to_json() == {
        "digest": best.digest,
        "used": best.digest,
        "found_for": "batch size 8 on 2 devices with 2 substitutions",
    }
    # Where a rule is not offered, what it made is nothing to begin with.
    assert {start.rewriting for start in known_joint_starts(store, setting, moves[1:], "program")} == {(0,)}


def test_named_starts_of_a_joint_search_have_its_substitutions_and_its_operators(store: Store) -> None:
    graph = import_module(Twice(), (torch.randn(8, 4),), {}, name="heads")
    moves = moves_of(graph)
    setting = setting_of(store, graph, 2, 8)
    plain = found(store, setting, 1, 1.0)
    merged = found(store, setting_of(store, rewritten(graph, moves[1]), 4, 16), 2, 1.0)
    starts = given_joint_starts(
        store, setting.model, moves, [merged.digest[:12], plain.digest, merged.digest]
    )
    assert [(start.rewriting, start.record.digest) for start in starts] == [
        ((1,), merged.digest),
        ((), plain.digest),
    ]
    used, start = joint_start(store, setting, moves, starts[0])
    start.strategy.validate(rewritten(graph, moves[1]), 2)
    assert (used.digest, used.strategy) == (merged.digest, start.strategy)

    reference = merged.digest[:12]
    with pytest.raises(
        UsageError, match=rf"^--start {reference}: has the substitution merge-linears .*, must have"
    ):
        given_joint_starts(store, setting.model, moves[:1], [reference])
    # A move is all matches whose calls are the same: of one of two nothing is known.
    with pytest.raises(
        UsageError, match=r"^--start .*: has the substitution merge-linears .*, must have those that"
    ):
        given_joint_starts(store, setting.model, [(*moves[0], *moves[1])], [reference])
    other = found(store, setting_of(store, replace(branches(), name="branches"), 4, 8), 3, 1.0)
    with pytest.raises(UsageError, match=r"^--start \w+: is a strategy of branches, must fit this heads \("):
        given_joint_starts(store, setting.model, moves, [other.digest])
