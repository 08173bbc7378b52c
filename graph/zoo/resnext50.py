"""ResNeXt-50, 32x4d: a ResNet whose 3x3 convolutions have 32 groups of 4 channels in the first stage.

Source: Xie et al., arXiv:1611.05431, table 1; 25.0 million parameters. One of Unity's networks (OSDI 2022), there
in batches of 16. Groups are an axis of a convolution, so that it is split by group (`graph.rules.convolution`).
"""

from __future__ import annotations

from collections.abc import Sequence

from graph.zoo import Built
from graph.zoo.images import image_batch
from graph.zoo.resnet101 import ResNet


def resnext50(
    batch_size: int,
    *,
    image_size: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    blocks: Sequence[int] = (3, 4, 6, 3),
    groups: int = 32,
    group_width: int = 4,
) -> Built:
    """Return ResNeXt-50 with a random batch of images; `width` scales the outputs of blocks alone."""
    module = ResNet(classes=classes, width=width, blocks=blocks, groups=groups, group_width=group_width)
    return module, image_batch(batch_size, image_size, classes), {}
