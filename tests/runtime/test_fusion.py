"""Fused operators against those that they stand for: the same loss, gradients, buffers and draws, whole and in parts.

Where nothing is said of compiling, torch executes what it would compile as it is: that takes no seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from graph.compiled_calls import COMPILED, PartCall, compiled_call, parts_of
from graph.document import graph_from_document, graph_to_document
from graph.errors import StrategyError
from graph.importer import import_module
from graph.operators import OperatorGraph, ValueKind
from graph.rules import local_calls, whole_call
from graph.rules.fused import FUSED
from graph.substitutions.rewriting import WITH_COMPILER, every_substitution, matches, rewritten
from graph.substitutions.substitution import Substitution
from graph.zoo import build
from profiler.operators import ExecutionContext, compile_call
from profiler.operators.inputs import random_inputs
from runtime.jobs.verified_program import in_double
from runtime.jobs.verify import execute
from tests.runtime.oracle import assert_equal, assert_same_step, graph_of, make_job, reference, train_plain
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import random_strategy


@pytest.fixture
def as_it_is() -> Iterator[None]:
    """Have torch execute functions as they are instead of compiling them."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Block(nn.Module):
    """Linear layer, activation and a residual sum behind it; norms, of one of which the input is read again; images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.convolution, self.batch_norm = nn.Conv1d(6, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.first(values))
        total = values + functional.dropout(self.second(hidden), 0.25)
        normal = self.norm(total * 2)
        scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-3)
        image = self.batch_norm(torch.relu(self.convolution(normal.transpose(1, 2))))
        loss: torch.Tensor = scaled.sum() + (normal * total).square().sum() + torch.relu(image).sum()
        return loss


def block() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    return Block(), (torch.randn(4, 6, 6),), {}


def zoo(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    return build(name, "small", None)


def fused(graph: OperatorGraph) -> OperatorGraph:
    """Return a graph with all fusions."""
    return rewritten(graph, every_substitution(graph, WITH_COMPILER))


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize(
    "name",
    [
        "block",
        "bert-large",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("hf-llama", "hf-t5", "resnet101", "inception")
        ),
    ],
)
def test_a_fused_graph_gives_the_loss_gradients_and_buffers_of_the_imported_one(name: str) -> None:
    built = block() if name == "block" else zoo(name)
    graph = import_module(*built, name=name)
    other = fused(graph)
    assert len(other.operators) < len(graph.operators)
    assert {value.name for value in other.values} < {value.name for value in graph.values}
    assert [value for value in other.values if value.kind is not ValueKind.OPERATOR] == [
        value for value in graph.values if value.kind is not ValueKind.OPERATOR
    ]

    assert_same_step(graph, other, built)


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize(
    "name",
    ["block", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert-large", "resnet101", "hf-llama"))],
)
def test_parts_of_fused_operators_are_those_of_the_whole(name: str) -> None:
    graph = in_double(fused(import_module(*(block() if name == "block" else zoo(name)), name=name)))
    draw = random.Random(11)
    context = ExecutionContext()
    known = set()
    for operator in graph.operators:
        whole = whole_call(graph, operator)
        if operator.target != FUSED or whole.key in known:
            continue
        known.add(whole.key)
        inputs = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(random_inputs(whole, "cpu", 13), whole.gradients, strict=True)
        ]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        slopes = [
            torch.randn(spec.shape, generator=torch.Generator().manual_seed(17), dtype=torch.float64)
            for spec in graph.output_specs(operator)
        ]

        def step(degrees: tuple[int, ...]) -> list[torch.Tensor]:
            results = execute(graph, operator, degrees, inputs, context)  # noqa: B023
            return [*results, *torch.autograd.grad(results, wanted, slopes)]  # noqa: B023

        expected = step((1,) * len(operator.space.axes))
        for _ in range(5):
            degrees = tuple(
                draw.choice([degree for degree in (1, 1, 2, 3) if degree <= axis.size])
                for axis in operator.space.axes[:-1]
            )
            calls = local_calls(graph, operator, (*degrees, 1))
            assert {call.target for call in calls} == {COMPILED}
            for part, of_whole in zip(step((*degrees, 1)), expected, strict=True):
                torch.testing.assert_close(part, of_whole, rtol=1e-9, atol=1e-10)
    assert len(known) > 1


def test_what_normalizes_is_whole_along_the_dim_and_a_product_splits_by_channel() -> None:
    graph = fused(import_module(*block(), name="block"))
    axes = {
        tuple(part.call.target.split(".")[1] for part in parts_of(whole_call(graph, operator))): {
            axis.name for axis in operator.space.axes[:-1]
        }
        for operator in graph.operators
        if operator.target == FUSED
    }
    assert axes["linear", "gelu"] == {"sample", "length", "channel"}
    assert axes["conv1d", "relu"] == {"sample", "channel"}
    assert axes["batch_norm_apply", "relu"] == {"sample", "channel", "length"}
    (norm,) = (of for kinds, of in axes.items() if "layer_norm" in kinds)
    assert norm == {"sample", "length"}


class Around(nn.Module):
    """A sum of two: of a value, and of what a linear layer, which is not fused, makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.linear(values))
        loss: torch.Tensor = (first + self.linear(first)).square().sum()
        return loss


def test_a_group_with_something_between_two_of_it_is_no_match() -> None:
    graph = import_module(Around(), (torch.randn(4, 6),), {}, name="around")
    names = {operator.target.split(".")[1]: operator.name for operator in graph.operators}
    assert all(
        not {names["tanh"], names["add"]}.issubset(match.operators) for match in matches(graph, WITH_COMPILER)
    )
    planted = Substitution("fuse-pointwise", (names["tanh"], names["add"]))
    with pytest.raises(StrategyError, match="these operators are no match"):
        rewritten(graph, [planted])


def test_groups_of_random_graphs_leave_an_order() -> None:
    """Of pointwise operators and products in random wiring: all groups together can be put into an order."""
    draw = random.Random(3)
    for _ in range(3):
        wiring = [
            (draw.randrange(1 + place), draw.randrange(1 + place), draw.random() < 0.3) for place in range(24)
        ]

        class Random(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)

            def forward(self, values: torch.Tensor) -> torch.Tensor:
                made = [values]
                for left, right, product in wiring:  # noqa: B023
                    made.append(self.linear(made[left]) if product else made[left] * made[right])
                return torch.stack(made[1:]).square().sum()

        graph = import_module(Random(), (torch.randn(2, 2),), {}, name="random")
        found = matches(graph, ("fuse-pointwise",))
        assert every_substitution(graph, ("fuse-pointwise",)) == found
        rewritten(graph, found).validate()


def test_what_stays_draws_as_before_and_a_fused_graph_can_be_written_and_read() -> None:
    graph = import_module(*block(), name="block")
    other = fused(graph)
    (dropout,) = (operator.name for operator in graph.operators if operator.target == "soapstone.dropout")
    first = next(operator.outputs[0] for operator in graph.operators if operator.name == dropout)
    made = [value.name for value in other.values if value.kind is ValueKind.OPERATOR]
    assert made.index(first) < graph.draw_numbers[dropout] == other.draw_numbers[dropout]
    again = graph_from_document(graph_to_document(other))
    assert again == other
    assert again.draw_numbers == other.draw_numbers


# torch's own, when its compiler is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_fused_operator_is_compiled_once_and_gives_what_its_parts_give() -> None:
    graph = fused(import_module(*block(), name="block"))
    operator = next(of for of in graph.operators if "gelu" in of.name)
    call = whole_call(graph, operator)
    results = []
    for stance in ("default", "force_eager"):
        inputs = random_inputs(call, "cpu", 5)
        with torch.compiler.set_stance(stance):
            outputs = compile_call(call)(inputs, ExecutionContext(step=2))
        slopes = [torch.ones_like(output) for output in outputs]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        results.append([*outputs, *torch.autograd.grad(outputs, wanted, slopes)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)
    # Of another layer alike it is the same function.
    assert compile_call(call) is compile_call(replace(call, bindings=call.bindings))


@pytest.mark.usefixtures("as_it_is")
def test_a_fused_operator_can_be_a_part_of_a_compiled_stretch() -> None:
    graph = fused(import_module(*block(), name="block"))
    first = whole_call(graph, next(of for of in graph.operators if "gelu" in of.name))
    inputs = random_inputs(first, "cpu", 5)
    sources = tuple(range(len(inputs)))
    stretch = compiled_call(first.inputs, [PartCall(first, sources)], [len(sources)])
    expected = compile_call(first)(inputs, ExecutionContext())
    assert torch.equal(compile_call(stretch)(inputs, ExecutionContext())[0], expected[0])
    assert parts_of(stretch)[0].call == first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_strategy_for_a_fused_graph_trains_as_the_module(pool: LocalPool, name: str, seed: int) -> None:
    graph, model = fused(graph_of(name)), reference(name)
    assert any(operator.target == FUSED for operator in graph.operators)
    job = make_job(graph, random_strategy(graph, 2, seed), model)
    assert_equal(pool.run(job), train_plain(model))
