"""A network whose operators may be merged."""

from __future__ import annotations

import torch


class Twice(torch.nn.Module):
    """Two pairs of products, each of which may be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, width) for width in (4, 4, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.parts
        y = a(x) * b(x)
        mean: torch.Tensor = (c(y) * d(y)).mean()
        return mean
