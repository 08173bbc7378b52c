"""XDL: click prediction for advertisements from categorical features alone.

Source: Unity (OSDI 2022), sizes of its public code (FlexFlow, `examples/cpp/XDL`): 4 tables of a million rows of 64,
one row a sample, summed as a bag; their concatenation goes through layers of 256, 256 and 2 without bias, ReLU between
them and a sigmoid at the end; mean squared error; batch 64, the default of that code. Named after X-DeepLearning
(Jiang et al., XDL, DLP-KDD 2019).
Shape letters: B batch, T tables, L rows looked up in a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built


class Xdl(nn.Module):
    """Bags of embeddings, their concatenation, linear layers; forward returns the mean squared error."""

    def __init__(self, *, tables: int, rows: int, embedding: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, embedding, mode="sum") for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)  # type: ignore[arg-type]
        widths = (tables * embedding, *layers)
        self.layers = nn.ModuleList(
            nn.Linear(inputs, outputs, bias=False) for inputs, outputs in zip(widths, layers, strict=False)
        )

    def forward(self, categories_BTL: Tensor, targets: Tensor) -> Tensor:
        looked_up = [table(categories_BTL[:, number]) for number, table in enumerate(self.tables)]
        x = torch.cat(looked_up, 1)
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return functional.mse_loss(torch.sigmoid(self.layers[-1](x)), targets)


def xdl(
    batch_size: int,
    *,
    tables: int = 4,
    rows: int = 1_000_000,
    embedding: int = 64,
    bag: int = 1,
    layers: Sequence[int] = (256, 256, 2),
) -> Built:
    """Return XDL with random categories [B, T, L] and targets of zeros and ones [B, last layer]."""
    module = Xdl(tables=tables, rows=rows, embedding=embedding, layers=layers)
    categories = torch.randint(0, rows, (batch_size, tables, bag))
    targets = torch.randint(0, 2, (batch_size, layers[-1])).to(torch.float32)
    return module, (categories, targets), {}
