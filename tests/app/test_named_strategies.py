"""`--strategy megatron`, `hugectr-distributed`, `insightface`: baselines by name, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.conftest import Command

pytestmark = pytest.mark.usefixtures("known_links")

BERT = (
    "--model",
    "bert-large",
    "--preset",
    "small",
    "--device",
    "cpu",
    "--devices",
    "2",
    "--on-miss",
    "estimate",
)


def test_a_transformer_runs_tensor_parallel_and_has_a_plan_of_torchs_own(
    command: Command, tmp_path: Path
) -> None:
    outcome = command("run", *BERT, "--strategy", "megatron-2", "--verify", "--iterations", "1", "--json")
    assert outcome.code == 0, outcome
    run = outcome.document
    assert all(one["relative"] <= one["allowed"] for one in run["deviations"])
    assert len(run["deviations"]) > 30
    plan = tmp_path / "plan.py"
    exported = command("strategy", "export", run["digest"], str(plan), "--format", "dtensor")
    assert exported.code == 0, exported
    text = plan.read_text()
    assert "ColwiseParallel" in text
    assert "RowwiseParallel" in text


@pytest.mark.parametrize("degree", ["megatron-3", "megatron-"])
def test_a_degree_that_does_not_divide_the_devices_is_refused(command: Command, degree: str) -> None:
    outcome = command("run", *BERT, "--strategy", degree)
    assert (outcome.code, outcome.output) == (2, "")
    line = outcome.errors.splitlines()[-1]
    assert line.startswith(f"error: strategy {degree}: has tensor-parallel degree ")
    assert line.endswith("must be one that divides 2 devices: 1, 2; name it as in megatron-2")


def test_degrees_for_other_numbers_of_devices_are_refused_before_costs_are_measured(
    command: Command,
) -> None:
    arguments = ("--micro-batches", "2", "--on-miss", "measure")
    outcome = command("run", *BERT[:-2], "--strategy", "3d-1x1x3", *arguments)
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.splitlines()[-1] == (
        "error: strategy 3d-1x1x3: is for 3 devices, must be for all 2; choose other degrees"
    )
    (row,) = command("query", "SELECT count(*) AS measured FROM op_costs", "--json").document
    assert row == {"measured": 0}


XDL = ("--model", "xdl", "--preset", "small", *BERT[4:])


def test_embedding_tables_are_split_by_name_and_verified(command: Command) -> None:
    outcome = command(
        "run", *XDL, "--strategy", "hugectr-distributed", "--verify", "--iterations", "1", "--json"
    )
    assert outcome.code == 0, outcome
    deviations = outcome.document["deviations"]
    assert len([one for one in deviations if "tables" in one["name"]]) >= 3
    assert all(one["relative"] <= one["allowed"] for one in deviations)


def test_a_baseline_that_the_network_does_not_have_is_refused(command: Command) -> None:
    outcome = command("run", *XDL, "--strategy", "insightface")
    assert (outcome.code, outcome.output) == (2, "")
    line = outcome.errors.splitlines()[-1]
    assert line.startswith(
        "error: strategy insightface: is none of xdl-small on 2 devices, must be one of data-parallel"
    )
    assert "hugectr-localized, hugectr-distributed" in line
