"""The loops that users of DistributedDataParallel and FSDP write equal the plain module's, by `runtime.parallelize`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import runtime
from graph.errors import ImportFailure, RuntimeFailure
from graph.importer import import_module
from runtime.launch.torchrun import call_on_ranks
from tests.runtime import loops
from tests.runtime.strategies import in_turn

Results = dict[tuple[str, str], list[dict[str, Any]]]


def cases_of(loop: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("strategy", loops.LOOPS[loop][1])


@pytest.fixture(scope="module")
def results() -> Results:
    """Each rank's result of every loop, from one start of two processes."""
    of_ranks = call_on_ranks(loops.SIZE, loops.every_loop, ())
    return {case: [of_rank[case] for of_rank in of_ranks] for case in of_ranks[0]}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for key, value in expected.items():
        if key == "state":
            assert list(found[key]) == list(value)
            for name, tensor in value.items():
                np.testing.assert_allclose(found[key][name], tensor, rtol=tolerance, atol=tolerance)
        else:
            assert found[key] == pytest.approx(value, rel=tolerance, nan_ok=True), key


@cases_of("accumulate")
def test_batches_of_a_divided_loss_make_the_step_of_their_mean(strategy: str, results: Results) -> None:
    expected = loops.accumulate_plainly()
    for of_rank in results["accumulate", strategy]:
        assert_equal(of_rank, expected, 1e-9)


@cases_of("scale losses")
def test_an_overflow_on_one_rank_is_skipped_on_all(strategy: str, results: Results) -> None:
    expected = loops.scale_losses_plainly()
    assert expected["scales"] == [1024, 1024, 512, 512, 512, 1024]
    assert not math.isfinite(expected["norms"][1])
    of_ranks = results["scale losses", strategy]
    for of_rank in of_ranks:
        assert_equal(of_rank, expected, 1e-4)
        assert of_rank["without the scaler"].startswith("apply: the gradients were scaled by a GradScaler")
    if strategy == "fsdp":
        assert [of_rank["finite"] for of_rank in of_ranks] == [[True, True, True], [True, False, True]]


@cases_of("sample")
def test_a_distributed_sampler_deals_out_the_whole_batch(strategy: str, results: Results) -> None:
    expected = loops.sample_plainly()
    first, second = results["sample", strategy]
    assert_equal(first, expected, 1e-9)
    assert_equal(second, expected, 1e-9)
    assert first["messages"] == second["messages"]
    starts = {
        ("no shards", 0): "inputs: all have the whole example's shapes",
        ("whole on rank 1", 0): "inputs: input.1 of rank 1 is another shard than that of rank 0",
        ("another mask on rank 1", 0): "inputs: input.2 of rank 1 differs from that of rank 0",
        ("fewer on rank 1", 0): "rank 1: inputs: input.0 has shape (6, 3), must have (6, 8) or a 1/2 of it",
        ("no shards", 1): "inputs: all have the whole example's shapes",
        ("whole on rank 1", 1): "rank 1: inputs: input.1 is whole, must be a shard along dim 0",
        ("another mask on rank 1", 1): "inputs: input.2 of rank 1 differs from that of rank 0",
        ("fewer on rank 1", 1): "rank 1: inputs: input.0 has shape (6, 3), must have (6, 8) or a 1/2 of it",
    }
    assert first["messages"].keys() == starts.keys()
    for key, start in starts.items():
        assert first["messages"][key].startswith(start)
        assert "\n" not in first["messages"][key]


@cases_of("tell")
def test_outputs_beside_the_loss_are_the_modules_own(strategy: str, results: Results) -> None:
    expected = loops.tell_plainly()
    for of_rank in results["tell", strategy]:
        assert_equal(of_rank, {"state": expected["state"]}, 1e-6)
        for found, wanted in zip(of_rank["outputs"], expected["outputs"], strict=True):
            assert list(found) == list(wanted)
            for name, tensor in wanted.items():
                assert found[name].dtype == tensor.dtype
                np.testing.assert_allclose(found[name], tensor, rtol=1e-6, atol=1e-6, err_msg=name)


@cases_of("finish")
def test_a_smaller_batch_trains_as_the_module(strategy: str, results: Results) -> None:
    expected = loops.finish_plainly()
    first, second = results["finish", strategy]
    assert_equal(first, expected, 2e-4)
    assert_equal(second, expected, 2e-4)
    assert first["messages"] == second["messages"]
    assert list(first["messages"])[:4] == ["1", "2", "3", "4"]
    for message in first["messages"].values():
        assert "inputs: input.0 has shape" in message
        assert "\n" not in message
    if strategy == "fsdp":
        reason = r"has shape \(1, 3, 9, 9\), for which .* splits axis sample into 2 parts of one point"
        assert re.search(reason, first["messages"]["one sample"])


def test_a_smaller_batch_drops_the_same_elements_under_any_strategy(results: Results) -> None:
    one, other = (results["drop", strategy][0] for strategy in loops.LOOPS["drop"][1])
    assert_equal(one, {"losses": other["losses"], "state": other["state"]}, 2e-4)


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    noise: Tensor
    head: Tensor


class Returning(torch.nn.Module):
    """Returns what a function makes of its loss, its logits, noise, and what a head makes that the loss leaves out."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form
        self.body, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, points: Tensor) -> Any:
        logits = self.body(points)
        return self.form(logits.square().mean(), logits, torch.rand(2), self.head(logits))


FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "tuple": (lambda *parts: parts, "1"),
    "dict": (lambda loss, logits, *_: {"loss": loss, "of": {"last": [logits]}}, "of.last.0"),
    "dataclass": (Result, "logits"),
    "object": (lambda loss, logits, *_: SimpleNamespace(loss=loss, logits=logits), "logits"),
}


def returning(form: str, outputs: Sequence[str] | str) -> tuple[runtime.Trainer, Returning, Tensor]:
    torch.manual_seed(0)
    module, points = Returning(FORMS[form][0]), torch.randn(5, 3)
    strategy = in_turn(import_module(module, (points,), name="returning"), [0])
    trainer = runtime.parallelize(module, strategy, (points,), optimizer=loops.sgd, outputs=outputs)
    return trainer, module, points


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_result_may_hold_the_loss(form: str) -> None:
    name = FORMS[form][1]
    trainer, module, points = returning(form, name)
    with pytest.raises(RuntimeFailure, match="there are none yet"):
        trainer.outputs()
    trainer.backward(points)
    torch.testing.assert_close(trainer.outputs(), {name: module.body(points).detach()})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scores", "its result has no tensor scores, must be one of loss, logits, noise, head;"),
        ("head", r"its result head follows from head\.\w+ in a way that the loss does not"),
        ("noise", r"its result noise follows from random numbers \(aten.rand.default\)"),
    ],
)
def test_outputs_that_do_not_follow_from_the_graph_are_refused(name: str, message: str) -> None:
    with pytest.raises(ImportFailure, match=message):
        returning("dataclass", [name])


def test_outputs_that_were_not_asked_for_are_refused() -> None:
    trainer, _, points = returning("tuple", ())
    trainer.step(points)
    with pytest.raises(RuntimeFailure, match="outputs: none are kept, must be named"):
        trainer.outputs()
