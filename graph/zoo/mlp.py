"""A multilayer perceptron: linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built


class Mlp(nn.Module):
    """Linear layers of the given widths with ReLU between them; forward returns the mean cross entropy."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 0 else layer(functional.relu(x))
        return functional.cross_entropy(x, targets)


def mlp(batch_size: int, *, widths: Sequence[int] = (1024, 4096, 4096, 4096, 1000)) -> Built:
    """Return a perceptron with random inputs; `widths` names the inputs, every layer, and last the classes."""
    targets = torch.randint(0, widths[-1], (batch_size,))
    return Mlp(widths), (torch.randn(batch_size, widths[0]), targets), {}
