"""`app search --algorithm`, its gap, and `--compare-baselines`, through the command line."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from app.db.records import TASK_ORDERS
from search.orders import ORDERS
from tests.app.conftest import Command

SEARCH = (
    "search", "--model", "alexnet", "--preset", "small", "--batch-size", "8", "--topology", "p100-cluster",
    "--devices", "2", "--fresh", "--proposals", "40",
)  # fmt: skip


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


def test_algorithms_are_chained_and_the_gap_is_stored(command: Command, database: Path) -> None:
    found = command(*SEARCH, "--algorithm", "optcnn,mcmc", "--json")
    assert found.code == 0, found
    optcnn, mcmc = found.document["algorithms"]
    assert (optcnn["name"], mcmc["name"]) == ("optcnn", "mcmc")
    assert mcmc["step_time_s"] <= optcnn["step_time_s"]
    assert optcnn["proven"].startswith("the least additive cost")
    best_s = found.document["predictions"][0]["predicted_step_time_s"]
    assert 0 < found.document["lower_bound_s"] <= best_s
    assert found.document["gap"] == pytest.approx(best_s / found.document["lower_bound_s"] - 1)
    assert rows(database, "SELECT algorithm, status, lower_bound_s FROM searches") == [
        ("optcnn,mcmc", "finished", found.document["lower_bound_s"])
    ]


@pytest.mark.parametrize("algorithm", ["greedy", "random", "optcnn"])
def test_other_algorithms_find_a_strategy_that_is_stored_without_proposals(
    command: Command, database: Path, algorithm: str
) -> None:
    found = command(*SEARCH, "--algorithm", algorithm, "--json")
    assert found.code == 0, found
    ((name, strategy),) = rows(database, "SELECT algorithm, best_strategy_id FROM searches")
    assert (name, strategy) == (algorithm, found.document["predictions"][0]["strategy"])
    refused = command("strategy", "rebuild", str(found.document["search"]))
    assert (refused.code, refused.output) == (2, ""), refused
    assert refused.errors == (
        f"error: search 1: is of algorithm {algorithm}, whose proposals are not recorded, must be of mcmc to rebuild a "
        f"strategy; its best one is stored, see app strategy show {strategy}\n"
    )
    assert rows(database, "SELECT count(*) FROM traces") == [(0,)]


def test_weights_are_shared_where_that_is_asked_for(command: Command, database: Path) -> None:
    """Adam over the weights of a small network takes long beside sums over links of a cluster that cost little."""
    found = command(*SEARCH, "--optimizer", "adam", "--share-weights", "--json")
    assert found.code == 0, found
    assert [one["found_for"] for one in found.document["known"]] == ["baseline zero", "baseline fsdp"]
    assert [one["name"] for one in found.document["algorithms"]] == ["mcmc", "sharding"]
    assert rows(database, "SELECT algorithm FROM searches") == [("mcmc,sharding",)]
    best_s = found.document["predictions"][0]["predicted_step_time_s"]
    assert 0 < found.document["lower_bound_s"] <= best_s
    assert best_s <= found.document["algorithms"][0]["step_time_s"]
    stored = rows(database, "SELECT source, document FROM strategies WHERE source IN ('zero', 'fsdp')")
    assert {source for source, _ in stored} == {"zero", "fsdp"}
    assert all('"sharding"' in str(document) for _, document in stored)


def test_all_baselines_are_compared_and_the_gain_is_over_the_best(command: Command) -> None:
    found = command(*SEARCH, "--compare-baselines", "--json").document
    best, *baselines = found["predictions"]
    names = {one["name"] for one in baselines}
    assert {"data-parallel", "expert", "single-device", "stanza", "megatron-2", "zero", "fsdp"} <= names
    assert "operator-placement" in names
    fastest = min(baselines, key=lambda one: one["predicted_step_time_s"])
    assert found["best_baseline"] == fastest["name"]
    gain = fastest["predicted_step_time_s"] / best["predicted_step_time_s"]
    assert found["gain_over_best_baseline"] == pytest.approx(gain)
    assert gain >= 1


def test_the_orders_that_are_stored_are_those_of_the_simulator() -> None:
    assert TASK_ORDERS == ORDERS


@pytest.mark.parametrize(
    "order",
    ["priority", *(pytest.param(one, marks=pytest.mark.slow) for one in ("priority-tic", "priority-tac"))],
)
def test_the_order_is_that_of_the_search_and_is_stored(command: Command, database: Path, order: str) -> None:
    best = command(*SEARCH, "--order", order, "--json").document["predictions"][0]
    stored = rows(database, "SELECT task_order, strategy_id, step_time_s FROM simulations")
    assert (order, best["strategy"], best["predicted_step_time_s"]) in stored
    assert {of for of, _, _ in stored} == {order}
    assert 0 <= best["scheduling_efficiency"] <= 1
    assert best["speedup_potential"] >= 0
    # What is stored can be simulated again, in its order.
    shown = command("strategy", "show", best["digest"], "--json").document
    assert shown["simulated_step_time_s"] == best["predicted_step_time_s"]


def test_the_gap_is_printed(command: Command) -> None:
    printed = " ".join(command(*SEARCH).output.split())
    assert "best baseline: " in printed
    assert " above the best possible: lower bound " in printed


def test_placement_of_a_large_network_is_refused_in_one_line(command: Command) -> None:
    outcome = command(*SEARCH, "--devices", "8", "--algorithm", "placement")
    assert (outcome.code, outcome.output) == (2, "")
    last = outcome.errors.splitlines()[-1]
    assert last.startswith("error: placement: ")
    assert "groups of operators on 8 devices are" in last


def test_an_unknown_algorithm_is_one_line(command: Command) -> None:
    outcome = command(*SEARCH, "--algorithm", "optcnn,guessing")
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.splitlines()[-1].startswith(
        "error: algorithm guessing: is unknown, must be one of exhaustive,"
    )


def test_unity_is_no_unknown_algorithm_to_micro_batches_of_any_number(command: Command) -> None:
    outcome = command(*SEARCH, "--algorithm", "unity", "--micro-batches", "auto")
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.splitlines()[-1].startswith(
        "error: --algorithm unity: chooses substitutions for a step in one batch, must be without --micro-batches"
    )


def test_one_device_and_one_proposal_are_in_the_singular(command: Command) -> None:
    printed = command(*SEARCH, "--devices", "1", "--proposals", "1", "--chains", "1").output
    assert ", on 1 device of " in printed
    assert "\n1 proposal, " in printed
