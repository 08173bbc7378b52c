"""RNNLM: prediction of the next token by LSTM layers, unrolled.

Source: FlexFlow (arXiv:1807.05358), evaluation: 2 recurrent layers followed by a softmax layer, hidden size 2048, 40
steps, on the Penn Treebank, whose usual vocabulary has 10,000 words.
"""

from __future__ import annotations

from torch import Tensor, nn

from graph.zoo import Built
from graph.zoo.recurrent import UnrolledLstm, embed_steps, mean_cross_entropy, token_batch


class LanguageModel(nn.Module):
    """Embedding, LSTM layers, and a linear layer at every step; forward returns the mean cross entropy."""

    def __init__(self, *, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = UnrolledLstm(layers, hidden)
        self.linear = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states = self.lstm.zero_states(tokens.shape[0], self.embedding.weight)
        outputs, _ = self.lstm(embed_steps(self.embedding, tokens), states)
        return mean_cross_entropy([self.linear(output) for output in outputs], targets)


def rnnlm(
    batch_size: int, *, steps: int = 40, layers: int = 2, hidden: int = 2048, vocabulary: int = 10_000
) -> Built:
    """Return RNNLM with random tokens and next tokens, both [batch, steps]."""
    module = LanguageModel(layers=layers, hidden=hidden, vocabulary=vocabulary)
    tokens, targets = (token_batch(batch_size, steps, vocabulary) for _ in range(2))
    return module, (tokens, targets), {}
