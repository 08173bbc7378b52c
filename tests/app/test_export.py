"""`app strategy export`: files for Soapstone and for PyTorch, or one line why there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiler.pinning import child_variables
from tests.app.conftest import Command, Outcome

MINE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.layers(x), y)
def factory(batch_size=6):
    print("built")
    return Net(), (torch.randn(batch_size, 8), torch.randint(4, (batch_size,))), {}
"""


# DTensor has no rule for this function of what a split layer makes.
UNRULED = MINE.replace("torch.nn.ReLU()", "torch.nn.Hardswish()")
# Each process has another loss.
RANKED = "import os\n" + MINE.replace(
    "cross_entropy(self.layers(x), y)",
    "cross_entropy(self.layers(x), y) * (1 + int(os.environ.get('RANK', 0)))",
)


@pytest.fixture
def mine(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A network of a user's own in the current folder; the digests of its baselines on two devices, by name."""
    monkeypatch.chdir(tmp_path)
    return baselines_of(command, tmp_path / "users_network.py", MINE)


def baselines_of(command: Command, file: Path, source: str) -> dict[str, str]:
    """Write a user's network and return the digests of its baselines on two devices, by name."""
    file.write_text(source)
    searched = command(
        "search", "--model", f"{file.stem}:factory", "--topology", "p100-cluster", "--devices", "2",
        "--batch-size", "8", "--proposals", "0", "--json",
    )  # fmt: skip
    assert searched.code == 0, searched
    return {prediction["name"]: prediction["digest"] for prediction in searched.document["predictions"]}


def assert_one_line(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.output == ""
    line = outcome.errors.splitlines()[-1]
    assert line.startswith("error: ")
    assert "Traceback" not in outcome.errors
    for word in words:
        assert word in line


def test_a_checked_plan_runs_and_equals_the_network(
    command: Command, mine: dict[str, str], tmp_path: Path
) -> None:
    """As it was checked, so once more: from its folder, under torchrun with nothing but the file."""
    outcome = command(
        "strategy", "export", mine["expert"], "--format", "dtensor", "--output", "plan.py", "--check"
    )
    assert outcome.code == 0, outcome
    equal = "5 of 5 (loss and gradients) equal the plain module's within 1e-06"
    assert outcome.output == (
        f"strategy {mine['expert'][:12]} written to plan.py\nchecked on 2 processes: {equal}\n"
    )
    ran = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "127.0.0.1:0", "plan.py",
        ],
        cwd=tmp_path, env={**os.environ, **child_variables()}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert equal in ran.stdout


def test_a_checked_plan_is_handed_over_only_where_it_runs_and_is_equal(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that PyTorch cannot run, nor one that computes something else."""
    monkeypatch.chdir(tmp_path)
    digests = {
        name: baselines_of(command, tmp_path / f"{name}_network.py", source)["expert"]
        for name, source in (("unruled", UNRULED), ("ranked", RANKED))
    }
    outcomes = {
        name: command("strategy", "export", digest, f"{name}.py", "--format", "dtensor", "--check")
        for name, digest in digests.items()
    }
    assert_one_line(outcomes["unruled"], "does not run (NotImplementedError: Operator aten.hardswish")
    assert (outcomes["ranked"].code, outcomes["ranked"].output) == (1, "")
    assert "computes something else (1 of 5 (loss and gradients) equal" in outcomes["ranked"].errors
    assert sorted(file.name for file in tmp_path.glob("*d.py")) == []


def test_a_zoo_networks_plan_names_the_zoo(command: Command, tmp_path: Path) -> None:
    searched = command(
        "search", "--model", "mlp", "--preset", "small", "--topology", "p100-cluster", "--devices", "4",
        "--batch-size", "8", "--proposals", "0", "--json",
    )  # fmt: skip
    (digest,) = [one["digest"] for one in searched.document["predictions"] if one["name"] == "data-parallel"]
    file = tmp_path / "plan.py"
    assert command("strategy", "export", digest, str(file), "--format", "dtensor").code == 0
    text = file.read_text()
    assert 'FACTORY = "graph.zoo:build"' in text
    assert '"preset": "small",' in text
    assert '"batch_size": 8,' in text
    assert 'MESH = {"data": 4}' in text
    assert digest in text


def test_a_strategy_that_no_mesh_expresses_writes_nothing(
    command: Command, mine: dict[str, str], tmp_path: Path
) -> None:
    outcome = command("strategy", "export", mine["single-device"], "plan.py", "--format", "dtensor")
    assert_one_line(outcome, mine["single-device"][:12], "it runs on one device", "--format json")
    assert not (tmp_path / "plan.py").exists()
    kept = tmp_path / "kept.py"
    kept.write_text("mine")
    assert command("strategy", "export", mine["single-device"], str(kept), "--format", "dtensor").code == 2
    assert kept.read_text() == "mine"


def stored(command: Command, name: str, *options: str) -> str:
    """Return the digest of a baseline of a small network on two devices, which a search has stored."""
    searched = command(
        "search", "--model", "mlp", "--preset", "small", "--batch-size", "16", "--topology", "p100-cluster",
        "--devices", "2", "--algorithm", "random", "--proposals", "1", "--compare-baselines", *options, "--json",
    )  # fmt: skip
    assert searched.code == 0, searched
    (digest,) = [one["digest"] for one in searched.document["predictions"] if one["name"] == name]
    assert isinstance(digest, str)
    return digest


def test_a_checked_pipeline_runs_and_equals_the_network(command: Command, tmp_path: Path) -> None:
    digest = stored(command, "3d-1x1x2", "--micro-batches", "4")
    file = tmp_path / "stages.py"
    outcome = command("strategy", "export", digest, str(file), "--format", "pipelining", "--check")
    assert outcome.code == 0, outcome
    equal = "7 of 7 (loss and gradients) equal the plain module's within 1e-06"
    assert f"checked on 2 processes: {equal}" in outcome.output
    assert "2 on 2 ranks, 4 micro-batches, 1f1b" in file.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("data-parallel",), ("goes through the batch at once", "--format dtensor")),
        (("data-parallel", "--micro-batches", "4"), ("operator linear has 2 tasks", "must have one")),
        (
            ("3d-1x1x2-actors", "--micro-batches", "4", "--schedule", "actors"),
            ("its schedule is actors", "must be one of gpipe, 1f1b, interleaved"),
        ),
        (
            ("3d-1x1x2-zero-bubble", "--micro-batches", "4"),
            ("its schedule is zero-bubble", "must be one of gpipe, 1f1b, interleaved"),
        ),
    ],
)
def test_what_is_no_pipeline_writes_nothing(
    command: Command, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    digest = stored(command, *options)
    file = tmp_path / "stages.py"
    outcome = command("strategy", "export", digest, str(file), "--format", "pipelining", "--check")
    assert_one_line(outcome, digest[:12], "export it with", *words)
    assert not file.exists()


def test_json_is_the_default_and_either_way_to_name_the_file_works(
    command: Command, mine: dict[str, str], tmp_path: Path
) -> None:
    assert command("strategy", "export", mine["expert"], "a.json").code == 0
    assert command("strategy", "export", mine["expert"], "--output", "b.json", "--format", "json").code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert set(json.loads((tmp_path / "a.json").read_text())) >= {"format", "graph", "operators"}


def test_mistakes_are_one_line(command: Command, mine: dict[str, str], tmp_path: Path) -> None:
    expert = mine["expert"]
    assert_one_line(command("strategy", "export", expert), "--output")
    assert_one_line(
        command("strategy", "export", expert, "a.json", "--output", "b.json"), "both FILE and --output"
    )
    assert_one_line(command("strategy", "export", expert, "a.json", "--format", "yaml"), "yaml", "dtensor")
    assert_one_line(command("strategy", "export", expert, "a.json", "--check"), "--check", "--format dtensor")
    assert_one_line(command("strategy", "export", expert, "no/folder/a.json"), "no/folder/a.json")
    assert not (tmp_path / "a.json").exists()


def test_a_network_that_has_changed_is_named(command: Command, mine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "users_network.py").write_text(MINE.replace("16", "240"))
    outcome = command("strategy", "export", mine["expert"], "plan.py", "--format", "dtensor")
    assert_one_line(outcome, "users_network:factory", "pass the model and sizes that it was made for")
    assert not (tmp_path / "plan.py").exists()
