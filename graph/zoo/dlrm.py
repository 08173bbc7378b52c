"""DLRM: recommendation from dense and categorical features.

Source: Naumov et al., arXiv:1906.00091; the sizes are those of its profiling study: 512 dense features, 8 tables of a
million rows of 64, bottom layers 512, 512, 64, top layers 1024, 1024, 1024, 1, batch 2048. One lookup per table.
Shape letters: B batch, F dense features, T tables, D embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built


def _layers(inputs: int, widths: Sequence[int]) -> tuple[nn.Sequential, int]:
    """Return linear layers of the given widths, each followed by ReLU, and the last width."""
    modules: list[nn.Module] = []
    for width in widths:
        modules += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*modules), inputs


class Dlrm(nn.Module):
    """Bottom layers, tables, dot products of all pairs, top layers; forward returns the binary cross entropy."""

    def __init__(
        self, *, tables: int, rows: int, dense_features: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.bottom, size = _layers(dense_features, bottom)
        self.tables = nn.ModuleList(nn.Embedding(rows, size) for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)  # type: ignore[arg-type]
        vectors = tables + 1
        lower = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", lower[0] * vectors + lower[1])
        self.top, last = _layers(size + vectors * tables // 2, top)
        self.output = nn.Linear(last, 1)

    def forward(self, dense_BF: Tensor, categories_BT: Tensor, targets_B1: Tensor) -> Tensor:
        bottom_BD = self.bottom(dense_BF)
        looked_up = [table(categories_BT[:, index]) for index, table in enumerate(self.tables)]
        vectors = torch.stack([bottom_BD, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        # Every pair once, without the diagonal.
        interactions = torch.index_select(products, 1, self.pairs)  # type: ignore[arg-type]
        logits_B1 = self.output(self.top(torch.cat([bottom_BD, interactions], 1)))
        return functional.binary_cross_entropy_with_logits(logits_B1, targets_B1)


def dlrm(
    batch_size: int,
    *,
    tables: int = 8,
    rows: int = 1_000_000,
    dense_features: int = 512,
    bottom: Sequence[int] = (512, 512, 64),
    top: Sequence[int] = (1024, 1024, 1024),
) -> Built:
    """Return DLRM with random dense features [B, F], categories [B, T] and clicks [B, 1].

    The last of the `bottom` widths is the size of an embedding too.
    """
    module = Dlrm(tables=tables, rows=rows, dense_features=dense_features, bottom=bottom, top=top)
    dense = torch.randn(batch_size, dense_features)
    categories = torch.randint(0, rows, (batch_size, tables))
    clicks = torch.randint(0, 2, (batch_size, 1)).to(torch.float32)
    return module, (dense, categories, clicks), {}
