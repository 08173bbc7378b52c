"""The main job through the command line, on real devices: profile, search, run, compare."""

from __future__ import annotations

import json
import sqlite3
from math import prod
from pathlib import Path
from statistics import fmean

import pytest

from graph.zoo import zoo_names
from tests.app.conftest import Command
from tests.quick import FEW_NETWORKS, few

DENSENET = ("--model", "densenet121", "--preset", "small", "--batch-size", "5")
ALEXNET = ("--model", "alexnet", "--preset", "small", "--batch-size", "5")
NMT = ("--model", "nmt", "--preset", "small")
TWO_CPUS = ("--device", "cpu", "--devices", "2")


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.timeout(900)  # beside others it takes 240 s, on a slow machine longer
def test_profile_search_run_and_compare_work_on_one_database(command: Command, database: Path) -> None:
    first = command("profile", *ALEXNET, *TWO_CPUS, "--json")
    assert first.code == 0, first
    assert first.document["measured"] == first.document["needed"] > 0

    # All are given at the speed that the first was measured at.
    (usual,) = command(
        "query", "SELECT DISTINCT round(reference_s * speed, 9) AS s FROM op_costs", "--json"
    ).document
    assert usual["s"] > 0

    again = command("profile", *ALEXNET, *TWO_CPUS)
    assert "nothing measured" in again.output
    assert "all known already" in again.output

    searched = command("search", *ALEXNET, *TWO_CPUS, "--proposals", "200", "--seed", "3", "--json")
    assert searched.code == 0, searched
    best, *baselines = searched.document["predictions"]
    assert {one["name"] for one in baselines} == {"data-parallel", "expert", "single-device"}
    assert all(best["predicted_step_time_s"] <= one["predicted_step_time_s"] for one in baselines)
    assert best["shares"]["measured"] == pytest.approx(1.0)

    for strategy in ("data-parallel", "best"):
        run = command(
            "run", *ALEXNET, *TWO_CPUS, "--strategy", strategy, "--iterations", "3", "--verify", "--json"
        )
        assert run.code == 0, run
        assert len(run.document["step_times_s"]) == 3
        assert all(deviation["ok"] for deviation in run.document["deviations"])
        assert run.document["speed"] > 0
        (row,) = command(
            "query", "SELECT mean_s, lost_s, slowdown FROM executions ORDER BY id DESC LIMIT 1", "--json"
        ).document
        step_s = (row["mean_s"] - fmean(json.loads(row["lost_s"]))) / row["slowdown"]
        assert run.document["at_usual_speed_s"] == pytest.approx(step_s)

    compared = command("compare", "--model", "alexnet-small", "--json")
    measured = [row for row in compared.document["strategies"] if row["measured_median_s"] is not None]
    # The best strategy may be data parallelism itself.
    assert {row["strategy"] for row in measured} == {best["digest"], baselines[0]["digest"]}
    for row in measured:
        error = (row["predicted_s"] - row["measured_median_s"]) / row["measured_median_s"]
        assert row["relative_error"] == pytest.approx(error)
        assert row["measured_throughput_samples_per_s"] == pytest.approx(5 / row["measured_median_s"])
        step_s = row["measured_at_usual_speed_s"]
        assert row["relative_error_at_usual_speed"] == pytest.approx((row["predicted_s"] - step_s) / step_s)


def test_the_same_seed_gives_the_same_strategy_from_nothing_that_is_known(
    command: Command, database: Path
) -> None:
    arguments = (
        "search", *NMT, "--topology", "p100-cluster", "--devices", "4", "--proposals", "80", "--fresh", "--json",
    )  # fmt: skip
    found = [command(*arguments, "--seed", seed).document for seed in ("7", "7", "8")]
    assert all(one["known"] == [] for one in found)
    first, again, other = (one["predictions"][0] for one in found)
    assert first == again != other
    assert rows(database, "SELECT count(*) FROM searches WHERE status = 'finished'") == [(3,)]


def test_a_search_starts_from_the_best_known_and_is_repeated_from_it(command: Command) -> None:
    arguments = (
        "search", "--model", "candle-uno", "--preset", "small", "--batch-size", "64", "--topology", "p100-cluster",
        "--proposals", "60", "--json",
    )  # fmt: skip
    best = command(*arguments, "--devices", "4").document["predictions"][0]
    warm = command(*arguments, "--devices", "4", "--seed", "9").document
    assert warm["known"] == [
        {"digest": best["digest"], "used": best["digest"], "found_for": "batch size 64 on 4 devices"}
    ]
    assert warm["proposals"] == 60 + 15
    assert warm["predictions"][0]["predicted_step_time_s"] <= best["predicted_step_time_s"]
    # Whatever was found since.
    start = ("--start", best["digest"])
    again = command(*arguments, "--devices", "4", "--seed", "9", *start).document
    assert again["predictions"][0] == warm["predictions"][0]
    # Its trace has it too: where a chain started from it, the start.
    fastest = command("strategy", "rebuild", "1", "--json").document
    assert fastest["digest"] == best["digest"]
    assert fastest["simulated_step_time_s"] == best["predicted_step_time_s"]
    at_start = command("strategy", "rebuild", str(warm["search"]), "--chain", "4", "--step", "0", "--json")
    assert at_start.document["digest"] == best["digest"]
    (nearest,) = command(*arguments, "--devices", "8").document["known"]
    assert nearest["found_for"] == "batch size 64 on 4 devices of p100-cluster[:4]"


def test_every_proposal_is_stored_and_its_configuration_can_be_read(command: Command, database: Path) -> None:
    from app.analytics.duck import connect
    from app.db.store import Store

    outcome = command(
        "search", *DENSENET, "--topology", "p100-cluster", "--devices", "4", "--proposals", "150", "--json"
    )
    assert outcome.code == 0, outcome
    with Store.open(database) as store, connect(store.database) as connection:
        counted = connection.execute("SELECT count(*), sum(accepted::INT) FROM proposals").fetchall()
        joined = connection.execute(
            "SELECT operator.axes, meaning.degrees, meaning.devices FROM proposals AS proposal "
            "JOIN proposal_devices AS meaning USING (search, configuration) "
            "JOIN operators AS operator ON operator.position = proposal.operator"
        ).fetchall()
    assert counted == [(outcome.document["proposals"], outcome.document["accepted"])]
    assert len(joined) == outcome.document["proposals"]
    for axes, degrees, devices in joined:
        assert len(axes) == len(degrees)
        assert len(devices) == prod(degrees)
        assert set(devices) <= set(range(4))


@pytest.mark.parametrize("name", few(FEW_NETWORKS, zoo_names()))
def test_every_zoo_network_is_searched_on_four_devices_with_its_estimates_marked(
    command: Command, name: str
) -> None:
    outcome = command(
        "search", "--model", name, "--preset", "small", "--topology", "p100-cluster", "--devices", "4",
        "--proposals", "60", "--chains", "2", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    best = outcome.document["predictions"][0]
    single = next(one for one in outcome.document["predictions"] if one["name"] == "single-device")
    assert 0 < best["predicted_step_time_s"] <= single["predicted_step_time_s"]
    assert best["shares"] == {"measured": 0.0, "estimated": 0.0, "datasheet": pytest.approx(1.0)}


@pytest.mark.usefixtures("known_links")
def test_a_search_without_a_profile_measures_what_the_profile_would(command: Command, database: Path) -> None:
    small = ("--model", "mlp", "--preset", "small", *TWO_CPUS)
    searched = command("search", *small, "--proposals", "40", "--json")
    assert searched.code == 0, searched
    assert searched.document["predictions"][0]["shares"]["measured"] == pytest.approx(1.0)
    profiled = command("profile", *small, "--json")
    assert (profiled.document["measured"], profiled.document["failed"]) == (0, 0)
    assert profiled.document["known"] == profiled.document["needed"] > 0


@pytest.mark.usefixtures("known_links")
def test_a_search_says_how_many_costs_are_estimates_and_how_good_they_are(command: Command) -> None:
    small = ("--model", "mlp", "--preset", "small", *TWO_CPUS)
    assert command("profile", *small, "--batch-size", "8").code == 0
    known = command("search", *small, "--batch-size", "8", "--proposals", "20", "--json").document
    assert (known["estimated_costs"], known["estimate_error"]) == (0, None)
    other = ("search", *small, "--batch-size", "24", "--proposals", "20", "--on-miss", "estimate")
    guessed = command(*other, "--json").document
    assert guessed["estimated_costs"] > 0
    assert 0 <= guessed["estimate_error"] < 10
    assert guessed["predictions"][0]["shares"]["datasheet"] == 0.0
    assert "half of such estimates are within" in " ".join(command(*other).output.split())


@pytest.mark.usefixtures("known_links")
def test_a_users_own_network_is_searched_from_its_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))\n"
        "    def forward(self, x, y):\n"
        "        return torch.nn.functional.cross_entropy(self.layers(x), y)\n"
        "def factory(batch_size=6):\n"
        "    return Net(), (torch.randn(batch_size, 8), torch.randint(4, (batch_size,))), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    outcome = command(
        "search", "--model", "mine:factory", "--topology", "dgx1-v100", "--proposals", "20", "--json"
    )
    assert outcome.code == 0, outcome
    assert outcome.document["batch_size"] == 6
    ran = command(
        "run", "--model", "mine:factory", *TWO_CPUS, "--strategy", "data-parallel", "--verify", "--json"
    )
    assert ran.code == 0, ran
