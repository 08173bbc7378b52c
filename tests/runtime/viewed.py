"""Small networks that read a weight through views of it. Worker processes build them by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built

WIDTH = 8

# Each reads a weight of WIDTH x WIDTH elements, and rows of WIDTH, through some memory of the weight's.
KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed": lambda x, weight: x @ weight.t(),
    "viewed": lambda x, weight: x @ weight.view(4, 16).reshape(WIDTH, WIDTH),
    "a view of a view": lambda x, weight: x @ weight.view(-1).view(2, 4, WIDTH).permute(2, 0, 1).flatten(1),
    "expanded": lambda x, weight: torch.bmm(x.unsqueeze(1), weight.expand(len(x), WIDTH, WIDTH)).squeeze(1),
    "selected": lambda x, weight: torch.sin(x * weight[3])[:, 2:6] @ weight[:, 2:6].t(),
    "split": lambda x, weight: torch.cat([torch.tanh(x @ part.t()) for part in weight.split(2)], 1),
    "slices in a cat": lambda x, weight: functional.linear(x, torch.cat([weight[4:], weight[:4]])),
    "detached": lambda x, weight: (x @ weight.t()) * torch.sigmoid(x @ weight.detach()),
    "a view that waits": lambda x, weight: _late(x, weight.t()),
    "a view beside the weight": lambda x, weight: functional.linear(torch.tanh(x @ weight.t()), weight),
    "given back": lambda x, weight: x @ weight.contiguous().to(torch.float32).squeeze(0).t(),
    "grouped": lambda x, weight: _experts(x, weight.view(2, 4, WIDTH)),
    "strided": lambda x, weight: x @ weight.as_strided((WIDTH, WIDTH), (1, WIDTH)),
    "diagonal": lambda x, weight: torch.exp(x * weight.diagonal()) @ weight.unfold(1, 4, 4).flatten(1),
}


def _late(x: Tensor, view: Tensor) -> Tensor:
    """Return what comes of a view that is made first and read last."""
    for _ in range(3):
        x = torch.tanh(x) + 0.5 * x.roll(1, 1)
    return x @ view


def _experts(x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of two experts, each a row's product with its own weight, there and back."""
    hidden = torch.einsum("bi,eoi->beo", x, weights)
    return torch.einsum("beo,eoi->bi", torch.relu(hidden), weights)


class Viewed(nn.Module):
    """A layer for each kind, with a plain layer before and one after."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.ParameterList(nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH)) for _ in kinds)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for kind, weight in zip(self.kinds, self.weights, strict=True):
            made = KINDS[kind](x, weight)
            x = x + 0.5 * functional.pad(made, (0, WIDTH - made.shape[1]))
        return functional.cross_entropy(self.last(x), targets)


def viewed(kind: str = "", batch_size: int = 6) -> Built:
    """Return a network of one kind, or of all of them."""
    kinds = (kind,) if kind else tuple(KINDS)
    return (
        Viewed(kinds),
        (torch.randn(batch_size, WIDTH), torch.randint(0, 5, (batch_size,))),
        {},
    )
