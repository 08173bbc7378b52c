"""Calls that the importer writes as several operators: they compute what the call did, whole and in parts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.importer import import_module
from graph.operators import OperatorGraph
from profiler.operators import ExecutionContext
from tests.reference.interpreter import interpret
from tests.reference.randoms import floats, indexes
from tests.reference.rules import random_degrees


class _Weighted(nn.Module):
    """The sum of a function of a weight [4, 6] and inputs, so that gradients go through the function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(floats(4, 6, seed=1).detach())
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return (self.function(self.weight, *args) * 1.5).sum()


def _shift(w: Tensor) -> Tensor:
    moved = torch.zeros_like(w)
    moved[..., 1:] = w[..., :-1]
    moved[..., 0] = 3.0
    return moved * w


def _middle(w: Tensor, x: Tensor) -> Tensor:
    w = w * 2
    w[1:3, 2:5] = x * w[0, 0]
    return w


def _moe(w: Tensor, x: Tensor) -> Tensor:
    probabilities, experts = torch.topk(torch.softmax(x @ w, -1), 2)
    order = torch.argsort(experts.flatten())
    tokens = x.repeat_interleave(2, 0)[order] * probabilities.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // 2, tokens)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "slices and elements written in place": (_shift, ()),
    "a block written in place": (_middle, (floats(2, 3, seed=2, gradient=False),)),
    "differences": (lambda w: torch.diff(w, dim=0) ** 2, ()),
    "differences with ends": (lambda w, x: torch.diff(w, prepend=x, append=x) ** 2, (floats(4, 1, seed=2),)),
    "second differences": (lambda w: torch.diff(w, n=2) ** 2, ()),
    "differences of truth values": (lambda w, x: w[:, :-1] * torch.diff(x > 0), (floats(4, 6, seed=2),)),
    "sorting": (lambda w: w.sort(dim=1, descending=True).values * torch.arange(6), ()),
    "one hot": (
        lambda w, i: w @ functional.one_hot(i, 6).double().transpose(0, 1),
        (indexes(6, 5, seed=3),),
    ),
    "repeated rows": (lambda w: w.repeat_interleave(3, dim=0) ** 2 * torch.arange(12)[:, None], ()),
    "repeated elements": (lambda w: w.repeat_interleave(2) * torch.arange(48), ()),
    "scalars": (lambda w: torch.where(w > 0, w, torch.scalar_tensor(0.5, dtype=w.dtype)), ()),
    "bits": (lambda w: w * ((w > 0) & (w < 1) | (w < -1)), ()),
    "tokens sent to experts and back": (_moe, (floats(5, 4, seed=4, gradient=False),)),
    "an inverse permutation": (
        lambda w, p: w[torch.zeros_like(p).index_put((p,), torch.arange(4))] * torch.arange(4)[:, None],
        (torch.tensor([2, 0, 3, 1]),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rewritten_calls_compute_what_they_did(name: str) -> None:
    function, args = CASES[name]
    args = tuple(argument.detach() for argument in args)
    module = _Weighted(function)
    graph = import_module(module, args, name="test")
    loss = module(*args)
    loss.backward()
    generator = random.Random(0)
    for number in range(8):
        degrees = None
        if number:
            degrees = {operator.name: random_degrees(operator.space, generator) for operator in graph}
        step = interpret(graph, {"weight": module.weight}, {}, args, ExecutionContext(), degrees)
        torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(step.gradients["weight"], module.weight.grad, rtol=1e-9, atol=1e-9)


def _targets(graph: OperatorGraph) -> set[str]:
    return {operator.target.split(".")[1] for operator in graph}


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("slices and elements written in place", {"slice_scatter", "select_scatter"}),
        ("differences with ends", {"diff"}),
        ("one hot", {"one_hot"}),
        ("repeated rows", {"repeat_interleave"}),
        ("scalars", {"scalar_tensor"}),
    ],
)
def test_rewritten_calls_leave_operators_with_rules_alone(name: str, gone: set[str]) -> None:
    function, args = CASES[name]
    graph = import_module(_Weighted(function), tuple(argument.detach() for argument in args), name="test")
    assert _targets(graph).isdisjoint(gone)
    assert all(operator.splittable for operator in graph)
    assert graph.unsplit == ()


def test_grouped_product_of_torch_is_ours() -> None:
    weight = nn.Parameter(torch.randn(3, 8, 16, dtype=torch.bfloat16))
    tokens = torch.randn(8, 8, dtype=torch.bfloat16)
    ends = torch.tensor([2, 5, 8], dtype=torch.int32)

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return functional.grouped_mm(x, self.weight, offs=ends).float().sum()

    graph = import_module(Grouped(), (tokens, ends), name="test")
    assert "grouped_mm" in _targets(graph)
    step = interpret(graph, {"weight": weight}, {}, (tokens, ends), ExecutionContext())
    rows = torch.cat(
        [tokens[start:end] @ weight[group] for group, (start, end) in enumerate([(0, 2), (2, 5), (5, 8)])]
    )
    torch.testing.assert_close(step.loss, rows.float().sum().detach())


def test_samples_stay_samples_through_sorting_and_in_what_is_made_for_them() -> None:
    def routed(w: Tensor, x: Tensor) -> Tensor:
        order = torch.argsort(x.flatten())
        mask = (torch.arange(6) < 4).expand(3, 6)
        return w.flatten()[order % 24] * mask.flatten()

    graph = import_module(_Weighted(routed), (indexes(9, 3, 6, seed=0),), name="test")
    samples = {
        operator.target.split(".")[1]: [axis.size for axis in operator.space.axes if axis.kind == "sample"]
        for operator in graph
    }
    assert math.prod(samples["index"]) == 18  # anywhere among the sorted
    assert samples["expand"] == [3]
    assert samples["arange"] == []  # places in a sequence are no samples
