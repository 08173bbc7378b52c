"""Example batches of the image classifiers, and channel counts scaled by a width."""

from __future__ import annotations

import torch
from torch import Tensor


def image_batch(batch_size: int, image_size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random images [batch, 3, image size, image size] and their classes [batch]."""
    images = torch.randn(batch_size, 3, image_size, image_size)
    return images, torch.randint(0, classes, (batch_size,))


def scaled(channels: int, width: float) -> int:
    """Return `channels` times `width`, rounded, at least 2."""
    return max(2, round(channels * width))
