"""Small networks for the runtime's tests. Worker processes build them by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built


class Perceptron(nn.Module):
    """Three linear layers; the middle one can be split by reduction, giving partial sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 9, bias=False)
        self.third = nn.Linear(9, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return functional.cross_entropy(self.third(torch.tanh(self.second(hidden))), targets)


def perceptron(batch_size: int = 7) -> Built:
    return Perceptron(), (torch.randn(batch_size, 6), torch.randint(0, 5, (batch_size,))), {}


class Convolutions(nn.Module):
    """Convolutions with padding and stride, batch norm, overlapping pooling: halos and synchronized statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, stride=2)
        self.head = nn.Linear(8 * 3 * 3, 4)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(images)))
        x = functional.max_pool2d(x, 3, stride=1, padding=1)
        x = torch.relu(self.second(x))
        x = functional.avg_pool2d(x, 2, stride=1)
        return functional.cross_entropy(self.head(x.flatten(1)), targets)


def convolutions(batch_size: int = 5) -> Built:
    return Convolutions(), (torch.randn(batch_size, 3, 9, 9), torch.randint(0, 4, (batch_size,))), {}


class Recurrent(nn.Module):
    """Two unrolled LSTM steps a layer with shared weights, and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = memory = torch.zeros(tokens.shape[0], 6)
        loss = torch.zeros(())
        for step in range(tokens.shape[1]):
            hidden, memory = self.cell(self.embedding(tokens[:, step]), (hidden, memory))
            logits = functional.linear(hidden, self.embedding.weight)
            loss = loss + functional.cross_entropy(logits, targets[:, step])
        return loss / tokens.shape[1]


def recurrent(batch_size: int = 5) -> Built:
    tokens = torch.randint(0, 11, (batch_size, 3))
    return Recurrent(), (tokens, torch.randint(0, 11, (batch_size, 3))), {}


class Branches(nn.Module):
    """Branches of different widths, concatenated and added: operators that can run side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left = nn.Linear(8, 5)
        self.right = nn.Linear(8, 7)
        self.skip = nn.Linear(6, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        stem = torch.relu(self.stem(x))
        joined = torch.cat([torch.tanh(self.left(stem)), torch.relu(self.right(stem))], dim=1)
        return functional.cross_entropy(self.head(joined + self.skip(x)), targets)


def branches(batch_size: int = 6) -> Built:
    return Branches(), (torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))), {}


class Dropped(nn.Module):
    """Dropout between linear layers, and attention with a fused projection: heads are inner factors of a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.projection(x).view(batch, length, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        hidden = self.norm(x + self.dropout(mixed))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def dropped(batch_size: int = 4) -> Built:
    return Dropped(), (torch.randn(batch_size, 5, 8), torch.randint(0, 3, (batch_size, 5))), {}


def failing(rank: int) -> Built:
    """Build a perceptron, but raise on one rank."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == rank:
        raise ValueError("no such weights")
    return perceptron()


def dying(rank: int) -> Built:
    """Build a perceptron, but end the process of one rank as the kernel would."""
    import os
    import signal

    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return perceptron()
