"""Searches for strategies with micro-batches: of one number or of each, stored, resumed, imported, run, refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.db.store import Store
from app.services.models.models import requested_model
from app.services.search import micro_batch_searches, micro_batches
from app.services.search.request import SearchRequest, request_of
from app.services.search.search import run_search
from graph.errors import StrategyError
from graph.schedule import Schedule
from tests.app.conftest import Command
from tests.app.test_micro_batches import BY_CHANCE, RANDOM, SEARCH, SIZES

TWO = ("--micro-batches", "2")


def test_a_search_is_for_strategies_with_micro_batches(command: Command) -> None:
    found = command(*RANDOM, "--micro-batches", "2", "--schedule", "gpipe", "--json")
    assert found.code == 0, found
    assert found.document["batch_size"] == 8
    assert found.document["lower_bound_s"] is None
    said = found.document["micro_batches"]
    assert {key: said[key] for key in ("count", "schedule", "samples")} == {
        "count": 2,
        "schedule": "gpipe",
        "samples": 4,
    }
    rows = command("query", "SELECT DISTINCT micro_batches, schedule FROM strategies", "--json").document
    assert rows == [{"micro_batches": 2, "schedule": "gpipe"}]
    digest = found.document["predictions"][0]["digest"]
    shown = command("strategy", "show", digest, "--json").document
    assert shown["micro_batches"] == said
    assert shown["batch_size"] == 8
    assert "micro-batches: 2, schedule gpipe, " in command("strategy", "show", digest).output
    baseline = found.document["predictions"][1]["digest"]
    diff = command("strategy", "diff", digest, baseline).output
    assert "A: micro-batches: 2, schedule gpipe, " in diff
    assert "B: micro-batches: 2, schedule gpipe, 1 stage; 4 samples each\n" in diff
    refused = command("strategy", "export", digest, "plan.py", "--format", "dtensor")
    assert refused.code == 2
    assert "goes through the batch in micro-batches, must go through it at once" in refused.errors
    assert refused.errors.count("\n") == 1


def test_a_search_begins_at_strategies_that_were_found_before(command: Command) -> None:
    known = (*SEARCH, "--algorithm", "random")
    first = command(*known, "--micro-batches", "2", "--json").document
    again = command(*known, "--micro-batches", "2", "--json").document
    assert again["known"]
    stored = "SELECT DISTINCT micro_batches FROM strategies ORDER BY 1"
    assert command("query", stored, "--json").document == [{"micro_batches": 2}]
    # Of another number of micro-batches, on another graph: transferred.
    other = command(*known, "--micro-batches", "4", "--json")
    assert other.code == 0, other
    assert other.document["known"]
    assert other.document["micro_batches"]["count"] == 4
    given = command(*known, "--micro-batches", "4", "--start", first["predictions"][0]["digest"], "--json")
    assert given.code == 0, given
    assert given.document["micro_batches"]["count"] == 4


def test_all_baselines_of_a_search_have_its_micro_batches(command: Command) -> None:
    found = command(*RANDOM, "--micro-batches", "2", "--compare-baselines", "--json").document
    names = {prediction["name"] for prediction in found["predictions"]}
    assert {"data-parallel", "zero", "fsdp", "3d-1x1x4", "3d-2x1x2-gpipe"} < names
    assert "3d-4x1x1" not in names  # data parallelism
    sources = "SELECT source FROM strategies WHERE digest = '{}'"
    digest = next(each["digest"] for each in found["predictions"] if each["name"] == "3d-1x1x4")
    assert command("query", sources.format(digest), "--json").document == [{"source": "megatron"}]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_a_search_with_micro_batches_shares_weights(command: Command, schedule: str) -> None:
    options = ("--micro-batches", "4", "--share-weights", "--schedule", schedule, "--json")
    found = command(*SEARCH, "--fresh", *options)
    assert found.code == 0, found
    assert found.document["micro_batches"]["count"] == 4
    (search,) = command("query", "SELECT algorithm, options FROM searches", "--json").document
    assert search["algorithm"] == "pipeline,sharding"
    starts = ["baseline zero", *([] if schedule == "zero-bubble" else ["baseline fsdp"])]
    assert [start["found_for"] for start in json.loads(search["options"])["known"]] == starts


def test_a_search_in_one_batch_is_stored_as_before(command: Command) -> None:
    found = command(*RANDOM, "--micro-batches", "1", "--json").document
    plain = command(*RANDOM, "--json").document
    assert found["micro_batches"] == plain["micro_batches"] == {}
    assert found["predictions"] == plain["predictions"]
    (first, second) = command("query", "SELECT options FROM searches", "--json").document
    request = json.loads(first["options"])["request"]
    assert request == json.loads(second["options"])["request"]
    assert "schedule" not in request
    assert "gradients" not in request
    assert "micro_batches" not in request["model"]


def test_a_search_with_micro_batches_can_be_resumed(command: Command, database: Path) -> None:
    options = ("--micro-batches", "2", "--schedule", "gpipe", "--gradients", "each")
    found = command(*RANDOM, *options, "--json").document
    assert found["micro_batches"]["gradients"] == "each"
    with Store.open(database) as store:
        request = request_of(store.search(found["search"]))
    assert (request.model.micro_batches, request.model.batch_size, request.schedule) == (2, 8, "gpipe")
    assert request.gradients == "each"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--algorithm", "mcmc", *TWO),
            "--algorithm: is mcmc, must be one of greedy, pipeline, random, recomputation, sharding",
        ),
        (("--algorithm", "optcnn", *TWO), "--algorithm: is optcnn, must be one of"),
        (("--algorithm", "exhaustive", *TWO), "--algorithm: is exhaustive, must be one of"),
        ((*BY_CHANCE, *TWO, "--compile"), "--compile: compiles operators"),
        ((*BY_CHANCE, *TWO, "--policy", "p3"), "--policy: is p3, must be fifo with 2"),
        ((*BY_CHANCE, *TWO, "--policy", "auto"), "--policy: is auto, must be fifo with 2"),
        ((*BY_CHANCE, *TWO, "--schedule", "interleaved"), "must be one of pipeline, sharding for 2"),
        ((*BY_CHANCE, *TWO, "--schedule", "2f2b"), "--schedule: is 2f2b, must be one of gpipe"),
        ((*BY_CHANCE, "--micro-batches", "few"), "--micro-batches: is few, must be a number from 1 or auto"),
        ((*BY_CHANCE, "--micro-batches", "0"), "--micro-batches: is 0, must be from 1 to 4096"),
        ((*BY_CHANCE, "--micro-batches", "3"), "must be a multiple of its 3 micro-batches"),
        (
            (*BY_CHANCE, "--schedule", "gpipe"),
            "--schedule: is gpipe, must be left out for a step in one batch",
        ),
        (
            (*BY_CHANCE, "--gradients", "each"),
            "--gradients: is each, must be left out for a step in one batch",
        ),
        (
            (*BY_CHANCE, "--micro-batches", "auto", "--policy", "tic"),
            "--policy: is tic, must be fifo with 2",
        ),
    ],
)
def test_a_search_that_cannot_have_micro_batches_is_refused_before_anything_is_written(
    command: Command, database: Path, options: tuple[str, ...], said: str
) -> None:
    refused = command(*SEARCH, *options)
    assert refused.code == 2
    assert said in refused.errors
    assert refused.errors.count("\n") == 1
    assert not database.exists()


def test_auto_searches_each_power_of_two_and_takes_the_best(command: Command) -> None:
    found = command(*RANDOM, "--micro-batches", "auto", "--json")
    assert found.code == 0, found
    rows = found.document["micro_batches"]
    assert [row["count"] for row in rows] == [1, 2, 4, 8]
    assert len({row["search"] for row in rows}) == 4
    assert [row["schedule"] for row in rows] == [None, "1f1b", "1f1b", "1f1b"]
    best = min(rows, key=lambda row: row["predicted_step_time_s"])
    assert found.document["best"]["search"] == best["search"]
    assert found.document["best"]["predictions"][0]["digest"] == best["digest"]
    again = command(*RANDOM, "--micro-batches", "auto", "--json").document["micro_batches"]
    assert [_answer(row) for row in again] == [_answer(row) for row in rows]
    alone = command(*RANDOM, "--micro-batches", "4", "--json").document
    assert alone["predictions"][0]["digest"] == rows[2]["digest"]
    printed = command(*RANDOM, "--micro-batches", "auto").output
    assert "micro-batches" in printed
    assert "the best is of search " in printed


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "search"}


def test_auto_takes_each_number_by_an_algorithm_that_can() -> None:
    request = SearchRequest(
        model=requested_model("mlp", "small", 8), topology="local", devices=None, nodes=None, processor=None,
        optimizer="sgd", batch_norm="synchronized", proposals=4, chains=1, seed=0, beta=1.0, order="program",
        time_limit_s=None, on_miss=None, schedule=Schedule.GPIPE,
    )  # fmt: skip
    for asked, one, several in (
        (None, "mcmc", "pipeline"),
        ("optcnn,mcmc", "optcnn,mcmc", "pipeline"),
        ("greedy",) * 3,
    ):
        requests = [micro_batch_searches._request(request, asked, count) for count in (1, 2)]
        assert [each.algorithm for each in requests] == [one, several]
        assert [each.schedule for each in requests] == [None, "gpipe"]
        assert [each.model.micro_batches for each in requests] == [1, 2]
    assert asdict(requests[0].model)["batch_size"] == asdict(requests[1].model)["batch_size"] == 8


def test_auto_passes_by_what_does_not_fit(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(request: SearchRequest, *others: Any) -> Any:
        if request.model.micro_batches in (1, 4):
            raise StrategyError(
                "search: what random found exceeds the devices' memories, must fit; take more"
            )
        return run_search(request, *others)

    monkeypatch.setattr(micro_batch_searches, "run_search", some)
    found = command(*RANDOM, "--micro-batches", "auto")
    assert found.code == 0, found
    assert "warning: 4 micro-batches: search: what random found exceeds" in found.errors
    rows = command(*RANDOM, "--micro-batches", "auto", "--json").document["micro_batches"]
    assert [row["count"] for row in rows] == [2, 8]
    monkeypatch.setattr(micro_batches, "DEFAULT_ALGORITHM", "random")
    refused = command(*RANDOM, "--batch-size", "1", "--micro-batches", "auto")
    assert refused.code == 2
    assert refused.errors.splitlines()[-1].startswith("error: search: what random found exceeds")


def test_ctrl_c_between_two_searches_shows_the_best_so_far(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_at(count: int) -> None:
        def some(request: SearchRequest, *others: Any) -> Any:
            if request.model.micro_batches == count:
                raise KeyboardInterrupt  # as while the network is imported
            return run_search(request, *others)

        monkeypatch.setattr(micro_batch_searches, "run_search", some)

    interrupted_at(4)
    found = command(*RANDOM, "--micro-batches", "auto", "--json")
    assert found.code == 130, found
    rows = found.document["micro_batches"]
    assert [row["count"] for row in rows] == [1, 2]
    best = min(rows, key=lambda row: row["predicted_step_time_s"])
    assert found.document["best"]["search"] == best["search"]
    printed = command(*RANDOM, "--micro-batches", "auto")
    assert (printed.code, printed.errors.splitlines()[-1]) == (130, "interrupted")
    assert "the best so far is of search " in printed.output
    interrupted_at(1)
    nothing = command(*RANDOM, "--micro-batches", "auto")
    assert (nothing.code, nothing.output, nothing.errors) == (130, "", "interrupted\n")


def test_a_file_is_imported_at_the_size_of_its_micro_batches(command: Command, tmp_path: Path) -> None:
    found = command(*RANDOM, "--micro-batches", "4", "--json").document["predictions"][0]["digest"]
    file = tmp_path / "strategy.json"
    assert command("strategy", "export", found, str(file)).code == 0
    imported = command("strategy", "import", str(file), *SIZES, "--json")
    assert imported.document["digest"] == found
    assert command("strategy", "import", str(file), "--json").document["digest"] == found
    refused = command("strategy", "import", str(file), *SIZES, "--micro-batches", "2")
    assert refused.code == 2
    assert "--micro-batches: is 2, must be 4 for strategy file" in refused.errors
    document = json.loads(file.read_text())
    del document["micro_batches"]
    file.write_text(json.dumps(document))
    plain = command("strategy", "import", str(file), *SIZES, "--micro-batches", "4", "--json")
    assert plain.document["digest"] != found


# Of its weights alone, with gradients and Adam's state, a device would need more than it has; to split an operator
# costs more messages than to go from one stage to the next.
CHAIN = """
import torch
def chain(batch_size=4):
    layers = [torch.nn.Linear(16, 16) for _ in range(6)]
    class Chain(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()
    return Chain(*[part for layer in layers for part in (layer, torch.nn.ReLU())]), (torch.randn(batch_size, 16),), {}
"""
CHAIN_PARAMETERS = 6 * 16 * 17
LIMITED = """
kinds:
  Small: {processor: cpu, peak_flops: {float32: 100 GFLOP/s}, memory: %d B, memory_bandwidth: 10 GB/s,
          launch_latency: 10 us}
nodes:
  count: 1
  devices: {Small: 2}
  interconnect: {type: switch, bandwidth: 1 GB/s, latency: 100 us}
"""


@pytest.mark.usefixtures("known_links")
def test_a_network_that_fits_no_device_trains_in_the_stages_that_a_search_finds(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the walk finds first exceeds this by the program's memory, though not by the search's own sum.
    limit = 4 * 4 * CHAIN_PARAMETERS - 1
    (tmp_path / "own_chain.py").write_text(CHAIN)
    (tmp_path / "limited.yaml").write_text(LIMITED % limit)
    monkeypatch.chdir(tmp_path)
    model = ("--model", "own_chain:chain", "--optimizer", "adam")
    found = command(
        "search", *model, "--micro-batches", "2", "--topology", "limited.yaml", "--proposals", "100", "--json"
    ).document
    feasible = {prediction["name"]: prediction["feasible"] for prediction in found["predictions"]}
    assert not feasible["data-parallel"]
    assert not feasible["single-device"]
    best = found["predictions"][0]
    assert best["feasible"]
    assert max(best["peak_memory_bytes"]) <= limit
    assert found["micro_batches"]["stages"] == 2
    done = command(
        "run", *model, "--device", "cpu", "--devices", "2", "--strategy", best["digest"], "--iterations", "1",
        "--on-miss", "estimate", "--json",
    )  # fmt: skip
    assert done.code == 0, done
    peaks = [device["measured_peak_bytes"] for device in done.document["memory"]]
    assert len(peaks) == 2
    assert 0 < max(peaks) <= limit
