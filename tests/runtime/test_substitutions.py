"""Rewritten graphs against those that were imported: the same loss, gradients and buffers, under the same names."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import runtime
from graph.importer import import_module
from graph.rules import local_calls
from graph.strategy import strategy_text
from graph.substitutions.merging import MERGING
from graph.substitutions.rewriting import matches, rewritten
from graph.substitutions.splitting import SPLITTING
from graph.substitutions.substitution import Substitution
from graph.zoo import build
from profiler.operators import ExecutionContext
from runtime.jobs.verified_program import in_double
from runtime.jobs.verify import execute
from search.space.baselines import single_device
from tests.runtime.oracle import assert_same_step

Built = tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


class Heads(nn.Module):
    """Three linear layers and, of the same input, three convolutions of unequal channels."""

    def __init__(self, biased: bool) -> None:  # noqa: FBT001
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, size, bias=biased) for size in (4, 4, 4))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(6, size, 3, stride=(1, 2), padding=(1, 2), bias=biased) for size in (3, 5, 2)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the sum of the squares of all results, each with a factor of its own."""
        last = image.movedim(1, -1)
        results = [*(linear(last) for linear in self.linears), *(one(image) for one in self.convolutions)]
        total = image.new_zeros(())
        for number, result in enumerate(results):
            total = total + (number + 1) * functional.gelu(result).square().sum()
        return total


def heads(*, biased: bool) -> Built:
    torch.manual_seed(5)
    return Heads(biased), (torch.randn(4, 6, 5, 7),), {}


def zoo(name: str) -> Built:
    torch.manual_seed(7)
    return build(name, "small", None)


@pytest.mark.parametrize(
    "name",
    [
        "heads",
        "heads without biases",
        "bert-large",
        "resnet101",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("inception", "hf-llama", "hf-t5")),
    ],
)
def test_a_rewritten_graph_gives_the_loss_gradients_and_buffers_of_the_imported_one(name: str) -> None:
    built = heads(biased=name == "heads") if name.startswith("heads") else zoo(name)
    graph = import_module(*built, name=name)
    found = [match for match in matches(graph) if match.rule in MERGING]
    assert found
    other = rewritten(graph, found)
    assert len(other.operators) == len(graph.operators) - sum(len(one.operators) - 1 for one in found)
    assert {value.name for value in other.values} == {value.name for value in graph.values}

    assert_same_step(graph, other, built)


class Classified(nn.Module):
    """A classifier of images with two losses: of weighted classes for every place, and of some targets that count."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.whole = nn.Conv2d(3, 5, 3), nn.Linear(48, 7)
        self.weights = nn.Buffer(torch.rand(5) + 0.5)

    def forward(self, image: torch.Tensor, places: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Return the sum of both losses of images [N, 3, 4, 4], classes of places [N, 2, 2], classes [N]."""
        logits = self.whole(image.flatten(1)) * 8
        every = functional.cross_entropy(self.places(image), places, weight=self.weights)
        return every + functional.cross_entropy(logits, classes, ignore_index=3)


def test_cross_entropies_in_two_operators_give_the_same_step_and_split_by_classes() -> None:
    torch.manual_seed(5)
    built: Built = (
        Classified(),
        (torch.randn(4, 3, 4, 4), torch.randint(5, (4, 2, 2)), torch.tensor([1, 3, 6, 0])),
        {},
    )
    graph = import_module(*built, name="classified")
    found = [match for match in matches(graph) if match.rule in SPLITTING]
    assert len(found) == 2
    other = rewritten(graph, found)
    assert len(other.operators) == len(graph.operators) + 2
    assert_same_step(graph, other, built)
    places, whole = ["sample", "length", "channel", "class", "replica"], ["sample", "class", "replica"]
    for target in ("soapstone.exp_sums", "soapstone.softmax_nll_sums"):
        operators = [operator for operator in other.operators if operator.target == target]
        assert [[axis.name for axis in operator.space.axes] for operator in operators] == [places, whole]


def test_losses_that_are_no_plain_means_over_classes_stay_one_operator() -> None:
    """Of probabilities, with smoothed labels, summed."""

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            logits = self.linear(x)
            return (
                functional.cross_entropy(logits, x.new_full((3, 5), 0.2))
                + functional.cross_entropy(logits, classes, label_smoothing=0.1)
                + functional.cross_entropy(logits, classes, reduction="sum")
            )

    graph = import_module(Others(), (torch.randn(3, 4), torch.randint(5, (3,))), {}, name="others")
    assert sum("cross_entropy" in operator.target for operator in graph.operators) == 3
    assert [match for match in matches(graph) if match.rule in SPLITTING] == []


@pytest.mark.parametrize("biased", [True, False])
def test_parts_of_merged_operators_are_exactly_those_of_the_whole_on_integers(*, biased: bool) -> None:
    built = heads(biased=biased)
    plain = import_module(*built, name="heads")
    graph = in_double(rewritten(plain, matches(plain)))
    draw = random.Random(11)
    generator = torch.Generator().manual_seed(13)
    context = ExecutionContext()
    merged = [operator for operator in graph.operators if operator.target.startswith("soapstone.merged")]
    assert [operator.target for operator in merged] == ["soapstone.merged_linear", "soapstone.merged_conv2d"]
    for operator in merged:
        inputs = [
            torch.randint(-4, 5, spec.shape, generator=generator).double().requires_grad_()
            for spec in graph.input_specs(operator)
        ]
        slopes = [
            torch.randint(-4, 5, spec.shape, generator=generator).double()
            for spec in graph.output_specs(operator)
        ]

        def step(degrees: tuple[int, ...]) -> list[torch.Tensor]:
            results = execute(graph, operator, degrees, inputs, context)  # noqa: B023
            return [*results, *torch.autograd.grad(results, inputs, slopes)]  # noqa: B023

        whole = step((1,) * len(operator.space.axes))
        for _ in range(12):
            degrees = tuple(
                draw.choice([degree for degree in (1, 1, 2, 3) if degree <= axis.size])
                for axis in operator.space.axes[:-1]
            )
            assert local_calls(graph, operator, (*degrees, 1))
            for part, expected in zip(step((*degrees, 1)), whole, strict=True):
                assert torch.equal(part, expected), degrees


def test_a_part_of_a_match_can_be_merged_and_the_rest_stays() -> None:
    graph = import_module(*heads(biased=True), name="heads")
    first, second = matches(graph)
    assert (first.rule, second.rule) == ("merge-linears", "merge-convolutions")
    part = Substitution(first.rule, first.operators[1:])
    other = rewritten(graph, [part])
    assert other.substitutions == (part,)
    assert first.operators[0] in other.operator_by_name
    assert "+".join(part.operators) in other.operator_by_name


def test_a_trainer_under_a_strategy_with_substitutions_trains_the_module_as_torch_does(
    tmp_path: Path,
) -> None:
    module, (image,), _ = heads(biased=True)
    plain = copy.deepcopy(module)
    graph = import_module(module, (image,), {}, name="heads")
    merged = rewritten(graph, matches(graph))
    file = tmp_path / "merged.json"
    file.write_text(strategy_text(single_device(merged), merged))
    trainer = runtime.parallelize(
        module, file, (image,), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2)
    )
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for seed in range(3):
        batch = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
        loss = trainer.step(batch)
        optimizer.zero_grad()
        expected = plain(batch)
        expected.backward()
        optimizer.step()
        assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    state = trainer.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=1e-5)
