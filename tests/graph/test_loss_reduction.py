"""Losses that add up samples are told from means, whatever stands between the reduction and the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from graph.importer import import_module
from graph.loss_reduction import adds_up_samples

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Of a layer's results, classes, and the layer's weights.
SUMS: list[Loss] = [
    lambda x, _, __: x.square().sum() * 0.5,
    lambda x, _, __: -x.view(-1).square().sum(),
    lambda x, _, __: x.square().mean(1).sum() / 3,
    lambda x, _, __: functional.mse_loss(x, x * 2, reduction="sum"),
    lambda x, target, _: functional.cross_entropy(x, target, reduction="none").sum(),
    lambda x, target, _: functional.cross_entropy(x, target, reduction="sum") + x.mean(),
    lambda x, _, weight: x.square().sum() + weight.square().sum(),
]
MEANS: list[Loss] = [
    lambda x, _, __: x.square().mean(),
    lambda x, _, __: x.square().sum(1).mean(),
    lambda x, target, _: functional.cross_entropy(x, target, reduction="none").mean(),
    lambda x, target, _: functional.cross_entropy(x, target) + 0.1 * x.square().mean(),
    lambda x, _, weight: x.square().mean() + weight.square().sum(),
    lambda x, _, __: torch.stack([x.mean(), x.square().mean()]).sum(),
]


class _Network(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.loss = loss

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(values), target, self.linear.weight)


@pytest.mark.parametrize("samples", [4, 1])
def test_sums_over_samples_are_told_from_means(samples: int) -> None:
    for losses, adds_up in ((SUMS, True), (MEANS, False)):
        for number, loss in enumerate(losses):
            inputs = (torch.zeros(samples, 5), torch.zeros(samples, dtype=torch.int64))
            graph = import_module(_Network(loss), inputs, name="x")
            assert adds_up_samples(graph) is adds_up, f"{number}: {graph.operators[-1].target}"
