"""Small networks for the runtime's tests. Worker processes build them by name."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from tests.runtime.viewed import viewed as viewed


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


class Ignoring(nn.Module):
    """Classes of different weights, and targets of which many do not count: of the first samples nearly none does."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 5)
        self.register_buffer("weight", torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25]))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.second(torch.tanh(self.first(x))).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), self.weight, ignore_index=-1)


def ignoring(batch_size: int = 6) -> Built:
    targets = torch.randint(0, 5, (batch_size, 4))
    counts = torch.arange(batch_size)[:, None] * 4 // batch_size + torch.arange(4)[None, :] >= 4
    counts[0, 0] = True
    return Ignoring(), (torch.randn(batch_size, 4, 6), torch.where(counts, targets, -1)), {}


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


class Blocked(nn.Module):
    """Convolutions of whole blocks of channels, widest before the last: there the backward takes most."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 32, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 64, 2, stride=2)
        self.last = nn.Conv2d(64, 16, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        loss: Tensor = self.last(self.up(self.down(images))).square().mean()
        return loss


def blocked(batch_size: int = 4) -> Built:
    return Blocked(), (torch.randn(batch_size, 3, 24, 24),), {}


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


class Mixed(nn.Module):
    """All kinds of state: frozen, unused, tied and partly read weights, a scalar one, and buffers of every sort."""

    places: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.positions = nn.Parameter(torch.randn(9, 6))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(2, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.arange(5), persistent=False)
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions[:5] * self.scale
        hidden = torch.tanh(self.frozen(hidden)) + self.positions[self.places]
        hidden = self.norm(hidden.flatten(0, 1))
        return functional.cross_entropy(self.head(hidden) * self.temperature, targets.flatten())


def mixed(batch_size: int = 5) -> Built:
    tokens = torch.randint(0, 13, (batch_size, 5))
    return Mixed(), (tokens,), {"targets": torch.randint(0, 13, (batch_size, 5))}


class Accumulating(nn.Module):
    """A buffer that the loss depends on, renewed by operators of its own, and a mask that travels as booleans."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5)
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.first(x)
        shifted = torch.tanh(hidden + self.offset).masked_fill(hidden > 0.1, 0.5)
        with torch.no_grad():
            self.offset.copy_(0.5 * self.offset + hidden.detach().sum(0))
        return functional.cross_entropy(self.second(shifted), targets)


def accumulating(batch_size: int = 12) -> Built:
    return Accumulating(), (torch.randn(batch_size, 6), torch.randint(0, 5, (batch_size,))), {}


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


def hanging(rank: int) -> Built:
    """Build a perceptron, but on one rank wait for what never comes."""
    import threading

    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == rank:
        threading.Event().wait()
    return perceptron()


def exhausting(rank: int) -> Built:
    """Build a perceptron, but on one rank ask for more memory than the process may have."""
    import resource

    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
        torch.empty(2**35, dtype=torch.uint8)
    return perceptron()


def differing() -> Built:
    """Build a perceptron whose weights depend on the rank, as those of a factory that nobody seeds."""
    import torch.distributed as dist

    module, args, kwargs = perceptron()
    if dist.is_initialized():
        with torch.no_grad():
            module.get_parameter("second.weight").add_(0.01 * dist.get_rank())
    return module, args, kwargs


def drawing() -> Built:
    """Build a perceptron whose weights come from the generators of Python and NumPy."""
    import random

    import numpy as np

    module, args, kwargs = perceptron()
    with torch.no_grad():
        module.get_parameter("first.bias").fill_(random.random())
        module.get_parameter("third.bias").fill_(float(np.random.rand()))
    return module, args, kwargs


class _Doubled(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def _twice(_module: nn.Module, gradients: Any, _outputs: Any) -> tuple[Tensor]:
    return (2 * gradients[0],)


class Secretive(nn.Module):
    """A perceptron of two layers; between them comes what no export keeps, or nothing where `lost` is ""."""

    def __init__(self, lost: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.lost = lost
        self.seen: list[int] = []
        self.numbers = numpy.random.default_rng()
        if lost == "parameter hook":
            self.first.weight.register_hook(lambda gradient: 2 * gradient)
        if lost == "module hook":
            self.second.register_full_backward_hook(_twice)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self._between(torch.tanh(self.first(x)))
        return functional.cross_entropy(self.second(hidden), targets)

    def _between(self, hidden: Tensor) -> Tensor:
        if self.lost == "backward":
            doubled: Tensor = _Doubled.apply(hidden)  # type: ignore[no-untyped-call]
            return doubled
        if self.lost == "tensor hook" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)
        if self.lost == "counter":
            self.seen.append(1)
            return hidden * len(self.seen)
        return hidden * self.numbers.random() if self.lost == "generator" else hidden


def secretive(lost: str = "") -> Built:
    return Secretive(lost), (torch.randn(4, 6), torch.randint(0, 5, (4,))), {}


class Unusual(nn.Module):
    """Tables of sparse or divided gradients, or without rows, random slopes, unread buffers, changed inputs."""

    last: Tensor
    rows: Tensor
    seen: Tensor

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.sparse = nn.Embedding(7, 6, sparse=True)
        self.frequent = nn.Embedding(3, 6, padding_idx=0, scale_grad_by_freq=True)
        self.none = nn.Parameter(torch.zeros(0, 6))
        self.head = nn.Linear(6, 5)
        self.register_buffer("last", torch.zeros(batch_size, 5))
        self.register_buffer("rows", torch.zeros(3, 5))
        self.register_buffer("before", torch.zeros(5, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        x.add_(1)
        hidden = self.head(torch.cat([self.sparse(tokens) + self.frequent(tokens % 3) + x, self.none]))
        loss: Tensor = functional.rrelu(hidden, training=True).square().mean()
        with torch.no_grad():
            self.last.copy_(hidden)
            self.rows[1] = hidden[0]
            self.rows[:, 2] += 1
            self.get_buffer("before").copy_(self.head.weight)
            self.seen.fill_(value=True)
        return loss


def unusual(batch_size: int = 5) -> Built:
    return Unusual(batch_size), (torch.randint(0, 7, (batch_size,)), torch.randn(batch_size, 6)), {}


def endless(batch_size: int = 5) -> Built:
    """Build a perceptron whose loss is no number."""
    module, (x, targets), kwargs = perceptron(batch_size)
    return module, (x / 0, targets), kwargs


class Autocast(Perceptron):
    """A perceptron that computes in sixteen bits by itself."""

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(*inputs)


def autocast() -> Built:
    _, args, kwargs = perceptron()
    return Autocast(), args, kwargs


class Broken(Perceptron):
    """A perceptron that cannot be executed."""

    def forward(self, *_inputs: Tensor) -> Tensor:
        raise ValueError("two lines\nof it")


def broken() -> Built:
    _, args, kwargs = perceptron()
    return Broken(), args, kwargs


class Integers(nn.Module):
    """Two linear layers of whole numbers and a bilinear loss: gradients and updates by quarters are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        loss: Tensor = (self.second(self.first(x)) * factors).sum()
        return loss


def integers(batch_size: int = 8) -> Built:
    whole = [torch.randint(-1, 2, (batch_size, width)).float() for width in (6, 5)]
    return Integers(), (whole[0], whole[1]), {}


class Margins(nn.Module):
    """A classifier of cosines with a margin for the own class, as in ArcFace (arXiv:1801.07698)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 5)
        self.classes = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        cosines = functional.linear(
            functional.normalize(self.backbone(x)), functional.normalize(self.classes)
        )
        own = functional.one_hot(targets, 7).to(cosines.dtype)
        return functional.cross_entropy((cosines - 0.35 * own) * 8.0, targets)


def margins(batch_size: int = 6) -> Built:
    return Margins(), (torch.randn(batch_size, 4), torch.randint(0, 7, (batch_size,))), {}
