"""DenseNet-121, bottleneck layers and compression by half.

Source: Huang et al., arXiv:1608.06993, table 1; 7.98 million parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from graph.zoo.images import image_batch


class DenseLayer(nn.Module):
    """Normalize, convolve by 1, normalize, convolve by 3; the result has `growth` channels."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.norm1(x)))
        return self.conv2(functional.relu(self.norm2(y)))  # type: ignore[no-any-return]


class DenseBlock(nn.Module):
    """Layers each of which reads the concatenation of the block's input and all layers before it."""

    def __init__(self, inputs: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + index * growth, growth) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(parts[0] if len(parts) == 1 else torch.cat(parts, 1)))
        return torch.cat(parts, 1)


class Transition(nn.Module):
    """Halves the channels and both sides of the image."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, inputs // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(functional.relu(self.norm(x))))  # type: ignore[no-any-return]


class DenseNet(nn.Module):
    """Dense blocks with transitions between them; forward returns the mean cross entropy."""

    def __init__(self, *, classes: int, growth: int, blocks: Sequence[int]) -> None:
        super().__init__()
        channels = 2 * growth
        self.conv = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        layers: list[nn.Module] = []
        for index, count in enumerate(blocks):
            if index > 0:
                layers.append(Transition(channels))
                channels //= 2
            layers.append(DenseBlock(channels, growth, count))
            channels += count * growth
        self.blocks = nn.Sequential(*layers)
        self.norm2 = nn.BatchNorm2d(channels)
        self.average_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.linear = nn.Linear(channels, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.norm1(self.conv(images))))
        x = functional.relu(self.norm2(self.blocks(x)))
        x = torch.flatten(self.average_pool(x), 1)
        return functional.cross_entropy(self.linear(x), targets)


def densenet121(
    batch_size: int,
    *,
    image_size: int = 224,
    classes: int = 1000,
    growth: int = 32,
    blocks: Sequence[int] = (6, 12, 24, 16),
) -> Built:
    """Return DenseNet-121 with a random batch of images."""
    module = DenseNet(classes=classes, growth=growth, blocks=blocks)
    return module, image_batch(batch_size, image_size, classes), {}
