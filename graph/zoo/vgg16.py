"""VGG-16, configuration D, without batch normalization.

Source: Simonyan and Zisserman, arXiv:1409.1556, table 1; 138.4 million parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from graph.zoo.images import image_batch, scaled

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg16(nn.Module):
    """Thirteen convolutions in five stages and three fully connected layers; forward returns the loss."""

    def __init__(self, *, classes: int, width: float, pooled_size: int, hidden: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        previous = 3
        for stage in STAGES:
            for channels in (scaled(channels, width) for channels in stage):
                convolution = nn.Conv2d(previous, channels, 3, padding=1)
                # The default bounds halve the signal in every layer; thirteen layers need He's.
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                layers += [convolution, nn.ReLU()]
                previous = channels
            layers.append(nn.MaxPool2d(2, stride=2))
        self.features = nn.Sequential(*layers)
        self.average_pool = nn.AdaptiveAvgPool2d((pooled_size, pooled_size))
        self.linear1 = nn.Linear(previous * pooled_size * pooled_size, hidden)
        self.dropout1 = nn.Dropout(dropout)
        self.linear2 = nn.Linear(hidden, hidden)
        self.dropout2 = nn.Dropout(dropout)
        self.linear3 = nn.Linear(hidden, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = torch.flatten(self.average_pool(self.features(images)), 1)
        x = self.dropout1(functional.relu(self.linear1(x)))
        x = self.dropout2(functional.relu(self.linear2(x)))
        return functional.cross_entropy(self.linear3(x), targets)


def vgg16(
    batch_size: int,
    *,
    image_size: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    pooled_size: int = 7,
    hidden: int = 4096,
    dropout: float = 0.5,
) -> Built:
    """Return VGG-16 with a random batch of images."""
    module = Vgg16(classes=classes, width=width, pooled_size=pooled_size, hidden=hidden, dropout=dropout)
    return module, image_batch(batch_size, image_size, classes), {}
