"""Inception-v3.

Source: Szegedy et al., arXiv:1512.00567, sizes as torchvision has them; 23.8 million parameters without the
auxiliary classifier, which is off by default, as in the FlexFlow study (arXiv:1807.05358).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from graph.zoo.images import image_batch, scaled

AUXILIARY_WEIGHT = 0.4
Size = int | tuple[int, int]


class Convolution(nn.Module):
    """Convolution without bias, batch normalization, ReLU; "same" padding unless told otherwise."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, stride: int = 1, padding: Size = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(x)))


def _chain(inputs: int, layers: Sequence[tuple[int, Size, int, Size]]) -> nn.Sequential:
    """Return convolutions in a row; a layer is (outputs, kernel, stride, padding)."""
    modules = []
    for outputs, kernel, stride, padding in layers:
        modules.append(Convolution(inputs, outputs, kernel, stride, padding))
        inputs = outputs
    return nn.Sequential(*modules)


class Branches(nn.Module):
    """Branches side by side on one input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _average_branch(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Convolution(inputs, outputs, 1))


# The five kinds of module; each returns the module and its number of output channels. `c` scales a channel count.


def _module_35(inputs: int, pooled: int, c: partial[int]) -> tuple[nn.Module, int]:
    """Figure 5: on the 35 x 35 grid."""
    module = Branches(
        Convolution(inputs, c(64), 1),
        _chain(inputs, [(c(48), 1, 1, 0), (c(64), 5, 1, 2)]),
        _chain(inputs, [(c(64), 1, 1, 0), (c(96), 3, 1, 1), (c(96), 3, 1, 1)]),
        _average_branch(inputs, c(pooled)),
    )
    return module, 2 * c(64) + c(96) + c(pooled)


def _reduction_35(inputs: int, c: partial[int]) -> tuple[nn.Module, int]:
    """Figure 10: from 35 x 35 to 17 x 17."""
    module = Branches(
        Convolution(inputs, c(384), 3, 2),
        _chain(inputs, [(c(64), 1, 1, 0), (c(96), 3, 1, 1), (c(96), 3, 2, 0)]),
        nn.MaxPool2d(3, stride=2),
    )
    return module, c(384) + c(96) + inputs


def _module_17(inputs: int, middle: int, c: partial[int]) -> tuple[nn.Module, int]:
    """Figure 6 with n = 7: on the 17 x 17 grid, 7 x 7 factored into 1 x 7 and 7 x 1."""
    row: tuple[Size, int, Size] = ((1, 7), 1, (0, 3))
    column: tuple[Size, int, Size] = ((7, 1), 1, (3, 0))
    m, full = c(middle), c(192)
    module = Branches(
        Convolution(inputs, full, 1),
        _chain(inputs, [(m, 1, 1, 0), (m, *row), (full, *column)]),
        _chain(inputs, [(m, 1, 1, 0), (m, *column), (m, *row), (m, *column), (full, *row)]),
        _average_branch(inputs, full),
    )
    return module, 4 * full


def _reduction_17(inputs: int, c: partial[int]) -> tuple[nn.Module, int]:
    """From 17 x 17 to 8 x 8."""
    m = c(192)
    module = Branches(
        _chain(inputs, [(m, 1, 1, 0), (c(320), 3, 2, 0)]),
        _chain(inputs, [(m, 1, 1, 0), (m, (1, 7), 1, (0, 3)), (m, (7, 1), 1, (3, 0)), (m, 3, 2, 0)]),
        nn.MaxPool2d(3, stride=2),
    )
    return module, c(320) + m + inputs


def _module_8(inputs: int, c: partial[int]) -> tuple[nn.Module, int]:
    """Figure 7: on the 8 x 8 grid, with branches that fork."""
    m = c(384)

    def fork() -> nn.Module:
        return Branches(Convolution(m, m, (1, 3), 1, (0, 1)), Convolution(m, m, (3, 1), 1, (1, 0)))

    module = Branches(
        Convolution(inputs, c(320), 1),
        nn.Sequential(Convolution(inputs, m, 1), fork()),
        nn.Sequential(_chain(inputs, [(c(448), 1, 1, 0), (m, 3, 1, 1)]), fork()),
        _average_branch(inputs, c(192)),
    )
    return module, c(320) + 4 * m + c(192)


class AuxiliaryClassifier(nn.Module):
    """A classifier on the 17 x 17 grid."""

    def __init__(self, inputs: int, classes: int, c: partial[int]) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(5, stride=3)
        self.convolutions = _chain(inputs, [(c(128), 1, 1, 0), (c(768), 5, 1, 0)])
        self.average_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.linear = nn.Linear(c(768), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.average_pool(self.convolutions(self.pool(x)))
        return self.linear(torch.flatten(x, 1))  # type: ignore[no-any-return]


class Inception3(nn.Module):
    """Inception-v3; forward returns the mean cross entropy, plus 0.4 times the auxiliary one if there is one."""

    def __init__(self, *, classes: int, width: float, auxiliary: bool, dropout: float) -> None:
        super().__init__()
        c = partial(scaled, width=width)
        self.stem = nn.Sequential(
            _chain(3, [(c(32), 3, 2, 0), (c(32), 3, 1, 0), (c(64), 3, 1, 1)]),
            nn.MaxPool2d(3, stride=2),
            _chain(c(64), [(c(80), 1, 1, 0), (c(192), 3, 1, 0)]),
            nn.MaxPool2d(3, stride=2),
        )
        channels, early, late = c(192), [], []
        for pooled in (32, 64, 64):
            module, channels = _module_35(channels, pooled, c)
            early.append(module)
        module, channels = _reduction_35(channels, c)
        early.append(module)
        for middle in (128, 160, 160, 192):
            module, channels = _module_17(channels, middle, c)
            early.append(module)
        self.early = nn.Sequential(*early)
        self.auxiliary = AuxiliaryClassifier(channels, classes, c) if auxiliary else None
        module, channels = _reduction_17(channels, c)
        late.append(module)
        for _ in range(2):
            module, channels = _module_8(channels, c)
            late.append(module)
        self.late = nn.Sequential(*late)
        self.average_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(channels, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        middle = self.early(self.stem(images))
        x = torch.flatten(self.dropout(self.average_pool(self.late(middle))), 1)
        loss = functional.cross_entropy(self.linear(x), targets)
        if self.auxiliary is None:
            return loss
        return loss + AUXILIARY_WEIGHT * functional.cross_entropy(self.auxiliary(middle), targets)


def inception(
    batch_size: int,
    *,
    image_size: int = 299,
    classes: int = 1000,
    width: float = 1.0,
    aux: bool = False,
    dropout: float = 0.5,
) -> Built:
    """Return Inception-v3 with a random batch of images; `aux` adds the auxiliary classifier."""
    module = Inception3(classes=classes, width=width, auxiliary=aux, dropout=dropout)
    return module, image_batch(batch_size, image_size, classes), {}
