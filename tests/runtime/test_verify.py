"""What verification compares, and that it does not pass what differs."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest
import torch

from graph.axes import AxisKind
from runtime.jobs.job import run_job
from runtime.jobs.models import ModelReference
from runtime.jobs.verify import RUN_LOSS, Deviation, Verification, by_severity, deviations, loss_deviation
from search.space.baselines import fsdp
from tests.runtime.oracle import SEED, STEPS, graph_of, make_job, reference
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, in_turn, random_strategy, randomly_shared


def test_gradients_weights_and_buffers_are_all_compared() -> None:
    graph = graph_of("convolutions")
    job = make_job(graph, in_turn(graph, [0]), reference("convolutions"), "adam")
    result = run_job(job)
    assert result is not None
    assert result.verification is not None
    assert result.verification.ok
    module, _, _ = job.model.build(SEED)
    parameters = [name for name, _ in module.named_parameters()]
    compared: dict[str, list[str]] = {}
    for one in result.verification.deviations:
        compared.setdefault(one.what, []).append(one.name)
    assert sorted(compared["gradient"]) == sorted(parameters)
    assert sorted(compared["weight"]) == sorted(parameters)
    assert sorted(compared["buffer"]) == sorted(name for name, _ in module.named_buffers())
    assert compared["eager gradient"] == compared["gradient"]
    assert sorted(compared["eager buffer"]) == sorted(compared["buffer"])
    assert compared["loss"] == ["in float64", "eager", "eager, the second time", RUN_LOSS]


@pytest.mark.parametrize(
    ("lost", "deviates"),
    [
        ("parameter hook", "eager gradient of first.weight"),
        ("module hook", "eager gradient of first.weight"),
        ("tensor hook", "eager gradient of first.weight"),
        ("backward", "eager gradient of first.weight"),
        ("counter", "loss eager, the second time"),
        ("generator", "loss eager"),
    ],
)
def test_what_a_graph_lacks_of_its_module_is_unequal(lost: str, deviates: str) -> None:
    graph = graph_of("secretive")
    job = make_job(
        graph, in_turn(graph, [0]), ModelReference("tests.runtime.models:secretive", {"lost": lost})
    )
    result = run_job(job)
    assert result is not None
    assert result.verification is not None
    assert not result.verification.ok
    unequal = [one for one in result.verification.deviations if not one.ok]
    assert all(one.from_eager for one in unequal)
    assert any(
        f"{one.what} of {one.name}" == deviates or f"{one.what} {one.name}" == deviates for one in unequal
    )
    line = result.verification.failure
    assert line is not None
    assert "of the module in plain PyTorch; export keeps the operators of a forward alone" in line
    assert "\n" not in line


def test_a_module_that_cannot_run_by_itself_is_not_verified() -> None:
    graph = graph_of("perceptron")
    result = run_job(make_job(graph, in_turn(graph, [0]), ModelReference("tests.runtime.models:broken")))
    assert result is not None
    assert result.verification is not None
    assert not result.verification.ok
    line = result.verification.failure
    assert line is not None
    assert line.startswith(
        "verification: the module itself cannot be compared, it fails in float64 (ValueError: two lines of it)"
    )


@pytest.mark.parametrize("devices", [2, 3])
def test_what_modules_seldom_do_is_equal_and_kept(pool: LocalPool, devices: int) -> None:
    """All weights are shared; buffers that no operator reads, or reads in part, have their new values after the run."""
    graph = graph_of("unusual")
    strategy = fsdp(graph, devices)
    if devices == 3:
        strategy = randomly_shared(random_strategy(graph, devices, SEED), graph, SEED)
    result = pool.run(make_job(graph, strategy, reference("unusual")))
    assert result.verification is not None
    assert result.verification.failure is None
    assert result.buffers is not None
    assert bool(result.buffers["seen"])
    assert result.buffers["rows"][[0, 2], 2].tolist() == [float(STEPS)] * 2
    assert all(result.buffers[name].any() for name in ("last", "before"))


def test_a_loss_that_is_no_number_is_the_modules_own() -> None:
    graph = graph_of("endless")
    result = run_job(make_job(graph, in_turn(graph, [0]), reference("endless")))
    assert result is not None
    assert result.verification is not None
    line = result.verification.failure
    assert line is not None
    assert line.startswith("verification: the graph's loss on one device is nan, must be a finite number")


def test_a_module_that_rounds_by_itself_may_deviate_so_far() -> None:
    graph = graph_of("autocast")
    result = run_job(make_job(graph, in_turn(graph, [0]), reference("autocast")))
    assert result is not None
    assert result.verification is not None
    assert result.verification.failure is None


def test_a_module_that_differs_by_process_is_not_verified(pool: LocalPool) -> None:
    graph = graph_of("perceptron")
    strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    job = make_job(graph, strategy, ModelReference("tests.runtime.models:differing"))
    found = pool.run(job).verification
    assert found is not None
    assert not found.ok
    assert found.differing == ("parameter second.weight is built otherwise on rank 1 than on rank 0",)
    assert not found.worst.ok
    assert found.worst.what in ("gradient", "weight")


def test_what_a_factory_draws_is_the_same_on_every_rank(pool: LocalPool) -> None:
    graph = graph_of("perceptron")
    job = make_job(
        graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), ModelReference("tests.runtime.models:drawing")
    )
    found = pool.run(job).verification
    assert found is not None
    assert found.ok, found


def test_deviations_are_relative_to_the_largest_element() -> None:
    expected = {"a": torch.tensor([0.0, -4.0]), "zero": torch.zeros(2)}
    found = {"a": torch.tensor([0.0, -3.0]), "zero": torch.tensor([0.0, 1e-9])}
    first, second = deviations("gradient", found, expected)
    assert (first.what, first.name, first.largest, first.relative) == ("gradient", "a", 1.0, 0.25)
    assert not first.ok
    # A gradient that is zero but for rounding is compared on a small share of the largest one.
    assert second.relative == pytest.approx(1e-9 / 0.004)
    assert second.ok


def test_a_missing_gradient_counts_as_zeros() -> None:
    (found,) = deviations("gradient", {}, {"a": torch.tensor([2.0])})
    assert (found.relative, found.ok) == (1.0, False)


def test_what_is_no_number_is_worst_and_never_allowed() -> None:
    nan = Deviation("gradient", "a", float("nan"), float("nan"), 1e-6)
    large = Deviation("gradient", "b", 1.0, 1.0, 1e-6)
    fine = Deviation("gradient", "c", 0.0, 0.0, 1e-6)
    assert [one.name for one in by_severity([fine, large, nan])] == ["a", "b", "c"]
    assert not nan.ok
    assert isnan(loss_deviation(float("nan"), 1.0).relative)
    verification = Verification(1.0, (fine,))
    assert verification.ok
    assert not replace(verification, deviations=(fine, nan)).ok
    assert not verification.with_run(float("nan")).ok
    assert not replace(verification, differing=("parameter a",)).ok
