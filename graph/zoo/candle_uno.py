"""CANDLE Uno: the response of a tumour cell line to a pair of drugs.

Source: the CANDLE benchmark Pilot1/Uno; sizes as in the public code of Unity (OSDI 2022): towers of 8 layers of 4,192
on 942 gene expressions, 5,270 drug descriptors and 2,048 drug fingerprints, a trunk of 4 layers of 4,192, batch 64.
Both drugs of a pair go through the same towers. The trunk is residual, an option of the benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built


def _layers(inputs: int, widths: Sequence[int]) -> nn.ModuleList:
    """Return linear layers of the given widths, without bias."""
    return nn.ModuleList(nn.Linear(size, width, bias=False) for size, width in pairwise((inputs, *widths)))


class Tower(nn.Module):
    """Linear layers with ReLU and dropout, on one kind of feature."""

    def __init__(self, inputs: int, widths: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.layers = _layers(inputs, widths)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(functional.relu(layer(x)))
        return x


class Trunk(nn.Module):
    """Linear layers with ReLU; a layer that keeps the width adds its input."""

    def __init__(self, inputs: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = _layers(inputs, widths)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = functional.relu(layer(x))
            x = x + y if x.shape == y.shape else y
        return x


class Uno(nn.Module):
    """Feature towers, their concatenation with the doses, the trunk; forward returns the mean squared error."""

    def __init__(
        self,
        *,
        cell_features: int,
        descriptors: int,
        fingerprints: int,
        tower: Sequence[int],
        trunk: Sequence[int],
        dropout: float,
    ) -> None:
        super().__init__()
        self.cell_tower = Tower(cell_features, tower, dropout)
        self.descriptor_tower = Tower(descriptors, tower, dropout)
        self.fingerprint_tower = Tower(fingerprints, tower, dropout)
        self.trunk = Trunk(2 + 5 * tower[-1], trunk)
        self.output = nn.Linear(trunk[-1], 1)

    def forward(
        self,
        doses: Tensor,
        cell: Tensor,
        descriptors1: Tensor,
        fingerprints1: Tensor,
        descriptors2: Tensor,
        fingerprints2: Tensor,
        targets: Tensor,
    ) -> Tensor:
        encoded = [
            doses,
            self.cell_tower(cell),
            self.descriptor_tower(descriptors1),
            self.fingerprint_tower(fingerprints1),
            self.descriptor_tower(descriptors2),
            self.fingerprint_tower(fingerprints2),
        ]
        return functional.mse_loss(self.output(self.trunk(torch.cat(encoded, 1))), targets)


def candle_uno(
    batch_size: int,
    *,
    cell_features: int = 942,
    descriptors: int = 5270,
    fingerprints: int = 2048,
    tower: Sequence[int] = (4192,) * 8,
    trunk: Sequence[int] = (4192,) * 4,
    dropout: float = 0.1,
) -> Built:
    """Return Uno with random features [batch, features] and responses [batch, 1]."""
    module = Uno(
        cell_features=cell_features,
        descriptors=descriptors,
        fingerprints=fingerprints,
        tower=tower,
        trunk=trunk,
        dropout=dropout,
    )
    widths = (2, cell_features, descriptors, fingerprints, descriptors, fingerprints, 1)
    return module, tuple(torch.randn(batch_size, width) for width in widths), {}
