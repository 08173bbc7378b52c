"""Activations that are made again, as a user has them: searched where memory is short, shown, stored, run."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from app.services.predict.recomputation_report import with_choice
from search.space.baselines import data_parallel
from tests.app.conftest import Command
from tests.app.test_fitting import TOPOLOGY
from tests.search.builders import unrolled

# Activations of 4 MiB a layer on each of two devices, and next to no weights.
NETWORK = """
import torch
class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))
    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return torch.nn.functional.cross_entropy(x, y)
def deep(batch_size=32768):
    return Deep(), (torch.randn(batch_size, 64), torch.randint(64, (batch_size,))), {}
"""


RUN = (
    "run", "--batch-size", "8192", "--device", "cpu", "--devices", "2", "--on-miss", "estimate", "--iterations", "1",
    "--warmup", "0", "--json", "--strategy", "data-parallel",
)  # fmt: skip


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a network in the current folder."""
    (tmp_path / "networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return "networks:deep"


def search(command: Command, network: str, memory: int, *options: str) -> tuple[str, ...]:
    """Return the words of a search on two devices of so many MiB."""
    path = Path("small.yaml")
    path.write_text(TOPOLOGY.format(memory=memory))
    return (
        "search", "--model", network, "--topology", str(path), "--proposals", "300", "--chains", "1", "--fresh",
        *options,
    )  # fmt: skip


def test_what_does_not_fit_makes_activations_again(command: Command, database: Path, network: str) -> None:
    words = search(command, network, 50, "--recompute", "--json")
    done = command(*words)
    assert done.code == 0, done
    found = done.document
    best, kept = (
        found["predictions"][0],
        next(one for one in found["predictions"] if one["name"] == "data-parallel"),
    )
    assert best["feasible"]
    assert not kept["feasible"]
    assert [one["name"] for one in found["algorithms"]] == ["mcmc", "recomputation"]
    assert [one["found_for"] for one in found["known"]][-1] == "activations that are made again"
    made_again = found["recomputation"]
    assert made_again["added_s"] > 0
    assert made_again["saved_bytes"] > 0
    assert 0 < made_again["operators"] < made_again["all_operators"]

    shown = command("strategy", "show", str(best["strategy"]), "--json").document
    assert shown["recomputation"] == made_again
    text = command("strategy", "show", str(best["strategy"]))
    assert "made again in the backward: " in text.output

    # A chain's strategies are rebuilt as they were, and a file brings back what it was written from.
    chain = len(found["known"])
    rebuilt = command(
        "strategy", "rebuild", str(found["search"]), "--chain", str(chain), "--step", "0", "--json"
    ).document
    assert rebuilt["digest"] == found["known"][-1]["digest"]
    assert command("strategy", "export", str(best["strategy"]), "best.json").code == 0
    assert json.loads(Path("best.json").read_text())["recomputation"] == made_again["groups"]
    again = command("strategy", "import", "best.json", "--json").document
    assert (again["digest"], again["known"]) == (best["digest"], True)
    refused = command("strategy", "export", str(best["strategy"]), "plan.py", "--format", "dtensor")
    assert refused.code == 2
    assert "makes activations again" in refused.errors
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT algorithm FROM searches").fetchall() == [("mcmc,recomputation",)]


def test_where_all_fits_nothing_is_made_again(command: Command, network: str) -> None:
    found = command(*search(command, network, 1000, "--recompute", "--json")).document
    assert found["known"] == []
    assert found["recomputation"] is None


def test_recomputation_before_the_walk_is_refused_in_one_line(command: Command, network: str) -> None:
    refused = command(*search(command, network, 50, "--algorithm", "recomputation,mcmc"))
    assert refused.code == 2
    assert "recomputation comes before mcmc" in refused.errors


@pytest.mark.usefixtures("known_links")
def test_a_run_makes_all_activations_again(command: Command, network: str) -> None:
    done = command(*RUN, "--model", network, "--recompute", "all")
    assert done.code == 0, done
    assert done.document["recomputed"]
    shown = command("strategy", "show", done.document["digest"], "--json").document
    assert shown["recomputation"]["groups"] == done.document["recomputed"]
    for one in done.document["memory"]:
        assert abs(one["relative_error"]) < 0.1
        # Of 26 activations of 1 MiB that are kept otherwise.
        assert one["measured_peak_bytes"] < 20 * 2**20


def test_all_is_made_again_or_none_or_what_the_strategy_says() -> None:
    graph = unrolled()
    plain = data_parallel(graph, 2)
    everywhere = with_choice(graph, plain, "all")
    assert len(everywhere.recomputation) > 1
    assert with_choice(graph, everywhere, None) == everywhere
    assert with_choice(graph, everywhere, "none") == plain


def test_another_choice_is_refused_in_one_line(command: Command) -> None:
    refused = command(*RUN, "--model", "mlp", "--recompute", "some")
    assert refused.code == 2
    assert "--recompute: is some, must be all or none" in refused.errors
