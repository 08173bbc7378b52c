"""ResNet-101 with the stride in the 3x3 convolution of a bottleneck, and its relatives of grouped convolutions.

Source: He et al., arXiv:1512.03385, table 1; 44.5 million parameters. The bottleneck of ResNeXt has a grouped 3x3
convolution between more channels (Xie et al., arXiv:1611.05431, figure 3c).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from graph.zoo.images import image_batch, scaled

EXPANSION = 4


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 beside a shortcut, which is projected where the shape changes.

    That of 3 has `groups` groups, and `inner` channels.
    """

    def __init__(self, inputs: int, outputs: int, inner: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of bottlenecks in four stages; forward returns the mean cross entropy.

    With `groups`, each has `group_width` channels in the first stage, twice as many in each that follows.
    """

    def __init__(
        self, *, classes: int, width: float, blocks: Sequence[int], groups: int = 1, group_width: int = 0
    ) -> None:
        super().__init__()
        channels = scaled(64, width)
        self.conv = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs, layers = channels, []
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                outputs = (channels << stage) * EXPANSION
                inner = (groups * group_width or channels) << stage
                layers.append(Bottleneck(inputs, outputs, inner, stride, groups))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.average_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.linear = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.norm(self.conv(images))))
        x = torch.flatten(self.average_pool(self.blocks(x)), 1)
        return functional.cross_entropy(self.linear(x), targets)


def resnet101(
    batch_size: int,
    *,
    image_size: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    blocks: Sequence[int] = (3, 4, 23, 3),
) -> Built:
    """Return ResNet-101 with a random batch of images."""
    module = ResNet(classes=classes, width=width, blocks=blocks)
    return module, image_batch(batch_size, image_size, classes), {}
