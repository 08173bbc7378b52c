"""AlexNet in one tower.

Source: Krizhevsky, arXiv:1404.5997, as torchvision has it: channels 64, 192, 384, 256, 256; 61.1 million parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from graph.zoo.images import image_batch, scaled


class AlexNet(nn.Module):
    """Five convolutions and three fully connected layers; forward returns the mean cross entropy."""

    def __init__(self, *, classes: int, width: float, pooled_size: int, hidden: int, dropout: float) -> None:
        super().__init__()
        first, second, third, fourth, fifth = (
            scaled(channels, width) for channels in (64, 192, 384, 256, 256)
        )
        self.conv1 = nn.Conv2d(3, first, 11, stride=4, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.conv3 = nn.Conv2d(second, third, 3, padding=1)
        self.conv4 = nn.Conv2d(third, fourth, 3, padding=1)
        self.conv5 = nn.Conv2d(fourth, fifth, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2)
        self.average_pool = nn.AdaptiveAvgPool2d((pooled_size, pooled_size))
        self.dropout1 = nn.Dropout(dropout)
        self.linear1 = nn.Linear(fifth * pooled_size * pooled_size, hidden)
        self.dropout2 = nn.Dropout(dropout)
        self.linear2 = nn.Linear(hidden, hidden)
        self.linear3 = nn.Linear(hidden, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.conv1(images)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = functional.relu(self.conv3(x))
        x = functional.relu(self.conv4(x))
        x = self.pool(functional.relu(self.conv5(x)))
        x = torch.flatten(self.average_pool(x), 1)
        x = functional.relu(self.linear1(self.dropout1(x)))
        x = functional.relu(self.linear2(self.dropout2(x)))
        return functional.cross_entropy(self.linear3(x), targets)


def alexnet(
    batch_size: int,
    *,
    image_size: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    pooled_size: int = 6,
    hidden: int = 4096,
    dropout: float = 0.5,
) -> Built:
    """Return AlexNet with a random batch of images."""
    module = AlexNet(classes=classes, width=width, pooled_size=pooled_size, hidden=hidden, dropout=dropout)
    return module, image_batch(batch_size, image_size, classes), {}
