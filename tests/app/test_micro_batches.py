"""Micro-batches as a user has them: imported, run, stored, compared, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.services.models import graph_cache
from app.services.models.models import (
    ModelRequest,
    batch_size_of,
    graph_keywords,
    import_graph,
    requested_model,
    stored_request,
)
from app.services.run import run as running
from graph.errors import DamagedDataError, UsageError
from graph.schedule import GradientSums, MicroBatches, Schedule
from runtime.jobs.job import Job, JobResult
from tests.app.conftest import USERS_NETWORK, Command

SIZES = ("--model", "mlp", "--preset", "small", "--batch-size", "8")
RUN = ("run", *SIZES, "--device", "cpu", "--devices", "2", "--on-miss", "estimate", "--iterations", "3")
SEARCH = (
    "search", *SIZES, "--topology", "p100-cluster", "--nodes", "1", "--devices", "4", "--proposals", "12",
    "--workers", "1", "--seed", "3",
)  # fmt: skip
BY_CHANCE = ("--algorithm", "random", "--fresh")
RANDOM = (*SEARCH, *BY_CHANCE)

FACTORIES = """
def fixed():
    return fine(4)
def unsure(batch_size=None):
    return fine(batch_size or 4)
class Counting(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))
    def forward(self, x, y):
        loss = super().forward(x, y) / self.count
        self.count.add_(1)
        return loss
def counting(batch_size=4):
    return Counting(), fine(batch_size)[1], {}
class Summing(Net):
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.b(torch.relu(self.a(x))), y, reduction="sum") / 2
def summing(batch_size=4):
    return Summing(), fine(batch_size)[1], {}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the user's own networks be in the current folder, as module `own_batches`."""
    (tmp_path / "own_batches.py").write_text(USERS_NETWORK + FACTORIES)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that runs make, which are not executed: every step takes ten milliseconds."""
    made: list[Job] = []

    def launch(job: Job, *_: object) -> JobResult:
        made.append(job)
        steps = (0.01,) * job.iterations
        return JobResult(steps, (steps,) * 2, (1.0,) * (job.iterations + job.warmup), None)

    monkeypatch.setattr(running, "_launch", launch)
    return made


# ---- the model


def test_a_graph_is_of_one_micro_batch_and_the_batch_of_all() -> None:
    divided = import_graph(requested_model("mlp", "small", 8, micro_batches=4), batch_norm="synchronized")
    part = import_graph(requested_model("mlp", "small", 2), batch_norm="synchronized")
    assert divided.graph.digest == part.graph.digest
    assert (divided.batch_size, divided.micro_batch_size, part.batch_size) == (8, 2, 2)


def test_a_job_builds_the_whole_batch_and_an_import_one_micro_batch() -> None:
    request = requested_model("mlp", "small", 8, micro_batches=4)
    assert request.factory_keywords["batch_size"] == 8
    assert graph_keywords(request) == {**request.factory_keywords, "batch_size": 2}
    of_preset = requested_model("mlp", "small", None, micro_batches=2)
    assert of_preset.factory_keywords["batch_size"] is None
    assert batch_size_of(of_preset) == 4
    assert graph_keywords(of_preset)["batch_size"] == 2


def test_the_graph_cache_tells_numbers_of_micro_batches_apart() -> None:
    requests = [requested_model("mlp", "small", 8, micro_batches=count) for count in (1, 2, 4)]
    keys = {graph_cache.key_of(request, "synchronized") for request in requests}
    assert len(keys) == 3
    for _ in range(2):  # exported, cached
        sizes = [import_graph(request, batch_norm="synchronized").batch_size for request in requests]
        assert sizes == [8, 8, 8]


@pytest.mark.parametrize("count", [1, 4])
def test_a_stored_request_is_the_one_that_was_stored(count: int) -> None:
    request = ModelRequest("mlp", "small", 8, precision="bfloat16", micro_batches=count)
    document = json.loads(json.dumps(request.to_json()))
    assert stored_request(document, "here") == request
    assert document.get("micro_batches") == (None if count == 1 else count)


def test_a_document_of_an_older_soapstone_is_of_one_batch() -> None:
    assert stored_request({"name": "mlp", "preset": "small", "batch_size": 8}, "here").micro_batches == 1


@pytest.mark.parametrize("count", [0, -1, True, "4", 4.0, 5000, None])
def test_a_number_of_micro_batches_that_was_never_written_is_damage(count: object) -> None:
    with pytest.raises(DamagedDataError, match="here: its model is no JSON object of"):
        stored_request({"name": "mlp", "micro_batches": count}, "here")


@pytest.mark.parametrize(
    ("size", "count", "said"),
    [
        (8, 3, "batch size is 8, must be a multiple of its 3 micro-batches"),
        (None, 8, "batch size is 4, must be a multiple of its 8 micro-batches"),
        (8, 0, "--micro-batches: is 0, must be from 1 to 4096"),
        (8, 5000, "--micro-batches: is 5000, must be from 1 to 4096"),
    ],
)
def test_micro_batches_that_do_not_divide_the_batch_are_refused(
    size: int | None, count: int, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        requested_model("mlp", "small", size, micro_batches=count)


@pytest.mark.usefixtures("own")
def test_a_factory_is_called_with_the_size_of_a_micro_batch(command: Command) -> None:
    shown = command("models", "show", "own_batches:fine", "--micro-batches", "3", "--json")
    assert shown.code == 0, shown
    assert (shown.document["batch_size"], shown.document["micro_batches"]) == (6, 3)
    alone = command("models", "show", "own_batches:fine", "--batch-size", "2", "--json")
    assert shown.document["forward_flops"] == alone.document["forward_flops"]
    printed = command("models", "show", "own_batches:fine", "--micro-batches", "3").output
    assert "at batch size 2, one of 3 micro-batches of 6" in printed


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("fixed", "its factory takes no batch_size, must for --micro-batches"),
        ("unsure", "--batch-size is missing, must be given with --micro-batches"),
        ("fine", "batch size is 6, must be a multiple of its 4 micro-batches"),
    ],
)
def test_a_factory_that_cannot_make_a_micro_batch_is_refused(
    command: Command, factory: str, said: str
) -> None:
    refused = command("models", "show", f"own_batches:{factory}", "--micro-batches", "4")
    assert refused.code == 2
    assert said in refused.errors
    assert refused.errors.count("\n") == 1


# ---- app run


@pytest.mark.usefixtures("known_links")
def test_a_run_of_a_baseline_accumulates_gradients(command: Command, jobs: list[Job]) -> None:
    done = command(*RUN, "--strategy", "data-parallel", "--micro-batches", "4", "--json")
    assert done.code == 0, done
    (job,) = jobs
    assert job.strategy.micro_batches == MicroBatches(4, Schedule.ONE_F_ONE_B)
    assert job.training.batch_size == job.model.keywords["batch_size"] == 8
    part = import_graph(requested_model("mlp", "small", 2), batch_norm="synchronized")
    assert job.graph.digest == part.graph.digest
    assert done.document["batch_size"] == 8
    assert done.document["throughput_samples_per_s"] == pytest.approx(800)
    assert done.document["micro_batches"] == {"count": 4, "schedule": "1f1b", "stages": 1, "samples": 2}
    printed = command(*RUN, "--strategy", "data-parallel", "--micro-batches", "4", "--schedule", "gpipe")
    assert "micro-batches: 4, schedule gpipe, 1 stage; 2 samples each\n" in printed.output
    assert jobs[-1].strategy.micro_batches == MicroBatches(4, Schedule.GPIPE)


@pytest.mark.usefixtures("known_links")
@pytest.mark.parametrize(
    ("strategy", "schedule", "stages"),
    [pytest.param("data-parallel", "1f1b", 1, marks=pytest.mark.slow), ("3d-1x1x2", "gpipe", 2)],
)
def test_a_run_in_micro_batches_is_verified(
    command: Command, strategy: str, schedule: str, stages: int
) -> None:
    options = ("--micro-batches", "4", "--schedule", schedule, "--verify", "--json")
    done = command(*RUN, "--strategy", strategy, *options)
    assert done.code == 0, done
    assert done.document["verified"]
    said = {"count": 4, "schedule": schedule, "stages": stages, "samples": 2}
    assert done.document["micro_batches"] == said
    again = command(*RUN, "--strategy", done.document["digest"], "--json")
    assert again.document["micro_batches"] == said
    assert again.document["losses"][0] == pytest.approx(done.document["losses"][0], rel=1e-5)


@pytest.mark.usefixtures("known_links")
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_a_run_sums_gradients_in_each_micro_batch(command: Command, strategy: str) -> None:
    options = ("--micro-batches", "4", "--gradients", "each", "--verify")
    done = command(*RUN, "--strategy", strategy, *options, "--json")
    assert done.code == 0, done
    assert done.document["verified"]
    said = {"count": 4, "schedule": "1f1b", "gradients": "each", "stages": 1, "samples": 2}
    assert done.document["micro_batches"] == said
    shown = command("strategy", "show", done.document["digest"]).output
    assert "micro-batches: 4, schedule 1f1b, gradients summed in each, 1 stage; 2 samples each\n" in shown


@pytest.mark.usefixtures("known_links")
def test_a_run_gives_actors_credits_and_sums_as_asked(command: Command, jobs: list[Job]) -> None:
    pipelined = ("--strategy", "3d-1x1x2", "--micro-batches", "4")
    actors = ("--schedule", "actors", "--credits", "3,2", "--gradients", "each")
    stored = command(*RUN, *pipelined, *actors, "--json")
    assert stored.code == 0, stored
    own = MicroBatches(4, Schedule.ACTORS, (3, 2), GradientSums.EACH)
    assert jobs[-1].strategy.micro_batches == own
    again = command(*RUN, "--strategy", stored.document["digest"], "--gradients", "last", "--json")
    assert again.code == 0, again
    assert jobs[-1].strategy.micro_batches == replace(own, gradients=GradientSums.LAST)
    for given, said in (
        (("--schedule", "actors", "--credits", "0,2"), "--credits: credits are 0, 2, must be a whole number"),
        (("--schedule", "actors", "--credits", "3"), "has credits for 1 stage, must have them for its 2"),
        (("--credits", "3,2"), "--credits: credits are given for schedule 1f1b, must be for schedule actors"),
    ):
        refused = command(*RUN, *pipelined, *given)
        assert refused.code == 2
        # A line that tells what is imported may stand before it.
        said_lines = [line for line in refused.errors.splitlines() if not line.startswith("importing")]
        assert len(said_lines) == 1
        assert said in said_lines[0]


@pytest.mark.usefixtures("known_links")
def test_a_run_in_one_batch_is_as_before(command: Command, jobs: list[Job]) -> None:
    first = command(*RUN, "--strategy", "data-parallel", "--json")
    second = command(*RUN, "--strategy", "data-parallel", "--micro-batches", "1", "--json")
    assert first.document["micro_batches"] == second.document["micro_batches"] == {}
    assert first.document["digest"] == second.document["digest"]
    assert jobs[0].graph.digest == jobs[1].graph.digest
    assert "micro-batches" not in command(*RUN, "--strategy", "data-parallel").output


@pytest.mark.usefixtures("known_links")
def test_a_stored_strategy_and_its_file_bring_their_micro_batches(
    command: Command, jobs: list[Job], tmp_path: Path
) -> None:
    stored = command(*RUN, "--strategy", "data-parallel", "--micro-batches", "4", "--json").document
    assert stored["digest"] == command(*RUN, "--strategy", stored["digest"], "--json").document["digest"]
    file = tmp_path / "strategy.json"
    exported = command("strategy", "export", stored["digest"], str(file))
    assert "micro-batches: 4, schedule 1f1b\n" in exported.output
    assert json.loads(file.read_text())["micro_batches"] == {"count": 4, "schedule": "1f1b"}
    again = command(*RUN, "--strategy", str(file), "--json")
    assert again.document["digest"] == stored["digest"]
    other = command(*RUN, "--strategy", str(file), "--schedule", "gpipe", "--json")
    assert other.document["micro_batches"]["schedule"] == "gpipe"
    assert [job.strategy.micro_batches.count for job in jobs] == [4] * 4
    for reference in (stored["digest"], str(file)):
        for count in ("1", "2"):
            refused = command(*RUN, "--strategy", reference, "--micro-batches", count)
            assert refused.code == 2
            assert f"--micro-batches: is {count}, must be 4 for strategy {reference}" in refused.errors
            assert refused.errors.count("\n") == 1
    best = command(*RUN, "--strategy", "best", "--micro-batches", "4", "--json")
    assert best.document["micro_batches"]["count"] == 4


@pytest.mark.usefixtures("known_links")
def test_a_strategy_of_one_batch_may_accumulate_gradients(command: Command, jobs: list[Job]) -> None:
    part = ("--batch-size", "2")
    stored = command(*RUN, *part, "--strategy", "data-parallel", "--json").document
    done = command(*RUN, "--strategy", stored["digest"], "--micro-batches", "4", "--json")
    assert done.code == 0, done
    assert jobs[-1].strategy == jobs[0].strategy.in_micro_batches(4)
    assert done.document["batch_size"] == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--strategy", "fsdp", "--micro-batches", "2", "--schedule", "zero-bubble"),
            "strategy fsdp: keeps weights in shares, must keep them whole with schedule zero-bubble",
        ),
        (
            ("--strategy", "zero", "--micro-batches", "2", "--policy", "tic"),
            "--policy: is tic, must be fifo with 2",
        ),
        (("--strategy", "zero", "--micro-batches", "2", "--compile"), "--compile: compiles operators"),
        (("--strategy", "zero", "--micro-batches", "3"), "must be a multiple of its 3 micro-batches"),
        (("--strategy", "zero", "--schedule", "gpipe"), "--schedule: is gpipe, must be left out for a step"),
        (("--strategy", "zero", "--gradients", "each"), "--gradients: is each, must be left out for a step"),
        (("--strategy", "zero", "--credits", "2,1"), "--credits: is 2,1, must be left out for a step"),
        (
            ("--strategy", "zero", "--credits", "two"),
            "--credits: is two, must be a whole number for each stage",
        ),
        (("--strategy", "zero", "--gradients", "never"), "--gradients: is never, must be one of last, each"),
        (
            ("--strategy", "zero", "--micro-batches", "2", "--schedule", "2f2b"),
            "--schedule: is 2f2b, must be one of gpipe, 1f1b, interleaved, zero-bubble",
        ),
    ],
)
def test_a_run_that_cannot_have_micro_batches_is_refused_before_anything_is_written(
    command: Command, database: Path, options: tuple[str, ...], said: str
) -> None:
    refused = command(*RUN, *options)
    assert refused.code == 2
    assert said in refused.errors
    assert refused.errors.count("\n") == 1
    assert not database.exists()


@pytest.mark.usefixtures("own")
def test_a_network_that_reads_what_it_renews_is_refused_before_anything_is_measured(
    command: Command, database: Path
) -> None:
    network = ("--model", "own_batches:counting", "--preset", "paper", "--micro-batches", "2")
    refused = command(*RUN, *network, "--strategy", "data-parallel")
    assert refused.code == 2
    assert "reads buffer count, which the micro-batch before renews" in refused.errors
    assert not database.exists()
    refused = command(*RANDOM, *network)
    assert refused.code == 2
    assert "reads buffer count, which the micro-batch before renews" in refused.errors


# ---- app compare


@pytest.mark.parametrize(
    ("factory", "count", "warned"), [("summing", 2, 1), ("summing", 1, 0), ("fine", 2, 0)]
)
def test_a_loss_that_adds_up_samples_is_warned_of(
    own: None, command: Command, factory: str, count: int, warned: int
) -> None:
    network = ("--model", f"own_batches:{factory}", "--batch-size", "8", "--micro-batches", str(count))
    found = command("search", *network, "--topology", "p100-cluster", "--devices", "2", "--proposals", "3")
    assert found.code == 0, found.errors
    assert found.errors.count("adds up samples, and a step's is the mean of its micro-batches'") == warned


@pytest.mark.usefixtures("known_links")
def test_a_comparison_shows_micro_batches_where_there_are_several(command: Command) -> None:
    run = ("run", "--model", "mlp", "--preset", "small", "--device", "cpu", "--devices", "2", "--iterations", "1",
           "--on-miss", "estimate", "--strategy")  # fmt: skip
    assert command(*run, "data-parallel").code == 0
    alone = command("compare").output
    assert "schedule" not in alone
    assert "mlp-small on " in alone
    assert command(*run, "3d-1x1x2", "--micro-batches", "2").code == 0
    both = command("compare").output
    assert "schedule" in both
    # Graphs of other sizes of a micro-batch, which are told apart.
    assert "mlp-small (graph 1) on " in both
    assert "mlp-small (graph 2) on " in both
    rows = command("compare", "--json").document["strategies"]
    assert sorted((row["micro_batches"], row["schedule"]) for row in rows if row["executions"]) == [
        (1, None),
        (2, "1f1b"),
    ]
