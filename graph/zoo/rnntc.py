"""RNNTC: classification of a text by LSTM layers, unrolled.

Source: FlexFlow (arXiv:1807.05358), evaluation: 4 recurrent layers followed by a softmax layer, hidden size 1024, 40
steps, on movie reviews in two classes. The vocabulary of 20,000 is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from graph.zoo.recurrent import UnrolledLstm, embed_steps, token_batch


class TextClassifier(nn.Module):
    """Embedding, LSTM layers, and a linear layer on the last step; forward returns the mean cross entropy."""

    def __init__(self, *, layers: int, hidden: int, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = UnrolledLstm(layers, hidden)
        self.linear = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states = self.lstm.zero_states(tokens.shape[0], self.embedding.weight)
        outputs, _ = self.lstm(embed_steps(self.embedding, tokens), states)
        return functional.cross_entropy(self.linear(outputs[-1]), targets)


def rnntc(
    batch_size: int,
    *,
    steps: int = 40,
    layers: int = 4,
    hidden: int = 1024,
    vocabulary: int = 20_000,
    classes: int = 2,
) -> Built:
    """Return RNNTC with random texts [batch, steps] and classes [batch]."""
    module = TextClassifier(layers=layers, hidden=hidden, vocabulary=vocabulary, classes=classes)
    return module, (token_batch(batch_size, steps, vocabulary), torch.randint(0, classes, (batch_size,))), {}
